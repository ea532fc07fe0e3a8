// Powers of two that keep what is multiplied with numbers of e4m3 within fp16: of Q, and of values
// whose tokens have scales.
#pragma once

#include <cstdint>
#include <cute/tensor.hpp>

#include "flash_attn/params.h"
#include "shared/e4m3_pairs.h"

namespace flash_attn_cuda {

// Q of bf16, a warp's pairs of numbers, as fp16: in units of a power of two that its largest number
// is 2^14 of, so that it has all bits of numbers down to 2^-28 of that one. Returns the unit.
template <int kPairs>
CUTE_DEVICE float queries_to_half(std::uint32_t* pairs) {
  constexpr std::uint32_t infinity = 0x7f80;
  constexpr std::uint32_t least_exponent = 15;  // whose unit is a normal number
  std::uint32_t largest = 0;
  CUTE_UNROLL
  for (int i = 0; i < kPairs; ++i) {
    const std::uint32_t low = pairs[i] & 0x7fff;
    const std::uint32_t high = pairs[i] >> 16 & 0x7fff;
    if (low < infinity) largest = max(largest, low);
    if (high < infinity) largest = max(largest, high);
  }
  largest = __reduce_max_sync(0xffffffffu, largest);
  const std::uint32_t exponent = max(largest >> 7, least_exponent);
  const float per_unit = __uint_as_float((2 * 127 + 14 - exponent) << 23);
  CUTE_UNROLL
  for (int i = 0; i < kPairs; ++i) {
    const float low = __uint_as_float(pairs[i] << 16);
    const float high = __uint_as_float(pairs[i] & 0xffff'0000u);
    pairs[i] = pair_of<cutlass::half_t>({low * per_unit, high * per_unit});
  }
  return __uint_as_float((exponent - 14) << 23);
}

// A warp's O where tokens have scales: P times a scale is fp16, which could neither hold very large
// nor very small scales. So O counts in units of a power of two near the largest scale so far.
struct ValueUnit {
  float unit = 0.0f;  // 0: no key yet

  static constexpr float headroom = 16.0f;  // of scales over the unit
  static constexpr float least = 0x1p-100f;
  static constexpr float greatest = 0x1p122f;  // of which most_per_unit are finite
  // No scale below 2^127 is that many units. Where P may be 2^15, it counts in these.
  static constexpr float most_per_unit = 2 * headroom;

  // For the scales of so many keys, by all lanes of a warp. multiply(ratio): O, where the unit
  // changes.
  template <int kKeys, class Multiply>
  CUTE_DEVICE void raise(const float* of_values, Multiply multiply) {
    const int lane = threadIdx.x % 32;
    std::uint32_t largest = 0;
    CUTE_UNROLL
    for (int first = 0; first < kKeys; first += 32) {
      const bool exists = kKeys % 32 == 0 || first + lane < kKeys;
      const float own = exists ? fabsf(of_values[first + lane]) : 0.0f;
      const bool is_finite = own < INFINITY;
      largest = max(largest, is_finite ? __float_as_uint(own) : 0u);
    }
    largest = __reduce_max_sync(0xffffffffu, largest);
    if (__uint_as_float(largest) > headroom * unit || unit == 0.0f) {
      const float power = __uint_as_float(largest & 0x7f80'0000u);
      const float next = fminf(fmaxf(power, least), greatest);
      multiply(unit / next);
      unit = next;
    }
  }
};

}  // namespace flash_attn_cuda
