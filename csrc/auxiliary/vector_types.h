// Sixteen bytes of fp16 or bf16 to and from fp32.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "flash_attn/config.h"

namespace flash_attn_cuda {

inline constexpr int vector_elements = vector_bytes / sizeof(__half);

template <class Element>
struct alignas(16) Vector {
  using Pair = std::conditional_t<std::is_same_v<Element, __half>, __half2, __nv_bfloat162>;
  Pair pairs[vector_elements / 2];

  __device__ float2 pair(int i) const {
    if constexpr (std::is_same_v<Element, __half>)
      return __half22float2(pairs[i]);
    else
      return __bfloat1622float2(pairs[i]);
  }
  __device__ void set_pair(int i, float2 value) {
    if constexpr (std::is_same_v<Element, __half>)
      pairs[i] = __float22half2_rn(value);
    else
      pairs[i] = __float22bfloat162_rn(value);
  }
};

// Calls run with an Element of the run-time dtype.
template <class Run>
void dispatch_dtype(Dtype dtype, Run run) {
  if (dtype == Dtype::fp16)
    run(__half{});
  else
    run(__nv_bfloat16{});
}

}  // namespace flash_attn_cuda
