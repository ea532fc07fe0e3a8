// What happens to a raw score q k^T besides the scale, as a chain: a curve, then terms.
//
// A curve is a nonlinear function of the score alone (softcap.h): the only link with a derivative
// other than 1. A term is added to the score of a pair (alibi.h). Its struct has
//
//   feature                    rows of the kernel table with this feature have its code
//   of(params, sequence, head, shift)
//                              what a tile needs of it, read ahead of the scores: key j is at
//                              distance |i + shift - j| of query i
//   in_units_of(unit)          itself, where a score is a multiple of unit
//   is_used()                  whether it changes a score of the tile
//   apply(score, query, key)   the score of a pair
//
// and, where that is faster, an apply() of a whole tile, and what a softmax has less work with
// (apply_but_row_bias and rise of alibi.h). The chain is folded over its links here. Kernels call
// the chain alone.
#pragma once

#include <cute/tensor.hpp>

#include "flash_attn/params.h"
#include "shared/host_device.h"
#include "shared/online_softmax.h"

namespace flash_attn_cuda {

// What a raw score is multiplied by: exactly 1, and then left out, where the scale is the unit.
// Kernels come here in every step, and a division to the last bit takes a call.
CUTE_DEVICE float scale_in_units(float softmax_scale, float unit) {
  return unit == softmax_scale ? 1.0f : __fdividef(softmax_scale, unit);
}

// The terms of the tiles of one query head, or of one row.
template <class... Terms>
struct ScoreTerms : Terms... {
  static constexpr FeatureSet features = (0 | ... | Terms::feature);

  CUTE_DEVICE static ScoreTerms of(const ScoreParams& params, int sequence, int head, int shift) {
    return {Terms::of(params, sequence, head, shift)...};
  }
  CUTE_DEVICE ScoreTerms in_units_of(float unit) const { return {Terms::in_units_of(unit)...}; }

  CUTE_DEVICE bool is_used() const { return (Terms::is_used() || ...); }

  CUTE_DEVICE float apply(float score, int query, int key) const {
    ((score = Terms::apply(score, query, key)), ...);
    return score;
  }

  // Applies the terms to a tile, in place; arguments as in shared/mask/mask.h.
  template <class Scores, class Coords>
  CUTE_DEVICE void apply_to_tile(Scores& scores, Coords const& coords, int query_begin,
                                 int key_begin) const {
    (add_if_used(static_cast<Terms const&>(*this), scores, coords, query_begin, key_begin), ...);
  }

  // apply_to_tile() for a softmax that takes a row_bias, which has the terms' rise: what all keys
  // of a row have in common goes there. kQueries, kKeys: the tile's.
  template <int kQueries, int kKeys, class Scores, class Coords, class Bias>
  CUTE_DEVICE void apply_for_softmax(Scores& scores, Coords const& coords, int query_begin,
                                     int key_begin, Bias& row_bias) const {
    (add_for_softmax<kQueries, kKeys>(static_cast<Terms const&>(*this), scores, coords, query_begin,
                                      key_begin, row_bias),
     ...);
  }
  template <int kKeys>
  CUTE_DEVICE float rise() const {
    return (rise_of<kKeys>(static_cast<Terms const&>(*this)) + ...);
  }

 private:
  template <class Term, class Scores, class Coords>
  CUTE_DEVICE static void add_if_used(Term const& term, Scores& scores, Coords const& coords,
                                      int query_begin, int key_begin) {
    if (term.is_used()) add(term, scores, coords, query_begin, key_begin);
  }

  template <class Term, class Scores, class Coords>
  CUTE_DEVICE static void add(Term const& term, Scores& scores, Coords const& coords,
                              int query_begin, int key_begin) {
    using namespace cute;
    if constexpr (requires { term.apply(scores, coords, query_begin, key_begin); }) {
      term.apply(scores, coords, query_begin, key_begin);
    } else {
      CUTE_UNROLL
      for (int row = 0; row < size<0>(scores); ++row) {
        CUTE_UNROLL
        for (int col = 0; col < size<1>(scores); ++col) {
          const auto pair = coords(row, col);
          scores(row, col) =
              term.apply(scores(row, col), query_begin + get<0>(pair), key_begin + get<1>(pair));
        }
      }
    }
  }

  template <int kQueries, int kKeys, class Term, class Scores, class Coords, class Bias>
  CUTE_DEVICE static void add_for_softmax(Term const& term, Scores& scores, Coords const& coords,
                                          int query_begin, int key_begin, Bias& row_bias) {
    if (!term.is_used()) return;
    if constexpr (takes_row_bias<Term> && Bias::exists) {
      if (term.template has_row_bias<kQueries, kKeys>(query_begin, key_begin)) {
        term.template apply_but_row_bias<kKeys>(scores, coords, query_begin, key_begin, row_bias);
        return;
      }
    }
    add(term, scores, coords, query_begin, key_begin);
  }

  // Whether a term leaves anything to row_bias.
  template <class Term>
  static constexpr bool takes_row_bias = requires(Term term) { term.template rise<1>(); };

