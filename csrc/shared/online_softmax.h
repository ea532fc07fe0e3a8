// Online softmax over key blocks with an unscaled O (FlashAttention-2, section 3.1.1), one warp
// owning whole rows.
//
// The reference of a row may lag behind its maximum: it moves, and O and the row sum are rescaled,
// only when a score of the warp exceeds it by more than kMaxLag. Numerator, row sum and LSE share
// the reference, so the result is exact; what grows is the range of P, which fp16 and bf16 hold
// without loss up to 2^15. Random scores move it a few times in a sequence, so the block's row
// reductions and the multiplication of O (one FMUL per element) leave the loop's usual path.
//
// Once it has a reference, softmax_to_pairs() looks for no maximum: its sums show that a score
// exceeds the reference too far.
#pragma once

#include <cutlass/numeric_conversion.h>

#include <cstdint>
#include <cute/tensor.hpp>
#include <type_traits>

#include "shared/e4m3.h"
#include "shared/fragments.h"
#include "shared/max_logits.h"

namespace flash_attn_cuda {

inline constexpr float kMaxLag = 8.0f;          // how far a score may exceed a reference, in log2
inline constexpr float kLargestSum = 32768.0f;  // of what a lane has of a row of one block
// Scores that are known to rise by more than this with every block, in powers of two, soon exceed
// any reference too far.
inline constexpr float kSteepRise = 2.0f;
// In powers of two, more than rounding makes of an exponent and of its power.
inline constexpr float kSlackOfLimit = 0.125f;

// A row is spread over the four lanes of a quad.
template <class Op>
CUTE_DEVICE float quad_reduce(float x, Op op) {
  x = op(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return op(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

CUTE_DEVICE float fast_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

CUTE_DEVICE float fast_log2(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

CUTE_DEVICE float fast_inverse(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Above this magnitude of row_max * scale its rounding error (2^-8 and more) no longer vanishes in
// P, and far above it would overflow exp2. The warp then subtracts the row maximum from the scores
// before it multiplies, as the textbook does.
inline constexpr float kLargestOffset = 65536.0f;

// A row's sum * 2^offset.
struct Denominator {
  float sum;
  float offset;
  float shrink = 1.0f;  // what the numerator has to be multiplied by as well

  CUTE_DEVICE bool is_zero() const { return sum == 0.0f; }  // a NaN is not

  // Plus exp(sink), relative to the larger of the two.
  CUTE_DEVICE Denominator with_sink(float sink) const {
    constexpr float log2e = 1.44269504088896f;
    if (sink == -INFINITY) return *this;
    const float sink_log2 = sink * log2e;
    if (is_zero()) return {1.0f, sink_log2, 0.0f};
    const float reference = fmaxf(offset, sink_log2);
    const float factor = fast_exp2(offset - reference);
    return {sum * factor + fast_exp2(sink_log2 - reference), reference, shrink * factor};
  }

  // The factor from numerator to output. A sum that is not 0 has about 1 in it, of the score that
  // the reference is: approximate functions do.
  CUTE_DEVICE float inverse() const { return is_zero() ? 0.0f : shrink * fast_inverse(sum); }

  CUTE_DEVICE float lse_log2() const { return is_zero() ? -INFINITY : offset + fast_log2(sum); }
  CUTE_DEVICE float lse() const {
    constexpr float ln2 = 0.693147180559945f;
    return lse_log2() * ln2;
  }
};

// What is still to be added to all scores of a row: nothing, or a number for each row.
struct NoRowBias {
  static constexpr bool exists = false;

  CUTE_DEVICE void start(float) {}
  CUTE_DEVICE bool is_steep(float) const { return false; }
  CUTE_DEVICE float add_to(float score, int) const { return score; }
  CUTE_DEVICE float take_from(float offset, int, float) const { return offset; }
  CUTE_DEVICE float move_to_reference(float reference, int) { return reference; }
};
template <int kRows>
struct RowBias {
  static constexpr bool exists = true;

  float of_row[kRows];
  float rise;  // how much higher it makes these scores than those of a block nearer to the rows

  CUTE_DEVICE void start(float rise_of_block) {
    rise = rise_of_block;
    CUTE_UNROLL
    for (float& bias : of_row) bias = 0.0f;
  }
  CUTE_DEVICE bool is_steep(float scale_log2) const { return rise * scale_log2 > kSteepRise; }
  CUTE_DEVICE float& operator[](int row) { return of_row[row]; }
  CUTE_DEVICE float add_to(float score, int row) const { return score + of_row[row]; }
  CUTE_DEVICE float take_from(float offset, int row, float scale_log2) const {
    return offset - of_row[row] * scale_log2;
  }
  // What a warp that shifts subtracts from a row's scores: the bias is in it, and 0 from then on.
  CUTE_DEVICE float move_to_reference(float reference, int row) {
    const float subtracted = reference - of_row[row];
    of_row[row] = 0.0f;
    return subtracted;
  }
};

// Makes the exponents of P from scores. A curve's Exponents (softcap.h) makes them from numbers of
// which the scores are a function.
struct StraightScores {
  float scale_log2;

  CUTE_DEVICE float exponent(float score, float offset) const {
    return score * scale_log2 - offset;
  }
};

// What numbers P may be. A reference is P = 2^power.
struct RangeOf16Bits {
  static constexpr bool is_of_e4m3 = false;
  static constexpr float power = 0.0f;
  static constexpr float max_lag = kMaxLag;
};
// From 2^-9 to 448, of which the largest stands for all beyond. A reference is an integer in powers
// of two, so that it takes no part in how P is rounded.
struct RangeOfE4m3 {
  static constexpr bool is_of_e4m3 = true;
  static constexpr float power = 7.0f;
  static constexpr float max_lag = 1.75f;  // 448 is 2^8.8
};

template <int kRows, class Maximum = NoMaximum, class Range = RangeOf16Bits>
struct OnlineSoftmax {
  float scale_log2;      // softmax_scale * log2(e), positive
  float row_max[kRows];  // reference maximum of the raw scores; -inf until a visible key was seen
  float
      row_offset[kRows];  // P = exp2(score * scale_log2 - row_offset): row_max * scale_log2, but 0
                          // while row_max is -inf, so that P of -inf is 0, and once the warp shifts
  float row_sum[kRows];   // of this lane's columns
  bool shifts = false;    // this warp subtracts row_max first; the same in all its lanes
  bool needs_maximum = true;              // some row of the warp has no reference yet, or it shifts
  [[no_unique_address]] Maximum maximum;  // of the head's scores (max_logits.h)

  CUTE_DEVICE explicit OnlineSoftmax(float scale) : scale_log2(scale) {
    CUTE_UNROLL
    for (int row = 0; row < kRows; ++row) {
      row_max[row] = -INFINITY;
      row_offset[row] = 0.0f;
      row_sum[row] = 0.0f;
      if constexpr (Maximum::is_of_sums) maximum.limits[row] = kLargestSum;
    }
  }
  // rows: those of the tile, here and below (NoRows).
  template <class Rows>
  CUTE_DEVICE OnlineSoftmax(float scale, Rows const& rows) : OnlineSoftmax(scale) {
    if constexpr (Maximum::exists)
      if (rows.are_wanted()) maximum.start(rows.place());
  }

  // Scores (rows, columns) of one key block become P in place; O (rows, head_dim) follows if a
  // reference moved.
  template <class Scores, class Output, class Rows = NoRows>
  CUTE_DEVICE void softmax_rescale_o(Scores& scores, Output& o, Rows const& rows = {}) {
    softmax(scores, [&](int row, float factor) { multiply_row(o, row, factor); }, rows);
  }

  template <class Output>
  CUTE_DEVICE static void multiply_row(Output& o, int row, float factor) {
    using namespace cute;
    CUTE_UNROLL
    for (int col = 0; col < size<1>(o); ++col) o(row, col) *= factor;
  }

  // softmax_rescale_o() with an O that rescale(row, factor) multiplies.
  template <class Scores, class Rescale, class Rows = NoRows>
  CUTE_DEVICE void softmax(Scores& scores, Rescale rescale, Rows const& rows = {}) {
    NoRowBias none;
    follow_maximum(scores, rescale, none, rows);
    exponentiate(scores);
  }

  // softmax() for a kernel with registers for scores and P: P in 16 bits, `pairs` of neighbouring
  // columns in wgmma's order of the scores. row_bias: what is still to be added to all scores of a
  // row; drop(tile, p) may zero some of the lane's p[row][column] of 16 columns. is_too_large: some
  // score is known to exceed its reference too far.
  //
  // It looks for the maximum only where scores are known to rise. If a sum says that a reference
  // was too low, P may be inf, but the scores are there still, and the block is done again.
  template <class Element, class Scores, class Pairs, class Bias, class Rows, class Rescale,
            class Drop>
  CUTE_DEVICE void softmax_to_pairs(Scores& scores, Pairs& pairs, Bias row_bias, Rows const& rows,
                                    Rescale rescale, Drop drop, bool is_too_large = false) {
    using namespace cute;
    const StraightScores straight{scale_log2};
    bool follows = needs_maximum || is_too_large || row_bias.is_steep(scale_log2);
    float sums[kRows];
    do {
      if (follows) follow_maximum(scores, rescale, row_bias, rows);
      const bool saturates =
          exponentiate_pairs<Element>(scores, straight, pairs, row_bias, drop, sums);
      follows =
          !follows && exceed_limits(sums, saturates) && !sees_all(scores, row_bias, sums, rows);
    } while (follows);
    CUTE_UNROLL
    for (int row = 0; row < kRows; ++row) row_sum[row] += sums[row];
  }

  // softmax_to_pairs() of numbers of which the scores are a curve, when !needs_maximum: in one
  // loop, so that exponentials hide what the curve takes. False: a score exceeds its reference too
  // far, `pairs` are of no use, and the sums and references are as they were.
  template <class Element, class Numbers, class Curve, class Pairs>
  CUTE_DEVICE bool softmax_of_curve_to_pairs(Numbers& numbers, Curve const& curve, Pairs& pairs) {
    using namespace cute;
    auto keep_all = [](int, float (&)[2][4]) {};
    float sums[kRows];
    exponentiate_pairs<Element>(numbers, curve, pairs, NoRowBias{}, keep_all, sums);
    if (has_too_large(sums)) {
      // So that the compiler makes anew what the next attempt shares with this one: there are no
      // registers to keep it in.
      CUTE_UNROLL
      for (int i = 0; i < size(numbers); ++i) asm volatile("" : "+f"(numbers(i)));
      return false;
    }
    CUTE_UNROLL
    for (int row = 0; row < kRows; ++row) row_sum[row] += sums[row];
    return true;
  }

  // Raises references to another warp's for the same rows where those are higher. references[row]
  // becomes the factor for what was made with them.
  template <class RescaleRow>
  CUTE_DEVICE void raise_references(float (&references)[kRows], RescaleRow rescale_row) {
    move_reference(references, rescale_row);
    CUTE_UNROLL
    for (int row = 0; row < kRows; ++row) {
      const float change = shifts ? (references[row] - row_max[row]) * scale_log2
                                  : __fmul_rn(references[row], scale_log2) - row_offset[row];
      references[row] = references[row] == -INFINITY ? 1.0f : fast_exp2(change);
    }
    if constexpr (Maximum::is_of_sums) set_limits(maximum.known);
  }

  // O *= o_scale / row sum; lse[row] gets the natural log-sum-exp of the scaled scores and `sink`.
  // No visible key: O = 0, lse = sink.
  template <class Output>
  CUTE_DEVICE void normalize_softmax_lse(Output& o, float (&lse)[kRows], float sink,
                                         float o_scale = 1.0f) {
    using namespace cute;
    const bool has_sink = __any_sync(0xffffffffu, sink != -INFINITY);  // a branch of all lanes
    CUTE_UNROLL
    for (int row = 0; row < kRows; ++row) {
      const float sum = quad_reduce(row_sum[row], [](float a, float b) { return a + b; });
      float offset = shifts ? row_max[row] * scale_log2 : row_offset[row];
      if (Range::is_of_e4m3 && shifts) offset += row_offset[row];
      Denominator total{sum, offset};
      if (has_sink) total = total.with_sink(sink);
      float inverse = total.inverse();
      if (inverse != 0.0f) inverse *= o_scale;  // which may be infinite
      lse[row] = total.lse();
      CUTE_UNROLL
      for (int col = 0; col < size<1>(o); ++col) o(row, col) *= inverse;
    }
  }

 private:
  // Whether a reference was too low. All lanes of the warp together.
  CUTE_DEVICE static bool has_too_large(float const (&sums)[kRows], bool too_large = false) {
    CUTE_UNROLL
    for (int row = 0; row < kRows; ++row) too_large |= !(sums[row] <= kLargestSum);
    return __any_sync(0xffffffffu, too_large);
  }

  // Whether it was, or there may be a score above the known maximum. saturates: of P of e4m3. Its
  // sums do not say so, and are looked at for the compiler to make them while there are registers.
  CUTE_DEVICE bool exceed_limits(float const (&sums)[kRows], bool saturates) const {
    if constexpr (Maximum::is_of_sums) {
      bool exceed = false;
      CUTE_UNROLL
      for (int row = 0; row < kRows; ++row) exceed |= !(sums[row] <= maximum.limits[row]);
      return __any_sync(0xffffffffu, exceed);
    } else {
      return has_too_large(sums, saturates);
    }
  }

  // Of a block whose sums exceed their limits: looks for its maximum, unless a reference was too
  // low, and returns false then.
  template <class Scores, class Bias, class Rows>
  CUTE_DEVICE bool sees_all(Scores const& scores, Bias const& row_bias, float const (&sums)[kRows],
                            Rows const& rows) {
    if constexpr (Maximum::is_of_sums) {
      if (!is_maximum_wanted() || has_too_large(sums)) return false;
      float block_max[kRows];
      CUTE_UNROLL
      for (int row = 0; row < kRows; ++row)
        block_max[row] = row_bias.add_to(largest_of(scores, row), row);
      see(block_max, rows);
      return true;
    } else {
      return false;
    }
  }

  // All lanes of the warp together.
  CUTE_DEVICE bool is_maximum_wanted() const {
    return __any_sync(0xffffffffu, maximum.known != INFINITY);
  }

  template <class Scores>
  CUTE_DEVICE static float largest_of(Scores const& scores, int row) {
    using namespace cute;
    float largest = scores(row, 0);
    CUTE_UNROLL
    for (int col = 1; col < size<1>(scores); ++col) largest = fmaxf(largest, scores(row, col));
    return largest;
  }

  // Takes the largest scores that this lane has of a block.
  template <class Rows>
  CUTE_DEVICE void see(float const (&block_max)[kRows], Rows const& rows) {
    constexpr float ln2 = 0.693147180559945f;
    float largest = -INFINITY;  // NaN does not count
    CUTE_UNROLL
    for (int row = 0; row < kRows; ++row)
      if (rows.attends(row)) largest = fmaxf(largest, block_max[row]);
    largest = warp_max(largest);
    const float natural = largest * scale_log2 * ln2;
    float* const place = not_uniform(rows.place(), largest);
    if constexpr (Maximum::is_of_sums) {
      if (natural > maximum.known) raise_maximum(place, natural);
      set_limits(fmaxf(natural, maximum.known));
      maximum.known = read_maximum(place);  // for the next time
    } else if (largest > maximum.known) {
      maximum.known = largest;
      raise_maximum(place, natural);
    }
  }

  // largest: natural. inf, where it is not wanted: what a reference allows.
  CUTE_DEVICE void set_limits(float largest) {
    constexpr float log2e = 1.44269504088896f;
    const float known = largest * log2e - kSlackOfLimit;
    CUTE_UNROLL
    for (int row = 0; row < kRows; ++row)
      maximum.limits[row] = fminf(kLargestSum, fast_exp2(known - row_offset[row]));
  }

  // Moves the references if these scores exceed them too far. rescale_row(row, factor) then gets
  // the factor for what was made with a row's old one.
  template <class Scores, class RescaleRow, class Bias, class Rows>
  CUTE_DEVICE void follow_maximum(Scores& scores, RescaleRow& rescale_row, Bias& row_bias,
                                  Rows const& rows) {
    using namespace cute;
    float block_max[kRows];
    bool moves = false;
    bool rises = false;
    CUTE_UNROLL
    for (int row = 0; row < kRows; ++row) {
      block_max[row] = row_bias.add_to(largest_of(scores, row), row);
      moves |= lag(block_max[row], row) > Range::max_lag;
      rises |= maximum.is_below(block_max[row]);
    }
    if (!__any_sync(0xffffffffu, moves || shifts || rises)) return;
    if (!Maximum::exists || __any_sync(0xffffffffu, moves || shifts)) {
      move_reference(block_max, rescale_row);
      if (shifts) subtract_reference(scores, row_bias);
    }
    if constexpr (Maximum::exists)
      if (is_maximum_wanted()) see(block_max, rows);
  }

  // By how much a score exceeds the reference, in powers of two.
  CUTE_DEVICE float lag(float score, int row) const {
    if (Range::is_of_e4m3 && !shifts && row_max[row] != -INFINITY)
      return score * scale_log2 - (row_offset[row] + Range::power);
    return (score - row_max[row]) * scale_log2;
  }

  template <class Scores>
  CUTE_DEVICE void exponentiate(Scores& scores) {
    using namespace cute;
    CUTE_UNROLL
    for (int row = 0; row < kRows; ++row) {
      CUTE_UNROLL
      for (int col = 0; col < size<1>(scores); ++col) {
        scores(row, col) = fast_exp2(scores(row, col) * scale_log2 - row_offset[row]);
        row_sum[row] += scores(row, col);
      }
    }
  }

  // pairs: of e4m3 words of four. Returns whether some of these is the largest number, or NaN.
  template <class Element, class Scores, class Curve, class Pairs, class Bias, class Drop>
  CUTE_DEVICE bool exponentiate_pairs(Scores const& scores, Curve const& curve, Pairs& pairs,
                                      Bias const& row_bias, Drop& drop,
                                      float (&sums)[kRows]) const {
    using namespace cute;
    static_assert(kRows == 2 && decltype(size<1>(scores))::value % 4 == 0);
    [[maybe_unused]] std::uint32_t saturated = 0;
    float offset[kRows];
    CUTE_UNROLL
    for (int row = 0; row < kRows; ++row) {
      offset[row] = row_bias.take_from(row_offset[row], row, scale_log2);
      sums[row] = 0.0f;
    }
    CUTE_UNROLL
    for (int tile = 0; tile < size<1>(scores) / 4; ++tile) {
      float p[kRows][4];
      CUTE_UNROLL
      for (int row = 0; row < kRows; ++row) {
        CUTE_UNROLL
        for (int col = 0; col < 4; ++col) {
          p[row][col] = fast_exp2(curve.exponent(scores(row, 4 * tile + col), offset[row]));
          sums[row] += p[row][col];
        }
      }
      drop(tile, p);
      CUTE_UNROLL
      for (int row = 0; row < kRows; ++row) {
        if constexpr (Range::is_of_e4m3) {
          const std::uint32_t word = word_of_e4m3(p[row]);
          saturated |= word + 0x0202'0202u;  // 448 is 0x7e, NaN 0x7f
          pairs(2 * tile + row) = word;
        } else {
          cutlass::NumericArrayConverter<Element, float, 2> convert;
          CUTE_UNROLL
          for (int half = 0; half < 2; ++half) {
            const auto pair = convert({p[row][2 * half], p[row][2 * half + 1]});
            pairs(4 * tile + 2 * half + row) = reinterpret_cast<std::uint32_t const&>(pair);
          }
        }
      }
    }
    return (saturated & 0x8080'8080u) != 0;
  }

  template <class RescaleRow>
  CUTE_DEVICE void move_reference(float const (&block_max)[kRows], RescaleRow& rescale_row) {
    using namespace cute;
    float moved[kRows];
    bool too_large = shifts;
    CUTE_UNROLL
    for (int row = 0; row < kRows; ++row) {
      moved[row] = quad_reduce(fmaxf(row_max[row], block_max[row]),
                               [](float a, float b) { return fmaxf(a, b); });
      too_large |= moved[row] != -INFINITY && fabsf(moved[row] * scale_log2) > kLargestOffset;
    }
    [[maybe_unused]] const bool has_shifted = shifts;
    shifts = __any_sync(0xffffffffu, too_large);
    bool is_unset = shifts;
    CUTE_UNROLL
    for (int row = 0; row < kRows; ++row) {
      const bool unset = shifts || moved[row] == -INFINITY;
      float offset = unset ? 0.0f : moved[row] * scale_log2;
      if constexpr (Range::is_of_e4m3) {
        const bool stays = !shifts && !has_shifted && moved[row] == row_max[row];
        offset = stays ? row_offset[row] : ceilf(offset) - Range::power;
      }
      // The factor comes from the offsets, so that their rounding cancels. Before the first visible
      // key the sums are 0.
      float change = shifts ? (row_max[row] - moved[row]) * scale_log2 : row_offset[row] - offset;
      if (Range::is_of_e4m3 && shifts && !has_shifted)
        change = row_offset[row] + Range::power - moved[row] * scale_log2;
      const float factor = row_max[row] == -INFINITY ? 1.0f : fast_exp2(change);
      is_unset |= moved[row] == -INFINITY;
      row_max[row] = moved[row];
      row_offset[row] = offset;
      row_sum[row] *= factor;
      rescale_row(row, factor);
    }
    needs_maximum = __any_sync(0xffffffffu, is_unset);
  }

  template <class Scores, class Bias>
  CUTE_DEVICE void subtract_reference(Scores& scores, Bias& row_bias) const {
    using namespace cute;
    CUTE_UNROLL
    for (int row = 0; row < kRows; ++row) {
      const float reference =
          row_bias.move_to_reference(row_max[row] == -INFINITY ? 0.0f : row_max[row], row);
      CUTE_UNROLL
      for (int col = 0; col < size<1>(scores); ++col) scores(row, col) -= reference;
    }
  }
};

// The logit that only the softmax's denominator knows of (OpenAI, "gpt-oss-120b & gpt-oss-20b Model
// Card", 2025, section 2.2); -inf for none.
CUTE_DEVICE float sink_of(const ScoreParams& params, int head) {
  return params.sink == nullptr ? -INFINITY : params.sink[head];
}

}  // namespace flash_attn_cuda
