// Launching a kernel whose only argument is one struct.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>
#include <string>

#include "flash_attn/instance.h"

namespace flash_attn_cuda {

// The runtime keeps its last error until somebody asks for it: whoever catches this one and goes on
// must not meet it again after a kernel of his own.
inline void check_cuda(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  static_cast<void>(cudaGetLastError());
  throw Error(std::string(what) + ": " + cudaGetErrorString(status));
}

// The current device's bit of a mask of devices that something is known of; 0: too many to know.
inline std::uint64_t device_bit() {
  constexpr int max_remembered = 64;
  int device = 0;
  check_cuda(cudaGetDevice(&device), "current device");
  return device < max_remembered ? std::uint64_t{1} << device : 0;
}

// More than 48 KB of dynamic shared memory has to be asked for, once per kernel and device.
template <auto kKernel>
void allow_shared_memory(std::size_t smem_bytes) {
  constexpr std::size_t without_opt_in = 48 * 1024;
  if (smem_bytes <= without_opt_in) return;

  static std::atomic<std::uint64_t> allowed_devices = 0;
  const std::uint64_t bit = device_bit();
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

// Whether the code that the current device runs waits for earlier kernels (shared/kernel_order.h),
// which code for older GPUs does not, wherever it runs.
template <auto kKernel>
bool can_launch_early() {
  static std::atomic<std::uint64_t> able_devices = 0, unable_devices = 0;
  const std::uint64_t bit = device_bit();
  if (able_devices.load(std::memory_order_relaxed) & bit) return true;
  if (unable_devices.load(std::memory_order_relaxed) & bit) return false;
  cudaFuncAttributes attributes{};
  check_cuda(cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kKernel)),
             "attributes of a kernel");
  const bool able = attributes.ptxVersion >= 90 && attributes.binaryVersion >= 90;
  (able ? able_devices : unable_devices).fetch_or(bit, std::memory_order_relaxed);
  return able;
}

// launch_kernel of a kernel that calls wait_for_earlier_kernels, and may start before they end.
// cluster: thread blocks that reach each other's shared memory.
template <auto kKernel, class Argument>
void launch_early(std::int64_t grid, dim3 threads, std::size_t smem_bytes, Stream stream,
                  const Argument& argument, int cluster = 1) {
  if (grid == 0) return;
  allow_shared_memory<kKernel>(smem_bytes);
  cudaLaunchAttribute attributes[2] = {};
  unsigned num_attributes = 0;
  if (can_launch_early<kKernel>()) {
    cudaLaunchAttribute& early = attributes[num_attributes++];
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
  }
  if (cluster > 1) {
    cudaLaunchAttribute& clusters = attributes[num_attributes++];
    clusters.id = cudaLaunchAttributeClusterDimension;
    clusters.val.clusterDim.x = static_cast<unsigned>(cluster);
    clusters.val.clusterDim.y = clusters.val.clusterDim.z = 1;
  }
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(grid));
  config.blockDim = threads;
  config.dynamicSmemBytes = smem_bytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = num_attributes;
  void* arguments[] = {const_cast<Argument*>(&argument)};
  check_cuda(cudaLaunchKernelExC(&config, reinterpret_cast<const void*>(kKernel), arguments),
             "kernel launch");
}

// Of a kernel's row: what its Traits say of a thread block.
template <class Traits>
inline constexpr std::size_t smem_bytes_of = sizeof(typename Traits::SharedStorage);

template <auto kKernel, class Traits, class Argument>
void launch_kernel(std::int64_t grid, Stream stream, const Argument& argument) {
  launch_kernel<kKernel>(grid, Traits::threads, smem_bytes_of<Traits>, stream, argument);
}

template <auto kKernel, class Traits, class Argument>
void launch_early(std::int64_t grid, Stream stream, const Argument& argument, int cluster = 1) {
  launch_early<kKernel>(grid, Traits::threads, smem_bytes_of<Traits>, stream, argument, cluster);
}

template <class Traits>
constexpr ForwardInstance make_instance(const char* name,
                                        decltype(ForwardInstance::launch) launch) {
  return {name, Traits::config, smem_bytes_of<Traits>, launch};
}

template <class Traits>
constexpr BackwardInstance make_instance(const char* name,
                                         decltype(BackwardInstance::launch) launch,
                                         decltype(BackwardInstance::convert_dq) convert_dq,
                                         bool writes_dq = false) {
  return {name, Traits::config, smem_bytes_of<Traits>, launch, convert_dq, writes_dq};
}

}  // namespace flash_attn_cuda
