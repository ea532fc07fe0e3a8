// Which key blocks a query tile visits, and which query blocks a key tile visits. Pure index logic.
#pragma once

#include "flash_attn/params.h"
#include "shared/host_device.h"

namespace flash_attn_cuda {

// Blocks [begin, end) hold at least one visible pair; blocks [interior_begin, interior_end) hold no
// hidden one and need no mask. An empty range has begin == end, an empty interior lies inside
// [begin, end].
struct BlockRange {
  int begin;
  int end;
  int interior_begin;
  int interior_end;

  FAC_HOST_DEVICE constexpr bool empty() const { return begin >= end; }
  FAC_HOST_DEVICE constexpr bool is_interior(int block) const {
    return block >= interior_begin && block < interior_end;
  }
};

namespace detail {
FAC_HOST_DEVICE constexpr int clamp(int x, int low, int high) {
  return x < low ? low : (x > high ? high : x);
}
}  // namespace detail

// In which order a tile visits the blocks of a range. Positions run down from end - 1 to begin:
// from the last block to the first, or from another one down to the first and then up from the one
// after it.
struct VisitOrder {
  int begin;
  int end;
  int behind;  // blocks behind the one that comes first

  FAC_HOST_DEVICE static constexpr VisitOrder downwards(const BlockRange& range) {
    return {.begin = range.begin, .end = range.end, .behind = 0};
  }
  // `first`: the range's nearest, where it does not hold this one.
  FAC_HOST_DEVICE static constexpr VisitOrder from(const BlockRange& range, int first) {
    const int last = range.end - 1;
    return {.begin = range.begin,
            .end = range.end,
            .behind = last - detail::clamp(first, range.begin, last)};
  }

  FAC_HOST_DEVICE constexpr int block_at(int position) const {
    return position >= begin + behind ? position - behind : begin + end - 1 - position;
  }
};

// A band of visible pairs: `other` is visible to `own` iff own + shift - left <= other <= own +
// shift + right. Seen from the queries own is the query index; from the keys the same band has
// shift negated and left and right exchanged.
struct Band {
  int shift;
  int left;
  int right;
  bool has_tree = false;  // which hides some others from `shift` on
};

// shift: the sequence's (shared/sequence/sequence.h).
FAC_HOST_DEVICE constexpr Band band_from_queries(const Window& window, int shift) {
  return {.shift = shift, .left = window.left, .right = window.right, .has_tree = window.has_tree};
}

FAC_HOST_DEVICE constexpr Band band_from_keys(const Window& window, int shift) {
  return {.shift = -shift, .left = window.right, .right = window.left};
}

// The other indices [begin, end) of [0, limit) that any of own indices [first, last] sees.
struct Reach {
  int begin;
  int end;

  FAC_HOST_DEVICE constexpr bool empty() const { return begin >= end; }
  FAC_HOST_DEVICE constexpr bool holds(int other) const { return other >= begin && other < end; }
};

FAC_HOST_DEVICE constexpr Reach reach_of(Band band, int first, int last, int limit) {
  using detail::clamp;
  if (first > last) return {.begin = 0, .end = 0};
  return {
      .begin = band.left == Window::unbounded ? 0 : clamp(first + band.shift - band.left, 0, limit),
      .end = band.right == Window::unbounded ? limit
                                             : clamp(last + band.shift + band.right + 1, 0, limit)};
}

// Own indices [first, last], other indices [0, limit) in blocks of `block`.
FAC_HOST_DEVICE constexpr BlockRange block_range(Band band, int first, int last, int limit,
                                                 int block) {
  using detail::clamp;
  const bool left_bounded = band.left != Window::unbounded;
  const bool right_bounded = band.right != Window::unbounded;
  const Reach any = reach_of(band, first, last, limit);
  if (any.empty()) return {.begin = 0, .end = 0, .interior_begin = 0, .interior_end = 0};
  // Seen by every index of the tile.
  const int all_begin = left_bounded ? clamp(last + band.shift - band.left, 0, limit) : 0;
  const int first_end = band.has_tree ? band.shift : first + band.shift + band.right + 1;
  const int all_end = right_bounded ? clamp(first_end, 0, limit) : limit;

  const int begin = any.begin / block;
  const int end = (any.end + block - 1) / block;
  const int interior_begin = clamp((all_begin + block - 1) / block, begin, end);
  const int interior_end = clamp(all_end / block, interior_begin, end);
  return {
      .begin = begin, .end = end, .interior_begin = interior_begin, .interior_end = interior_end};
}

// The blocks of [of_tile.begin, of_tile.end) that own indices [first, last], if any, see; if they
// see none the last of the tile's, which is no interior one.
FAC_HOST_DEVICE constexpr BlockRange own_range(Band band, int first, int last, int limit, int block,
                                               BlockRange const& of_tile) {
  BlockRange own = block_range(band, first, last, limit, block);
  if (own.begin < of_tile.begin) own.begin = of_tile.begin;
  if (own.end > of_tile.end) own.end = of_tile.end;
  if (own.empty()) {
    own.end = own.interior_begin = own.interior_end = of_tile.end;
    own.begin = own.end - 1;
  }
  return own;
}

// Keys of a narrow step, the fewest that P V can multiply: where steps are short, a last block of
// no more is multiplied by instructions as wide. Planning knows of it as well as the kernels.
inline constexpr int narrow_step_keys = 16;

}  // namespace flash_attn_cuda
