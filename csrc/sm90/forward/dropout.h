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
#include "sm90/forward/arguments.h"
#include "sm90/forward/traits.h"

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

template <class Traits>
struct ThreadWords {
  std::uint32_t words[Traits::Words::words];
};

// A consumer thread's words of its next step, whose buffer is given back.
template <class Traits>
CUTE_DEVICE ThreadWords<Traits> take_words(typename Traits::SharedStorage& smem, int warpgroup,
                                           int thread,
                                           PipelineState<Traits::word_stages> const& state) {
  ThreadWords<Traits> kept;
  auto& ring = smem.dropout.ring[warpgroup];
  consumer_wait(ring, state);
  CUTE_UNROLL
  for (int word = 0; word < Traits::Words::words; ++word)
    kept.words[word] = smem.dropout.words[warpgroup][state.stage][word][thread];
  __syncwarp();
  consumer_release(ring, state);
  return kept;
}

// Zero unless a bit is set. A product under a predicate, because a selection is the ALU's, which
// drawing, packing and making predicates share, at half its rate while tensor cores are busy.
CUTE_DEVICE void zero_unless(std::uint32_t bit, float& p) {
  asm("{ .reg .pred dropped; setp.eq.u32 dropped, %1, 0; @dropped mul.f32 %0, %0, 0f00000000; }"
      : "+f"(p)
      : "r"(bit));
}

// Zeroes what is dropped of p[row][column] of its share of 16 columns. Bits in their order, so that
// one instruction makes predicates of seven.
template <class Traits>
CUTE_DEVICE void drop_pairs(ThreadWords<Traits> const& kept, int tile, float (&p)[2][4]) {
  using Words = typename Traits::Words;
  const int word = tile / Words::tiles_per_word;
  CUTE_UNROLL
  for (int i = 0; i < 8; ++i) {
    const int bit = tile % Words::tiles_per_word * 8 + i;
    zero_unless(kept.words[word] & 1u << bit,
                p[Words::row_of(bit)][Words::column_of(word, bit) % 4]);
  }
}

template <int kTiles>
CUTE_DEVICE void drop_pairs(DropoutDecisions<kTiles, false> const& kept, int tile,
                            float (&p)[2][4]) {
  CUTE_UNROLL
  for (int row = 0; row < 2; ++row) {
    CUTE_UNROLL
    for (int column = 0; column < 4; ++column) {
      if (!kept.keeps(tile, row, column)) p[row][column] = 0.0f;
    }
  }
}

}  // namespace flash_attn_cuda::sm90
