// A consumer warpgroup's 64 query rows of a forward tile, and the blocks of keys that they see.
#pragma once

#include "shared/mask/mask.h"
#include "sm90/tile/arguments.h"
#include "sm90/tile/traits.h"

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

// Rows of a tile for a softmax that knows a maximum (shared/max_logits.h). That looks at them
// seldom, and so they are made of what lies in shared memory: no register waits for it.
template <class Traits>
struct RowsOfTile {
  ForwardParams const& params;
  TileWork const& work;

  CUTE_DEVICE bool are_wanted() const { return params.max_logits != nullptr; }
  CUTE_DEVICE float* place() const {
    return place_of_maximum(params, work.sequence.index, work.head);
  }
  CUTE_DEVICE bool attends(int row) const {
    int thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    const int warp = (thread - warpgroup_threads) / 32 % (Traits::block_m / 16);
    const int query = work.tile * Traits::block_m + 16 * warp + thread % 32 / 4 + 8 * row;
    return query < work.sequence.seqlen_q;
  }
};

// The order of a tile's blocks, which its CTA's warps agree on. ALiBi makes scores fall on both
// sides of a query, so the keys nearest to the tile's last one come first: few scores then rise
// above the softmax's reference. Calls over pages, whose queries are the last of their keys, start
// there anyway.
template <class Traits>
CUTE_DEVICE VisitOrder visit_order(ForwardParams const& params, TileWork const& work,
                                   BlockRange const& range) {
  if constexpr (Traits::has_row_bias && !Traits::is_paged) {
    if (params.score.alibi_slopes != nullptr) {
      const int last_query = (work.tile + 1) * Traits::block_m - 1;
      return VisitOrder::from(range, (last_query + work.sequence.shift) / Traits::block_n);
    }
  }
  return VisitOrder::downwards(range);
}

}  // namespace flash_attn_cuda::sm90
