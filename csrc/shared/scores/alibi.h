// ALiBi (Press et al., "Train Short, Test Long", 2022): score -> score - slope * |i + shift - j|.
#pragma once

#include <cute/tensor.hpp>

#include "flash_attn/params.h"
#include "shared/host_device.h"

namespace flash_attn_cuda {

// Of one query head.
struct Alibi {
  static constexpr FeatureSet feature = feature::alibi;
  static constexpr bool is_linear = true;

  float slope;  // in the unit of the scores; 0: none
  int shift;    // key j is at distance |i + shift - j| of query i

  FAC_HOST_DEVICE static constexpr bool is_wanted(const ScoreParams& params) {
    return params.alibi_slopes != nullptr;
  }

  CUTE_DEVICE static float slope_of(const ScoreParams& params, int sequence, int head) {
    return is_wanted(params) ? params.alibi_slopes[sequence * params.alibi_batch_stride + head]
                             : 0.0f;
  }

  CUTE_DEVICE bool is_used() const { return slope != 0.0f; }

  CUTE_DEVICE float apply(float score, int query, int key) const {
    return score - slope * fabsf(static_cast<float>(query + shift - key));
  }

  // A tile's, in place; coords and origins as in shared/mask/mask.h.
  template <class Scores, class Coords>
  CUTE_DEVICE void apply(Scores& scores, Coords const& coords, int query_begin,
                         int key_begin) const {
    using namespace cute;
    // From the thread's first column, so that the others are constants away.
    const int first_column = get<1>(coords(0, 0));
    CUTE_UNROLL
    for (int row = 0; row < size<0>(scores); ++row) {
      apply_to_row(scores, coords, row,
                   static_cast<float>(query_begin + get<0>(coords(row, 0)) + shift - key_begin -
                                      first_column));
    }
  }

  // A row of it; first_distance: from its query to the thread's first column.
  template <class Scores, class Coords>
  CUTE_DEVICE void apply_to_row(Scores& scores, Coords const& coords, int row,
                                float first_distance) const {
    using namespace cute;
    CUTE_UNROLL
    for (int column = 0; column < size<1>(scores); ++column)
      scores(row, column) -= slope * fabsf(first_distance - step_to(coords, row, column));
  }

  // Whether a tile's keys are all on one side of all its queries: then the distances to a row are
  // linear, and what all keys of the row have in common can be left out. kQueries, kKeys: of the
  // tile that the coordinates are of.
  template <int kQueries, int kKeys>
  CUTE_DEVICE bool is_one_sided(int query_begin, int key_begin) const {
    const int first_distance = query_begin + shift - key_begin;
    return is_used() &&
           (keys_come_first<kKeys>(first_distance) || first_distance + kQueries - 1 <= 0);
  }

  // How much higher what is left out makes the rows than that of a tile of keys nearer to them.
  template <int kKeys>
  CUTE_DEVICE float rise() const {
    return -slope * kKeys;
  }

  // The same as apply() where the tile is one-sided, but for what goes to row_shifts.
  template <int kKeys, class Scores, class Coords, class RowShifts>
  CUTE_DEVICE void apply_but_shifts(Scores& scores, Coords const& coords, int query_begin,
                                    int key_begin, RowShifts& row_shifts) const {
    using namespace cute;
    const int first_distance = query_begin + shift - key_begin;
    const float signed_slope = this->signed_slope<kKeys>(first_distance);
    CUTE_UNROLL
    for (int row = 0; row < size<0>(scores); ++row) {
      const int first_of_row = get<0>(coords(row, 0)) - get<1>(coords(row, 0));
      row_shifts[row] = -signed_slope * static_cast<float>(first_distance + first_of_row);
      CUTE_UNROLL
      for (int column = 0; column < size<1>(scores); ++column)
        scores(row, column) += signed_slope * step_to(coords, row, column);
    }
  }

  CUTE_DEVICE static float derivative(float) { return 1.0f; }

 private:
  template <int kKeys>
  CUTE_DEVICE static bool keys_come_first(int first_distance) {
    return first_distance >= kKeys - 1;
  }
  template <int kKeys>
  CUTE_DEVICE float signed_slope(int first_distance) const {
    return keys_come_first<kKeys>(first_distance) ? slope : -slope;
  }

  template <class Coords>
  CUTE_DEVICE static float step_to(Coords const& coords, int row, int column) {
    using namespace cute;
    return static_cast<float>(get<1>(coords(row, column)) - get<1>(coords(row, 0)));
  }
};

}  // namespace flash_attn_cuda
