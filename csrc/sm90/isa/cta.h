// What an SM of a Hopper GPU gives a CTA, and the threads of a warpgroup.
#pragma once

#include <cute/config.hpp>

namespace flash_attn_cuda::sm90 {

// Bytes of shared memory. Every CTA costs 1 KiB more.
constexpr int smem_limit_of(int ctas_per_sm) { return 233472 / ctas_per_sm - 1024; }

// Registers that the launch gives every thread: 168 of three warpgroups, 128 of four, 96 of five
// and 80 of two times three.
constexpr int launch_registers_of(int threads, int ctas_per_sm = 1) {
  return 65536 / (threads * ctas_per_sm) / 8 * 8;
}

inline constexpr int warpgroup_threads = 128;

// The first of a thread's two rows of an accumulator of 64, whose first is `begin`; the other one
// is 8 further on.
CUTE_DEVICE int first_row_of(int thread, int begin = 0) {
  return begin + thread / 32 * 16 + thread % 32 / 4;
}

// The shuffle tells the compiler that all lanes have the same number.
CUTE_DEVICE int same_in_warp(int number) { return __shfl_sync(0xffffffffu, number, 0); }

CUTE_DEVICE int warp_of_cta() { return same_in_warp(threadIdx.x / 32); }

}  // namespace flash_attn_cuda::sm90
