// The modifiers of scores that there are.
#pragma once

#include "shared/scores/alibi.h"
#include "shared/scores/score_chain.h"
#include "shared/scores/softcap.h"

namespace flash_attn_cuda {

// In the order in which they change a score; score_bias.h adds a tensor after them. A row of the
// kernel table says which of them it has the code of, a call which of them it wants. A new one is a
// file of its own here, its name in this list and its parameter in ScoreParams.
using ScoreModifiers = ScoreChain<Softcap, Alibi>;

inline constexpr FeatureSet modifier_features = ScoreModifiers::features;
inline constexpr FeatureSet curve_features = ScoreModifiers::Curve::feature;

// Whether the call wants more than the scale.
FAC_HOST_DEVICE constexpr bool modifies_scores(const ScoreParams& params) {
  return params.wants(modifier_features | feature::bias);
}

// What kernels that carry modifiers count scores in.
FAC_HOST_DEVICE constexpr float score_unit(const ScoreParams& params) {
  return ScoreModifiers::unit(params);
}

// The modifiers of a tile whose rows are of several heads. Its scores are not in units.
template <int kRows>
struct RowModifiers {
  using Curve = ScoreModifiers::Curve;
  using Terms = ScoreModifiers::Terms;

  Terms terms[kRows];

  CUTE_DEVICE void set(int row, const ScoreParams& params, bool attends, int sequence, int head) {
    terms[row] = {};
    if (attends) terms[row] = Terms::of(params, sequence, head, 0);
  }

  // Raw scores -> scores, in place. centres: the key that each row's query is at; columns count
  // from key_begin.
  template <class Scores, class Coords>
  CUTE_DEVICE void apply(const ScoreParams& params, Scores& scores, Coords const& coords,
                         int const (&centres)[kRows], int key_begin) const {
    using namespace cute;
    if (Curve::of(params).is_used) {
      Curve::scale_and_apply(params, scores);
    } else {
      CUTE_UNROLL
      for (int i = 0; i < size(scores); ++i) scores(i) *= params.softmax_scale;
    }
    if (!params.wants(Terms::features)) return;
    CUTE_UNROLL
    for (int row = 0; row < kRows; ++row) {
      CUTE_UNROLL
      for (int col = 0; col < size<1>(scores); ++col) {
        const int key = key_begin + get<1>(coords(row, col));
        scores(row, col) = terms[row].apply(scores(row, col), centres[row], key);
      }
    }
  }
};

}  // namespace flash_attn_cuda
