// Dropout in a forward CTA: warps that do not multiply draw the decisions of the next step, as
// words of bits in the layout of the consumers' scores, and leave them in shared memory. To a
// consumer, which a step waits for, a decision is then a predicate and a product.
//
// Every consumer warpgroup has a ring of its own: its buffer is full when all drawing warps have
// written their words of a step, and empty when the four warps have read theirs. Drawing warps
// learn of tiles from the ring of work, as the consumers do, and visit the same blocks in the same
// order, so both sides of a ring see the same steps. They wait only for steps that consumers are
// already in.
#pragma once

#include <cutlass/arch/arch.h>

#include "shared/dropout/dropout.h"
#include "sm90/forward/traits.h"
#include "sm90/tile/arguments.h"

namespace flash_attn_cuda::sm90 {

template <class Traits>
CUTE_DEVICE void init_word_rings(typename Traits::SharedStorage& smem) {
  for (auto& ring : smem.dropout.ring) ring.init(4, Traits::drawing_warps);
}

// Each of the drawing warps calls it, for all tiles of the CTA: it draws the words of one warp of
// every consumer warpgroup. Of two lanes with neighbouring rows one draws the first word's columns
// and the other the second's, for both. What depends on the columns alone serves all warpgroups.
template <class Traits>
CUTE_DEVICE void draw_words(ForwardArguments const& args, typename Traits::SharedStorage& smem,
                            int drawing_warp) {
  using Words = typename Traits::Words;
  static_assert(Traits::drawing_warps == 4, "one for each warp of a warpgroup");
  const int lane = threadIdx.x % 32;
  constexpr int neighbour = 4;  // lanes away is the next row
  const int own_word = lane / neighbour % 2;
  ForwardParams const& params = args.params;
  const RngState rng = read_rng(params.dropout.rng);
  const auto threshold = DropoutThreshold::of(params.dropout.threshold);

  PipelineState<Traits::work_stages> work_state;
  PipelineState<Traits::word_stages> state;
  for (;; work_state.advance()) {
    consumer_wait(smem.work_ring, work_state);
    TileWork const& work = smem.work[work_state.stage].work;
    if (work.tile == no_tile) break;
    const BlockRange range = smem.work[work_state.stage].range;
    const auto mask =
        DropoutMask::of(rng, params.dropout.threshold, work.sequence.stream, work.head);
    const int first_query =
        work.sequence.first_q + work.tile * Traits::block_m + 16 * drawing_warp + lane / 4;
    const int key_of_lane =
        work.sequence.first_k + own_word * Words::columns_per_word + lane % 4 * 2;
    __syncwarp();
    consumer_release(smem.work_ring, work_state);

    CUTE_NO_UNROLL
    for (int block = range.end - 1; block >= range.begin; --block) {
      const auto columns = TileColumns::of(mask, block * Traits::block_n + key_of_lane);
      CUTE_NO_UNROLL
      for (int warpgroup = 0; warpgroup < Traits::consumers; ++warpgroup) {
        const DrawnTiles drawn = columns.draw(mask, threshold, first_query + 64 * warpgroup);
        const std::uint32_t received =
            __shfl_xor_sync(0xffffffffu, drawn.word(1 - own_word), neighbour);
        auto& ring = smem.dropout.ring[warpgroup];
        auto& words = smem.dropout.words[warpgroup][state.stage];
        producer_acquire(ring, state);  // late: these are drawn ahead of it
        words[own_word][32 * drawing_warp + lane] = drawn.word(own_word);
        words[1 - own_word][32 * drawing_warp + lane] = received;
        __syncwarp();
        producer_commit(ring, state);
      }
      state.advance();
    }
  }
}

}  // namespace flash_attn_cuda::sm90
