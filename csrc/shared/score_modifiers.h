// What happens to a raw score q k^T besides the scale: softcap (Gemma 2, section 2) and ALiBi
// (Press et al., "Train Short, Test Long", 2022); score_bias.h adds a tensor. Kernels that carry
// these scale the scores themselves, so that the softmax sees them in units of score_unit.
#pragma once

#include <cstdint>

#include "flash_attn/params.h"
#include "shared/block_range.h"
#include "shared/host_device.h"
#include "shared/online_softmax.h"

namespace flash_attn_cuda {

FAC_HOST_DEVICE constexpr bool has_score_modifiers(const ScoreParams& params) {
  return params.softcap > 0.0f || params.alibi_slopes != nullptr || params.bias.data != nullptr;
}

// The logit that only the softmax's denominator knows of; -inf for none (OpenAI, "gpt-oss-120b &
// gpt-oss-20b Model Card", 2025, section 2.2).
CUTE_DEVICE float sink_of(const ScoreParams& params, int head) {
  return params.sink == nullptr ? -INFINITY : params.sink[head];
}

// A score is score_unit times what kernels hold: with softcap they go on with tanh alone, and to
// ALiBi alone with q k^T as it is, so that nothing has to be multiplied. Slopes in a unit much
// smaller than any that is used might overflow.
FAC_HOST_DEVICE constexpr float score_unit(const ScoreParams& params) {
  constexpr float least_unit = 1e-6f;
  if (params.softcap > 0.0f) return params.softcap;
  const bool is_alibi_alone = params.alibi_slopes != nullptr && params.bias.data == nullptr;
  return is_alibi_alone && params.softmax_scale >= least_unit ? params.softmax_scale : 1.0f;
}

// tanh to the last places of fp32 around 1: tanh.approx, with 11 bits, would show in LSE. Two
// MUFU operations; neither end overflows.
CUTE_DEVICE float tanh_by_exp(float x) {
  constexpr float two_log2e = 2.88539008177793f;
  float quotient;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(quotient) : "f"(fast_exp2(x * two_log2e) + 1.0f));
  return 1.0f - 2.0f * quotient;
}

// tanh(0.275 z) for |z| < 2 by a polynomial, to 1e-7: MUFU, at 4 operations a clock and quadrant,
// is what a kernel with softcap has least of. Chebyshev interpolation of tanh(x) / x in x^2.
CUTE_DEVICE float tanh_by_polynomial(float z) {
  const float w = z * z;
  float p = 1.467097440e-07f;
  p = p * w - 6.254623056e-06f;
  p = p * w + 2.094735433e-04f;
  p = p * w - 6.932178978e-03f;
  p = p * w + 2.749999910e-01f;
  return p * z;
}

inline constexpr float polynomial_argument = 0.275f;  // x = this * z

// x -> tanh(x) for x = scores * factor, in place, all lanes of the warp together: by the
// polynomial where it reaches for every score of the tile, which with the softcaps that models
// have it usually does.
template <class Scores>
CUTE_DEVICE void tanh_of_scores(Scores& scores, float factor) {
  using namespace cute;
  const float z_factor = factor * (1.0f / polynomial_argument);
  std::uint32_t bits = 0;
  CUTE_UNROLL
  for (int i = 0; i < size(scores); ++i) {
    scores(i) *= z_factor;
    bits |= __float_as_uint(scores(i));
  }
  constexpr std::uint32_t from_two_on = 0x4000'0000;  // a bit of the exponent, of NaN as well
  if (__any_sync(0xffffffffu, (bits & from_two_on) != 0)) {
    CUTE_UNROLL
    for (int i = 0; i < size(scores); ++i) scores(i) = tanh_by_exp(scores(i) * polynomial_argument);
  } else {
    CUTE_UNROLL
    for (int i = 0; i < size(scores); ++i) scores(i) = tanh_by_polynomial(scores(i));
  }
}

