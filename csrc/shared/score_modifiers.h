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
#include "shared/modifiers/alibi.h"
#include "shared/modifiers/softcap.h"

namespace flash_attn_cuda {

// The modifiers, and those whose derivative is not 1.
inline constexpr FeatureSet modifier_features = Softcap::feature | Alibi::feature;
inline constexpr FeatureSet bending_features = Softcap::feature;

// Whether the call wants more than the scale.
FAC_HOST_DEVICE constexpr bool modifies_scores(const ScoreParams& params) {
  return Softcap::is_wanted(params) || Alibi::is_wanted(params) || params.bias.data != nullptr;
}

// A score is score_unit times what kernels hold: with a softcap they go on with tanh alone, and to
// ALiBi alone with q k^T as it is, so that nothing has to be multiplied. Slopes in a unit much
// smaller than any that is used might overflow.
FAC_HOST_DEVICE constexpr float score_unit(const ScoreParams& params) {
  constexpr float least_unit = 1e-6f;
  if (Softcap::is_wanted(params)) return Softcap::unit(params);
  const bool is_alibi_alone = Alibi::is_wanted(params) && params.bias.data == nullptr;
  return is_alibi_alone && params.softmax_scale >= least_unit ? params.softmax_scale : 1.0f;
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
    return {.softcap = {.factor = params.softmax_scale / unit,
                        .is_used = Softcap::is_wanted(params)},
            .alibi = {.slope = slope / unit, .shift = shift}};
  }

  // Whether derivatives are not all 1.
  CUTE_DEVICE bool bends() const { return softcap.is_used; }

  // A raw score -> a score in units.
  CUTE_DEVICE float apply(float score, int query, int key) const {
    const float bent = softcap.is_used ? softcap.apply(score) : score * softcap.factor;
    return alibi.apply(bent, query, key);
  }

  // The same of a tile, in place; coords and origins as in mask.h.
  template <class Scores, class Coords>
  CUTE_DEVICE void apply(Scores& scores, Coords const& coords, int query_begin,
                         int key_begin) const {
    apply_and_differentiate(scores, coords, query_begin, key_begin, [](auto) {});
  }

  // The same for a backward: after each modifier that bends scores, multiply(derivative) with what
  // makes a factor of the chain rule of each of `scores`.
  template <class Scores, class Coords, class Multiply>
  CUTE_DEVICE void apply_and_differentiate(Scores& scores, Coords const& coords, int query_begin,
                                           int key_begin, Multiply multiply) const {
    scale_or_cap(scores, multiply);
    if (alibi.is_used()) alibi.apply(scores, coords, query_begin, key_begin);
  }

  // apply() but for what all keys of a row have in common, which goes to the softmax in
  // `row_shifts` and saves an operation a score. kQueries, kKeys: of the tile.
  template <int kQueries, int kKeys, class Scores, class Coords, class RowShifts>
  CUTE_DEVICE void apply_but_shifts(Scores& scores, Coords const& coords, int query_begin,
                                    int key_begin, RowShifts& row_shifts) const {
    using namespace cute;
    row_shifts.rise = alibi.template rise<kKeys>(query_begin, key_begin);
    CUTE_UNROLL
    for (int row = 0; row < size<0>(scores); ++row) row_shifts[row] = 0.0f;
    if (!alibi.template is_one_sided<kQueries, kKeys>(query_begin, key_begin)) {
      apply(scores, coords, query_begin, key_begin);
      return;
    }
    scale_or_cap(scores, [](auto) {});
    alibi.template apply_but_shifts<kKeys>(scores, coords, query_begin, key_begin, row_shifts);
  }

 private:
  template <class Scores, class Multiply>
  CUTE_DEVICE void scale_or_cap(Scores& scores, Multiply multiply) const {
    using namespace cute;
    if (softcap.is_used) {
      softcap.apply(scores);
      multiply([](float modified) { return Softcap::derivative(modified); });
    } else if (softcap.factor != 1.0f) {
      CUTE_UNROLL
      for (int i = 0; i < size(scores); ++i) scores(i) *= softcap.factor;
    }
  }
};

}  // namespace flash_attn_cuda
