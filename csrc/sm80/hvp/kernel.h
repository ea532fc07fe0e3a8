// The second backward of attention: gradients of <dO, tO> + <dLSE, tLSE> by Q, K and V, where tO
// and tLSE are its derivative in the direction tQ, tK, tV (sm80/jvp/kernel.h). dK and dV of one key
// tile a CTA, dQ summed over key tiles in fp32.
//
//   P = exp(scale * Q K^T - LSE), T = scale * (tQ K^T + Q tK^T), mu = tLSE
//   dP = dO V^T, dS = P * (dP - D), D = rowsum(dO * O) - dLSE
//   tdS = P * (dO tV^T + (T - mu) * (dP - D) - beta), beta = rowsum(dO * tO)
//   dV = (P * (T - mu))^T dO, dQ = scale * (tdS K + dS tK), dK = scale * (tdS^T Q + dS^T tQ)
//
// scores.h has what modifiers and dropout change between the products; the way from the products to
// gradients in memory is that of the backward (sm80/backward/results.h), the statistics of rows are
// the preprocess kernel's (auxiliary/backward/preprocess.cu).
//
// Threads: num_warps x 32. dK and dV stay in registers for the life of the CTA, which walks the
// query tiles of every query head that shares its key head. Shared memory: K, V and their tangents,
// one buffer of Q, tQ and dO, and three score tiles in 16 bits (traits.h).
#pragma once

#include "shared/gradient/backward_arguments.h"
#include "sm80/backward/loads.h"
#include "sm80/backward/own_turns.h"
#include "sm80/backward/results.h"
#include "sm80/backward/steps.h"
#include "sm80/hvp/scores.h"
#include "sm80/hvp/traits.h"

namespace flash_attn_cuda::sm80 {

// The query side of a step on its way to shared memory.
template <class Traits>
struct HvpLoads : TileLoads<Traits> {
  using Base = TileLoads<Traits>;
  using Base::args, Base::sequence, Base::smem, Base::thread;
  static constexpr int block_m = Traits::block_m;

  template <class Step>
  CUTE_DEVICE void load(Step const& step) const {
    BackwardParams const& params = args.params;
    const int query = step.tile * block_m;
    auto load = [&](TensorView const& view, int columns, typename Traits::Element* buffer) {
      auto tile = smem_tile<typename Traits::QueryLayout>(buffer);
      Traits::QueryLoader::load(view, sequence.batch_q, step.head, sequence.row_q + query,
                                sequence.seqlen_q - query, columns, tile, thread);
    };
    load(params.q, params.shape.head_dim, smem.q);
    if (params.tangents.q.data != nullptr)
      load(params.tangents.q, params.shape.head_dim, smem.tangent_q);
    load(params.dout, params.shape.head_dim_v, smem.dout);
    load_row_statistics(this->q_tile_index(step) * block_m);
    commit_loads();
  }