// Of one query head.
struct ScoreModifiers {
  float factor;  // from q k^T to the argument of tanh, or, without softcap, to the score in units
  bool has_softcap;
  float alibi_slope;  // in score_unit; 0 without ALiBi
  int shift;          // key j is at distance |i + shift - j| of query i

  CUTE_DEVICE static ScoreModifiers of(const ScoreParams& params, int sequence, int head,
                                       int shift) {
    const float slope = params.alibi_slopes == nullptr
                            ? 0.0f
                            : params.alibi_slopes[sequence * params.alibi_batch_stride + head];
    const float unit = score_unit(params);
    return {.factor = params.softmax_scale / unit,
            .has_softcap = params.softcap > 0.0f,
            .alibi_slope = slope / unit,
            .shift = shift};
  }

  // Raw scores -> scores in units, in place; coords and origins as in mask.h.
  template <class Scores, class Coords>
  CUTE_DEVICE void apply(Scores& scores, Coords const& coords, int query_begin,
                         int key_begin) const {
    scale_or_cap(scores);
    if (alibi_slope != 0.0f) add_alibi(scores, coords, query_begin, key_begin);
  }

  // The same but for what all keys of a row have in common, which goes to the softmax in
  // `row_shifts` and saves an operation a score: with all keys on one side of all queries the
  // distances to a row are linear. kQueries, kKeys: of the tile that the coordinates are of.
  template <int kQueries, int kKeys, class Scores, class Coords, class RowShifts>
  CUTE_DEVICE void apply_but_shifts(Scores& scores, Coords const& coords, int query_begin,
                                    int key_begin, RowShifts& row_shifts) const {
    using namespace cute;
    const int first_distance = query_begin + shift - key_begin;
    const bool keys_come_first = first_distance >= kKeys - 1;
    const bool keys_come_last = first_distance + kQueries - 1 <= 0;
    const float signed_slope = keys_come_first ? alibi_slope : -alibi_slope;
    row_shifts.rise = -signed_slope * kKeys;  // blocks are visited from the last to the first
    CUTE_UNROLL
    for (int row = 0; row < size<0>(scores); ++row) row_shifts[row] = 0.0f;
    if (alibi_slope == 0.0f || !(keys_come_first || keys_come_last)) {
      apply(scores, coords, query_begin, key_begin);
      return;
    }
    scale_or_cap(scores);
    CUTE_UNROLL
    for (int row = 0; row < size<0>(scores); ++row) {
      const int first_of_row = get<0>(coords(row, 0)) - get<1>(coords(row, 0));
      row_shifts[row] = -signed_slope * static_cast<float>(first_distance + first_of_row);
      CUTE_UNROLL
      for (int column = 0; column < size<1>(scores); ++column) {
        const auto step = static_cast<float>(get<1>(coords(row, column)) - get<1>(coords(row, 0)));
        scores(row, column) += signed_slope * step;
      }
    }
  }

  template <class Scores, class Coords>
  CUTE_DEVICE void add_alibi(Scores& scores, Coords const& coords, int query_begin,
                             int key_begin) const {
    using namespace cute;
    const int first_column = get<1>(coords(0, 0));
    CUTE_UNROLL
    for (int row = 0; row < size<0>(scores); ++row) {
      // From the thread's first column, so that the others are constants away.
      const float centre = static_cast<float>(query_begin + get<0>(coords(row, 0)) + shift -
                                              key_begin - first_column);
      CUTE_UNROLL
      for (int column = 0; column < size<1>(scores); ++column) {
        const auto step = static_cast<float>(get<1>(coords(row, column)) - get<1>(coords(row, 0)));
        scores(row, column) -= alibi_slope * fabsf(centre - step);
      }
    }
  }

 private:
  template <class Scores>
  CUTE_DEVICE void scale_or_cap(Scores& scores) const {
    using namespace cute;
    if (has_softcap) {
      tanh_of_scores(scores, factor);
    } else if (factor != 1.0f) {
      CUTE_UNROLL
      for (int i = 0; i < size(scores); ++i) scores(i) *= factor;
    }
  }
};

}  // namespace flash_attn_cuda
