// The producers of a backward CTA for wide heads: a thread for each of the two rings of slots,
// whose warpgroup reads them in the order in which it multiplies them, and for one of the two
// tiles.
#pragma once

#include "sm90/tile/spans.h"
#include "sm90/wide/slot_loader.h"
#include "sm90/wide_backward/jobs.h"

namespace flash_attn_cuda::sm90 {

template <class Traits>
struct WideGradientProducer {
  using Place = GradientSteps::Place;
  static constexpr int block = Traits::block;

  WideBackwardArguments const& args;
  typename Traits::SharedStorage& smem;
  int warpgroup;  // whose ring this is
  SlotLoader<Traits> slots{smem, warpgroup};

  CUTE_DEVICE RowSpan query_span(Place const& place) const {
    return queries_from(smem.job.sequence, place.head, place.block * block);
  }
  CUTE_DEVICE RowSpan key_span(Place const& place) const {
    return keys_from(smem.job.sequence, place.head, place.block * block);
  }

  CUTE_DEVICE void load_own_tile(CUtensorMap const& map, RowSpan const& span, int head_dim) {
    load_existing_boxes<block>(map, &smem.tile_full[warpgroup], smem.tiles[warpgroup], span,
                               head_dim);
  }

  // dK or dQ. span: of a step's block.
  template <class Span>
  CUTE_DEVICE void load_for_scores(TensorMaps const& x, CUtensorMap const& y, Span span) {
    AttentionShape const& shape = args.call.params.shape;
    GradientSteps const& steps = smem.job.steps;
    const int count = steps.count();
    CUtensorMap const& map = warpgroup == 0 ? x.tile : y;
    const int last_box = last_wide_box(warpgroup == 0 ? shape.head_dim : shape.head_dim_v);
    const int last_row_box = last_wide_box(shape.head_dim);
    slots.load_columns(map, span(steps.at(0)), last_box);
    CUTE_NO_UNROLL
    for (int step = 0; step < count; ++step) {
      if (step + 1 < count) slots.load_columns(map, span(steps.at(step + 1)), last_box);
      slots.load_rows(x.rows, span(steps.at(step)), last_row_box);
    }
  }

  // dV, of which each warpgroup has every second step.
  CUTE_DEVICE void load_for_values() {
    AttentionShape const& shape = args.call.params.shape;
    GradientSteps const& steps = smem.job.steps;
    const int last = steps.count() - 1;
    const auto span = [&](int step) { return query_span(steps.at(min(step, last))); };
    const int last_box = last_wide_box(shape.head_dim);
    const int last_box_v = last_wide_box(shape.head_dim_v);
    slots.load_columns(args.q.tile, span(warpgroup), last_box);
    CUTE_NO_UNROLL
    for (int step = 0; step <= last; step += 2) {
      if (step + 2 <= last) slots.load_columns(args.q.tile, span(step + 2 + warpgroup), last_box);
      slots.load_rows(args.dout.rows, span(step + warpgroup), last_box_v);
      slots.load_rows(args.dout.rows, span(step + 1 - warpgroup), last_box_v);
    }
  }

  CUTE_DEVICE void run() {
    AttentionShape const& shape = args.call.params.shape;
    WideJob const& job = smem.job;
    const Place own{job.head, job.tile};
    const bool is_first = warpgroup == 0;
    const int columns = is_first ? shape.head_dim : shape.head_dim_v;
    if (job.gradient == Gradient::dq) {
      load_own_tile(is_first ? args.q.tile : args.dout.tile, query_span(own), columns);
      load_for_scores(args.k, args.v, [&](Place const& place) { return key_span(place); });
      return;
    }
    if (job.gradient == Gradient::dk || is_first)
      load_own_tile(is_first ? args.k.tile : args.v, key_span(own), columns);
    if (job.gradient == Gradient::dk) {
      load_for_scores(args.q, args.dout.tile,
                      [&](Place const& place) { return query_span(place); });
    } else {
      load_for_values();
    }
  }
};

}  // namespace flash_attn_cuda::sm90
