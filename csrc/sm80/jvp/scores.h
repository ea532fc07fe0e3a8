// What lies between the products S, T and the products with V: P from S, and from T its tangent,
// for a thread's (rows, columns) of one score tile. coords: the (query, key) each element stands
// for, counted from the tile's first pair.
#pragma once

#include "shared/dropout/dropout.h"
#include "shared/mask/mask.h"
#include "shared/scores/score_bias.h"
#include "shared/scores/score_modifiers.h"

namespace flash_attn_cuda::sm80 {

using namespace cute;

// A tangent of the bias added to those of the scores, which are in natural units.
template <class Element, class Scores, class Coords>
CUTE_DEVICE void add_bias_tangent(BiasParams const& bias, ScoreTile const& tile, Scores& tangents,
                                  Coords const& coords) {
  if (bias.data == nullptr) return;
  ScoreBias<Element>::of(bias, tile.sequence.index, tile.sequence.seqlen_q, tile.head)
      .add(tangents, coords, tile.query_begin, tile.key_begin, 1.0f);
}

// A score is scale_log2 * S in powers of two. lse_log2: of the thread's rows.
template <int kRows, class Scores>
CUTE_DEVICE void probabilities_of_rows(Scores& scores, float scale_log2,
                                       float const (&lse_log2)[kRows]) {
  CUTE_UNROLL
  for (int row = 0; row < kRows; ++row) {
    CUTE_UNROLL
    for (int col = 0; col < size<1>(scores); ++col)
      scores(row, col) = fast_exp2(scores(row, col) * scale_log2 - lse_log2[row]);
  }
}

// T -> P * T, whose row sums are added to `sums`. Where P is 0 the tangent of a bias may be
// anything.
template <int kRows, class Scores>
CUTE_DEVICE void weigh_tangents(Scores const& probs, Scores& tangents, float (&sums)[kRows]) {
  CUTE_UNROLL
  for (int row = 0; row < kRows; ++row) {
    CUTE_UNROLL
    for (int col = 0; col < size<1>(probs); ++col) {
      const float p = probs(row, col);
      tangents(row, col) = p == 0.0f ? 0.0f : p * tangents(row, col);
      sums[row] += tangents(row, col);
    }
  }
}

// Zeros in P and its tangent where dropout takes a pair away.
template <class Scores, class Coords>
CUTE_DEVICE void drop_both(DropoutMask const& dropout, Scores& probs, Scores& tangents,
                           Coords const& coords, int first_query, int first_key) {
  // Between the two passes a negative P is a dropped one.
  for_each_decision(dropout, probs, coords, first_query, first_key,
                    [](float& p, bool is_kept) { p = is_kept ? p : -p; });
  CUTE_UNROLL
  for (int i = 0; i < size(probs); ++i) {
    const bool is_dropped = probs(i) < 0.0f;
    probs(i) = is_dropped ? 0.0f : probs(i);
    tangents(i) = is_dropped ? 0.0f : tangents(i);
  }
}

}  // namespace flash_attn_cuda::sm80
