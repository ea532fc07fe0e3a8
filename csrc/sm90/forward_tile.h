// A consumer warpgroup's 64 query rows of a forward tile, and the blocks of keys that they see.
#pragma once

#include "shared/block_range.h"
#include "shared/mask.h"
#include "shared/own_range.h"
#include "sm90/forward_arguments.h"
#include "sm90/forward_traits.h"

namespace flash_attn_cuda::sm90 {

template <class Traits>
struct ForwardTile {
  ForwardParams const& params;
  TileWork const& work;
  BlockRange of_tile;  // what all of its queries visit
  int query_begin;
  BlockRange range;  // what these do

  CUTE_DEVICE static ForwardTile of(ForwardArguments const& args, WorkItem const& item,
                                    int warpgroup) {
    ForwardParams const& params = args.params;
    Sequence const& sequence = item.work.sequence;
    const BlockRange of_tile = item.range;
    const int query_begin = item.work.tile * Traits::block_m + 64 * warpgroup;
    BlockRange range = of_tile;
    if (Traits::drops_blocks && !params.window.is_full()) {
      range = own_range(band_from_queries(params.window, sequence.seqlen_q, sequence.seqlen_k),
                        query_begin, min(query_begin + 64, sequence.seqlen_q) - 1,
                        sequence.seqlen_k, Traits::block_n, of_tile);
    }
    return {params, item.work, of_tile, query_begin, range};
  }

  CUTE_DEVICE Sequence const& sequence() const { return work.sequence; }

  CUTE_DEVICE ScoreMask<Traits::config.mask> mask() const {
    return {.band = band_from_queries(params.window, sequence().seqlen_q, sequence().seqlen_k),
            .seqlen_k = sequence().seqlen_k};
  }
};

}  // namespace flash_attn_cuda::sm90
