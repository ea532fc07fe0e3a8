// The frame of a kernel for Hopper, of which sm90/jvp/kernel.h is the shortest:
//
//   set up   a thread initialises the barriers and calls publish_barriers(), all call
//            follow_earlier_kernels() and __syncthreads();
//   load     the first warpgroup gives registers away. Each of its warps has a part, ProducerWarp;
//   compute  the others take those registers and multiply;
//   finish   and write their results.
//
// The array of shared memory stands in each kernel: from a function that they share, the compiler
// makes other code.
#pragma once

#include <cutlass/arch/barrier.h>
#include <cutlass/arch/reg_reconfig.h>

#include <cute/arch/copy_sm90_desc.hpp>

#include "shared/kernel_order.h"
#include "sm90/isa/cta.h"

namespace flash_attn_cuda::sm90 {

// TMA may use the barriers that the calling thread has initialised. maps: what the CTA will load
// by.
template <class... Maps>
CUTE_DEVICE void publish_barriers(Maps const&... maps) {
  cutlass::arch::fence_barrier_init();
  (cute::prefetch_tma_descriptor(&maps), ...);
}

// The first warpgroup, and its warps. Where a CTA takes tile after tile, one finds those and one
// clears the results of those that have nothing to compute.
inline constexpr int producer_warpgroup = 0;
enum ProducerWarp : int { loading_warp, clearing_warp, finding_warp, assisting_warp };

// What setmaxnreg makes of a warpgroup's registers: it waits for those that others give away. 0:
// they stay what the launch gives.
template <class Traits, int kRegisters>
CUTE_DEVICE void set_registers() {
  if constexpr (kRegisters == 0) {
    return;
  } else if constexpr (kRegisters < Traits::launch_registers) {
    cutlass::arch::warpgroup_reg_dealloc<kRegisters>();
  } else {
    cutlass::arch::warpgroup_reg_alloc<kRegisters>();
  }
}

}  // namespace flash_attn_cuda::sm90
