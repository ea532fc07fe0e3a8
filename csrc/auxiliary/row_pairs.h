// A row of 16-bit numbers as a thread of append_kv.cu's kernels for caches of e4m3 holds a part of
// it: kPairs pairs, which the rotation turns and quantization divides.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>
#include <type_traits>

#include "auxiliary/rotary.h"
#include "flash_attn/params.h"
#include "shared/e4m3.h"

namespace flash_attn_cuda {

// How a row is divided: its first rotary_dim columns as the rotation pairs them, and column
// rotary_dim + i with the one half of the others after it.
struct RowPairing {
  int columns = 0;     // a multiple of 2 * kPairs, as is rotary_dim
  int rotary_dim = 0;  // 0: nothing is rotated
  bool is_interleaved = false;
};

// Columns first + i and second + i, i below kPairs. Rotated interleaved pairs are neighbours, and
// then the columns are consecutive.
template <class Element, int kPairs>
struct RowPairs {
  using Part = Columns<Element, kPairs>;

  int first = 0;
  int second = 0;
  bool is_rotated = false;
  Part firsts{}, seconds{};

  // Pairs number * kPairs on.
  __device__ static RowPairs load(const Element* row, const RowPairing& pairing, int number) {
    const int pair = number * kPairs;
    const int rotated_half = pairing.rotary_dim / 2;
    RowPairs part;
    part.is_rotated = pair < rotated_half;
    const bool are_neighbours = part.is_rotated && pairing.is_interleaved;
    const int half = part.is_rotated ? rotated_half : pairing.columns / 2 - rotated_half;
    part.first = are_neighbours ? 2 * pair : (part.is_rotated ? 0 : rotated_half) + pair;
    part.second = part.first + (are_neighbours ? kPairs : half);
    part.firsts = Part::at(row, part.first);
    part.seconds = Part::at(row, part.second);
    return part;
  }

  // Element i of pair `pair`.
  __device__ Element& element(bool are_neighbours, int pair, int i) {
    if (!are_neighbours) return (i == 0 ? firsts : seconds).values[pair];
    const int place = 2 * pair + i;
    return (place < kPairs ? firsts : seconds).values[place % kPairs];
  }

  // By the angles of rows `cosines` and `sines` of their tables.
  __device__ void rotate(const Element* cosines, const Element* sines, bool are_neighbours) {
    const int pair = are_neighbours ? first / 2 : first;
    const Part cosine = Part::at(cosines, pair);
    const Part sine = Part::at(sines, pair);
    if (are_neighbours)
      rotate_pairs<true>(cosine, sine);
    else
      rotate_pairs<false>(cosine, sine);
  }

  __device__ float largest_magnitude() const {
    float largest = 0.f;
    for_each([&](float x) { largest = fmaxf(largest, fabsf(x)); });  // NaN is left out
    if (largest != INFINITY) return largest;
    largest = 0.f;
    for_each([&](float x) { largest = isinf(x) ? largest : fmaxf(largest, fabsf(x)); });
    return largest;
  }

  __device__ void store(Element* row) const {
    *reinterpret_cast<Part*>(row + first) = firsts;
    *reinterpret_cast<Part*>(row + second) = seconds;
  }

  __device__ void store_quotients(std::uint8_t* row, float scale) const {
    quotients(firsts, scale).store(row + first);
    quotients(seconds, scale).store(row + second);
  }

 private:
  struct alignas(kPairs) Quotients {
    std::uint8_t codes[kPairs];
    __device__ void store(std::uint8_t* target) const {
      *reinterpret_cast<Quotients*>(target) = *this;
    }
  };

  template <bool kNeighbours>
  __device__ void rotate_pairs(const Part& cosine, const Part& sine) {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      Element& x = element(kNeighbours, i, 0);
      Element& y = element(kNeighbours, i, 1);
      const float c = static_cast<float>(cosine.values[i]);
      const float s = static_cast<float>(sine.values[i]);
      const float own = static_cast<float>(x), partner = static_cast<float>(y);
      x = static_cast<Element>(turned(own, partner, c, -s));
      y = static_cast<Element>(turned(partner, own, c, s));
    }
  }

  template <class Visit>
  __device__ void for_each(Visit visit) const {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) visit(static_cast<float>(firsts.values[i]));
#pragma unroll
    for (int i = 0; i < kPairs; ++i) visit(static_cast<float>(seconds.values[i]));
  }

  // What a scale of 0 stands for is 0, whatever is divided.
  __device__ static Quotients quotients(const Part& part, float scale) {
    Quotients result;
    const auto quotient = [&](int i) {
      return scale == 0.f ? 0.f : __fdiv_rn(static_cast<float>(part.values[i]), scale);
    };
    if constexpr (kPairs == 1) {
      result.codes[0] = e4m3_of(quotient(0));
    } else {
#pragma unroll
      for (int i = 0; i < kPairs; i += 2) {
        const std::uint16_t pair = e4m3_of(quotient(i), quotient(i + 1));
        result.codes[i] = static_cast<std::uint8_t>(pair);
        result.codes[i + 1] = static_cast<std::uint8_t>(pair >> 8);
      }
    }
    return result;
  }
};

}  // namespace flash_attn_cuda
