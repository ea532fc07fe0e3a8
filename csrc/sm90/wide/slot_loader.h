// A producer's side of a ring of slots.
#pragma once

#include "sm90/isa/barriers.h"
#include "sm90/wide/tile_columns.h"

namespace flash_attn_cuda::sm90 {

// One thread's.
template <class Traits>
struct SlotLoader {
  using Slots = typename Traits::Slots;
  static constexpr int block = Slots::block;

  typename Traits::SharedStorage& smem;
  int warpgroup;  // whose ring this is
  PipelineState<Slots::count> state{};

  // A block's rows, some columns at a time: the right operand of scores.
  CUTE_DEVICE void load_columns(CUtensorMap const& map, RowSpan const& span, int last_box) {
    CUTE_NO_UNROLL
    for (int column = 0; column < Slots::head_dim; column += Slots::columns) {
      fill([&](std::uint64_t* full, auto* slot) {
        load_tile<block, Slots::columns>(map, full, slot, span, last_box, block,
                                         min(column, last_box));
      });
    }
  }

  // The warpgroup's columns of a block, some rows at a time: the right operand of results. Of rows
  // that do not exist the block's first one is loaded in their place: what is multiplied by zero
  // must be a number, and a box must have a row.
  CUTE_DEVICE void load_rows(CUtensorMap const& map, RowSpan const& span, int last_box) {
    const int first_column = min(warpgroup * Slots::own_columns, last_box);
    CUTE_NO_UNROLL
    for (int row = 0; row < block; row += Slots::rows) {
      RowSpan rows{span.batch, span.head, span.row + row, span.rows - row};
      if (rows.rows <= 0) rows = {span.batch, span.head, span.row, 1};
      fill([&](std::uint64_t* full, auto* slot) {
        load_tile<Slots::rows, Slots::own_columns>(map, full, slot, rows, last_box, Slots::rows,
                                                   first_column);
      });
    }
  }

 private:
  // The next slot once it is free, for `load` to fill.
  template <class Load>
  CUTE_DEVICE void fill(Load load) {
    auto& ring = smem.rings[warpgroup];
    producer_acquire(ring, state);
    std::uint64_t* full = &ring.full[state.stage];
    FullBarrier::arrive_and_expect_tx(full, Slots::bytes);
    load(full, smem.slots[warpgroup] + state.stage * Slots::elements);
    state.advance();
  }
};

}  // namespace flash_attn_cuda::sm90
