// A consumer warpgroup of a forward CTA for wide heads. Of 64 queries O of 512 columns in fp32
// fills half of the registers, so two warpgroups have half of its columns each. In a step each
// makes S and P of one block of keys and tells the other P, thread by thread; then both multiply
// both P with their columns of V.
//
// Each follows the maximum of its own scores, which rise rarely once a tile has begun. Where a
// row's reference is not the other warpgroup's, what was made with the lower one is scaled, and
// both go on with the higher.
#pragma once

#include "shared/online_softmax.h"
#include "sm90/epilogue.h"
#include "sm90/tile/results.h"
#include "sm90/tile/scores.h"
#include "sm90/wide/partner.h"
#include "sm90/wide/products.h"
#include "sm90/wide_forward/steps.h"

namespace flash_attn_cuda::sm90 {

// P times a factor for each row. tOrP: as a product's left operand has it, pairs of columns,
// alternately of the thread's first row and its second.
template <class Operand>
CUTE_DEVICE void scale_probabilities(Operand& tOrP, float const (&factors)[2]) {
  using Element = typename Operand::value_type;
  CUTE_UNROLL
  for (int i = 0; i < size(tOrP); ++i)
    tOrP(i) = static_cast<Element>(static_cast<float>(tOrP(i)) * factors[i / 2 % 2]);
}

template <class Traits>
CUTE_DEVICE void write_wide_output(ForwardParams const& params, Sequence const& sequence, int head,
                                   int query_begin, int warpgroup, auto& output,
                                   typename Traits::Softmax& softmax, int thread) {
  float lse[Traits::rows_per_thread];
  softmax.normalize_softmax_lse(output, lse, sink_of(params.score, head));
  const int first_query = first_row_of(thread, query_begin);
  CUTE_UNROLL
  for (int row = 0; row < Traits::rows_per_thread; ++row) {
    const int query = first_query + 8 * row;
    if (query >= sequence.seqlen_q) {  // does not attend, and may be the sequence's
      lse[row] = -INFINITY;
      CUTE_UNROLL
      for (int column = 0; column < size<1>(output); ++column) output(row, column) = 0.0f;
    }
    if (warpgroup == 0 && thread % 4 == 0 && query < sequence.rows_q)
      *lse_row(params, sequence, head, query) = lse[row];
  }
  const int first_column = warpgroup * Traits::Slots::own_columns;
  const auto write_as = [&](auto stored) {
    using Stored = decltype(stored);
    const RowTarget<Stored> target{.first = static_cast<Stored*>(params.out.data) +
                                            output_offset(params.out, sequence, head, query_begin) +
                                            first_column,
                                   .row_stride = params.out.row_stride,
                                   .rows = sequence.rows_q - query_begin,
                                   .columns = params.shape.head_dim_v - first_column};
    write_rows(output, target, thread);
  };
  if (Traits::writes_fp32 && params.fp32_results) {
    write_as(float{});
  } else {
    write_rounding_of_rows<Traits>(params, sequence, head, query_begin, output, thread,
                                   first_column);
    write_as(typename Traits::Element{});
  }
}

template <class Traits>
CUTE_DEVICE void consume_wide(ForwardArguments const& args, typename Traits::SharedStorage& smem,
                              int warpgroup) {
  using Element = typename Traits::Element;
  constexpr int rows = Traits::rows_per_thread;
  ForwardParams const& params = args.params;
  const int thread = threadIdx.x % warpgroup_threads;
  PipelineState<Traits::work_stages> work_state;
  PipelineState<1> q_state;
  ForwardEffects<Traits> effects;
  WideProducts<Traits> products{smem, warpgroup, thread};
  Partner partner{smem.told, warpgroup, thread};
  auto tSrS = products.make_scores();
  auto tOrO = products.make_result();
  FragmentLike<Element, decltype(a_operand_view(tSrS))> tOrP, tOrOtherP;
  auto output = rows_cols_view(tOrO);

  for (;; work_state.advance(), q_state.advance()) {
    consumer_wait(smem.work_ring, work_state);
    TileWork const& work = smem.work[work_state.stage].work;
    if (work.tile == no_tile) break;
    const PairedBlocks<Traits> steps(params, work, smem.work[work_state.stage].range);
    Sequence const& sequence = work.sequence;
    const int query_begin = work.tile * Traits::block_m;
    const ForwardTile<Traits> tile{params, sequence, query_begin, steps.range};
    const ForwardScores<Traits> scores(tile, work, smem, warpgroup, thread, effects);
    typename Traits::Softmax softmax(args.scale_log2, scores.rows);
    auto rescale_o = [&](int row, float factor) { softmax.multiply_row(output, row, factor); };

    consumer_wait(smem.q_ring, q_state);
    products.start_scores(smem.q, tSrS);
    products.reader.finish(tSrS);
    // Inline, because as a function it would have its registers in memory. No product crosses the
    // end of a step: the compiler may move registers there.
    auto multiply = [&](int step, auto is_last) __attribute__((always_inline)) {
      typename ForwardScores<Traits>::Left left;
      if (steps.has_block(step, warpgroup)) {
        left = scores.modify_and_mask(steps.block_of(step, warpgroup), false, tSrS);
      } else {
        fill(tSrS, -INFINITY);
      }
      scores.probabilities(tSrS, left, softmax, tOrP, rescale_o);
      partner.tell(tOrP, softmax.row_max);
      if constexpr (is_last) {
        consumer_release(smem.q_ring, q_state);
      } else {
        products.start_scores(smem.q, tSrS);
      }
      float references[rows];
      partner.hear(tOrOtherP, references);
      const bool differs =
          references[0] != softmax.row_max[0] || references[1] != softmax.row_max[1];
      if (__any_sync(0xffffffffu, differs)) {
        float factors[rows];
        softmax.raise_references(references, [&](int row, float factor) {
          rescale_o(row, factor);
          factors[row] = factor;
        });
        scale_probabilities(tOrP, factors);
        scale_probabilities(tOrOtherP, references);
      }
      products.start_result(tOrP, tOrO, step > 0);
      products.start_result(tOrOtherP, tOrO, true);
      products.reader.finish(tOrO);
      if constexpr (!is_last) warpgroup_fence_operand(tSrS);
    };
    CUTE_NO_UNROLL
    for (int step = 0; step + 1 < steps.count; ++step) multiply(step, false_type{});
    multiply(steps.count - 1, true_type{});

    float own_sums[rows], other_sums[rows];
    CUTE_UNROLL
    for (int row = 0; row < rows; ++row)
      own_sums[row] = quad_reduce(softmax.row_sum[row], [](float a, float b) { return a + b; });
    partner.tell(own_sums);
    partner.hear(other_sums);
    CUTE_UNROLL
    for (int row = 0; row < rows; ++row)
      softmax.row_sum[row] = thread % 4 == 0 ? own_sums[row] + other_sums[row] : 0.0f;
    write_wide_output<Traits>(params, sequence, work.head, query_begin, warpgroup, output, softmax,
                              thread);
    __syncwarp();
    consumer_release(smem.work_ring, work_state);
  }
}

}  // namespace flash_attn_cuda::sm90
