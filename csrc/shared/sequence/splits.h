// How many CTAs share the keys of a tile.
#pragma once

#include "flash_attn/params.h"
#include "shared/host_device.h"

namespace flash_attn_cuda {

// Whether the lengths of sequences are where the host cannot see them.
FAC_HOST_DEVICE constexpr bool has_lengths_on_device(const SequenceParams& sequences) {
  return sequences.seqused_k != nullptr || sequences.leftpad_k != nullptr ||
         sequences.cu_seqlens_q != nullptr || sequences.cu_seqlens_k != nullptr;
}

// With so many tiles for every slot nothing is gained by splitting them.
inline constexpr int most_tiles_per_slot = 4;

// The time that `tiles` equal tiles of so many steps take on so many slots, in steps: that of the
// slot with the most CTAs. Beginning and ending takes each CTA as long as one more step.
FAC_HOST_DEVICE constexpr float cost_of_splits(int tiles, int slots, int steps, int splits) {
  const int rounds = (tiles * splits + slots - 1) / slots;
  const int steps_of_one = (steps + splits - 1) / splits;
  return static_cast<float>(rounds) * static_cast<float>(steps_of_one + 1);
}

// The fewest splits that take about as long as the best number are chosen: their results have to be
// combined.
FAC_HOST_DEVICE constexpr bool is_about_as_long(float cost, float least) {
  constexpr float tolerance = 1.05f;
  return cost <= tolerance * least;
}

}  // namespace flash_attn_cuda
