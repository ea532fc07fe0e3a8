// The producers of a backward CTA for wide heads: a thread for each of the two rings of slots,
// whose warpgroup reads them in the order in which it multiplies them, and for one of the two
// tiles.
#pragma once

#include "sm90/tile/spans.h"
#include "sm90/wide/tile_columns.h"
#include "sm90/wide_backward/jobs.h"

namespace flash_attn_cuda::sm90 {

template <class Traits>
struct WideGradientProducer {
  using Place = WideSteps::Place;
  static constexpr int block = Traits::block;

  WideBackwardArguments const& args;
  typename Traits::SharedStorage& smem;
  int warpgroup;  // whose ring this is
  PipelineState<Traits::slots> state{};

  CUTE_DEVICE RowSpan query_span(Place const& place) const {
    return queries_from(smem.job.sequence, place.head, place.block * block);
  }
  CUTE_DEVICE RowSpan key_span(Place const& place) const {
    return keys_from(smem.job.sequence, place.head, place.block * block);
  }

  // The next slot once it is free, for `load` to fill.
  template <class Load>
  CUTE_DEVICE void fill_slot(Load load) {
    auto& ring = smem.rings[warpgroup];
    producer_acquire(ring, state);
    std::uint64_t* full = &ring.full[state.stage];
    FullBarrier::arrive_and_expect_tx(full, Traits::slot_bytes);
    load(full, smem.slots[warpgroup] + state.stage * Traits::slot_elements);
    state.advance();
  }

  // A block's rows, some columns at a time: the right operand of scores.
  CUTE_DEVICE void load_columns(CUtensorMap const& map, RowSpan const& span, int head_dim) {
    const int last_box = last_wide_box(head_dim);
    CUTE_NO_UNROLL
    for (int column = 0; column < Traits::head_dim; column += Traits::slot_columns) {
      fill_slot([&](std::uint64_t* full, auto* slot) {
        load_tile<block, Traits::slot_columns>(map, full, slot, span, last_box, block,
                                               min(column, last_box));
      });
    }
  }

  // The warpgroup's columns of a block, some rows at a time: the right operand of a gradient. Of
  // rows that do not exist the block's first one is loaded in their place: what is multiplied by
  // zero must be a number, and a box must have a row.
  CUTE_DEVICE void load_rows(CUtensorMap const& map, RowSpan const& span, int head_dim) {
    const int last_box = last_wide_box(head_dim);
    const int first_column = min(warpgroup * Traits::columns, last_box);
    CUTE_NO_UNROLL
    for (int row = 0; row < block; row += Traits::slot_rows) {
      RowSpan rows{span.batch, span.head, span.row + row, span.rows - row};
      if (rows.rows <= 0) rows = {span.batch, span.head, span.row, 1};
      fill_slot([&](std::uint64_t* full, auto* slot) {
        load_tile<Traits::slot_rows, Traits::columns>(map, full, slot, rows, last_box,
                                                      Traits::slot_rows, first_column);
      });
    }
  }

  CUTE_DEVICE void load_own_tile(CUtensorMap const& map, RowSpan const& span, int head_dim) {
    load_existing_boxes<block>(map, &smem.tile_full[warpgroup], smem.tiles[warpgroup], span,
                               head_dim);
  }

  // dK or dQ. span: of a step's block.
  template <class Span>
  CUTE_DEVICE void load_for_scores(TensorMaps const& x, CUtensorMap const& y, Span span) {
    AttentionShape const& shape = args.call.params.shape;
    WideSteps const& steps = smem.job.steps;
    const int count = steps.count();
    CUtensorMap const& map = warpgroup == 0 ? x.tile : y;
    const int columns = warpgroup == 0 ? shape.head_dim : shape.head_dim_v;
    load_columns(map, span(steps.at(0)), columns);
    CUTE_NO_UNROLL
    for (int step = 0; step < count; ++step) {
      if (step + 1 < count) load_columns(map, span(steps.at(step + 1)), columns);
      load_rows(x.rows, span(steps.at(step)), shape.head_dim);
    }
  }

  // dV, of which each warpgroup has every second step.
  CUTE_DEVICE void load_for_values() {
    AttentionShape const& shape = args.call.params.shape;
    WideSteps const& steps = smem.job.steps;
    const int last = steps.count() - 1;
    const auto span = [&](int step) { return query_span(steps.at(min(step, last))); };
    load_columns(args.q.tile, span(warpgroup), shape.head_dim);
    CUTE_NO_UNROLL
    for (int step = 0; step <= last; step += 2) {
      if (step + 2 <= last) load_columns(args.q.tile, span(step + 2 + warpgroup), shape.head_dim);
      load_rows(args.dout.rows, span(step + warpgroup), shape.head_dim_v);
      load_rows(args.dout.rows, span(step + 1 - warpgroup), shape.head_dim_v);
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
