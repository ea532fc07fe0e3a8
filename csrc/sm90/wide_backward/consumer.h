// A consumer warpgroup of a backward CTA for wide heads: half of the columns of 64 rows of one
// gradient, which in fp32 fill half of the registers.
//
//   dK and dQ: one warpgroup makes P, the other dP; it makes dS = P * (dP - D) of both and tells it
//   back. Both multiply it with their columns of Q or K.
//   dV: each makes P of every second step, tells it, and multiplies both with its columns of dO.
//
// Rows of scores are the tile's: keys, and queries for dQ.
#pragma once

#include "shared/mask/mask.h"
#include "shared/online_softmax.h"
#include "sm90/epilogue.h"
#include "sm90/wide/products.h"
#include "sm90/wide_backward/jobs.h"

namespace flash_attn_cuda::sm90 {

// LSE in powers of two, or D, of the queries of scores that a thread holds.
template <bool kRowsAreKeys>
struct QueryStatistics;
template <>
struct QueryStatistics<true> {
  float2 of_columns[8];

  CUTE_DEVICE void load(float const* tile, int thread) {
    CUTE_UNROLL
    for (int i = 0; i < 8; ++i)
      of_columns[i] = __ldg(reinterpret_cast<const float2*>(tile + 8 * i + 2 * (thread % 4)));
  }
  CUTE_DEVICE float at(int, int column) const {
    return column % 2 == 0 ? of_columns[column / 2].x : of_columns[column / 2].y;
  }
};
template <>
struct QueryStatistics<false> {
  float of_rows[2];

  CUTE_DEVICE void load(float const* tile, int thread) {
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) of_rows[i] = __ldg(tile + first_row_of(thread) + 8 * i);
  }
  CUTE_DEVICE float at(int row, int) const { return of_rows[row]; }
};

template <class Traits, bool kRowsAreKeys>
struct GradientScores {
  BackwardArguments const& call;
  WideJob const& job;
  int thread;

  // The queries of a step, among those of all heads.
  CUTE_DEVICE float const* statistics(float const* of_all,
                                      GradientSteps::Place const& place) const {
    const int head = kRowsAreKeys ? place.head : job.head;
    const int tile = kRowsAreKeys ? place.block : job.tile;
    const std::int64_t index = std::int64_t(head) * call.q_tiles + job.sequence.first_q_tile + tile;
    return of_all + index * Traits::block;
  }

  // S -> P in fp32, in place.
  template <class Scores>
  CUTE_DEVICE void probabilities(Scores& scores, int block,
                                 QueryStatistics<kRowsAreKeys> const& lse_log2) const {
    if (!job.steps.range.is_interior(block)) hide(scores, block);
    CUTE_UNROLL
    for (int row = 0; row < size<0>(scores); ++row) {
      CUTE_UNROLL
      for (int column = 0; column < size<1>(scores); ++column) {
        scores(row, column) =
            fast_exp2(scores(row, column) * call.scale_log2 - lse_log2.at(row, column));
      }
    }
  }

 private:
  template <class Scores>
  CUTE_DEVICE void hide(Scores& scores, int block) const {
    Sequence const& sequence = job.sequence;
    Window const& window = call.params.window;
    const ScoreMask<Traits::config.mask> mask{
        .band = kRowsAreKeys ? band_from_keys(window, sequence.shift)
                             : band_from_queries(window, sequence.shift),
        .seqlen_k = kRowsAreKeys ? sequence.seqlen_q : sequence.seqlen_k};
    auto coords = rows_cols_view(
        accumulator_share(typename Traits::ScoresMma{},
                          make_identity_tensor(Shape<_64, Int<Traits::block>>{}), thread));
    mask.apply_by_bits(scores, coords, job.tile * Traits::block, block * Traits::block, -INFINITY);
  }
};

