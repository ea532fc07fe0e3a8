// Gradients in fp32 on their way to global memory, where they may be added to what is there.
#pragma once

#include <cute/config.hpp>

namespace flash_attn_cuda {

// Two neighbours, aligned to 8 bytes, in place of what is there or added to it. Nothing waits for
// an addition, and as no other thread adds there, its bits are those of a plain sum, subnormal
// numbers apart, which count as zero.
CUTE_DEVICE void write_pair(float* target, float2 pair, bool accumulates) {
  if (!accumulates) {
    *reinterpret_cast<float2*>(target) = pair;
    return;
  }
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  // By a generic address: with one of global memory, kernels at their last register spill more.
  asm volatile("red.add.v2.f32 [%0], {%1, %2};" ::"l"(target), "f"(pair.x), "f"(pair.y) : "memory");
#else
  atomicAdd(target, pair.x);
  atomicAdd(target + 1, pair.y);
#endif
}

}  // namespace flash_attn_cuda
