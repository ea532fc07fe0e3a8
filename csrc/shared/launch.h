// Launching a kernel whose only argument is one struct.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>
#include <string>

#include "flash_attn/api.h"

namespace flash_attn_cuda {

inline void check_cuda(cudaError_t status, const char* what) {
  if (status != cudaSuccess) throw Error(std::string(what) + ": " + cudaGetErrorString(status));
}

// More than 48 KB of dynamic shared memory has to be asked for, once per kernel and device.
template <auto kKernel>
void allow_shared_memory(std::size_t smem_bytes) {
  constexpr std::size_t without_opt_in = 48 * 1024;
  constexpr int max_remembered = 64;
  if (smem_bytes <= without_opt_in) return;

  static std::atomic<std::uint64_t> allowed_devices = 0;
  int device = 0;
  check_cuda(cudaGetDevice(&device), "current device");
  const std::uint64_t bit = device < max_remembered ? std::uint64_t{1} << device : 0;
  if (allowed_devices.load(std::memory_order_relaxed) & bit) return;
  check_cuda(cudaFuncSetAttribute(reinterpret_cast<const void*>(kKernel),
                                  cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  static_cast<int>(smem_bytes)),
             "shared memory of a kernel");
  allowed_devices.fetch_or(bit, std::memory_order_relaxed);
}

template <auto kKernel, class Argument>
void launch_kernel(std::int64_t grid, int threads, std::size_t smem_bytes, Stream stream,
                   const Argument& argument) {
  if (grid == 0) return;
  allow_shared_memory<kKernel>(smem_bytes);
  void* arguments[] = {const_cast<Argument*>(&argument)};
  check_cuda(
      cudaLaunchKernel(reinterpret_cast<const void*>(kKernel), dim3(static_cast<unsigned>(grid)),
                       dim3(threads), arguments, smem_bytes, stream),
      "kernel launch");
}

}  // namespace flash_attn_cuda
