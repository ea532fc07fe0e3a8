// The producers of a CTA for wide heads: a thread for each of the two rings of buffers, whose
// warpgroup reads K and V from it in the order in which it multiplies them.
#pragma once

#include "sm90/tile/finder.h"
#include "sm90/tile/spans.h"
#include "sm90/wide/tile_columns.h"
#include "sm90/wide_forward/steps.h"
#include "sm90/wide_forward/traits.h"

namespace flash_attn_cuda::sm90 {

template <class Traits>
struct WideProducer {
  ForwardArguments const& args;
  typename Traits::SharedStorage& smem;
  int warpgroup;  // whose ring this is
  PipelineState<1> q_state{};
  PipelineState<Traits::slots> state{};
  PipelineState<Traits::work_stages> work_state{};

  CUTE_DEVICE void load_queries(TileWork const& work) {
    producer_acquire(smem.q_ring, q_state);
    q_state.advance();
    load_existing_boxes<Traits::block_m>(
        args.q_map, &smem.q_ring.full[0], smem.q,
        queries_from(work.sequence, work.head, work.tile * Traits::block_m),
        args.params.shape.head_dim);
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

  CUTE_DEVICE RowSpan span_of(TileWork const& work, int key) const {
    return keys_from(work.sequence, args.params.shape.key_head(work.head), key);
  }

  CUTE_DEVICE void load_keys(TileWork const& work, int block) {
    const RowSpan span = span_of(work, block * Traits::block_n);
    const int last_box = last_wide_box(args.params.shape.head_dim);
    CUTE_NO_UNROLL
    for (int column = 0; column < Traits::head_dim; column += Traits::key_columns) {
      fill_slot([&](std::uint64_t* full, auto* slot) {
        load_tile<Traits::block_n, Traits::key_columns>(args.k_map, full, slot, span, last_box,
                                                        Traits::block_n, min(column, last_box));
      });
    }
  }

  // The warpgroup's columns of a block's values. Of rows that do not exist the block's first one is
  // loaded in their place: what P is zero for must be a number, and a box must have a row.
  CUTE_DEVICE void load_values(TileWork const& work, int block) {
    const int first_column = min(warpgroup * Traits::columns_v, args.last_v_box);
    CUTE_NO_UNROLL
    for (int row = 0; row < Traits::block_n; row += Traits::value_rows) {
      RowSpan span = span_of(work, block * Traits::block_n + row);
      if (span.rows <= 0) span = {span.batch, span.head, span.row - row, 1};
      fill_slot([&](std::uint64_t* full, auto* slot) {
        load_tile<Traits::value_rows, Traits::columns_v>(
            args.v_map, full, slot, span, args.last_v_box, Traits::value_rows, first_column);
      });
    }
  }

  CUTE_DEVICE void run() {
    for (;; work_state.advance()) {
      consumer_wait(smem.work_ring, work_state);
      const int tile = work_state.stage;
      TileWork const& work = smem.work[tile].work;
      if (work.tile == no_tile) break;
      const WideSteps<Traits> steps(args.params, work, smem.work[tile].range);
      if (warpgroup == 0) load_queries(work);
      load_keys(work, steps.block_of(0, warpgroup));
      CUTE_NO_UNROLL
      for (int step = 0; step < steps.count; ++step) {
        if (step + 1 < steps.count) load_keys(work, steps.block_of(step + 1, warpgroup));
        load_values(work, steps.block_of(step, warpgroup));
        load_values(work, steps.block_of(step, 1 - warpgroup));
      }
      if (warpgroup == 0) EmptyBarrier::arrive(&smem.tile_wanted);
      EmptyBarrier::arrive(&smem.work_ring.empty[tile]);
    }
  }
};

}  // namespace flash_attn_cuda::sm90
