// A CUDA runtime of two made-up devices, an H200 and one of capability 8.6, whose count fails the
// first time. Once a program.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>

namespace two_devices {
inline std::atomic<int> count_queries = 0;
inline std::atomic<int> attribute_queries = 0;
inline std::atomic<int> errors_taken = 0;
}  // namespace two_devices

extern "C" {

cudaError_t CUDARTAPI cudaGetDeviceCount(int* count) {
  *count = 2;
  return two_devices::count_queries++ == 0 ? cudaErrorInitializationError : cudaSuccess;
}

cudaError_t CUDARTAPI cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  ++two_devices::attribute_queries;
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor:
      *value = device == 0 ? 9 : 8;
      break;
    case cudaDevAttrComputeCapabilityMinor:
      *value = device == 0 ? 0 : 6;
      break;
    case cudaDevAttrMultiProcessorCount:
      *value = device == 0 ? 132 : 84;
      break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = device == 0 ? 232'448 : 101'376;
      break;
    case cudaDevAttrL2CacheSize:
      *value = device == 0 ? 50 << 20 : 6 << 20;
      break;
    default:
      return cudaErrorInvalidValue;
  }
  return cudaSuccess;
}

cudaError_t CUDARTAPI cudaGetLastError() {
  ++two_devices::errors_taken;
  return cudaErrorInitializationError;
}

const char* CUDARTAPI cudaGetErrorString(cudaError_t) { return "made-up failure"; }

}  // extern "C"
