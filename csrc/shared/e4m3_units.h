// The scales of keys and values of e4m3, whose products are of the numbers as they are stored, and
// powers of two that keep what is multiplied with these within fp16: of Q, and of P where tokens
// have scales.
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

// A block's scores or P (rows, columns), each column times the scale of its token and a factor.
// coords: (rows, columns) -> (query, token); neighbouring columns are of neighbouring tokens.
template <class Block, class Coords>
CUTE_DEVICE void multiply_columns(Block& block, Coords const& coords, const float* scales,
                                  float factor) {
  using namespace cute;
  CUTE_UNROLL
  for (int col = 0; col < size<1>(block); col += 2) {
    const auto pair = *reinterpret_cast<const float2*>(scales + get<1>(coords(0, col)));
    const float of_columns[2] = {pair.x * factor, pair.y * factor};
    CUTE_UNROLL
    for (int row = 0; row < size<0>(block); ++row) {
      block(row, col) *= of_columns[0];
      block(row, col + 1) *= of_columns[1];
    }
  }
}

// The scales of Q and of a key head, which are left to be multiplied with scores.
struct ScoreScales {
  static constexpr float least = 0x1p-120f, most = 0x1p120f;

  float of_head;
  bool keys_have_own;  // scales per token

  // query_unit: what Q counts in.
  CUTE_DEVICE static ScoreScales of(ScaleParams const& scales, int sequence, int head_k,
                                    float query_unit) {
    return {scale_of_head(scales.q, sequence, head_k) * scale_of_head(scales.k, sequence, head_k) *
                query_unit,
            scales.k.per_token};
  }

  // Hands the head's to the softmax, which multiplies scores by the result, if it can have it.
  CUTE_DEVICE float leave_to_softmax(float scale_log2) {
    const float of_softmax = scale_log2 * of_head;
    if (!(of_softmax >= least && of_softmax <= most)) return scale_log2;
    of_head = 1.0f;
    return of_softmax;
  }

  CUTE_DEVICE bool are_one() const { return of_head == 1.0f && !keys_have_own; }

  template <class Scores, class Coords>
  CUTE_DEVICE void apply(Scores& scores, Coords const& coords, const float* of_keys) const {
    if (keys_have_own) {
      multiply_columns(scores, coords, of_keys, of_head);
    } else {
      using namespace cute;
      CUTE_UNROLL
      for (int i = 0; i < size(scores); ++i) scores(i) *= of_head;
    }
  }
};

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

  // P of a block times the scales of its values, in the unit of O, which follows.
  template <int kKeys, class Probabilities, class Coords, class Accumulator>
  CUTE_DEVICE void weigh(const float* of_values, Probabilities& probabilities, Coords const& coords,
                         Accumulator& output) {
    using namespace cute;
    raise<kKeys>(of_values, [&](float ratio) {
      CUTE_UNROLL
      for (int i = 0; i < size(output); ++i) output(i) *= ratio;
    });
    multiply_columns(probabilities, coords, of_values, 1.0f / unit);
  }
};

}  // namespace flash_attn_cuda
