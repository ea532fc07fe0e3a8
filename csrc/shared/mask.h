// Hides the pairs of one score tile that the window or the ends of the sequences exclude. Called
// for boundary blocks only.
#pragma once

#include <cute/tensor.hpp>

#include "shared/block_range.h"

namespace flash_attn_cuda {

template <MaskKind kKind>
struct ScoreMask {
  Band band;  // from the queries
  int seqlen_k;

  // scores: this thread's (rows, columns) of the tile; coords: the (query, key) each element stands
  // for, same layout, both counted from (query_begin, key_begin). Hidden elements become `hidden`.
  template <class Scores, class Coords>
  CUTE_DEVICE void apply(Scores& scores, Coords const& coords, int query_begin, int key_begin,
                         float hidden) const {
    using namespace cute;
    CUTE_UNROLL
    for (int row = 0; row < size<0>(scores); ++row) {
      int key_low = 0;  // visible keys of this row, counted from key_begin: [key_low, key_high)
      int key_high = seqlen_k - key_begin;
      if constexpr (kKind == MaskKind::windowed) {
        const int centre = query_begin + get<0>(coords(row, 0)) + band.shift - key_begin;
        if (band.left != Window::unbounded) key_low = centre - band.left;
        if (band.right != Window::unbounded) key_high = min(key_high, centre + band.right + 1);
      }
      CUTE_UNROLL
      for (int col = 0; col < size<1>(scores); ++col) {
        const int key = get<1>(coords(row, col));
        if (key >= key_high || (kKind == MaskKind::windowed && key < key_low))
          scores(row, col) = hidden;
      }
    }
  }
};

}  // namespace flash_attn_cuda
