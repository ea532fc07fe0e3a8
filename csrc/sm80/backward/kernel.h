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
#include "sm80/backward/find_tile.h"
#include "sm80/backward/loads.h"
#include "sm80/backward/own_turns.h"
#include "sm80/backward/results.h"
#include "sm80/backward/scores.h"
#include "sm80/backward/steps.h"
#include "sm80/backward/traits.h"

namespace flash_attn_cuda::sm80 {

template <class Tag>
__global__ void __launch_bounds__(BackwardTraits<Tag>::threads)
    backward_kernel(const __grid_constant__ BackwardArguments args) {
  using Traits = BackwardTraits<Tag>;
  using Element = typename Traits::Element;
  constexpr int block_m = Traits::block_m;
  constexpr int block_n = Traits::block_n;
  constexpr int own_columns = Traits::columns_per_cta;
  constexpr bool wide = Traits::shares_columns;

  extern __shared__ __align__(128) char smem_bytes[];
  auto& smem = *reinterpret_cast<typename Traits::SharedStorage*>(smem_bytes);
  BackwardParams const& params = args.params;
  AttentionShape const& shape = params.shape;
  const int thread = threadIdx.x;

  // Work and range lie in shared memory, because registers are what this kernel is short of.
  if (thread == 0) find_tile<Traits>(args, smem);
  __syncthreads();
  TileWork const& work = smem.work;
  Sequence const& sequence = work.sequence;
  BlockRange const& range = smem.range;
  if (work.tile == no_tile) return;
  const auto own = OwnGradients<Traits>::of(args, smem);
  const OwnTurns<Traits> turns{args, work, own, thread};
  if constexpr (Traits::is_sparse) {
    if (turns.have_marks()) mark_tiles<Traits, Marked::skipped>(args, smem);
  }

  auto sK = smem_tile<typename Traits::KeyLayout>(smem.k);     // (block_n, head_dim)
  auto sV = smem_tile<typename Traits::KeyLayout>(smem.v);     // (block_n, head_dim)
  auto sP = smem_tile<typename Traits::ScoresLayout>(smem.p);  // (block_m, block_n)
  auto sdS = smem_tile<typename Traits::ScoresLayout>(smem.ds);
  // The columns that this CTA makes gradients of.
  auto own_of_queries = [&](auto const& tile) {
    return smem_tile<typename Traits::OwnQueryLayout>(raw_pointer_cast(tile.data()) +
                                                      own.column_begin * block_m);
  };
  auto sOwnK = smem_tile<typename Traits::OwnKeyLayout>(smem.k + own.column_begin * block_n);

  const auto walk = steps_of<Traits>(args, work, range, own.first_head, own.end_head);
  const StepLoads<Traits> loads{{args, sequence, smem, thread}};

  using Rows = LoadMatrix<Element>;
  using Columns = LoadMatrixTransposed<Element>;
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
  auto to_shared = [&](auto const& accumulator, auto& tile) {
    fragment_to_shared<Element>(accumulator, scores_mma, tile, thread);
  };
  RngState rng{};
  if (Traits::has_dropout) rng = read_rng(params.dropout.rng);

  // Inline, because as a function, which it is long enough to become, it puts dK and dV in memory.
  auto run_step = [&](auto const& step, auto const& following, int index,
                      bool is_last) __attribute__((always_inline)) {
    loads.load_during(following, index, is_last);
    auto sQ = smem_tile<typename Traits::QueryLayout>(smem.q[index % Traits::stages_q]);
    auto sdO = smem_tile<typename Traits::QueryLayout>(smem.dout[index % Traits::stages_do]);
    const StepScores<Traits, std::remove_cvref_t<decltype(step)>> math{
        .args = args,
        .sequence = sequence,
        .range = range,
        .step = step,
        .key_begin = own.key_begin,
        .makes_dbias = own.column_begin == 0,
        .lse_log2 = smem.lse_log2[index % 2],
        .softmax_d = smem.softmax_d[index % 2],
        .free_words = reinterpret_cast<__half2*>(smem.ds)};

    AccumulatorOf<decltype(scores_mma), Shape<Int<block_m>, Int<block_n>>> tSrS;
    clear(tSrS);
    gemm_tile_rows<Rows, wide>(scores_mma, tSrS, sQ, sK, shape.head_dim, thread);
    auto scores = rows_cols_view(tSrS);
    if (Traits::is_plain) probabilities(scores, tScS, args.scale_log2, math.lse_log2);

    AccumulatorOf<decltype(scores_mma), Shape<Int<block_m>, Int<block_n>>> tdPrdP;
    clear(tdPrdP);
    gemm_tile_rows<Rows, wide>(scores_mma, tdPrdP, sdO, sV, shape.head_dim_v, thread);
    auto dscores = rows_cols_view(tdPrdP);
    math.differentiate(rng, scores, dscores, tScS, [&] { to_shared(tSrS, sP); });
    to_shared(tdPrdP, sdS);
    __syncthreads();  // P and dS are whole

    if (own.has_v) {
      gemm_tiles<Columns, Columns>(dkdv_mma, tdVrdV, transposed(sP),
                                   transposed(own_of_queries(sdO)), thread);
    }
    if (own.has_k) {
      AccumulatorOf<decltype(dq_mma), Shape<Int<block_m>, Int<own_columns>>> tdQrdQ;
      clear(tdQrdQ);
      gemm_tiles<Rows, Columns>(dq_mma, tdQrdQ, sdS, transposed(sOwnK), thread);
      const std::int64_t q_tile = loads.q_tile_index(step);
      turns.wait(q_tile, step.tile);
      add_query_gradient<Traits>(args, q_tile, own.column_begin, tdQrdQ, thread);
      gemm_tiles<Columns, Columns>(dkdv_mma, tdKrdK, transposed(sdS),
                                   transposed(own_of_queries(sQ)), thread);
      turns.pass_on(q_tile);
    }
    loads.load_behind(following, is_last);
  };

  const int steps = walk.steps();
  if (steps > 0) {
    loads.load_keys(params.k, own, shape.head_dim, smem.k);
    loads.load_keys(params.v, own, shape.head_dim_v, smem.v);
    auto step = walk.first();
    loads.load_first(step);
    for (int index = 0; index < steps; ++index) {
      const auto following = walk.next(step);
      run_step(step, following, index, index + 1 == steps);
      step = following;
    }
  }
  leave_key_gradients<Traits>(args, sequence, smem, own, tdKrdK, tdVrdV, thread);
  if constexpr (Traits::is_sparse) {
    if (turns.have_marks()) mark_tiles<Traits, Marked::all>(args, smem);
  }
}

}  // namespace flash_attn_cuda::sm80