// P times (dP - D), in 16 bits, where P lies.
template <class Operand, class Scores, class Statistics>
CUTE_DEVICE void multiply_differences(Operand& operand, Scores& dscores,
                                      Statistics const& softmax_d) {
  CUTE_UNROLL
  for (int i = 0; i < size(operand); ++i) {
    // Pairs of columns, alternately of the thread's first row and its second.
    const int row = i / 2 % 2;
    const int column = i / 4 * 2 + i % 2;
    const float difference = dscores(row, column) - softmax_d.at(row, column);
    operand(i) =
        static_cast<typename Operand::value_type>(static_cast<float>(operand(i)) * difference);
  }
}

// dK or dQ, without the factor that scores have.
template <class Traits, bool kRowsAreKeys, class Products, class Accumulator>
CUTE_DEVICE void mma_wide_dk_or_dq(BackwardArguments const& call, Products& products,
                                   Partner& partner, int thread, Accumulator& gradient) {
  WideJob const& job = products.smem.job;
  const int warpgroup = products.warpgroup;
  auto& tile = products.smem.tiles[warpgroup];
  const GradientScores<Traits, kRowsAreKeys> scores{call, job, thread};
  const int count = job.steps.count();
  float const* const all_statistics = warpgroup == 0 ? call.lse_log2 : call.softmax_d;
  QueryStatistics<kRowsAreKeys> statistics;
  auto tSrS = products.make_scores();
  FragmentLike<typename Traits::Element, decltype(a_operand_view(tSrS))> operand;
  auto view = rows_cols_view(tSrS);

  statistics.load(scores.statistics(all_statistics, job.steps.at(0)), thread);
  products.start_scores(tile, tSrS);
  products.reader.finish(tSrS);
  auto multiply = [&](int step, auto is_last) __attribute__((always_inline)) {
    if (warpgroup == 0) {
      scores.probabilities(view, job.steps.at(step).block, statistics);
      convert_into(a_operand_view(tSrS), operand);
      partner.tell(operand);
    } else {
      partner.hear(operand);
      multiply_differences(operand, view, statistics);
      partner.tell(operand);
    }
    if constexpr (!is_last) {
      if (kRowsAreKeys)
        statistics.load(scores.statistics(all_statistics, job.steps.at(step + 1)), thread);
      products.start_scores(tile, tSrS);
    }
    if (warpgroup == 0) partner.hear(operand);
    products.start_result(operand, gradient, step > 0);
    products.reader.finish(gradient);
    if constexpr (!is_last) warpgroup_fence_operand(tSrS);
  };
  CUTE_NO_UNROLL
  for (int step = 0; step + 1 < count; ++step) multiply(step, false_type{});
  multiply(count - 1, true_type{});
}

template <class Traits, class Products, class Accumulator>
CUTE_DEVICE void mma_wide_dv(BackwardArguments const& call, Products& products, Partner& partner,
                             int thread, Accumulator& gradient) {
  WideJob const& job = products.smem.job;
  auto& keys = products.smem.tiles[0];
  const GradientScores<Traits, true> scores{call, job, thread};
  const int count = job.steps.count();
  QueryStatistics<true> lse_log2;
  auto tSrS = products.make_scores();
  FragmentLike<typename Traits::Element, decltype(a_operand_view(tSrS))> operand, other_operand;
  auto view = rows_cols_view(tSrS);
  const auto own = [&](int step) {
    return job.steps.at(min(step + products.warpgroup, count - 1));
  };

  lse_log2.load(scores.statistics(call.lse_log2, own(0)), thread);
  products.start_scores(keys, tSrS);
  products.reader.finish(tSrS);
  auto multiply = [&](int step, auto is_last) __attribute__((always_inline)) {
    // The last step may lack the second warpgroup's.
    if (step + products.warpgroup >= count) fill(tSrS, -INFINITY);
    scores.probabilities(view, own(step).block, lse_log2);
    convert_into(a_operand_view(tSrS), operand);
    partner.tell(operand);
    if constexpr (!is_last) {
      lse_log2.load(scores.statistics(call.lse_log2, own(step + 2)), thread);
      products.start_scores(keys, tSrS);
    }
    partner.hear(other_operand);
    products.start_result(operand, gradient, step > 0);
    products.start_result(other_operand, gradient, true);
    products.reader.finish(gradient);
    if constexpr (!is_last) warpgroup_fence_operand(tSrS);
  };
  int step = 0;
  CUTE_NO_UNROLL
  for (; step + 2 < count; step += 2) multiply(step, false_type{});
  multiply(step, true_type{});
}

