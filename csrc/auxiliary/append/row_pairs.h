// A row of 16-bit numbers as a thread of append_kv.cu's kernels for caches of e4m3 holds a part of
// it: kPairs pairs, which the rotation turns and quantization divides.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "auxiliary/rotary.h"
#include "flash_attn/params.h"
#include "shared/e4m3.h"

namespace flash_attn_cuda {

// How a row is divided: its first rotary_dim columns as the rotation pairs them, and column
// rotary_dim + i with the one half of the others after it.
struct RowPairing {
  unsigned columns = 0;     // a multiple of 2 * kPairs, as is rotary_dim
  unsigned rotary_dim = 0;  // 0: nothing is rotated
  bool is_interleaved = false;
};

// Consecutive numbers, in whole registers: the compiler would cut arrays of 16-bit numbers apart as
// soon as they are loaded, and wait for them there.
template <class Element, int kNumbers>
struct alignas(sizeof(Element) * kNumbers) Packed {
  static constexpr bool is_half = std::is_same_v<Element, __half>;
  using Pair = std::conditional_t<is_half, __half2, __nv_bfloat162>;
  std::uint32_t words[kNumbers / 2];

  __device__ static Pair pair_of(std::uint32_t word) {
    Pair pair;
    memcpy(&pair, &word, sizeof(pair));
    return pair;
  }

