// Keys and values of e4m3 (FP8: a sign, 4 bits of exponent, 3 of mantissa, no infinity), as loaded,
// in pairs: to 16 bits, which hold all of their values.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cutlass/numeric_types.h>

#include <cmath>
#include <cstdint>
#include <cute/config.hpp>
#include <type_traits>

#include "flash_attn/params.h"

namespace flash_attn_cuda {

// Two of fp16.
CUTE_DEVICE __half2 half2_of_e4m3(std::uint16_t pair) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  std::uint32_t bits;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(bits) : "h"(pair));
  return reinterpret_cast<__half2 const&>(bits);
#else
  // The exponent's offset is 15 and not 7: what its bits say is smaller by 2^8. 480 stands for NaN.
  const std::uint32_t bytes = __byte_perm(pair, 0, 0x1404);  // each in the upper half of 16 bits
  const std::uint32_t bits = (bytes & 0x8000'8000u) | (bytes & 0x7f00'7f00u) >> 1;
  const __half2 value = __hmul2(reinterpret_cast<__half2 const&>(bits), __float2half2_rn(256.0f));
  const std::uint32_t result = reinterpret_cast<std::uint32_t const&>(value) |
                               __hgt2_mask(__habs2(value), __float2half2_rn(448.0f));
  return reinterpret_cast<__half2 const&>(result);
#endif
}

// Four of e4m3 -> two times two.
CUTE_DEVICE void halves_of_e4m3(std::uint32_t word, __half2 (&pairs)[2]) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  std::uint32_t bits[2];
  asm("{\n"
      ".reg .b16 low, high;\n"
      "mov.b32 {low, high}, %2;\n"
      "cvt.rn.f16x2.e4m3x2 %0, low;\n"
      "cvt.rn.f16x2.e4m3x2 %1, high;\n"
      "}\n"
      : "=r"(bits[0]), "=r"(bits[1])
      : "r"(word));
  pairs[0] = reinterpret_cast<__half2 const&>(bits[0]);
  pairs[1] = reinterpret_cast<__half2 const&>(bits[1]);
#else
  pairs[0] = half2_of_e4m3(static_cast<std::uint16_t>(word));
  pairs[1] = half2_of_e4m3(static_cast<std::uint16_t>(word >> 16));
#endif
}

// Two fp32 numbers -> two of Element, in a register.
template <class Element>
CUTE_DEVICE std::uint32_t pair_of(float2 values) {
  if constexpr (std::is_same_v<Element, cutlass::half_t>) {
    const __half2 pair = __float22half2_rn(values);
    return reinterpret_cast<std::uint32_t const&>(pair);
  } else {
    const __nv_bfloat162 pair = __float22bfloat162_rn(values);
    return reinterpret_cast<std::uint32_t const&>(pair);
  }
}

// Two of Element, exactly.
template <class Element>
CUTE_DEVICE std::uint32_t pair_of_e4m3(std::uint16_t pair) {
  const __half2 halves = half2_of_e4m3(pair);
  if constexpr (std::is_same_v<Element, cutlass::half_t>) {
    return reinterpret_cast<std::uint32_t const&>(halves);
  } else {
    return pair_of<Element>(__half22float2(halves));
  }
}

// The scale of a sequence and key head. Of scales per token: 1.
CUTE_DEVICE float scale_of_head(ScaleView const& scales, int sequence, int head) {
  if (scales.data == nullptr || scales.per_token) return 1.0f;
  return scales.data[sequence * scales.batch_stride + head * scales.head_stride];
}

// The scales of a key head's latent rows, wherever they lie. Of no token's own: those of the
// sequence, for every row.
struct LatentScales {
  const float* data;
  std::int64_t batch_stride;
  std::int64_t row_stride;
  int group_stride;
  int group_shift;

  CUTE_DEVICE static LatentScales of(ScaleView const& view, int sequence, int head) {
    const float* of_head = view.data + head * view.head_stride;
    if (!view.per_token) return {of_head + sequence * view.batch_stride, 0, 0, 0, view.group_shift};
    return {of_head, view.batch_stride, view.row_stride, view.group_stride, view.group_shift};
  }

  // Of row `row` of a batch entry or page, from `data` on.
  CUTE_DEVICE std::int64_t offset(int batch, int row) const {
    return batch * batch_stride + row * row_stride;
  }
  // Of a column of the row at an offset.
  CUTE_DEVICE float const& at(std::int64_t offset, int column) const {
    return data[offset + std::int64_t{column >> group_shift} * group_stride];
  }
};

}  // namespace flash_attn_cuda
