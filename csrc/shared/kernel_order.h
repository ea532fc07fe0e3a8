// Programmatic dependent launch: a kernel that starts while the one before it in the stream still
// runs (launch_early, shared/launch.h), so that its start costs nothing.
//
// A kernel may let the next one start if it has waited itself or was launched by launch_kernel: the
// next one then waits for it, and so for all before it.
#pragma once

namespace flash_attn_cuda {

// The later kernel calls it ahead of everything that it reads or writes: it returns when all before
// it in the stream has ended and may be seen. Without launch_early there is nothing to wait for.
__device__ inline void wait_for_earlier_kernels() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The earlier one calls it: when all of its thread blocks have, the next may start beside them.
__device__ inline void let_next_kernel_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

__device__ inline void follow_earlier_kernels() {
  wait_for_earlier_kernels();
  let_next_kernel_start();
}

}  // namespace flash_attn_cuda
