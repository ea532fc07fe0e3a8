// Dropout's decisions in the hands of a consumer: words that other warps have drawn for it
// (sm90/forward/dropout.h), or what it draws for itself.
#pragma once

#include "shared/dropout/dropout.h"
#include "sm90/isa/barriers.h"

namespace flash_attn_cuda::sm90 {

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
