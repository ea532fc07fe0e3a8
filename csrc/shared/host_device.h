// Functions that the host's planner, its C++ tests and the kernels share.
#pragma once

#if defined(__CUDACC__)
#define FAC_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define FAC_HOST_DEVICE inline
#endif