  __device__ float2 pair(int i) const {
    if constexpr (is_half)
      return __half22float2(pair_of(words[i]));
    else  // bf16 is the upper half of fp32
      return {__uint_as_float(words[i] << 16), __uint_as_float(words[i] & 0xffff'0000u)};
  }
  __device__ void set_pair(int i, float x, float y) {
    Pair pair;
    if constexpr (is_half)
      pair = __floats2half2_rn(x, y);
    else
      pair = __floats2bfloat162_rn(x, y);
    memcpy(&words[i], &pair, sizeof(pair));
  }
  // Pair i becomes the larger of its numbers and those of `other`, or what is not NaN.
  __device__ void raise_pair(int i, Pair other) {
    const Pair pair = __hmax2(pair_of(words[i]), other);
    memcpy(&words[i], &pair, sizeof(pair));
  }
};

template <class Element>
struct Packed<Element, 1> {
  Element value;
};

// Columns first + i and second + i, i below kPairs. Rotated interleaved pairs are neighbours, and
// then the columns are consecutive.
template <class Element, int kPairs>
struct RowPairs {
  static_assert(kPairs == 1 || kPairs % 4 == 0);
  using Part = Packed<Element, kPairs>;

  unsigned first = 0;
  unsigned second = 0;
  bool is_rotated = false;
  Part firsts{}, seconds{};

  // Pairs number * kPairs on.
  __device__ static RowPairs load(const Element* row, const RowPairing& pairing, unsigned number) {
    const unsigned pair = number * kPairs;
    const unsigned rotated_half = pairing.rotary_dim / 2;
    RowPairs part;
    part.is_rotated = pair < rotated_half;
    const bool are_neighbours = part.is_rotated && pairing.is_interleaved;
    const unsigned half = part.is_rotated ? rotated_half : pairing.columns / 2 - rotated_half;
    part.first = are_neighbours ? 2 * pair : (part.is_rotated ? 0 : rotated_half) + pair;
    part.second = part.first + (are_neighbours ? kPairs : half);
    part.firsts = at(row, part.first);
    part.seconds = at(row, part.second);
    return part;
  }

  // By the angles of rows `cosines` and `sines` of their tables.
  __device__ void rotate(const Element* cosines, const Element* sines, bool are_neighbours) {
    const unsigned pair = are_neighbours ? first / 2 : first;
    const Part cosine = at(cosines, pair);
    const Part sine = at(sines, pair);
    if constexpr (kPairs == 1)
      rotate_pair(cosine, sine);
    else if (are_neighbours)
      rotate_neighbours(cosine, sine);
    else
      rotate_halves(cosine, sine);
  }

  // NaN and infinity are left out.
  __device__ float largest_magnitude() const {
    float largest = 0.f;
    if constexpr (kPairs == 1) {
      for_each([&](float x) { largest = fmaxf(largest, fabsf(x)); });
    } else {
      Packed<Element, 2> two{};
#pragma unroll
      for (int i = 0; i < kPairs / 2; ++i) {
        two.raise_pair(0, __habs2(Part::pair_of(firsts.words[i])));
        two.raise_pair(0, __habs2(Part::pair_of(seconds.words[i])));
      }
      const float2 both = two.pair(0);
      largest = fmaxf(both.x, both.y);
    }
    if (largest != INFINITY) return largest;
    largest = 0.f;
    for_each([&](float x) { largest = isinf(x) ? largest : fmaxf(largest, fabsf(x)); });
    return largest;
  }

  __device__ void store(Element* row) const {
    *reinterpret_cast<Part*>(row + first) = firsts;
    *reinterpret_cast<Part*>(row + second) = seconds;
  }

  // quotient_of: what is stored of a number, in fp32.
  template <class Quotient>
  __device__ void store_quotients(std::uint8_t* row, Quotient quotient_of) const {
    store_codes(row + first, firsts, quotient_of);
    store_codes(row + second, seconds, quotient_of);
  }

 private:
  __device__ static Part at(const Element* row, unsigned column) {
    return *reinterpret_cast<const Part*>(row + column);
  }

  __device__ void rotate_pair(const Part& cosine, const Part& sine) {
    const auto c = static_cast<float>(cosine.value), s = static_cast<float>(sine.value);
    const auto x = static_cast<float>(firsts.value), y = static_cast<float>(seconds.value);
    firsts.value = static_cast<Element>(turned(x, y, c, -s));
    seconds.value = static_cast<Element>(turned(y, x, c, s));
  }

  __device__ void rotate_halves(const Part& cosine, const Part& sine) {
#pragma unroll
    for (int i = 0; i < kPairs / 2; ++i) {
      const float2 c = cosine.pair(i), s = sine.pair(i);
      const float2 x = firsts.pair(i), y = seconds.pair(i);
      firsts.set_pair(i, turned(x.x, y.x, c.x, -s.x), turned(x.y, y.y, c.y, -s.y));
      seconds.set_pair(i, turned(y.x, x.x, c.x, s.x), turned(y.y, x.y, c.y, s.y));
    }
  }

  __device__ void rotate_neighbours(const Part& cosine, const Part& sine) {
    const auto rotate_word = [](Part& part, int i, float c, float s) {
      const float2 x = part.pair(i);
      part.set_pair(i, turned(x.x, x.y, c, -s), turned(x.y, x.x, c, s));
    };
#pragma unroll
    for (int i = 0; i < kPairs / 2; ++i) {
      const float2 c = cosine.pair(i), s = sine.pair(i);
      Part& part = i < kPairs / 4 ? firsts : seconds;
      const int word = 2 * i % (kPairs / 2);
      rotate_word(part, word, c.x, s.x);
      rotate_word(part, word + 1, c.y, s.y);
    }
  }

  template <class Visit>
  __device__ void for_each(Visit visit) const {
    visit_part(firsts, visit);
    visit_part(seconds, visit);
  }

  template <class Visit>
  __device__ static void visit_part(const Part& part, Visit& visit) {
    if constexpr (kPairs == 1) {
      visit(static_cast<float>(part.value));
    } else {
#pragma unroll
      for (int i = 0; i < kPairs / 2; ++i) {
        const float2 x = part.pair(i);
        visit(x.x);
        visit(x.y);
      }
    }
  }

  template <class Quotient>
  __device__ static void store_codes(std::uint8_t* target, const Part& part, Quotient quotient_of) {
    if constexpr (kPairs == 1) {
      *target = e4m3_of(quotient_of(static_cast<float>(part.value)));
    } else {
      Codes codes;
#pragma unroll
      for (int i = 0; i < kPairs / 4; ++i) {
        const float2 low = part.pair(2 * i), high = part.pair(2 * i + 1);
        codes.words[i] = e4m3_of(quotient_of(low.x), quotient_of(low.y)) |
                         std::uint32_t{e4m3_of(quotient_of(high.x), quotient_of(high.y))} << 16;
      }
      *reinterpret_cast<Codes*>(target) = codes;
    }
  }

  struct alignas(kPairs) Codes {
    std::uint32_t words[kPairs < 4 ? 1 : kPairs / 4];
  };
};

}  // namespace flash_attn_cuda
