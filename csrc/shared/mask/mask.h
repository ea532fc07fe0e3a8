// Hides the pairs of one score tile that the window or the ends of the sequences exclude. Called
// for boundary blocks only.
#pragma once

#include <climits>
#include <cstdint>
#include <cute/tensor.hpp>

#include "shared/mask/block_range.h"

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
      const Visible keys = visible(query_begin + get<0>(coords(row, 0)), key_begin);
      CUTE_UNROLL
      for (int col = 0; col < size<1>(scores); ++col) {
        const int key = get<1>(coords(row, col));
        if (key >= keys.end || (kKind == MaskKind::windowed && key < keys.begin))
          scores(row, col) = hidden;
      }
    }
  }

  // apply() for the columns that a thread holds of a wgmma accumulator, (j, j + 1) of every eight:
  // how many of them lie in front of a bound is a little arithmetic, and a bit for each of 32 makes
  // one instruction an element of what would be four. Queries from query_end on see nothing.
  template <class Scores, class Coords>
  CUTE_DEVICE void apply_by_bits(Scores& scores, Coords const& coords, int query_begin,
                                 int key_begin, float hidden, int query_end = INT_MAX) const {
    using namespace cute;
    constexpr int columns = decltype(size<1>(scores))::value;
    constexpr int bits = 32;
    constexpr int keys_of_bits = bits / 2 * 8;
    const int first = get<1>(coords(0, 0));
    CUTE_UNROLL
    for (int row = 0; row < size<0>(scores); ++row) {
      const int query = query_begin + get<0>(coords(row, 0));
      Visible keys = visible(query, key_begin);
      if (query >= query_end) keys.end = 0;
      CUTE_UNROLL
      for (int begin = 0; begin < columns; begin += bits) {
        const int origin = first + begin / bits * keys_of_bits;
        std::uint32_t seen = bits_below(keys.end - origin);
        if constexpr (kKind == MaskKind::windowed) seen &= ~bits_below(keys.begin - origin);
        CUTE_UNROLL
        for (int i = 0; i < bits && begin + i < columns; ++i) {
          if ((seen >> i & 1) == 0) scores(row, begin + i) = hidden;
        }
      }
    }
  }

  // apply() where nothing but the sequence's end hides keys.
  template <class Scores, class Coords>
  CUTE_DEVICE void apply_end(Scores& scores, Coords const& coords, int key_begin,
                             float hidden) const {
    using namespace cute;
    CUTE_UNROLL
    for (int col = 0; col < size<1>(scores); ++col) {
      if (key_begin + get<1>(coords(0, col)) < seqlen_k) continue;
      CUTE_UNROLL
      for (int row = 0; row < size<0>(scores); ++row) scores(row, col) = hidden;
    }
  }

 private:
  // A bit for each of a thread's columns 0, 1, 8, 9, 16, .. that is less than `bound`.
  CUTE_DEVICE static std::uint32_t bits_below(int bound) {
    const int inside = min(max(bound, 0), 128);
    const int count = inside / 8 * 2 + min(inside % 8, 2);
    return count == 32 ? ~0u : (1u << count) - 1;
  }

  // Keys that one query sees, counted from key_begin.
  struct Visible {
    int begin;
    int end;
  };

  CUTE_DEVICE Visible visible(int query, int key_begin) const {
    Visible keys{.begin = 0, .end = seqlen_k - key_begin};
    if constexpr (kKind == MaskKind::windowed) {
      const int centre = query + band.shift - key_begin;
      if (band.left != Window::unbounded) keys.begin = centre - band.left;
      if (band.right != Window::unbounded) keys.end = min(keys.end, centre + band.right + 1);
    }
    return keys;
  }
};

}  // namespace flash_attn_cuda
