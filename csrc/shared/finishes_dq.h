// Which kernels of the backward that write dq also convert sums of it, where the plan says so.
#pragma once

#include "flash_attn/config.h"

namespace flash_attn_cuda {

// Those with issue slots, L2 and registers to spare (docs/backward_sm90.md has what it cost
// others).
constexpr bool can_finish_dq(const BackwardConfig& config) {
  constexpr FeatureSet plain = feature::deterministic;
  return config.head_dim <= 128 && (config.features & ~plain) == 0;
}

}  // namespace flash_attn_cuda
