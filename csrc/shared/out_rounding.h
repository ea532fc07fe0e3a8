// What rounding to 16 bits takes from O, in eight bits: a backward that adds them has the
// D = rowsum(dO * O) of an O that is off by 2^-16 instead of 2^-8 (fp16: by 2^-19; twice that by a
// tie). What D is off by, the keys' common part multiplies in dQ
// (docs/numerics.md#what-rounding-takes-from-o).
//
// The bits of two floats of one sign differ by as many units in the last place as lie between them.
// What is kept is the distance from the rounded number's bits to the exact one's, rounded to its
// upper eight bits. So nothing is kept of a number that rounding leaves alone.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <bit>
#include <cstdint>

#include "flash_attn/config.h"
#include "shared/host_device.h"

namespace flash_attn_cuda {

template <Dtype kDtype>
struct OutRounding {
  static constexpr bool is_fp16 = kDtype == Dtype::fp16;
  static constexpr int dropped = is_fp16 ? 13 : 16;  // bits of fp32's mantissa
  static constexpr int shift = dropped - 8;          // those of them that are not kept
  static constexpr int half = 1 << (dropped - 1);

  FAC_HOST_DEVICE static float2 rounded(float2 exact) {
    if constexpr (is_fp16)
      return __half22float2(__float22half2_rn(exact));
    else
      return __bfloat1622float2(__float22bfloat162_rn(exact));
  }

  // Of two neighbouring columns, the first in the low byte.
  FAC_HOST_DEVICE static std::uint16_t of(float2 exact) {
    const float2 near = rounded(exact);
    // In the second byte. A tie may have gone either way, and fp16 has numbers of fewer bits.
    const auto distance = [](float x, float y) {
      int units = std::bit_cast<int>(x) - std::bit_cast<int>(y) + (1 << (shift - 1));
      units = units < half ? units : half - 1;
      if (is_fp16) units = units < -half ? -half : units;
      return static_cast<std::uint32_t>(units) << (8 - shift);
    };
    return static_cast<std::uint16_t>((distance(exact.x, near.x) >> 8 & 0xff) |
                                      (distance(exact.y, near.y) & 0xff00));
  }

  // The number again, of one that was rounded and what was kept.
  FAC_HOST_DEVICE static float exact(float rounded, std::int8_t kept) {
    return std::bit_cast<float>(std::bit_cast<int>(rounded) + kept * (1 << shift));
  }

  // Two neighbouring columns of O; kept: null where nothing is known.
  template <class Element>
  FAC_HOST_DEVICE static float2 load(const Element* out, const std::int8_t* kept) {
    struct alignas(2 * sizeof(Element)) Pair {
      Element x, y;
    };
    const Pair pair = *reinterpret_cast<const Pair*>(out);
    const float2 near{static_cast<float>(pair.x), static_cast<float>(pair.y)};
    if (kept == nullptr) return near;
    const char2 of_pair = *reinterpret_cast<const char2*>(kept);
    return {exact(near.x, of_pair.x), exact(near.y, of_pair.y)};
  }
};

// Of four neighbouring columns.
template <Dtype kDtype>
FAC_HOST_DEVICE void store_rounding(std::int8_t* target, const float (&exact)[4]) {
  auto* pairs = reinterpret_cast<std::uint16_t*>(target);
  pairs[0] = OutRounding<kDtype>::of({exact[0], exact[1]});
  pairs[1] = OutRounding<kDtype>::of({exact[2], exact[3]});
}

}  // namespace flash_attn_cuda
