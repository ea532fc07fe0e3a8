// Backward attention, FlashAttention-2 Algorithm 2: dK and dV of one key tile a CTA, dQ summed over
// key tiles in fp32.
//
//   S = Q K^T, P = exp(scale * S - LSE), dP = dO V^T, dS = P * (dP - D), D = rowsum(dO * O) - dLSE
//   dV = P^T dO, dK = scale * dS^T Q, dQ = scale * dS K
//
// scores.h has what modifiers and dropout change between the products, shared/schedule/turns.h how
// dQ is summed in a fixed order.
//
// Threads: num_warps x 32. dK and dV stay in registers for the life of the CTA, which walks the
// query tiles of every query head that shares its key head, so that GQA needs no expanded gradient.
// Shared memory: K and V, one or two buffers of Q and dO, P and dS in 16 bits (traits.h).
// With two buffers the next tiles load during the whole step.
#pragma once

#include "shared/gradient/backward_arguments.h"
#include "shared/gradient/dq_accumulator.h"
#include "shared/mask/mask.h"
#include "shared/mask/pair_mask.h"
#include "shared/scores/score_bias.h"
#include "sm80/backward/scores.h"
#include "sm80/backward/steps.h"
#include "sm80/backward/traits.h"
#include "sm80/epilogue.h"