 private:
  CUTE_DEVICE void load_row_statistics(std::int64_t first_row) const {
    constexpr int copies = block_m / 4;  // of 16 bytes, for each statistic
    if (thread >= Traits::row_statistics * copies) return;
    const int statistic = thread / copies;
    const float* const source = statistic == Traits::lse_log2      ? args.lse_log2
                                : statistic == Traits::softmax_d   ? args.softmax_d
                                : statistic == Traits::tangent_lse ? args.tangent_lse
                                                                   : args.tangent_dot;
    const int offset = 4 * (thread % copies);
    float* target = smem.rows[statistic] + offset;
    SM80_CP_ASYNC_CACHEGLOBAL<uint128_t>::copy(
        *reinterpret_cast<const uint128_t*>(source + first_row + offset),
        *reinterpret_cast<uint128_t*>(target));
  }
};

template <class Tag>
__global__ void __launch_bounds__(HvpTraits<Tag>::threads)
    hvp_kernel(const __grid_constant__ BackwardArguments args) {
  using Traits = HvpTraits<Tag>;
  using Element = typename Traits::Element;
  constexpr int block_m = Traits::block_m;
  constexpr int block_n = Traits::block_n;
  constexpr int own_columns = Traits::columns_per_cta;
  constexpr bool wide = Traits::shares_columns;

  extern __shared__ __align__(128) char smem_bytes[];
  auto& smem = *reinterpret_cast<typename Traits::SharedStorage*>(smem_bytes);
  BackwardParams const& params = args.params;
  TangentParams const& tangents = params.tangents;
  AttentionShape const& shape = params.shape;
  const int thread = threadIdx.x;

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
  const bool moves_q = tangents.q.data != nullptr;
  const bool moves_k = tangents.k.data != nullptr;
  // Of products that are sums over the two sides, that with tQ and that with tK. They stand in
  // loops because each place of a product takes seconds to compile.
  const int first_side = moves_q ? 0 : 1;
  const int end_side = moves_k ? 2 : 1;
  const bool moves_v = tangents.v.data != nullptr;

  auto sK = smem_tile<typename Traits::KeyLayout>(smem.k);     // (block_n, head_dim)
  auto sQ = smem_tile<typename Traits::QueryLayout>(smem.q);   // (block_m, head_dim)
  auto sP = smem_tile<typename Traits::ScoresLayout>(smem.p);  // (block_m, block_n)
  auto sdS = smem_tile<typename Traits::ScoresLayout>(smem.ds);
  auto sTangentdS = smem_tile<typename Traits::ScoresLayout>(smem.tangent_ds);
  // The columns that this CTA makes gradients of.
  auto sOwnQ = smem_tile<typename Traits::OwnQueryLayout>(smem.q + own.column_begin * block_m);
  auto sOwnK = smem_tile<typename Traits::OwnKeyLayout>(smem.k + own.column_begin * block_n);

  const auto walk = steps_of<Traits>(args, work, range, own.first_head, own.end_head);
  const HvpLoads<Traits> loads{{args, sequence, smem, thread}};

  using Rows = LoadMatrix<Element>;
  using Columns = LoadMatrixTransposed<Element>;
  typename Traits::ScoresMma scores_mma;
  typename Traits::DkdvMma dkdv_mma;
  typename Traits::DqMma dq_mma;
  AccumulatorOf<decltype(dkdv_mma), Shape<Int<block_n>, Int<own_columns>>> tdKrdK;
  AccumulatorOf<decltype(dkdv_mma), Shape<Int<block_n>, Int<own_columns>>> tdVrdV;
  clear(tdKrdK);
  clear(tdVrdV);
  // Operands of the first of several tiles that lie alike.
  auto q = operand_a(Rows{}, scores_mma, sQ, thread);
  auto k = operand_b(Rows{}, scores_mma, sK, thread);
  auto scores_of_keys = operand_a(Columns{}, dkdv_mma, transposed(sP), thread);
  auto own_queries = operand_b(Columns{}, dkdv_mma, transposed(sOwnQ), thread);
  auto scores_of_queries = operand_a(Rows{}, dq_mma, sP, thread);
  auto own_keys = operand_b(Columns{}, dq_mma, transposed(sOwnK), thread);
  auto cS = make_identity_tensor(Shape<Int<block_m>, Int<block_n>>{});
  // This thread's (rows, columns) of S -> (query, key)
  auto tScS = rows_cols_view(accumulator_share(scores_mma, cS, thread));
  auto to_shared = [&](auto const& accumulator, auto& tile) {
    fragment_to_shared<Element>(accumulator, scores_mma, tile, thread);
  };

  // Inline, as in the backward.
  auto run_step = [&](auto const& step) __attribute__((always_inline)) {
    AccumulatorOf<decltype(scores_mma), Shape<Int<block_m>, Int<block_n>>> tSrS, tSrT, tdPrdP,
        tdPrTangent;
    clear(tSrS);
    clear(tSrT);
    clear(tdPrdP);
    clear(tdPrTangent);
    auto multiply = [&](auto& accumulator, Element const* queries, Element const* keys,
                        int columns) {
      auto a = q.behind(queries - smem.q);
      auto b = k.behind(keys - smem.k);
      gemm_rows<wide>(scores_mma, accumulator, a, b, columns);
    };
    multiply(tSrS, smem.q, smem.k, shape.head_dim);
    CUTE_NO_UNROLL
    for (int side = first_side; side < end_side; ++side)
      multiply(tSrT, side == 0 ? smem.tangent_q : smem.q, side == 0 ? smem.k : smem.tangent_k,
               shape.head_dim);
    multiply(tdPrdP, smem.dout, smem.v, shape.head_dim_v);
    if (moves_v) multiply(tdPrTangent, smem.dout, smem.tangent_v, shape.head_dim_v);

    auto scores = rows_cols_view(tSrS);
    auto moved = rows_cols_view(tSrT);
    auto dscores = rows_cols_view(tdPrdP);
    auto tangent_dscores = rows_cols_view(tdPrTangent);
    const HvpScores<Traits, std::remove_cvref_t<decltype(step)>> math{
        .args = args,
        .sequence = sequence,
        .range = range,
        .step = step,
        .key_begin = own.key_begin,
        .makes_dbias = own.column_begin == 0,
        .rows = smem.rows};
    math.differentiate(scores, moved, dscores, tangent_dscores, tScS);
    to_shared(tSrS, sP);
    to_shared(tdPrdP, sdS);
    to_shared(tdPrTangent, sTangentdS);
    __syncthreads();  // the score tiles are whole

    auto multiply_keys = [&](auto& accumulator, Element const* score_tile, Element const* queries) {
      auto a = scores_of_keys.behind(score_tile - smem.p);
      auto b = own_queries.behind(queries - smem.q);
      gemm(dkdv_mma, accumulator, a, b);
    };
    auto multiply_queries = [&](auto& accumulator, Element const* score_tile, Element const* keys) {
      auto a = scores_of_queries.behind(score_tile - smem.p);
      auto b = own_keys.behind(keys - smem.k);
      gemm(dq_mma, accumulator, a, b);
    };
    if (own.has_v) multiply_keys(tdVrdV, smem.p, smem.dout);
    if (own.has_k) {
      AccumulatorOf<decltype(dq_mma), Shape<Int<block_m>, Int<own_columns>>> tdQrdQ;
      clear(tdQrdQ);
      CUTE_NO_UNROLL
      for (int side = 0; side < end_side; ++side)
        multiply_queries(tdQrdQ, side == 0 ? smem.tangent_ds : smem.ds,
                         side == 0 ? smem.k : smem.tangent_k);
      const std::int64_t q_tile = loads.q_tile_index(step);
      turns.wait(q_tile, step.tile);
      add_query_gradient<Traits>(args, q_tile, own.column_begin, tdQrdQ, thread);
      CUTE_NO_UNROLL
      for (int side = 1; side >= first_side; --side)
        multiply_keys(tdKrdK, side == 0 ? smem.ds : smem.tangent_ds,
                      side == 0 ? smem.tangent_q : smem.q);
      turns.pass_on(q_tile);
    }
  };

  const int steps = walk.steps();
  if (steps > 0) {
    loads.load_keys(params.k, own, shape.head_dim, smem.k);
    loads.load_keys(params.v, own, shape.head_dim_v, smem.v);
    if (moves_k) loads.load_keys(tangents.k, own, shape.head_dim, smem.tangent_k);
    if (moves_v) loads.load_keys(tangents.v, own, shape.head_dim_v, smem.tangent_v);
    auto step = walk.first();
    loads.load(step);
    for (int index = 0; index < steps; ++index) {
      wait_for_loads();
      run_step(step);
      step = walk.next(step);
      __syncthreads();  // the query side is read
      if (index + 1 < steps) loads.load(step);
    }
  }
  leave_key_gradients<Traits>(args, sequence, smem, own, tdKrdK, tdVrdV, thread);
  if constexpr (Traits::is_sparse) {
    if (turns.have_marks()) mark_tiles<Traits, Marked::all>(args, smem);
  }
}

}  // namespace flash_attn_cuda::sm80
