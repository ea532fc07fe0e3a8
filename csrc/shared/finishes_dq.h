// Which kernels of the backward also turn sums of dQ into dq, where the plan says so.
#pragma once

#include "flash_attn/config.h"

namespace flash_attn_cuda {

// Those with issue slots, L2 and registers to spare (docs/backward_sm90.md has what it cost
// others).
constexpr bool can_finish_dq(const BackwardConfig& config) {
  constexpr FeatureSet few = feature::deterministic | feature::block_sparse;
  return config.family == KernelFamily::sm90 && config.head_dim <= 128 &&
         (config.features & ~few) == 0;
}

// The same have key tiles that CTAs share.
constexpr bool can_share_tiles(const BackwardConfig& config) { return can_finish_dq(config); }

// Warps of a CTA that do, and strips of 16 rows that they draw at a time.
inline constexpr int finishing_warps = 2;
inline constexpr int strips_at_once = 2;

}  // namespace flash_attn_cuda
