// ALiBi (Press et al., "Train Short, Test Long", 2022): score -> score - slope * |i + shift - j|.
#pragma once

#include <cute/tensor.hpp>

#include "flash_attn/params.h"
#include "shared/scores/score_chain.h"

namespace flash_attn_cuda {

// A term of score_chain.h.
struct Alibi {
  static constexpr FeatureSet feature = feature::alibi;

  float slope;  // in the unit of the scores; 0: none
  int shift;    // key j is at distance |i + shift - j| of query i

  CUTE_DEVICE static Alibi of(const ScoreParams& params, int sequence, int head, int shift) {
    return {.slope = params.alibi_slopes != nullptr
                         ? params.alibi_slopes[sequence * params.alibi_batch_stride + head]
                         : 0.0f,
            .shift = shift};
  }
  CUTE_DEVICE Alibi in_units_of(float unit) const {
    return {.slope = __fdividef(slope, unit), .shift = shift};
  }

  CUTE_DEVICE bool is_used() const { return slope != 0.0f; }

  CUTE_DEVICE float apply(float score, int query, int key) const {
    return score - slope * fabsf(static_cast<float>(query + shift - key));
  }

  // Applies the term to a tile, in place; arguments as in shared/mask/mask.h.
  template <class Scores, class Coords>
  CUTE_DEVICE void apply(Scores& scores, Coords const& coords, int query_begin,
                         int key_begin) const {
    using namespace cute;
    // Columns count from the thread's first, so that the others are constants away.
    const int first_column = get<1>(coords(0, 0));
    CUTE_UNROLL
    for (int row = 0; row < size<0>(scores); ++row) {
      const auto first_distance = static_cast<float>(query_begin + get<0>(coords(row, 0)) + shift -
                                                     key_begin - first_column);
      CUTE_UNROLL
      for (int column = 0; column < size<1>(scores); ++column)
        scores(row, column) -= slope * fabsf(first_distance - step_to(coords, row, column));
    }
  }

  // Whether apply_but_row_bias() may take the place of apply(): a tile's keys are all on one side
  // of all its queries, so that the distances to a row are linear, and what all keys of the row
  // have in common can go to row_bias. kQueries, kKeys: the tile's.
  template <int kQueries, int kKeys>
  CUTE_DEVICE bool has_row_bias(int query_begin, int key_begin) const {
    const int first_distance = query_begin + shift - key_begin;
    return is_used() &&
           (keys_come_first<kKeys>(first_distance) || first_distance + kQueries - 1 <= 0);
  }

  template <int kKeys, class Scores, class Coords, class Bias>
  CUTE_DEVICE void apply_but_row_bias(Scores& scores, Coords const& coords, int query_begin,
                                      int key_begin, Bias& row_bias) const {
    using namespace cute;
    const int first_distance = query_begin + shift - key_begin;
    const float signed_slope = keys_come_first<kKeys>(first_distance) ? slope : -slope;
    CUTE_UNROLL
    for (int row = 0; row < size<0>(scores); ++row) {
      const int first_of_row = get<0>(coords(row, 0)) - get<1>(coords(row, 0));
      row_bias[row] = -signed_slope * static_cast<float>(first_distance + first_of_row);
      CUTE_UNROLL
      for (int column = 0; column < size<1>(scores); ++column)
        scores(row, column) += signed_slope * step_to(coords, row, column);
    }
  }

  // The rise: how much higher row_bias makes a row's scores than those of a tile of nearer keys.
  template <int kKeys>
  CUTE_DEVICE float rise() const {
    return -slope * kKeys;
  }

 private:
  template <int kKeys>
  CUTE_DEVICE static bool keys_come_first(int first_distance) {
    return first_distance >= kKeys - 1;
  }

  template <class Coords>
  CUTE_DEVICE static float step_to(Coords const& coords, int row, int column) {
    using namespace cute;
    return static_cast<float>(get<1>(coords(row, column)) - get<1>(coords(row, 0)));
  }
};

}  // namespace flash_attn_cuda
