// The derivative of attention in a direction: tangents of O and LSE, for one query tile a CTA.
//
//   S = Q K^T, P = exp(scale * S - LSE), T = scale * (tQ K^T + Q tK^T), mu = rowsum(P * T)
//   tO = (P * T) V + P tV - mu * O, tLSE = mu
//
// A softcap multiplies T by its derivative, a bias's tangent adds to it, and a sink adds its
// probability times its tangent to mu. LSE and O are the forward's, so that there is no maximum to
// follow, and O is no product here.
//
// Threads: num_warps x 32; every warp owns block_m / num_warps query rows of S, T and tO, all in
// registers. Shared memory: Q and tQ block_m x head_dim each, K, V and their tangents block_n x
// head_dim each (traits.h). One buffer each is enough: V(n) and tV(n) travel while S(n) and T(n)
// multiply, K and tK of the next block during the products with V. What has no tangent is not
// loaded or multiplied. Of wide heads several CTAs share the columns of V and O.
#pragma once

#include "shared/dropout/dropout.h"
#include "shared/online_softmax.h"
#include "shared/row_tangents.h"
#include "shared/write_rounding.h"
#include "sm80/epilogue.h"
#include "sm80/jvp/scores.h"
#include "sm80/jvp/traits.h"

namespace flash_attn_cuda::sm80 {

struct JvpArguments {
  ForwardParams params;
  TileSchedule schedule;
  SequenceTable table;
  float scale_log2;        // from a score, as kernels hold it, to powers of two
  float keep_probability;  // 1 without dropout
  int ctas_per_row;        // CTAs that share the columns of V and O
};

// What this CTA does, for all its threads.
template <class Traits>
CUTE_DEVICE void find_jvp_tile(JvpArguments const& args, int block_id,
                               typename Traits::SharedStorage& smem) {
  ForwardParams const& params = args.params;
  TileWork work;
  if (!find_work(args.schedule, args.table, params, block_id, work)) {
    smem.work.tile = no_tile;
    return;
  }
  work.tile =
      ranked_tile<Traits::block_m>(params, args.table, work.sequence.index, work.head, work.tile);
  const int query_begin = work.tile * Traits::block_m;
  const int query_last = min(query_begin + Traits::block_m, work.sequence.seqlen_q) - 1;
  smem.work = work;
  smem.range = block_range(band_from_queries(params.window, work.sequence.shift), query_begin,
                           query_last, work.sequence.seqlen_k, Traits::block_n);
  smem.visits.find(params.sparsity.lists, work.sequence.index, work.head, query_begin / list_tile,
                   smem.range);
}

// telling_lse_log2() of the thread's rows.
template <class Traits, class Coords>
CUTE_DEVICE void read_lse(ForwardParams const& params, TileWork const& work, Coords const& coords,
                          float (&lse_log2)[Traits::rows_per_thread]) {
  const float* rows = lse_rows(params.lse, work.sequence, work.head);
  CUTE_UNROLL
  for (int row = 0; row < Traits::rows_per_thread; ++row) {
    const int query = work.tile * Traits::block_m + get<0>(coords(row, 0));
    lse_log2[row] = telling_lse_log2(rows, work.sequence, query);
  }
}

// (P * T) V + P tV -> the tangent of O, and mu, that of LSE: registers -> shared memory (Q's
// buffer) -> global memory.
template <class Traits, class Accumulator, class Coords>
CUTE_DEVICE void write_tangents(JvpArguments const& args, TileWork const& work, int column_begin,
                                Accumulator& accumulator, Coords const& coords,
                                float const (&mu)[Traits::rows_per_thread],
                                typename Traits::SharedStorage& smem, int thread) {
  using Element = typename Traits::Element;
  ForwardParams const& params = args.params;
  Sequence const& sequence = work.sequence;
  const int query_begin = work.tile * Traits::block_m;
  const int rows = sequence.rows_q - query_begin;
  const int columns = params.shape.head_dim_v - column_begin;
  const float kept = 1.0f / args.keep_probability;

  auto output = rows_cols_view(accumulator);
  const Element* out =
      row_pointer<Element>(params.out, sequence.batch_q, work.head, sequence.row_q + query_begin) +
      column_begin;
  const std::int8_t* rounding = nullptr;
  if (params.out_rounding.data != nullptr)
    rounding = row_pointer<std::int8_t>(params.out_rounding, sequence.batch_q, work.head,
                                        sequence.row_q + query_begin) +
               column_begin;
  float* row_lse = lse_rows(params.tangents.lse, sequence, work.head) + query_begin;
  CUTE_UNROLL
  for (int row = 0; row < Traits::rows_per_thread; ++row) {
    const int query = get<0>(coords(row, 0));
    const bool attends = query_begin + query < sequence.seqlen_q;
    const Element* out_row = out + query * params.out.row_stride;
    const std::int8_t* of_row =
        rounding == nullptr ? nullptr : rounding + query * params.out_rounding.row_stride;
    CUTE_UNROLL
    for (int col = 0; col < size<1>(output); col += 2) {
      const int column = get<1>(coords(row, col));
      const bool exists = attends && column < columns;
      float2 pair{};
      if (exists)
        pair = OutRounding<Traits::config.dtype>::load(
            out_row + column, of_row == nullptr ? nullptr : of_row + column);
      output(row, col) = exists ? output(row, col) * kept - mu[row] * pair.x : 0.0f;
      output(row, col + 1) = exists ? output(row, col + 1) * kept - mu[row] * pair.y : 0.0f;
    }
    if (query < rows && get<1>(coords(row, 0)) == 0 && column_begin == 0)
      row_lse[query] = attends ? mu[row] : 0.0f;
  }

  if (TensorView const& view = params.tangents.out_rounding; view.data != nullptr) {
    auto* kept =
        row_pointer<std::int8_t>(view, sequence.batch_q, work.head, sequence.row_q + query_begin);
    write_rounding<Traits::config.dtype>(kept + column_begin, view.row_stride, output, rows,
                                         columns, [&](int i) { return get<0>(coords(i, 0)); });
  }
  auto sO = smem_tile<typename Traits::OutputLayout>(smem.q);
  __syncthreads();  // Q is read
  fragment_to_shared<Element>(accumulator, typename Traits::Mma{}, sO, thread);
  __syncthreads();
  Traits::OutputWriter::store(
      from_column<Element, Traits::shares_columns>(params.tangents.out, column_begin),
      sequence.batch_q, work.head, sequence.row_q + query_begin, rows, columns, sO, thread);
}

template <class Tag>
__global__ void __launch_bounds__(JvpTraits<Tag>::threads)
    jvp_kernel(const __grid_constant__ JvpArguments args) {
  using Traits = JvpTraits<Tag>;
  using Element = typename Traits::Element;
  constexpr int block_m = Traits::block_m;
  constexpr int block_n = Traits::block_n;
  constexpr bool wide = Traits::shares_columns;

  extern __shared__ __align__(128) char smem_bytes[];
  auto& smem = *reinterpret_cast<typename Traits::SharedStorage*>(smem_bytes);
  ForwardParams const& params = args.params;
  TangentParams const& tangents = params.tangents;
  AttentionShape const& shape = params.shape;
  const int thread = threadIdx.x;
  const int block_id = wide ? blockIdx.x / args.ctas_per_row : blockIdx.x;
  const int column_begin =  // of this CTA's columns of V and O
      wide ? (blockIdx.x - block_id * args.ctas_per_row) * Traits::columns_per_cta : 0;
  if (thread == 0) find_jvp_tile<Traits>(args, block_id, smem);
  __syncthreads();
  TileWork const& work = smem.work;
  Sequence const& sequence = work.sequence;
  const BlockRange range = smem.range;
  if (work.tile == no_tile) return;
  const int head_k = shape.key_head(work.head);
  const int query_begin = work.tile * block_m;
  const bool moves_q = tangents.q.data != nullptr;
  const bool moves_k = tangents.k.data != nullptr;
  const bool moves_v = tangents.v.data != nullptr;

  auto sQ = smem_tile<typename Traits::QueryLayout>(smem.q);  // (block_m, head_dim)
  auto sK = smem_tile<typename Traits::KeyLayout>(smem.k);    // (block_n, head_dim)
  auto sV = smem_tile<typename Traits::ValueLayout>(smem.v);  // (block_n, columns_per_cta)
  auto sTangentQ = smem_tile<typename Traits::QueryLayout>(smem.tangent_q);
  auto sTangentK = smem_tile<typename Traits::KeyLayout>(smem.tangent_k);
  auto sTangentV = smem_tile<typename Traits::ValueLayout>(smem.tangent_v);

  auto load_queries = [&](TensorView const& view, auto& tile) {
    Traits::QueryLoader::load(view, sequence.batch_q, work.head, sequence.row_q + query_begin,
                              sequence.seqlen_q - query_begin, shape.head_dim, tile, thread);
  };
  auto load_keys = [&](int block) {
    const int key = block * block_n;
    auto load = [&](TensorView const& view, auto& tile) {
      Traits::KeyLoader::load(view, sequence.batch_k, head_k, sequence.row_k + key,
                              sequence.seqlen_k - key, shape.head_dim, tile, thread);
    };
    load(params.k, sK);
    if (moves_k) load(tangents.k, sTangentK);
    commit_loads();
  };
  auto load_values = [&](int block) {
    const int key = block * block_n;
    auto load = [&](TensorView const& view, auto& tile) {
      Traits::ValueLoader::load(from_column<Element, wide>(view, column_begin), sequence.batch_k,
                                head_k, sequence.row_k + key, sequence.seqlen_k - key,
                                shape.head_dim_v - column_begin, tile, thread);
    };
    load(params.v, sV);
    if (moves_v) load(tangents.v, sTangentV);
    commit_loads();
  };

  typename Traits::Mma mma;
  auto q = operand_a(LoadMatrix<Element>{}, mma, sQ, thread);
  auto k = operand_b(LoadMatrix<Element>{}, mma, sK, thread);
  auto v = operand_b(LoadMatrixTransposed<Element>{}, mma, transposed(sV), thread);
  auto tangent_v = v.behind(smem.tangent_v - smem.v);
  auto cS = make_identity_tensor(Shape<Int<block_m>, Int<block_n>>{});
  auto cO = make_identity_tensor(Shape<Int<block_m>, Int<Traits::columns_per_cta>>{});
  // This thread's (rows, columns) of S -> (query, key)
  auto tScS = rows_cols_view(accumulator_share(mma, cS, thread));
  auto tOcO = rows_cols_view(accumulator_share(mma, cO, thread));

  AccumulatorOf<decltype(mma), Shape<Int<block_m>, Int<Traits::columns_per_cta>>> tOrO;
  clear(tOrO);
  float lse_log2[Traits::rows_per_thread];
  float mu[Traits::rows_per_thread];
  read_lse<Traits>(params, work, tScS, lse_log2);
  CUTE_UNROLL
  for (int row = 0; row < Traits::rows_per_thread; ++row)
    mu[row] = tangent_of_sink(params, work.head, lse_log2[row]);
  const bool is_modified = modifies_scores(params.score);
  const auto modifiers =
      ScoreModifiers::of(params.score, sequence.index, work.head, sequence.shift);
  DropoutMask dropout{};
  const bool drops = params.dropout.threshold > 0;
  if (drops) {
    const RngState rng = read_rng(params.dropout.rng);
    dropout = DropoutMask::of(rng, params.dropout.threshold, sequence.stream, work.head);
  }

  const bool has_lists = params.sparsity.lists.data != nullptr;
  auto visit_at = [&](int position) { return smem.visits.at(has_lists, position, range); };

  auto step = [&](int position, Visit const& visit, Visit const& next_visit) {
    const int key_begin = visit.block * block_n;
    const ScoreTile tile{sequence, work.head, query_begin, key_begin};
    wait_for_loads();  // K and its tangent are here; V's buffers are free
    load_values(visit.block);
    AccumulatorOf<decltype(mma), Shape<Int<block_m>, Int<block_n>>> tSrS, tSrT;
    clear(tSrS);
    clear(tSrT);
    gemm_rows<wide>(mma, tSrS, q, k, shape.head_dim);
    // With tQ and with tK. In a loop, because each place of a product takes seconds to compile.
    CUTE_NO_UNROLL
    for (int side = moves_q ? 0 : 1; side < (moves_k ? 2 : 1); ++side) {
      auto queries = q.behind(side == 0 ? smem.tangent_q - smem.q : 0);
      auto keys = k.behind(side == 0 ? 0 : smem.tangent_k - smem.k);
      gemm_rows<wide>(mma, tSrT, queries, keys, shape.head_dim);
    }

    wait_for_loads();  // V and its tangent are here; K's buffers are free
    if (position > range.begin) load_keys(next_visit.block);

    auto scores = rows_cols_view(tSrS);
    auto moved = rows_cols_view(tSrT);
    CUTE_UNROLL
    for (int i = 0; i < size(moved); ++i) moved(i) *= params.score.softmax_scale;
    if (modifiers.is_curved()) {
      const bool reaches = modifiers.scale_to_curve(scores);
      modifiers.apply_and_differentiate(scores, reaches, tScS, query_begin, key_begin,
                                        [&](auto derivative) {
                                          CUTE_UNROLL
                                          for (int i = 0; i < size(moved); ++i)
                                            moved(i) *= derivative(scores(i));
                                        });
    } else if (is_modified) {
      modifiers.apply(scores, tScS, query_begin, key_begin);
    }
    Traits::Bias::apply(params.score, tile, scores, tScS);
    add_bias_tangent<Element>(tangents.bias, tile, moved, tScS);
    probabilities_of_rows(scores, args.scale_log2, lse_log2);
    Traits::Lists::apply(params.sparsity, visit, tile, scores, tScS, 0.0f);
    if (!smem.visits.is_interior(has_lists, visit.block, range)) {
      const ScoreMask<Traits::config.mask> mask{
          .band = band_from_queries(params.window, sequence.shift), .seqlen_k = sequence.seqlen_k};
      mask.apply(scores, tScS, query_begin, key_begin, 0.0f);
    }
    weigh_tangents(scores, moved, mu);
    if (drops)
      drop_both(dropout, scores, moved, tScS, sequence.first_q + query_begin,
                sequence.first_k + key_begin);
    auto rT = convert_fragment<Element>(tSrT);
    gemm_registers_a(mma, tOrO, a_operand_view(rT), v);
    if (moves_v) {
      auto rP = convert_fragment<Element>(tSrS);
      gemm_registers_a(mma, tOrO, a_operand_view(rP), tangent_v);
    }
  };

  if (!range.empty()) {
    load_queries(params.q, sQ);
    if (moves_q) load_queries(tangents.q, sTangentQ);
    Visit visit = visit_at(range.end - 1);
    load_keys(visit.block);
    for (int position = range.end - 1; position >= range.begin; --position) {
      const Visit next_visit = visit_at(position - 1);
      step(position, visit, next_visit);
      visit = next_visit;
    }
  }
  CUTE_UNROLL
  for (int row = 0; row < Traits::rows_per_thread; ++row)
    mu[row] = quad_reduce(mu[row], [](float a, float b) { return a + b; });
  write_tangents<Traits>(args, work, column_begin, tOrO, tOcO, mu, smem, thread);
}

}  // namespace flash_attn_cuda::sm80
