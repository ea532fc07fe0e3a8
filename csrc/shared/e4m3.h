// Numbers of e4m3 (Micikevicius et al., "FP8 Formats for Deep Learning", 2022, section 3): four
// bits of exponent, three of mantissa, no infinity.
#pragma once

#include <bit>
#include <cstdint>

#include "shared/host_device.h"

namespace flash_attn_cuda {

inline constexpr float largest_e4m3 = 448.f;

namespace detail {
// As cvt.rn.satfinite.e4m3x2.f32 of GPUs from compute capability 8.9 on.
FAC_HOST_DEVICE constexpr std::uint32_t e4m3_in_integers(float x) {
  constexpr std::uint32_t nan = 0x7f, sign = 0x80;
  constexpr int dropped_bits = 20;                // of fp32's mantissa
  constexpr std::uint32_t bias = (127 - 7) << 3;  // between the exponents
  constexpr float least_normal = 0x1p-6f;
  constexpr float aligner = 0x1p14f;  // whose last bit is worth e4m3's least number
  const auto bits = std::bit_cast<std::uint32_t>(x);
  const std::uint32_t magnitude_bits = bits & 0x7fff'ffff;
  if (magnitude_bits > 0x7f80'0000) return nan;
  const auto given = std::bit_cast<float>(magnitude_bits);
  const float magnitude = given < largest_e4m3 ? given : largest_e4m3;
  std::uint32_t code = 0;
  if (magnitude < least_normal) {
    code =
        std::bit_cast<std::uint32_t>(magnitude + aligner) - std::bit_cast<std::uint32_t>(aligner);
  } else {
    const auto exact = std::bit_cast<std::uint32_t>(magnitude);
    const std::uint32_t is_odd = exact >> dropped_bits & 1;
    code = ((exact + (1u << (dropped_bits - 1)) - 1 + is_odd) >> dropped_bits) - bias;
  }
  return code | (bits >> 24 & sign);
}
}  // namespace detail

// To the nearest, the even one of two, and no further than the largest; NaN becomes 0x7f.
FAC_HOST_DEVICE std::uint8_t e4m3_of(float x) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  std::uint16_t pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.f), "f"(x));
  return static_cast<std::uint8_t>(pair);
#else
  return static_cast<std::uint8_t>(detail::e4m3_in_integers(x));
#endif
}

// Two of them, the first in the low byte.
FAC_HOST_DEVICE std::uint16_t e4m3_of(float first, float second) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  std::uint16_t pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(second), "f"(first));
  return pair;
#else
  return static_cast<std::uint16_t>(detail::e4m3_in_integers(first) |
                                    detail::e4m3_in_integers(second) << 8);
#endif
}

// Four of them, the first in the low byte.
FAC_HOST_DEVICE std::uint32_t word_of_e4m3(float const (&x)[4]) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  std::uint32_t word;
  asm("{\n"
      ".reg .b16 low, high;\n"
      "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
      "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
      "mov.b32 %0, {low, high};\n"
      "}\n"
      : "=r"(word)
      : "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]));
  return word;
#else
  return e4m3_of(x[0], x[1]) | std::uint32_t{e4m3_of(x[2], x[3])} << 16;
#endif
}

}  // namespace flash_attn_cuda
