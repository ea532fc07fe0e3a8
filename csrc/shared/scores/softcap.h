// Softcap (Gemma 2, section 2): score -> cap * tanh(score / cap). Kernels count its scores in units
// of cap and go on with tanh alone. It is a curve of score_chain.h.
#pragma once

#include <cstdint>

#include "flash_attn/params.h"
#include "shared/host_device.h"
#include "shared/online_softmax.h"

namespace flash_attn_cuda {

struct Softcap {
  static constexpr FeatureSet feature = feature::softcap;

  bool is_used;

  // What kernels count scores in under the curve; 0 without it.
  FAC_HOST_DEVICE static constexpr float unit(const ScoreParams& params) { return params.softcap; }

  CUTE_DEVICE static Softcap of(const ScoreParams& params) {
    return {.is_used = unit(params) > 0.0f};
  }

  // factor: from q k^T to the argument of tanh.
  CUTE_DEVICE static float apply(float score, float factor) { return tanh_by_exp(score * factor); }

  // The first half of the curve for a tile, by all lanes of the warp together: q k^T -> arguments
  // of the polynomial. True if the polynomial reaches all of the warp's, as it usually does with
  // the caps that models have.
  template <class Scores>
  CUTE_DEVICE static bool scale(Scores& scores, float factor) {
    using namespace cute;
    const float z_factor = factor * (1.0f / polynomial_argument);
    std::uint32_t bits = 0;
    CUTE_UNROLL
    for (int i = 0; i < size(scores); ++i) {
      scores(i) *= z_factor;
      bits |= __float_as_uint(scores(i));
    }
    constexpr std::uint32_t from_two_on = 0x4000'0000;  // a bit of the exponent, of NaN as well
    return !__any_sync(0xffffffffu, (bits & from_two_on) != 0);
  }

  // The second half: the polynomial's arguments -> tanh.
  template <class Scores>
  CUTE_DEVICE static void apply_to_scaled(Scores& scores, bool reaches) {
    using namespace cute;
    if (!reaches) {
      CUTE_UNROLL
      for (int i = 0; i < size(scores); ++i)
        scores(i) = tanh_by_exp(scores(i) * polynomial_argument);
    } else {
      CUTE_UNROLL
      for (int i = 0; i < size(scores); ++i) scores(i) = tanh_by_polynomial(scores(i));
    }
  }

  // The second half for one argument that the polynomial reaches.
  CUTE_DEVICE static float apply_to_scaled(float z) { return tanh_by_polynomial(z); }

  // The second half for a softmax that makes P of the polynomial's arguments, with tanh and its
  // scale in one polynomial (OnlineSoftmax::softmax_of_curve_to_pairs).
  struct Exponents {
    float c0, c1, c2, c3;

    CUTE_DEVICE explicit Exponents(float scale_log2)
        : c0(tanh_c0 * scale_log2),
          c1(tanh_c1 * scale_log2),
          c2(tanh_c2 * scale_log2),
          c3(tanh_c3 * scale_log2) {}
    CUTE_DEVICE float exponent(float z, float offset) const {
      const float w = z * z;
      return (((c3 * w + c2) * w + c1) * w + c0) * z - offset;
    }
  };

  // q k^T -> scores that are not in units, by exponentials alone: little code, for a kernel
  // that waits for memory.
  template <class Scores>
  CUTE_DEVICE static void scale_and_apply(const ScoreParams& params, Scores& scores) {
    using namespace cute;
    const float inner = __fdividef(params.softmax_scale, params.softcap);
    CUTE_UNROLL
    for (int i = 0; i < size(scores); ++i)
      scores(i) = params.softcap * tanh_by_exp(scores(i) * inner);
  }

  // The derivative at the score that apply() made.
  CUTE_DEVICE static float derivative(float score) { return 1.0f - score * score; }

  // What derivative() changes with, relative to itself: its own derivative by the argument over it.
  CUTE_DEVICE static float bend(float score) { return -2.0f * score; }

 private:
  // tanh to the last places of fp32 around 1: tanh.approx, with 11 bits, would show in LSE. Two
  // MUFU operations; neither end overflows.
  CUTE_DEVICE static float tanh_by_exp(float x) {
    constexpr float two_log2e = 2.88539008177793f;
    return 1.0f - 2.0f * fast_inverse(fast_exp2(x * two_log2e) + 1.0f);
  }

  static constexpr float polynomial_argument = 0.275f;  // x = this * z

  // tanh(0.275 z) for |z| < 2 by a polynomial, to 1.3e-6 of it: MUFU, at 4 operations a clock and
  // quadrant, is what a kernel with a softcap has least of. Chebyshev interpolation of tanh(x) / x
  // in x^2.
  static constexpr float tanh_c0 = 2.74999689e-01f;
  static constexpr float tanh_c1 = -6.92979297e-03f;
  static constexpr float tanh_c2 = 2.06513784e-04f;
  static constexpr float tanh_c3 = -5.07670476e-06f;
  CUTE_DEVICE static float tanh_by_polynomial(float z) {
    const float w = z * z;
    return (((tanh_c3 * w + tanh_c2) * w + tanh_c1) * w + tanh_c0) * z;
  }
};

}  // namespace flash_attn_cuda
