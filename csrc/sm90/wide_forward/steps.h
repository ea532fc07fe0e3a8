// The steps of a tile of wide heads: two blocks of keys each, one for every warpgroup.
#pragma once

#include "sm90/tile/tile.h"
#include "sm90/wide_forward/traits.h"

namespace flash_attn_cuda::sm90 {

template <class Traits>
struct PairedBlocks {
  BlockRange range;
  VisitOrder order;
  int count;

  CUTE_DEVICE PairedBlocks(ForwardParams const& params, TileWork const& work,
                           BlockRange const& range)
      : range(range),
        order(visit_order<Traits>(params, work, range)),
        count((range.end - range.begin + 1) / 2) {}

  CUTE_DEVICE int position_of(int step, int warpgroup) const {
    return range.end - 1 - 2 * step - warpgroup;
  }
  // The last step may lack the second warpgroup's block.
  CUTE_DEVICE bool has_block(int step, int warpgroup) const {
    return position_of(step, warpgroup) >= range.begin;
  }
  // The warpgroup has the first one's block in its place, and hides every pair of it.
  CUTE_DEVICE int block_of(int step, int warpgroup) const {
    return order.block_at(max(position_of(step, warpgroup), range.begin));
  }
};

}  // namespace flash_attn_cuda::sm90
