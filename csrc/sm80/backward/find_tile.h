// What a CTA makes gradients of, in kernels that walk the query tiles of a key tile: the backward,
// and the second one (sm80/hvp/).
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
    if (!Traits::is_ordered || !args.turns.used())  // which are in the order of tiles
      work.tile = ranked_tile<block_n>(params, args.table, sequence.index, head, work.tile);
  }
  const int key_begin = work.tile * block_n;
  const int key_last = min(key_begin + block_n, sequence.seqlen_k) - 1;
  smem.work = work;
  smem.range = tiles_that_see<block_m>(params.window, sequence, key_begin, key_last);
}

// A CTA's share of the gradients, once find_tile() has found its key tile.
template <class Traits>
struct OwnGradients {
  int column_begin;
  bool has_k;  // columns of dQ and dK
  bool has_v;
  int head_k;
  int split;  // of the query heads that share the key head
  int first_head;
  int end_head;
  int key_begin;

  CUTE_DEVICE static OwnGradients of(BackwardArguments const& args,
                                     typename Traits::SharedStorage const& smem) {
    constexpr bool shares_columns = Traits::shares_columns;
    AttentionShape const& shape = args.params.shape;
    TileWork const& work = smem.work;
    const int column_begin = shares_columns ? smem.column_begin : 0;
    const int head_k = work.head / args.dkdv_splits;
    const int split = work.head - head_k * args.dkdv_splits;
    const int heads = shape.heads_per_key_head() / args.dkdv_splits;
    const int first_head = (head_k * args.dkdv_splits + split) * heads;
    return {.column_begin = column_begin,
            .has_k = !shares_columns || column_begin < shape.head_dim,
            .has_v = !shares_columns || column_begin < shape.head_dim_v,
            .head_k = head_k,
            .split = split,
            .first_head = first_head,
            .end_head = first_head + heads,
            .key_begin = work.tile * Traits::block_n};
  }
};

}  // namespace flash_attn_cuda::sm80
