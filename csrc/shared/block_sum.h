// The sum of a number of each thread, in a fixed order.
#pragma once

namespace flash_attn_cuda {

// The sum over a warp's lanes, which all of them get.
__device__ inline float warp_sum(float x) {
  for (int distance = 16; distance > 0; distance /= 2)
    x += __shfl_xor_sync(0xffffffffu, x, distance);
  return x;
}

// The sum over a block's threads, which thread 0 gets. Every thread calls it, once a kernel.
template <int kThreads>
__device__ float block_sum(float x) {
  constexpr int lanes = 32;
  constexpr int warps = kThreads / lanes;
  static_assert(kThreads % lanes == 0 && warps <= lanes);
  __shared__ float sums[warps];
  const int thread = static_cast<int>(threadIdx.x);
  x = warp_sum(x);
  if (thread % lanes == 0) sums[thread / lanes] = x;
  __syncthreads();
  if (thread >= lanes) return 0.0f;
  return warp_sum(thread < warps ? sums[thread] : 0.0f);
}

}  // namespace flash_attn_cuda
