// Sums of fp32 numbers with the same bits in whatever order the numbers are added: integers, in
// several words, with room for 2^31 numbers. A unit of word w is 2^(32 w - 149).
#pragma once

#include <cstdint>

#include "shared/host_device.h"

namespace flash_attn_cuda {

inline constexpr int exact_sum_words = 9;
inline constexpr int infinite_numbers = exact_sum_words;  // the word that counts those and NaNs
inline constexpr int words_of_exact_sum = exact_sum_words + 1;

constexpr int log2_unit(int word) { return 32 * word - 149; }

// A number as what it adds to two words, low to the first and high to the one after it.
struct ExactNumber {
  int word;
  std::int64_t low;
  std::int64_t high;

  // bits: of a finite fp32 number.
  FAC_HOST_DEVICE static constexpr ExactNumber of(std::uint32_t bits) {
    const int exponent = static_cast<int>(bits >> 23 & 0xff);
    const std::uint32_t fraction = bits & 0x7fffff;
    const std::int64_t mantissa = exponent == 0 ? fraction : fraction | 0x800000;
    const int shift = exponent == 0 ? 0 : exponent - 1;  // of the mantissa, in units of word 0
    const std::int64_t shifted = mantissa << shift % 32;
    const std::int64_t sign = bits >> 31 != 0 ? -1 : 1;
    return {
        .word = shift / 32, .low = sign * (shifted & 0xffffffff), .high = sign * (shifted >> 32)};
  }
};

#if defined(__CUDACC__)
// sum: of which each word lies `stride` after the one before it.
__device__ inline void add_exactly(unsigned long long* sum, std::int64_t stride, float x) {
  if (!isfinite(x)) {
    atomicAdd(sum + infinite_numbers * stride, 1ull);
    return;
  }
  const ExactNumber number = ExactNumber::of(__float_as_uint(x));
  unsigned long long* word = sum + number.word * stride;
  if (number.low != 0) atomicAdd(word, static_cast<unsigned long long>(number.low));
  if (number.high != 0) atomicAdd(word + stride, static_cast<unsigned long long>(number.high));
}
#endif

}  // namespace flash_attn_cuda
