// A CUDA runtime without a driver, for programs that plan and never launch. Once a program.
#pragma once

#include <cuda_runtime_api.h>

extern "C" {

cudaError_t CUDARTAPI cudaGetDriverEntryPointByVersion(const char*, void** function, unsigned,
                                                       unsigned long long,
                                                       cudaDriverEntryPointQueryResult* found) {
  *function = nullptr;
  *found = cudaDriverEntryPointSymbolNotFound;
  return cudaErrorInitializationError;
}

cudaError_t CUDARTAPI cudaGetDevice(int*) { return cudaErrorInitializationError; }
cudaError_t CUDARTAPI cudaSetDevice(int) { return cudaErrorInitializationError; }

cudaError_t CUDARTAPI cudaGetLastError() { return cudaErrorInitializationError; }
const char* CUDARTAPI cudaGetErrorString(cudaError_t) { return "made-up failure"; }

}  // extern "C"