  template <int kKeys, class Term>
  CUTE_DEVICE static float rise_of(Term const& term) {
    if constexpr (takes_row_bias<Term>) return term.template rise<kKeys>();
    return 0.0f;
  }
};

// The chain of one query head. Kernels that carry it scale the scores themselves, so that the
// softmax sees them in units.
template <class CurveLink, class... TermLinks>
struct ScoreChain {
  using Curve = CurveLink;
  using Terms = ScoreTerms<TermLinks...>;
  static constexpr FeatureSet features = Curve::feature | Terms::features;

  Curve curve;
  float factor;  // from q k^T to the curve's argument or, without a curve, to a score in units
  Terms terms;

  // The unit: a score is this times what kernels hold. With a curve it is the curve's; with terms
  // alone it is the scale, so that q k^T needs no multiplication. Terms in a unit much smaller than
  // any that is used might overflow.
  FAC_HOST_DEVICE static constexpr float unit(const ScoreParams& params) {
    constexpr float least_unit = 1e-6f;
    if (Curve::unit(params) > 0.0f) return Curve::unit(params);
    const bool has_terms_alone = params.wants(Terms::features) && !params.wants(feature::bias);
    return has_terms_alone && params.softmax_scale >= least_unit ? params.softmax_scale : 1.0f;
  }

  CUTE_DEVICE static ScoreChain of(const ScoreParams& params, int sequence, int head, int shift) {
    const Terms terms = Terms::of(params, sequence, head, shift);
    const float unit = ScoreChain::unit(params);
    const float factor = scale_in_units(params.softmax_scale, unit);
    return {.curve = Curve::of(params), .factor = factor, .terms = terms.in_units_of(unit)};
  }

  // Whether derivatives are not all 1.
  CUTE_DEVICE bool is_curved() const { return curve.is_used; }

  // A raw score -> a score in units.
  CUTE_DEVICE float apply(float score, int query, int key) const {
    const float curved = curve.is_used ? Curve::apply(score, factor) : score * factor;
    return terms.apply(curved, query, key);
  }

  // apply() for a tile, in place; arguments as in shared/mask/mask.h.
  template <class Scores, class Coords>
  CUTE_DEVICE void apply(Scores& scores, Coords const& coords, int query_begin,
                         int key_begin) const {
    if (curve.is_used) {
      const bool reaches = Curve::scale(scores, factor);
      Curve::apply_to_scaled(scores, reaches);
    } else {
      scale(scores);
    }
    terms.apply_to_tile(scores, coords, query_begin, key_begin);
  }

  // The first half of the curve. It returns what the second half takes as `reaches`.
  template <class Scores>
  CUTE_DEVICE bool scale_to_curve(Scores& scores) const {
    return Curve::scale(scores, factor);
  }

  // The rest of apply() in a backward whose scores have a curve. After the curve it calls
  // multiply(derivative), where derivative(score) is the chain rule's factor of each of `scores` as
  // they are then.
  template <class Scores, class Coords, class Multiply>
  CUTE_DEVICE void apply_and_differentiate(Scores& scores, bool reaches, Coords const& coords,
                                           int query_begin, int key_begin,
                                           Multiply multiply) const {
    Curve::apply_to_scaled(scores, reaches);
    multiply([](float score) { return Curve::derivative(score); });
    terms.apply_to_tile(scores, coords, query_begin, key_begin);
  }

  // What those factors change with, relative to themselves, at a score in units before its terms.
  CUTE_DEVICE static float bend(float score) { return Curve::bend(score); }

  // Whether the softmax may do the curve's second half: there is nothing but the curve, and its
  // unit is not so large that scores are subtracted from each other (kLargestOffset).
  CUTE_DEVICE bool is_curve_alone(ScoreParams const& params) const {
    constexpr float log2e = 1.44269504088896f;
    return curve.is_used && !terms.is_used() && Curve::unit(params) * log2e <= kLargestOffset;
  }

  // apply() except what the softmax does with less: `row_bias` gets what all keys of a row have in
  // common, if the softmax takes one; where `leaves_curve` allows it and this returns true,
  // `scores` are what scale_to_curve() made of them. kQueries, kKeys: the tile's; kFeatures: those
  // that the call may want.
  template <int kQueries, int kKeys, FeatureSet kFeatures, class Scores, class Coords, class Bias>
  CUTE_DEVICE bool apply_for_softmax(Scores& scores, Coords const& coords, int query_begin,
                                     int key_begin, bool leaves_curve, Bias& row_bias) const {
    row_bias.start(terms.template rise<kKeys>());
    if ((kFeatures & Curve::feature) != 0 && curve.is_used) {
      const bool reaches = Curve::scale(scores, factor);
      if (leaves_curve && reaches) return true;
      Curve::apply_to_scaled(scores, reaches);
    } else {
      scale(scores);
    }
    terms.template apply_for_softmax<kQueries, kKeys>(scores, coords, query_begin, key_begin,
                                                      row_bias);
    return false;
  }

 private:
  template <class Scores>
  CUTE_DEVICE void scale(Scores& scores) const {
    using namespace cute;
    if (factor == 1.0f) return;
    CUTE_UNROLL
    for (int i = 0; i < size(scores); ++i) scores(i) *= factor;
  }
};

}  // namespace flash_attn_cuda
