// A consumer warpgroup's 64 query rows of a forward tile, and the blocks of keys that they see.
#pragma once

#include "shared/block_range.h"
#include "shared/mask.h"
#include "sm90/forward_arguments.h"
#include "sm90/forward_traits.h"

namespace flash_attn_cuda::sm90 {

template <class Traits>
struct ForwardTile {
  ForwardParams const& params;
  Sequence const& sequence;
  int query_begin;
  BlockRange range;

  CUTE_DEVICE ScoreMask<Traits::config.mask> mask() const {
    return {.band = band_from_queries(params.window, sequence.shift),
            .seqlen_k = sequence.seqlen_k};
  }
};

}  // namespace flash_attn_cuda::sm90
