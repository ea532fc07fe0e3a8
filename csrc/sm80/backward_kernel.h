// Backward attention, FlashAttention-2 Algorithm 2: dK and dV of one key tile a CTA, dQ summed over
// key tiles in fp32.
//
//   S = Q K^T, P = exp(scale * S - LSE), dP = dO V^T, dS = P * (dP - D), D = rowsum(dO * O) - dLSE
//   dV = P^T dO, dK = scale * dS^T Q, dQ = scale * dS K
//
// Threads: num_warps x 32. dK and dV stay in registers for the life of the CTA, which walks the
// query tiles of every query head that shares its key head, so that GQA needs no expanded gradient.
// Shared memory: K and V, one or two buffers of Q and dO, P and dS in 16 bits (backward_traits.h).
// With two buffers the next tiles load during the whole step.
#pragma once

#include "shared/block_range.h"
#include "shared/dq_accumulator.h"
#include "shared/mask.h"
#include "shared/online_softmax.h"
#include "shared/tile_scheduler.h"
#include "sm80/backward_traits.h"

namespace flash_attn_cuda::sm80 {

struct BackwardArguments {
  BackwardParams params;
  TileSchedule schedule;  // tile: key block; head: key head * dkdv_splits + split
  int dkdv_splits;
  int seqlen_q_rounded;
  float scale_log2;       // softmax_scale * log2(e), signed
  const float* lse_log2;  // (batch, num_heads_q, seqlen_q_rounded), +inf where a row has no key or
                          // does not exist
  float* dq_accum;        // (batch, num_heads_q, query tiles, block_m * head_dim) in fragment order
  float*
      dk_partial;  // (dkdv_splits, batch, seqlen_k, num_heads_k, head_dim), used if dkdv_splits > 1
  float* dv_partial;
};

// Registers -> shared memory -> a (batch, seqlen_k, num_heads_k, head_dim) tensor.
template <class Traits, class Accumulator>
CUTE_DEVICE void write_key_gradient(TensorView const& view, AttentionShape const& shape, int batch,
                                    int head_k, int key_begin, Accumulator const& accumulator,
                                    typename Traits::Element* buffer, int thread) {
  using Element = typename Traits::Element;
  auto sGrad = smem_tile<typename Traits::KeyLayout>(buffer);
  auto copy = make_tiled_copy_C(StoreMatrix<Element>{}, typename Traits::DkdvMma{})
                  .get_thread_slice(thread);
  auto fragment = convert_fragment<Element>(accumulator);
  cute::copy(StoreMatrix<Element>{}, copy.retile_S(fragment), copy.partition_D(sGrad));
  __syncthreads();
  Traits::KeyWriter::store(view, batch, head_k, key_begin, shape.seqlen_k - key_begin,
                           shape.head_dim, sGrad, thread);
}

// Registers -> this split's fp32 partial sum.
template <class Traits, class Accumulator>
CUTE_DEVICE void write_partial(float* partial, int split, AttentionShape const& shape, int batch,
                               int head_k, int key_begin, Accumulator const& accumulator,
                               int thread) {
  constexpr int head_dim = Traits::head_dim;
  auto gradient = rows_cols_view(accumulator);
  auto cGrad = make_identity_tensor(Shape<Int<Traits::block_n>, Int<head_dim>>{});
  auto coords =
      rows_cols_view(typename Traits::DkdvMma{}.get_thread_slice(thread).partition_C(cGrad));
  const std::int64_t first_row =
      (std::int64_t(split) * shape.batch_size + batch) * shape.seqlen_k + key_begin;
  CUTE_UNROLL
  for (int row = 0; row < size<0>(gradient); ++row) {
    const int key = get<0>(coords(row, 0));
    if (key_begin + key >= shape.seqlen_k) continue;
    float* target = partial + ((first_row + key) * shape.num_heads_k + head_k) * head_dim;
    CUTE_UNROLL
    for (int col = 0; col < size<1>(gradient); col += 2) {
      *reinterpret_cast<float2*>(target + get<1>(coords(row, col))) = {gradient(row, col),
                                                                       gradient(row, col + 1)};
    }
  }
}

template <class Tag>
__global__ void __launch_bounds__(BackwardTraits<Tag>::threads)
    backward_kernel(const __grid_constant__ BackwardArguments args) {
  using Traits = BackwardTraits<Tag>;
  using Element = typename Traits::Element;
  constexpr int block_m = Traits::block_m;
  constexpr int block_n = Traits::block_n;
  constexpr int head_dim = Traits::head_dim;

  extern __shared__ __align__(128) char smem_bytes[];
  auto& smem = *reinterpret_cast<typename Traits::SharedStorage*>(smem_bytes);
  BackwardParams const& params = args.params;
  AttentionShape const& shape = params.shape;
  const int thread = threadIdx.x;

  const TileCoord coord = tile_coord(args.schedule, blockIdx.x);
  const int head_k = coord.head / args.dkdv_splits;
  const int split = coord.head - head_k * args.dkdv_splits;
  const int heads_per_cta = shape.num_heads_q / shape.num_heads_k / args.dkdv_splits;
  const int first_head = (head_k * args.dkdv_splits + split) * heads_per_cta;
  const int key_begin = coord.tile * block_n;
  const int key_last = min(key_begin + block_n, shape.seqlen_k) - 1;
  const int query_tiles = (shape.seqlen_q + block_m - 1) / block_m;
  const BlockRange range =
      block_range(band_from_keys(params.window, shape.seqlen_q, shape.seqlen_k), key_begin,
                  key_last, shape.seqlen_q, block_m);
  const bool ragged_keys = key_begin + block_n > shape.seqlen_k;

  auto sK = smem_tile<typename Traits::KeyLayout>(smem.k);     // (block_n, head_dim)
  auto sV = smem_tile<typename Traits::KeyLayout>(smem.v);     // (block_n, head_dim)
  auto sP = smem_tile<typename Traits::ScoresLayout>(smem.p);  // (block_m, block_n)
  auto sdS = smem_tile<typename Traits::ScoresLayout>(smem.ds);

  // One step is one query tile of one head; the steps of a CTA are numbered through its heads.
  struct Step {
    int head;
    int tile;
  };
  auto next = [&](Step step) {
    return step.tile + 1 < range.end ? Step{step.head, step.tile + 1}
                                     : Step{step.head + 1, range.begin};
  };
  auto load_queries = [&](TensorView const& view, Element* buffer, Step step) {
    auto tile = smem_tile<typename Traits::QueryLayout>(buffer);
    const int query = step.tile * block_m;
    Traits::QueryLoader::load(view, coord.batch, step.head, query, shape.seqlen_q - query,
                              shape.head_dim, tile, thread);
  };
  auto load_row_statistics = [&](int buffer, Step step) {
    constexpr int copies = block_m / 4;  // of 16 bytes, for each of the two arrays
    if (thread >= 2 * copies) return;
    const std::int64_t row =
        (std::int64_t(coord.batch) * shape.num_heads_q + step.head) * args.seqlen_q_rounded +
        step.tile * block_m;
    const bool is_lse = thread < copies;
    const int offset = 4 * (is_lse ? thread : thread - copies);
    const float* source = (is_lse ? args.lse_log2 : params.softmax_d) + row + offset;
    float* target = (is_lse ? smem.lse_log2[buffer] : smem.softmax_d[buffer]) + offset;
    SM80_CP_ASYNC_CACHEGLOBAL<uint128_t>::copy(*reinterpret_cast<const uint128_t*>(source),
                                               *reinterpret_cast<uint128_t*>(target));
  };

  typename Traits::ScoresMma scores_mma;
  typename Traits::DkdvMma dkdv_mma;
  typename Traits::DqMma dq_mma;
  auto tdKrdK = partition_fragment_C(dkdv_mma, Shape<Int<block_n>, Int<head_dim>>{});
  auto tdVrdV = partition_fragment_C(dkdv_mma, Shape<Int<block_n>, Int<head_dim>>{});
  clear(tdKrdK);
  clear(tdVrdV);

  auto cS = make_identity_tensor(Shape<Int<block_m>, Int<block_n>>{});
  // This thread's (rows, columns) of S -> (query, key)
  auto tScS = rows_cols_view(scores_mma.get_thread_slice(thread).partition_C(cS));
  auto store_scores =
      make_tiled_copy_C(StoreMatrix<Element>{}, scores_mma).get_thread_slice(thread);
  auto to_shared = [&](auto const& accumulator, auto& tile) {
    auto fragment = convert_fragment<Element>(accumulator);
    cute::copy(StoreMatrix<Element>{}, store_scores.retile_S(fragment),
               store_scores.partition_D(tile));
  };
  const ScoreMask<Traits::config.mask> mask{
      .band = band_from_queries(params.window, shape.seqlen_q, shape.seqlen_k),
      .seqlen_k = shape.seqlen_k};

  auto run_step = [&](Step step, int index, bool is_last) {
    wait_for_loads();  // this step's tiles are here; the previous step's buffers are free
    const Step following = next(step);
    if (!is_last) {
      const int other = (index + 1) % 2;
      if (Traits::stages_q == 2) load_queries(params.q, smem.q[other], following);
      if (Traits::stages_do == 2) load_queries(params.dout, smem.dout[other], following);
      load_row_statistics(other, following);
      commit_loads();
    }
    auto sQ = smem_tile<typename Traits::QueryLayout>(smem.q[index % Traits::stages_q]);
    auto sdO = smem_tile<typename Traits::QueryLayout>(smem.dout[index % Traits::stages_do]);
    const float* lse_log2 = smem.lse_log2[index % 2];
    const float* softmax_d = smem.softmax_d[index % 2];

    auto tSrS = partition_fragment_C(scores_mma, Shape<Int<block_m>, Int<block_n>>{});
    clear(tSrS);
    {
      auto q = operand_a(LoadMatrix<Element>{}, scores_mma, sQ, thread);
      auto k = operand_b(LoadMatrix<Element>{}, scores_mma, sK, thread);
      gemm(scores_mma, tSrS, q, k);
    }
    auto scores = rows_cols_view(tSrS);
    CUTE_UNROLL
    for (int row = 0; row < size<0>(scores); ++row) {
      const float row_lse = lse_log2[get<0>(tScS(row, 0))];
      CUTE_UNROLL
      for (int col = 0; col < size<1>(scores); ++col) {
        scores(row, col) = fast_exp2(scores(row, col) * args.scale_log2 - row_lse);
      }
    }

    auto tdPrdP = partition_fragment_C(scores_mma, Shape<Int<block_m>, Int<block_n>>{});
    clear(tdPrdP);
    {
      auto dout = operand_a(LoadMatrix<Element>{}, scores_mma, sdO, thread);
      auto v = operand_b(LoadMatrix<Element>{}, scores_mma, sV, thread);
      gemm(scores_mma, tdPrdP, dout, v);
    }
    // Only now, so that the exponentials share the product's basic block and fill its gaps.
    if (ragged_keys || !range.is_interior(step.tile)) {
      mask.apply(scores, tScS, step.tile * block_m, key_begin, 0.0f);
    }
    to_shared(tSrS, sP);
    auto dscores = rows_cols_view(tdPrdP);
    CUTE_UNROLL
    for (int row = 0; row < size<0>(dscores); ++row) {
      const float row_d = softmax_d[get<0>(tScS(row, 0))];
      CUTE_UNROLL
      for (int col = 0; col < size<1>(dscores); ++col) {
        dscores(row, col) = scores(row, col) * (dscores(row, col) - row_d);
      }
    }
    to_shared(tdPrdP, sdS);
    __syncthreads();  // P and dS are whole

    {
      auto p = operand_a(LoadMatrixTransposed<Element>{}, dkdv_mma, transposed(sP), thread);
      auto dout = operand_b(LoadMatrixTransposed<Element>{}, dkdv_mma, transposed(sdO), thread);
      gemm(dkdv_mma, tdVrdV, p, dout);
    }
    {
      auto ds = operand_a(LoadMatrix<Element>{}, dq_mma, sdS, thread);
      auto k = operand_b(LoadMatrixTransposed<Element>{}, dq_mma, transposed(sK), thread);
      auto tdQrdQ = partition_fragment_C(dq_mma, Shape<Int<block_m>, Int<head_dim>>{});
      clear(tdQrdQ);
      gemm(dq_mma, tdQrdQ, ds, k);
      const std::int64_t tile =
          (std::int64_t(coord.batch) * shape.num_heads_q + step.head) * query_tiles + step.tile;
      DqAccumulator<Traits::threads>::add(args.dq_accum + tile * (block_m * head_dim), tdQrdQ,
                                          thread);
    }
    {
      auto ds = operand_a(LoadMatrixTransposed<Element>{}, dkdv_mma, transposed(sdS), thread);
      auto q = operand_b(LoadMatrixTransposed<Element>{}, dkdv_mma, transposed(sQ), thread);
      gemm(dkdv_mma, tdKrdK, ds, q);
    }
    if (!is_last && (Traits::stages_q == 1 || Traits::stages_do == 1)) {
      __syncthreads();  // the single buffers are read
      if (Traits::stages_q == 1) load_queries(params.q, smem.q[0], following);
      if (Traits::stages_do == 1) load_queries(params.dout, smem.dout[0], following);
      commit_loads();
    }
  };

  const int steps = range.empty() ? 0 : heads_per_cta * (range.end - range.begin);
  if (steps > 0) {
    const int keys = shape.seqlen_k - key_begin;
    Traits::KeyLoader::load(params.k, coord.batch, head_k, key_begin, keys, shape.head_dim, sK,
                            thread);
    Traits::KeyLoader::load(params.v, coord.batch, head_k, key_begin, keys, shape.head_dim, sV,
                            thread);
    Step step{first_head, range.begin};
    load_queries(params.q, smem.q[0], step);
    load_queries(params.dout, smem.dout[0], step);
    load_row_statistics(0, step);
    commit_loads();
    for (int index = 0; index < steps; ++index, step = next(step)) {
      run_step(step, index, index + 1 == steps);
    }
  }

  CUTE_UNROLL
  for (int i = 0; i < size(tdKrdK); ++i) tdKrdK(i) *= params.softmax_scale;
  if (args.dkdv_splits > 1) {
    write_partial<Traits>(args.dk_partial, split, shape, coord.batch, head_k, key_begin, tdKrdK,
                          thread);
    write_partial<Traits>(args.dv_partial, split, shape, coord.batch, head_k, key_begin, tdVrdV,
                          thread);
    return;
  }
  __syncthreads();  // K and V are read, their buffers take dK and dV
  write_key_gradient<Traits>(params.dk, shape, coord.batch, head_k, key_begin, tdKrdK, smem.k,
                             thread);
  write_key_gradient<Traits>(params.dv, shape, coord.batch, head_k, key_begin, tdVrdV, smem.v,
                             thread);
}

}  // namespace flash_attn_cuda::sm80
