// The chain of what happens to a raw score q k^T besides the scale: each of modifiers/ is a struct
// with apply(), from a score to the modified one, and derivative(), the factor of the chain rule at
// that. score_bias.h adds a tensor. Kernels call the chain alone; a row of the kernel table says of
// which modifiers it has the code, a call which of them it wants.
//
// Kernels that carry these scale the scores themselves, so that the softmax sees them in units of
// score_unit.
#pragma once

#include "flash_attn/params.h"
#include "shared/host_device.h"
#include "shared/online_softmax.h"
#include "shared/scores/alibi.h"
#include "shared/scores/softcap.h"

namespace flash_attn_cuda {

// The modifiers, and those whose derivative is not 1.
inline constexpr FeatureSet modifier_features = Softcap::feature | Alibi::feature;
inline constexpr FeatureSet bending_features = Softcap::feature;

// Whether the call wants more than the scale. Here and below params are asked themselves: with
// calls of is_wanted() kernels with a bias spill.
FAC_HOST_DEVICE constexpr bool modifies_scores(const ScoreParams& params) {
  return params.softcap > 0.0f || params.alibi_slopes != nullptr || params.bias.data != nullptr;
}

// A score is score_unit times what kernels hold: with a softcap they go on with tanh alone, and to
// ALiBi alone with q k^T as it is, so that nothing has to be multiplied. Slopes in a unit much
// smaller than any that is used might overflow.
FAC_HOST_DEVICE constexpr float score_unit(const ScoreParams& params) {
  constexpr float least_unit = 1e-6f;
  if (params.softcap > 0.0f) return params.softcap;
  const bool is_alibi_alone = params.alibi_slopes != nullptr && params.bias.data == nullptr;
  return is_alibi_alone && params.softmax_scale >= least_unit ? params.softmax_scale : 1.0f;
}

// What a raw score is multiplied by: exactly 1, and then left out, where the scale is the unit.
// Kernels come here in every step, and a division to the last bit takes a call.
CUTE_DEVICE float scale_in_units(float softmax_scale, float unit) {
  return unit == softmax_scale ? 1.0f : __fdividef(softmax_scale, unit);
}

// Of one query head.
struct ScoreModifiers {
  Softcap softcap;
  Alibi alibi;

  // shift: key j is at distance |i + shift - j| of query i.
  CUTE_DEVICE static ScoreModifiers of(const ScoreParams& params, int sequence, int head,
                                       int shift) {
    const float slope = Alibi::slope_of(params, sequence, head);
    const float unit = score_unit(params);
    return {.softcap = {.factor = scale_in_units(params.softmax_scale, unit),
                        .is_used = Softcap::is_wanted(params)},
            .alibi = {.slope = __fdividef(slope, unit), .shift = shift}};
  }

  // Whether derivatives are not all 1.
  CUTE_DEVICE bool bends() const { return softcap.is_used; }

  // The modifier that bends, in halves (softcap.h): the first, and the second, of a tile that the
  // first's polynomial reaches or of one number of it, and what a softmax does in its place.
  using Curve = Softcap::Curve;
  template <class Scores>
  CUTE_DEVICE bool scale_to_bend(Scores& scores) const {
    return softcap.scale(scores);
  }
  template <class Scores>
  CUTE_DEVICE static void bend_reached(Scores& scores) {
    Softcap::bend(scores, true);
  }
  CUTE_DEVICE static float bend_reached(float number) { return Softcap::bend(number); }
  CUTE_DEVICE static float derivative(float bent) { return Softcap::derivative(bent); }

  // A raw score -> a score in units.
  CUTE_DEVICE float apply(float score, int query, int key) const {
    const float bent = softcap.is_used ? softcap.apply(score) : score * softcap.factor;
    return alibi.apply(bent, query, key);
  }

  // The same of a tile, in place; coords and origins as in shared/mask/mask.h.
  template <class Scores, class Coords>
  CUTE_DEVICE void apply(Scores& scores, Coords const& coords, int query_begin,
                         int key_begin) const {
    scale_or_cap(scores);
    if (alibi.is_used()) alibi.apply(scores, coords, query_begin, key_begin);
  }

