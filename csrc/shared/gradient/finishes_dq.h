// How kernels of the backward also turn sums of dQ into dq: those whose row says finishes_dq, where
// the plan says so. They are the ones with issue slots, L2 and registers to spare
// (docs/experiments_sm90.md has what it cost others).
#pragma once

namespace flash_attn_cuda {

// Warps of a CTA that do, and strips of 16 rows that they draw at a time.
inline constexpr int finishing_warps = 2;
inline constexpr int strips_at_once = 2;

}  // namespace flash_attn_cuda
