// The part of a tile's blocks that some of its queries see. Pure index logic.
#pragma once

#include "shared/block_range.h"

namespace flash_attn_cuda {

// Of the blocks [of_tile.begin, of_tile.end) those that own indices [first, last] see, of which
// there may be none; if they see none the last of the tile's, which is no interior one.
FAC_HOST_DEVICE constexpr BlockRange own_range(Band band, int first, int last, int limit, int block,
                                               BlockRange const& of_tile) {
  BlockRange own = block_range(band, first, last, limit, block);
  if (own.begin < of_tile.begin) own.begin = of_tile.begin;
  if (own.end > of_tile.end) own.end = of_tile.end;
  if (own.empty()) {
    own.end = own.interior_begin = own.interior_end = of_tile.end;
    own.begin = own.end - 1;
  }
  return own;
}

}  // namespace flash_attn_cuda