  // The same for the backward of a call that bends scores, behind scale_to_bend(scores), which said
  // `reaches`: after each modifier that bends, multiply(derivative), of which derivative(score) is
  // the chain rule's factor of each of `scores` as they are then.
  template <class Scores, class Coords, class Multiply>
  CUTE_DEVICE void apply_and_differentiate(Scores& scores, bool reaches, Coords const& coords,
                                           int query_begin, int key_begin,
                                           Multiply multiply) const {
    Softcap::bend(scores, reaches);
    multiply([](float modified) { return Softcap::derivative(modified); });
    if (alibi.is_used()) alibi.apply(scores, coords, query_begin, key_begin);
  }

  // Whether the softmax may bend scores itself: nothing but a softcap, and no cap so high that
  // scores are subtracted from each other (kLargestOffset).
  CUTE_DEVICE bool bends_alone(ScoreParams const& params) const {
    constexpr float log2e = 1.44269504088896f;
    return softcap.is_used && !alibi.is_used() && params.softcap * log2e <= kLargestOffset;
  }

  // apply() but for what the softmax does with less: what all keys of a row have in common goes to
  // it in `row_shifts`, if it takes them; and where `leaves_bending` allows it and this returns
  // true, `scores` are arguments of the softcap's polynomial, which the softmax has to bend.
  // kQueries, kKeys: of the tile; kFeatures: those that the call may want.
  template <int kQueries, int kKeys, FeatureSet kFeatures, class Scores, class Coords, class Shifts>
  CUTE_DEVICE bool apply_for_softmax(Scores& scores, Coords const& coords, int query_begin,
                                     int key_begin, bool leaves_bending, Shifts& row_shifts) const {
    using namespace cute;
    constexpr bool shifts_rows = !std::is_same_v<Shifts, NoShifts>;
    if constexpr (shifts_rows) {
      row_shifts.rise = alibi.template rise<kKeys>();
      CUTE_UNROLL
      for (int row = 0; row < size<0>(scores); ++row) row_shifts[row] = 0.0f;
    }
    if ((kFeatures & Softcap::feature) != 0 && softcap.is_used) {
      const bool reaches = softcap.scale(scores);
      if (leaves_bending && reaches) return true;
      Softcap::bend(scores, reaches);
    } else {
      scale(scores);
    }
    if (!alibi.is_used()) return false;
    if constexpr (shifts_rows) {
      if (alibi.template is_one_sided<kQueries, kKeys>(query_begin, key_begin)) {
        alibi.template apply_but_shifts<kKeys>(scores, coords, query_begin, key_begin, row_shifts);
        return false;
      }
    }
    alibi.apply(scores, coords, query_begin, key_begin);
    return false;
  }

 private:
  template <class Scores>
  CUTE_DEVICE void scale_or_cap(Scores& scores) const {
    if (softcap.is_used) {
      softcap.apply(scores);
    } else {
      scale(scores);
    }
  }

  template <class Scores>
  CUTE_DEVICE void scale(Scores& scores) const {
    using namespace cute;
    if (softcap.factor == 1.0f) return;
    CUTE_UNROLL
    for (int i = 0; i < size(scores); ++i) scores(i) *= softcap.factor;
  }
};

// Of a tile whose rows are of several heads. Its scores are not in units.
template <int kRows>
struct RowModifiers {
  Alibi alibi[kRows];

  CUTE_DEVICE void set(int row, const ScoreParams& params, bool attends, int sequence, int head) {
    alibi[row] = {.slope = attends ? Alibi::slope_of(params, sequence, head) : 0.0f, .shift = 0};
  }

  // Raw scores -> scores, in place. centres: the key that each row's query is at; columns count
  // from key_begin.
  template <class Scores, class Coords>
  CUTE_DEVICE void apply(const ScoreParams& params, Scores& scores, Coords const& coords,
                         int const (&centres)[kRows], int key_begin) const {
    using namespace cute;
    if (Softcap::is_wanted(params)) {
      Softcap::scale_and_apply(params, scores);
    } else {
      CUTE_UNROLL
      for (int i = 0; i < size(scores); ++i) scores(i) *= params.softmax_scale;
    }
    if (!Alibi::is_wanted(params)) return;
    CUTE_UNROLL
    for (int row = 0; row < kRows; ++row) {
      CUTE_UNROLL
      for (int col = 0; col < size<1>(scores); ++col) {
        const int key = key_begin + get<1>(coords(row, col));
        scores(row, col) = alibi[row].apply(scores(row, col), centres[row], key);
      }
    }
  }
};

}  // namespace flash_attn_cuda
