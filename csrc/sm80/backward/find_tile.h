// The key tile of a CTA of kernels that walk query tiles: the backward, and the second one
// (sm80/hvp/).
#pragma once

#include "shared/gradient/backward_arguments.h"
#include "shared/mask/block_lists.h"
#include "shared/schedule/tile_work.h"
#include "sm80/isa/copy.h"

namespace flash_attn_cuda::sm80 {

// What this CTA does, for all its threads.
template <class Traits>
CUTE_DEVICE void find_tile(BackwardArguments const& args, typename Traits::SharedStorage& smem) {
  constexpr int block_m = Traits::block_m;
  constexpr int block_n = Traits::block_n;
  BackwardParams const& params = args.params;
  int block_id = blockIdx.x;
  if (Traits::is_ordered && args.turns.used()) block_id = atomicAdd(args.tickets, 1);
  if (Traits::shares_columns) {
    const int tile_id = block_id / args.ctas_per_tile;
    smem.column_begin = (block_id - tile_id * args.ctas_per_tile) * Traits::columns_per_cta;
    block_id = tile_id;
  }
  TileWork work;
  if (!find_work(args.schedule, args.table, params, block_id, work)) {
    smem.work.tile = no_tile;
    return;
  }
  Sequence& sequence = work.sequence;
  sequence.first_q_tile += sequence.index * args.q_tiles_per_sequence;
  if constexpr (Traits::is_sparse) {
    // The first of the query heads that share the key head.
    const int head =
        work.head / args.dkdv_splits * (params.shape.num_heads_q / params.shape.num_heads_k);
    work.tile = ranked_tile<block_n>(params, args.table, sequence.index, head, work.tile);
  }
  const int key_begin = work.tile * block_n;
  const int key_last = min(key_begin + block_n, sequence.seqlen_k) - 1;
  smem.work = work;
  smem.range = tiles_that_see<block_m>(params.window, sequence, key_begin, key_last);
}

}  // namespace flash_attn_cuda::sm80