// The warpgroup's columns of the tile's rows that exist. Those that do not attend are zeros.
template <class Traits, class Rows>
CUTE_DEVICE void write_wide_gradient(BackwardArguments const& call, WideJob const& job,
                                     int warpgroup, int thread, Rows& rows) {
  BackwardParams const& params = call.params;
  Sequence const& sequence = job.sequence;
  const bool is_dq = job.gradient == Gradient::dq;
  TensorView const& view = is_dq ? params.dq : job.gradient == Gradient::dk ? params.dk : params.dv;
  const int columns =
      job.gradient == Gradient::dv ? params.shape.head_dim_v : params.shape.head_dim;
  const int first_row = job.tile * Traits::block;
  const int attending = (is_dq ? sequence.seqlen_q : sequence.seqlen_k) - first_row;
  const int existing = (is_dq ? sequence.rows_q : sequence.rows_k) - first_row;
  const int first_column = warpgroup * Traits::Slots::own_columns;
  const float factor = job.gradient == Gradient::dv ? 1.0f : call.score_factor;
  const int own_row = first_row_of(thread);
  CUTE_UNROLL
  for (int row = 0; row < 2; ++row) {
    const bool attends = own_row + 8 * row < attending;
    CUTE_UNROLL
    for (int column = 0; column < size<1>(rows); ++column)
      rows(row, column) = attends ? rows(row, column) * factor : 0.0f;
  }
  const std::int64_t offset =
      (is_dq ? sequence.batch_q : sequence.batch_k) * view.batch_stride +
      job.head * view.head_stride +
      ((is_dq ? sequence.row_q : sequence.row_k) + first_row) * view.row_stride + first_column;
  if (Traits::writes_fp32 && params.fp32_results) {
    write_rows(rows,
               RowTarget<float>{.first = static_cast<float*>(view.data) + offset,
                                .row_stride = view.row_stride,
                                .rows = existing,
                                .columns = columns - first_column,
                                .accumulates = params.accumulate},
               thread);
  } else {
    using Element = typename Traits::Element;
    write_rows(rows,
               RowTarget<Element>{.first = static_cast<Element*>(view.data) + offset,
                                  .row_stride = view.row_stride,
                                  .rows = existing,
                                  .columns = columns - first_column},
               thread);
  }
}

template <class Traits>
CUTE_DEVICE void consume_wide_backward(WideBackwardArguments const& args,
                                       typename Traits::SharedStorage& smem, int warpgroup) {
  BackwardArguments const& call = args.call;
  WideJob const& job = smem.job;
  const int thread = threadIdx.x % warpgroup_threads;
  WideProducts<Traits> products{smem, warpgroup, thread};
  Partner partner{smem.told, warpgroup, thread};
  auto gradient = products.make_result();
  auto rows = rows_cols_view(gradient);

  if (job.steps.count() == 0) {
    // The preprocess kernel has cleared dq of such tiles.
    if (job.gradient == Gradient::dq || call.params.accumulate) return;
    clear(gradient);
  } else {
    FullBarrier::wait(&smem.tile_full[job.gradient == Gradient::dv ? 0 : warpgroup], 0);
    if (job.gradient == Gradient::dk) {
      mma_wide_dk_or_dq<Traits, true>(call, products, partner, thread, gradient);
    } else if (job.gradient == Gradient::dq) {
      mma_wide_dk_or_dq<Traits, false>(call, products, partner, thread, gradient);
    } else {
      mma_wide_dv<Traits>(call, products, partner, thread, gradient);
    }
  }
  write_wide_gradient<Traits>(call, job, warpgroup, thread, rows);
}

}  // namespace flash_attn_cuda::sm90
