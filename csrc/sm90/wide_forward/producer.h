// The producers of a CTA for wide heads: a thread for each of the two rings of buffers, whose
// warpgroup reads K and V from it in the order in which it multiplies them.
#pragma once

#include "sm90/tile/finder.h"
#include "sm90/tile/spans.h"
#include "sm90/wide/slot_loader.h"
#include "sm90/wide_forward/steps.h"
#include "sm90/wide_forward/traits.h"

namespace flash_attn_cuda::sm90 {

template <class Traits>
struct WideProducer {
  ForwardArguments const& args;
  typename Traits::SharedStorage& smem;
  int warpgroup;  // whose ring this is
  SlotLoader<Traits> slots{smem, warpgroup};
  PipelineState<1> q_state{};
  PipelineState<Traits::work_stages> work_state{};

  CUTE_DEVICE void load_queries(TileWork const& work) {
    producer_acquire(smem.q_ring, q_state);
    q_state.advance();
    load_existing_boxes<Traits::block_m>(
        args.q_map, &smem.q_ring.full[0], smem.q,
        queries_from(work.sequence, work.head, work.tile * Traits::block_m),
        args.params.shape.head_dim);
  }

  CUTE_DEVICE RowSpan keys_of(TileWork const& work, int block) const {
    return keys_from(work.sequence, args.params.shape.key_head(work.head), block * Traits::block_n);
  }
  CUTE_DEVICE void load_keys(TileWork const& work, int block) {
    slots.load_columns(args.k_map, keys_of(work, block), last_wide_box(args.params.shape.head_dim));
  }
  CUTE_DEVICE void load_values(TileWork const& work, int block) {
    slots.load_rows(args.v_map, keys_of(work, block), args.last_v_box);
  }

  CUTE_DEVICE void run() {
    for (;; work_state.advance()) {
      consumer_wait(smem.work_ring, work_state);
      const int tile = work_state.stage;
      TileWork const& work = smem.work[tile].work;
      if (work.tile == no_tile) break;
      const PairedBlocks<Traits> steps(args.params, work, smem.work[tile].range);
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
