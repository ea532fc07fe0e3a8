// How kernels of the backward also convert sums of dQ to dq: those whose row says finishes_dq,
// where the plan says so. They are the ones with issue slots, L2 and registers to spare
// (benchmarks/results/experiments.md has what it cost others).
#pragma once

namespace flash_attn_cuda {

// Warps of a CTA that do, and strips that they take at a time.
inline constexpr int finishing_warps = 2;
inline constexpr int strips_at_once = 2;
inline constexpr int strip_rows = 16;

// The kernel that follows has a warp for each of a CTA's strips (sm90/backward/convert_dq.h).
inline constexpr int convert_dq_threads = 128;
inline constexpr int convert_dq_rows = convert_dq_threads / 32 * strip_rows;
inline constexpr int convert_dq_ctas_per_sm = 2048 / convert_dq_threads;

}  // namespace flash_attn_cuda
