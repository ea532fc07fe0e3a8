// A consumer warpgroup of a CTA: S, T and the tangent of O of 64 query rows, in registers. While it
// makes P and its tangent of a block, the other warpgroup multiplies: of the five products of a
// block the exponentials of the other one take less time than two.
#pragma once

#include "shared/mask/mask.h"
#include "shared/online_softmax.h"
#include "shared/row_tangents.h"
#include "shared/write_rounding.h"
#include "sm90/epilogue.h"
#include "sm90/jvp/arguments.h"
#include "sm90/jvp/traits.h"

namespace flash_attn_cuda::sm90 {

// What a thread knows of its two rows.
struct JvpRows {
  int first_query;  // the second one is 8 further on
  float lse_log2[2];
  float mu[2];  // the tangent of LSE, of this thread's share of keys

  CUTE_DEVICE static JvpRows of(ForwardParams const& params, TileWork const& work, int query_begin,
                                int thread) {
    JvpRows rows{.first_query = first_row_of(thread, query_begin)};
    const float* lse_of_head = lse_rows(params.lse, work.sequence, work.head);
    CUTE_UNROLL
    for (int row = 0; row < 2; ++row) {
      rows.lse_log2[row] = telling_lse_log2(lse_of_head, work.sequence, rows.first_query + 8 * row);
      rows.mu[row] = tangent_of_sink(params, work.head, rows.lse_log2[row]);
    }
    return rows;
  }
};

// S -> P.
template <class Scores>
CUTE_DEVICE void probabilities(Scores& scores, float scale_log2, JvpRows const& rows) {
  CUTE_UNROLL
  for (int row = 0; row < 2; ++row) {
    CUTE_UNROLL
    for (int col = 0; col < size<1>(scores); ++col)
      scores(row, col) = fast_exp2(scores(row, col) * scale_log2 - rows.lse_log2[row]);
  }
}

// T -> P * T, which mu takes in.
template <class Scores>
CUTE_DEVICE void weigh(Scores const& probs, Scores& tangents, float softmax_scale, JvpRows& rows) {
  CUTE_UNROLL
  for (int row = 0; row < 2; ++row) {
    CUTE_UNROLL
    for (int col = 0; col < size<1>(probs); ++col) {
      tangents(row, col) *= probs(row, col) * softmax_scale;
      rows.mu[row] += tangents(row, col);
    }
  }
}

// (P * T) V + P tV -> the tangent of O; mu is that of LSE.
template <class Traits, class Output>
CUTE_DEVICE void write_tangents(ForwardParams const& params, TileWork const& work, int query_begin,
                                Output& output, JvpRows& rows, int thread) {
  using Element = typename Traits::Element;
  Sequence const& sequence = work.sequence;
  const int columns = params.shape.head_dim_v;
  const auto offset_of = [&](TensorView const& view, int query) {
    return sequence.batch_q * view.batch_stride + work.head * view.head_stride +
           (std::int64_t(sequence.row_q) + query) * view.row_stride;
  };
  CUTE_UNROLL
  for (int row = 0; row < 2; ++row) {
    const int query = rows.first_query + 8 * row;
    const bool attends = query < sequence.seqlen_q;
    const float mu = quad_reduce(rows.mu[row], [](float a, float b) { return a + b; });
    const Element* out =
        static_cast<const Element*>(params.out.data) + offset_of(params.out, query);
    const auto* kept = static_cast<const std::int8_t*>(params.out_rounding.data);
    if (kept != nullptr) kept += offset_of(params.out_rounding, query);
    CUTE_UNROLL
    for (int i = 0; i < size<1>(output); i += 2) {
      const int column = 4 * i + 2 * (thread % 4);
      const bool exists = attends && column < columns;
      float2 pair{};
      if (exists)
        pair = OutRounding<Traits::config.dtype>::load(out + column,
                                                       kept == nullptr ? nullptr : kept + column);
      output(row, i) = exists ? output(row, i) - mu * pair.x : 0.0f;
      output(row, i + 1) = exists ? output(row, i + 1) - mu * pair.y : 0.0f;
    }
    if (thread % 4 == 0 && query < sequence.rows_q)
      lse_rows(params.tangents.lse, sequence, work.head)[query] = attends ? mu : 0.0f;
  }
  if (TensorView const& view = params.tangents.out_rounding; view.data != nullptr) {
    write_rounding<Traits::config.dtype>(
        static_cast<std::int8_t*>(view.data) + offset_of(view, query_begin), view.row_stride,
        output, sequence.rows_q - query_begin, columns,
        [&](int row) { return rows.first_query + 8 * row - query_begin; });
  }
  const RowTarget<Element> target{.first = static_cast<Element*>(params.tangents.out.data) +
                                           offset_of(params.tangents.out, query_begin),
                                  .row_stride = params.tangents.out.row_stride,
                                  .rows = sequence.rows_q - query_begin,
                                  .columns = columns};
  write_rows(output, target, thread);
}

template <class Traits>
CUTE_DEVICE void consume_jvp(JvpArguments const& args, typename Traits::SharedStorage& smem,
                             int warpgroup) {
  using Element = typename Traits::Element;
  constexpr int block_n = Traits::block_n;
  ForwardParams const& params = args.params;
  TileWork const& work = smem.work;
  Sequence const& sequence = work.sequence;
  const BlockRange range = smem.range;
  const int thread = threadIdx.x % warpgroup_threads;
  const int query_begin = work.tile * Traits::block_m + 64 * warpgroup;
  PipelineState<Traits::stages> state;  // K and V of a block lie in the same place of their rings

  typename Traits::ScoresMma scores_mma;
  typename Traits::OutputMma output_mma;
  auto sQ = smem_tile<typename Traits::QueryLayout>(smem.q);  // (64, head_dim, consumers)
  auto sK = smem_tile<typename Traits::KeyLayout>(smem.k);    // (block_n, head_dim, stages)
  auto sV = smem_tile<typename Traits::KeyLayout>(smem.v);
  auto sTangentQ = smem_tile<typename Traits::QueryLayout>(smem.tangent_q);
  auto sTangentK = smem_tile<typename Traits::KeyLayout>(smem.tangent_k);
  auto sTangentV = smem_tile<typename Traits::KeyLayout>(smem.tangent_v);
  auto tSrQ = a_fragment(scores_mma, sQ, thread);
  auto tSrK = b_fragment(scores_mma, sK, thread);
  auto tOrV = b_fragment(output_mma, transposed(sV), thread);
  auto tSrTangentQ = a_fragment(scores_mma, sTangentQ, thread);
  auto tSrTangentK = b_fragment(scores_mma, sTangentK, thread);
  auto tOrTangentV = b_fragment(output_mma, transposed(sTangentV), thread);

  AccumulatorOf<decltype(scores_mma), Shape<_64, Int<block_n>>> tSrS, tSrT;
  AccumulatorOf<decltype(output_mma), Shape<_64, Int<Traits::head_dim>>> tOrO;
  FragmentLike<Element, decltype(a_operand_view(tSrS))> tOrP, tOrT;
  clear(tOrO);
  auto scores = rows_cols_view(tSrS);
  auto tangents = rows_cols_view(tSrT);
  const auto coords = rows_cols_view(
      accumulator_share(scores_mma, make_identity_tensor(Shape<_64, Int<block_n>>{}), thread));
  const ScoreMask<Traits::config.mask> mask{
      .band = band_from_queries(params.window, sequence.shift), .seqlen_k = sequence.seqlen_k};
  JvpRows rows = JvpRows::of(params, work, query_begin, thread);

  if (!range.empty()) FullBarrier::wait(&smem.q_ring.full[0], 0);
  CUTE_NO_UNROLL
  for (int block = range.end - 1; block >= range.begin; --block, state.advance()) {
    const int stage = state.stage;
    consumer_wait(smem.k_ring, state);
    start_product(scores_mma, tSrQ(_, _, _, warpgroup), tSrK(_, _, _, stage), tSrS, false);
    start_product(scores_mma, tSrTangentQ(_, _, _, warpgroup), tSrK(_, _, _, stage), tSrT, false);
    start_product(scores_mma, tSrQ(_, _, _, warpgroup), tSrTangentK(_, _, _, stage), tSrT, true);
    wait_products<2>(tSrS);
    if (!range.is_interior(block)) {
      mask.apply_by_bits(scores, coords, query_begin, block * block_n, -INFINITY);
    }
    probabilities(scores, args.scale_log2, rows);
    wait_products<0>(tSrT);
    consumer_release(smem.k_ring, state);
    weigh(scores, tangents, params.score.softmax_scale, rows);
    convert_into(a_operand_view(tSrT), tOrT);
    convert_into(a_operand_view(tSrS), tOrP);
    consumer_wait(smem.v_ring, state);
    start_product(output_mma, tOrT, tOrV(_, _, _, stage), tOrO, true);
    start_product(output_mma, tOrP, tOrTangentV(_, _, _, stage), tOrO, true);
    wait_products<0>(tOrO);
    consumer_release(smem.v_ring, state);
  }
  auto output = rows_cols_view(tOrO);
  write_tangents<Traits>(params, work, query_begin, output, rows, thread);
}

}  // namespace flash_attn_cuda::sm90