namespace flash_attn_cuda::sm80 {

// Registers -> shared memory -> the tile's rows of dk or dv.
template <class Traits, class Accumulator>
CUTE_DEVICE void write_key_gradient(TensorView const& view, Sequence const& sequence, int head_k,
                                    int key_begin, int columns, Accumulator const& accumulator,
                                    typename Traits::Element* buffer, int thread) {
  auto sGrad = smem_tile<typename Traits::OwnKeyLayout>(buffer);
  fragment_to_shared<typename Traits::Element>(accumulator, typename Traits::DkdvMma{}, sGrad,
                                               thread);
  __syncthreads();
  Traits::KeyWriter::store(view, sequence.batch_k, head_k, sequence.row_k + key_begin,
                           sequence.rows_k - key_begin, columns, sGrad, thread);
}

// Registers -> the tile's rows of dk or dv in fp32, or, where the query heads are split, of this
// split's partial sum.
template <class Traits, class Accumulator>
CUTE_DEVICE void write_fp32_gradient(TensorView const& view, float* partial,
                                     BackwardArguments const& args, Sequence const& sequence,
                                     int split, int head_k, int key_begin, int column_begin,
                                     int columns, Accumulator const& accumulator, int thread) {
  constexpr int head_dim = Traits::head_dim;
  AttentionShape const& shape = args.params.shape;
  Fp32Rows target{
      .first = row_pointer<float>(view, sequence.batch_k, head_k, sequence.row_k + key_begin),
      .row_stride = view.row_stride,
      .rows = sequence.rows_k - key_begin,
      .columns = columns,
      .accumulates = args.params.accumulate};
  if (args.dkdv_splits > 1) {
    const std::int64_t row = split * args.partial_rows +
                             std::int64_t(sequence.batch_k) * shape.seqlen_k + sequence.row_k +
                             key_begin;
    target.first = partial + (row * shape.num_heads_k + head_k) * head_dim + column_begin;
    target.row_stride = shape.num_heads_k * head_dim;
    target.columns = Traits::columns_per_cta;
    target.accumulates = false;
  }
  fragment_to_fp32_rows<Traits::block_n, Traits::columns_per_cta>(
      accumulator, typename Traits::DkdvMma{}, target, thread);
}

// What this CTA does, for all its threads.
template <class Traits>
CUTE_DEVICE void find_tile(BackwardArguments const& args, typename Traits::SharedStorage& smem) {
  constexpr int block_m = Traits::block_m;
  constexpr int block_n = Traits::block_n;
  BackwardParams const& params = args.params;
  int block_id = blockIdx.x;
  if (Traits::has(feature::deterministic) && args.turns.used())
    block_id = atomicAdd(args.tickets, 1);
  if constexpr (Traits::shares_columns) {
    const int tile_id = block_id / args.ctas_per_tile;
    smem.column_begin = (block_id - tile_id * args.ctas_per_tile) * Traits::columns_per_cta;
    block_id = tile_id;
  }
  TileWork work;
  if (!find_work(args.schedule, args.table, params, block_id, work)) {
    smem.work.tile = no_tile;
    return;
  }
  Sequence& sequence = work.sequence;
  sequence.first_q_tile += sequence.index * args.q_tiles_per_sequence;
  if constexpr (Traits::is_sparse) {
    // Of the first of the query heads that share the key head.
    const int head =
        work.head / args.dkdv_splits * (params.shape.num_heads_q / params.shape.num_heads_k);
    work.tile = ranked_tile<block_n>(params, args.table, sequence.index, head, work.tile);
  }
  const int key_begin = work.tile * block_n;
  const int key_last = min(key_begin + block_n, sequence.seqlen_k) - 1;
  smem.work = work;
  smem.range = tiles_that_see<block_m>(params.window, sequence, key_begin, key_last);
}

template <class Tag>
__global__ void __launch_bounds__(BackwardTraits<Tag>::threads)
    backward_kernel(const __grid_constant__ BackwardArguments args) {
  using Traits = BackwardTraits<Tag>;
  using Element = typename Traits::Element;
  constexpr int block_m = Traits::block_m;
  constexpr int block_n = Traits::block_n;
  constexpr int head_dim = Traits::head_dim;
  constexpr int own_columns = Traits::columns_per_cta;

  extern __shared__ __align__(128) char smem_bytes[];
  auto& smem = *reinterpret_cast<typename Traits::SharedStorage*>(smem_bytes);
  BackwardParams const& params = args.params;
  AttentionShape const& shape = params.shape;
  const int thread = threadIdx.x;

  // In shared memory, because registers are what this kernel is short of.
  if (thread == 0) find_tile<Traits>(args, smem);
  __syncthreads();
  TileWork const& work = smem.work;
  Sequence const& sequence = work.sequence;
  BlockRange const& range = smem.range;
  if (work.tile == no_tile) return;
  const int column_begin = Traits::shares_columns ? smem.column_begin : 0;
  const bool has_own_k = column_begin < shape.head_dim;  // columns of Q and K
  const bool has_own_v = column_begin < shape.head_dim_v;
  const int adding_ctas =  // to dQ of a tile
      Traits::shares_columns ? (shape.head_dim - 1) / own_columns + 1 : 1;
  const int head_k = work.head / args.dkdv_splits;
  const int split = work.head - head_k * args.dkdv_splits;
  const int heads_per_cta = shape.num_heads_q / shape.num_heads_k / args.dkdv_splits;
  const int first_head = (head_k * args.dkdv_splits + split) * heads_per_cta;
  const int key_begin = work.tile * block_n;
  // In turns, key tiles that start early must not wait for what others do last
  // (shared/schedule/turns.h).
  const bool descends =
      Traits::has(feature::deterministic) && args.turns.used() && !args.turns.tiles_descend;

  auto sK = smem_tile<typename Traits::KeyLayout>(smem.k);     // (block_n, head_dim)
  auto sV = smem_tile<typename Traits::KeyLayout>(smem.v);     // (block_n, head_dim)
  auto sP = smem_tile<typename Traits::ScoresLayout>(smem.p);  // (block_m, block_n)
  auto sdS = smem_tile<typename Traits::ScoresLayout>(smem.ds);
  // The columns that this CTA makes gradients of.
  auto own_of_queries = [&](auto const& tile) {
    return smem_tile<typename Traits::OwnQueryLayout>(raw_pointer_cast(tile.data()) +
                                                      column_begin * block_m);
  };
  auto sOwnK = smem_tile<typename Traits::OwnKeyLayout>(smem.k + column_begin * block_n);

  const StepRange step_range{range, first_head, first_head + heads_per_cta};
  const auto walk = [&] {
    if constexpr (Traits::is_sparse) {
      return ListSteps<block_m, block_n>(step_range, params.sparsity.lists, work);
    } else {
      return WindowSteps{step_range, descends};
    }
  }();
  // Index of a step's tile among the query tiles of all heads.
  auto q_tile_index = [&](auto const& step) {
    return std::int64_t(step.head) * args.q_tiles + sequence.first_q_tile + step.tile;
  };
  // Where a step's data lies. Found while the loads before it are on their way.
  struct Sources {
    typename Traits::QueryLoader::Source q, dout;
    std::int64_t first_row;  // of the row statistics
  };
  auto sources_of = [&](auto const& step) {
    const int query = step.tile * block_m;
    auto source = [&](TensorView const& view) {
      return Traits::QueryLoader::source(view, sequence.batch_q, step.head, sequence.row_q + query,
                                         sequence.seqlen_q - query, thread);
    };
    return Sources{source(params.q), source(params.dout), q_tile_index(step) * block_m};
  };
  auto load_queries = [&](auto const& source, Element* buffer) {
    auto tile = smem_tile<typename Traits::QueryLayout>(buffer);
    Traits::QueryLoader::load(params.q, source, shape.head_dim, tile, thread);
  };
  auto load_dout = [&](auto const& source, Element* buffer) {
    auto tile = smem_tile<typename Traits::QueryLayout>(buffer);
    Traits::QueryLoader::load(params.dout, source, shape.head_dim_v, tile, thread);
  };
  auto load_row_statistics = [&](int buffer, std::int64_t first_row) {
    constexpr int copies = block_m / 4;  // of 16 bytes, for each of the two arrays
    if (thread >= 2 * copies) return;
    const bool is_lse = thread < copies;
    const int offset = 4 * (is_lse ? thread : thread - copies);
    const float* source = (is_lse ? args.lse_log2 : args.softmax_d) + first_row + offset;
    float* target = (is_lse ? smem.lse_log2[buffer] : smem.softmax_d[buffer]) + offset;
    SM80_CP_ASYNC_CACHEGLOBAL<uint128_t>::copy(*reinterpret_cast<const uint128_t*>(source),
                                               *reinterpret_cast<uint128_t*>(target));
  };

  typename Traits::ScoresMma scores_mma;
  typename Traits::DkdvMma dkdv_mma;
  typename Traits::DqMma dq_mma;
  AccumulatorOf<decltype(dkdv_mma), Shape<Int<block_n>, Int<own_columns>>> tdKrdK;
  AccumulatorOf<decltype(dkdv_mma), Shape<Int<block_n>, Int<own_columns>>> tdVrdV;
  clear(tdKrdK);
  clear(tdVrdV);

  auto cS = make_identity_tensor(Shape<Int<block_m>, Int<block_n>>{});
  // This thread's (rows, columns) of S -> (query, key)
  auto tScS = rows_cols_view(accumulator_share(scores_mma, cS, thread));
  // A product over the columns of two tiles, of which so many exist.
  auto multiply_rows = [&](auto& accumulator, auto& a, auto& b, [[maybe_unused]] int columns) {
    if constexpr (Traits::shares_columns) {
      gemm_columns(scores_mma, accumulator, a, b, columns);
    } else {
      gemm(scores_mma, accumulator, a, b);
    }
  };
  auto to_shared = [&](auto const& accumulator, auto& tile) {
    fragment_to_shared<Element>(accumulator, scores_mma, tile, thread);
  };
  [[maybe_unused]] RngState rng{};
  if constexpr (Traits::has(feature::dropout)) rng = read_rng(params.dropout.rng);

  // As a function of its own, which it is long enough to become, it would put dK and dV in memory.
  auto run_step = [&](auto const& step, auto const& following, int index,
                      bool is_last) __attribute__((always_inline)) {
    const Sources sources = sources_of(following);
    wait_for_loads();  // this step's tiles are here; the previous step's buffers are free
    if (!is_last) {
      const int other = (index + 1) % 2;
      if (Traits::stages_q == 2) load_queries(sources.q, smem.q[other]);
      if (Traits::stages_do == 2) load_dout(sources.dout, smem.dout[other]);
      load_row_statistics(other, sources.first_row);
      commit_loads();
    }
    auto sQ = smem_tile<typename Traits::QueryLayout>(smem.q[index % Traits::stages_q]);
    auto sdO = smem_tile<typename Traits::QueryLayout>(smem.dout[index % Traits::stages_do]);
    const float* lse_log2 = smem.lse_log2[index % 2];
    const float* softmax_d = smem.softmax_d[index % 2];

    const int query_begin = step.tile * block_m;
    AccumulatorOf<decltype(scores_mma), Shape<Int<block_m>, Int<block_n>>> tSrS;
    clear(tSrS);
    {
      auto q = operand_a(LoadMatrix<Element>{}, scores_mma, sQ, thread);
      auto k = operand_b(LoadMatrix<Element>{}, scores_mma, sK, thread);
      multiply_rows(tSrS, q, k, shape.head_dim);
    }
    auto scores = rows_cols_view(tSrS);
    if constexpr (Traits::is_plain) probabilities(scores, tScS, args.scale_log2, lse_log2);

    AccumulatorOf<decltype(scores_mma), Shape<Int<block_m>, Int<block_n>>> tdPrdP;
    clear(tdPrdP);
    {
      auto dout = operand_a(LoadMatrix<Element>{}, scores_mma, sdO, thread);
      auto v = operand_b(LoadMatrix<Element>{}, scores_mma, sV, thread);
      multiply_rows(tdPrdP, dout, v, shape.head_dim_v);
    }
    auto dscores = rows_cols_view(tdPrdP);
    // Only now, so that the exponentials share the product's basic block and fill its gaps.
    auto hide = [&] {
      if (key_begin + block_n <= sequence.seqlen_k && range.is_interior(step.tile)) return;
      const ScoreMask<Traits::config.mask> mask{
          .band = band_from_queries(params.window, sequence.shift), .seqlen_k = sequence.seqlen_k};
      mask.apply(scores, tScS, query_begin, key_begin, 0.0f);
    };
    auto hide_unlisted = [&] {
      if constexpr (Traits::is_sparse) {
        if (!walk.has_lists() ||
            step.pieces.template show_all<block_m, block_n>(query_begin, key_begin))
          return;
        const HeadBits bits = HeadBits::of(params.sparsity.bits, sequence.index, step.head);
        hide_pairs(scores, tScS, step.pieces, bits, query_begin, key_begin, 0.0f);
      }
    };
    auto add_bias = [&] {
      if constexpr (Traits::has(feature::bias)) {
        if (params.score.bias.data == nullptr) return;
        const auto bias =
            ScoreBias<Element>::of(params.score.bias, sequence.index, sequence.seqlen_q, step.head);
        bias.add(scores, tScS, query_begin, key_begin, 1.0f / score_unit(params.score));
      }
    };
    if constexpr (!Traits::is_plain) {
      const ModifiedScores<Traits::has(feature::dropout)> modified{
          .modifiers = ScoreModifiers::of(params.score, sequence.index, step.head, sequence.shift),
          .is_modified = modifies_scores(params.score),
          .dropout = DropoutMask::of(rng, params.dropout.threshold, sequence.stream, step.head),
          .scale_log2 = args.scale_log2,
          .keep_probability = args.keep_probability,
          .query_begin = query_begin,
          .key_begin = key_begin,
          .first_query = sequence.first_q + query_begin,
          .first_key = sequence.first_k + key_begin};
      const auto hide_both = [&] {
        hide();
        hide_unlisted();
      };
      modified.differentiate(scores, dscores, tScS, lse_log2, softmax_d, add_bias, hide_both,
                             [&] { to_shared(tSrS, sP); });
      if constexpr (Traits::has(feature::bias)) {
        if (params.dbias.data != nullptr && column_begin == 0)
          add_bias_gradient<Element>(params.dbias, params.score.bias, sequence.index, step.head,
                                     1.0f / args.keep_probability, dscores, tScS, query_begin,
                                     key_begin);
      }
    } else {
      hide();
      to_shared(tSrS, sP);
      score_gradients(scores, dscores, tScS, softmax_d);
    }
    to_shared(tdPrdP, sdS);
    __syncthreads();  // P and dS are whole

    if (!Traits::shares_columns || has_own_v) {
      auto p = operand_a(LoadMatrixTransposed<Element>{}, dkdv_mma, transposed(sP), thread);
      auto dout = operand_b(LoadMatrixTransposed<Element>{}, dkdv_mma,
                            transposed(own_of_queries(sdO)), thread);
      gemm(dkdv_mma, tdVrdV, p, dout);
    }
    if (!Traits::shares_columns || has_own_k) {
      auto ds = operand_a(LoadMatrix<Element>{}, dq_mma, sdS, thread);
      auto k = operand_b(LoadMatrixTransposed<Element>{}, dq_mma, transposed(sOwnK), thread);
      AccumulatorOf<decltype(dq_mma), Shape<Int<block_m>, Int<own_columns>>> tdQrdQ;
      clear(tdQrdQ);
      gemm(dq_mma, tdQrdQ, ds, k);
      if constexpr (Traits::has(feature::deterministic)) {
        if (args.turns.used()) {
          args.turns.wait(
              q_tile_index(step), adders_of<block_m, block_n>(params.window, sequence, step.tile),
              work.tile, thread, [] { __syncthreads(); }, adding_ctas);
        }
      }
      DqAccumulator<Traits::threads>::add(
          args.dq_accum + q_tile_index(step) * (block_m * head_dim) + column_begin * block_m,
          tdQrdQ, thread);
    }
    if (!Traits::shares_columns || has_own_k) {
      auto ds = operand_a(LoadMatrixTransposed<Element>{}, dkdv_mma, transposed(sdS), thread);
      auto q = operand_b(LoadMatrixTransposed<Element>{}, dkdv_mma, transposed(own_of_queries(sQ)),
                         thread);
      gemm(dkdv_mma, tdKrdK, ds, q);
    }
    if constexpr (Traits::has(feature::deterministic)) {
      if (args.turns.used() && (!Traits::shares_columns || has_own_k))
        args.turns.pass_on(q_tile_index(step), thread, [] { __syncthreads(); });
    }
    if (!is_last && (Traits::stages_q == 1 || Traits::stages_do == 1)) {
      const Sources after = sources_of(following);
      __syncthreads();  // the single buffers are read
      if (Traits::stages_q == 1) load_queries(after.q, smem.q[0]);
      if (Traits::stages_do == 1) load_dout(after.dout, smem.dout[0]);
      commit_loads();
    }
  };

  const int steps = walk.steps();
  if (steps > 0) {
    const int keys = sequence.seqlen_k - key_begin;
    const int row = sequence.row_k + key_begin;
    Traits::KeyLoader::load(params.k, sequence.batch_k, head_k, row, keys, shape.head_dim, sK,
                            thread);
    Traits::KeyLoader::load(params.v, sequence.batch_k, head_k, row, keys, shape.head_dim_v, sV,
                            thread);
    auto step = walk.first();
    const Sources sources = sources_of(step);
    load_queries(sources.q, smem.q[0]);
    load_dout(sources.dout, smem.dout[0]);
    load_row_statistics(0, sources.first_row);
    commit_loads();
    for (int index = 0; index < steps; ++index) {
      const auto following = walk.next(step);
      run_step(step, following, index, index + 1 == steps);
      step = following;
    }
  }

  const float kept = Traits::has(feature::dropout) ? 1.0f / args.keep_probability : 1.0f;
  CUTE_UNROLL
  for (int i = 0; i < size(tdKrdK); ++i) tdKrdK(i) *= args.score_factor;
  if constexpr (Traits::has(feature::dropout)) {
    CUTE_UNROLL
    for (int i = 0; i < size(tdVrdV); ++i) tdVrdV(i) *= kept;
  }
  const int own_k = shape.head_dim - column_begin;
  const int own_v = shape.head_dim_v - column_begin;
  if (args.dkdv_splits > 1 || (Traits::writes_fp32 && params.fp32_results)) {
    write_fp32_gradient<Traits>(from_column<float>(params.dk, column_begin), args.dk_partial, args,
                                sequence, split, head_k, key_begin, column_begin, own_k, tdKrdK,
                                thread);
    write_fp32_gradient<Traits>(from_column<float>(params.dv, column_begin), args.dv_partial, args,
                                sequence, split, head_k, key_begin, column_begin, own_v, tdVrdV,
                                thread);
    return;
  }
  __syncthreads();  // K and V are read, their buffers take dK and dV
  write_key_gradient<Traits>(from_column<Element>(params.dk, column_begin), sequence, head_k,
                             key_begin, own_k, tdKrdK, smem.k, thread);
  write_key_gradient<Traits>(from_column<Element>(params.dv, column_begin), sequence, head_k,
                             key_begin, own_v, tdVrdV, smem.v, thread);
}

}  // namespace flash_attn_cuda::sm80
