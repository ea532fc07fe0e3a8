// Philox4x32 with 7 rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011,
// table 2: the fewest that pass BigCrush): random bits as a function of a counter and a key.
#pragma once

#include <cstdint>

#include "shared/host_device.h"

namespace flash_attn_cuda {

struct PhiloxKey {
  std::uint32_t low;
  std::uint32_t high;
};

struct PhiloxBlock {
  std::uint32_t words[4];
};

inline constexpr std::uint32_t philox_first_multiplier = 0xD2511F53u;   // of word 0
inline constexpr std::uint32_t philox_second_multiplier = 0xCD9E8D57u;  // of word 2

FAC_HOST_DEVICE constexpr PhiloxKey next_philox_key(PhiloxKey key) {
  return {key.low + 0x9E3779B9u, key.high + 0xBB67AE85u};
}

inline constexpr int philox_rounds = 7;

FAC_HOST_DEVICE constexpr PhiloxBlock philox_round(const PhiloxBlock& block, PhiloxKey key) {
  const std::uint64_t first = std::uint64_t{philox_first_multiplier} * block.words[0];
  const std::uint64_t second = std::uint64_t{philox_second_multiplier} * block.words[2];
  return {{static_cast<std::uint32_t>(second >> 32) ^ block.words[1] ^ key.low,
           static_cast<std::uint32_t>(second),
           static_cast<std::uint32_t>(first >> 32) ^ block.words[3] ^ key.high,
           static_cast<std::uint32_t>(first)}};
}

// What `rounds` rounds make of a block that `done` rounds have made of a counter.
FAC_HOST_DEVICE constexpr PhiloxBlock more_philox_rounds(PhiloxBlock block, PhiloxKey key, int done,
                                                         int rounds) {
#if defined(__CUDA_ARCH__)
#pragma unroll
#endif
  for (int round = 0; round < done + rounds; ++round) {
    if (round >= done) block = philox_round(block, key);
    key = next_philox_key(key);
  }
  return block;
}

FAC_HOST_DEVICE constexpr PhiloxBlock philox(const PhiloxBlock& counter, PhiloxKey key) {
  return more_philox_rounds(counter, key, 0, philox_rounds);
}

}  // namespace flash_attn_cuda
