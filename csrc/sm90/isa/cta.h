// What an SM of a Hopper GPU gives a CTA, and its warps.
#pragma once

#include <cute/config.hpp>

namespace flash_attn_cuda::sm90 {

// Registers that the launch gives every thread: 168 of three warpgroups, 128 of four, 96 of five
// and 80 of two times three.
constexpr int launch_registers_of(int threads, int ctas_per_sm = 1) {
  return 65536 / (threads * ctas_per_sm) / 8 * 8;
}

// The shuffle tells the compiler that all lanes have the same number.
CUTE_DEVICE int same_in_warp(int number) { return __shfl_sync(0xffffffffu, number, 0); }

CUTE_DEVICE int warp_of_cta() { return same_in_warp(threadIdx.x / 32); }

}  // namespace flash_attn_cuda::sm90
