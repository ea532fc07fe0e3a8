// Columns of tiles that a narrower head lacks. A box must have a column of the tensor, so those of
// a product's left operand are zeros, written once, and those of its right operand are of the last
// box that exists.
#pragma once

#include "sm90/isa/barriers.h"
#include "sm90/isa/copy.h"

namespace flash_attn_cuda::sm90 {

inline constexpr int wide_box_columns = 64;

CUTE_HOST_DEVICE constexpr int last_wide_box(int head_dim) {
  return (head_dim - 1) / wide_box_columns * wide_box_columns;
}

// All threads of the CTA call it before any of the tile, kColumns wide, is read or loaded.
template <int kRows, int kColumns, class Element>
CUTE_DEVICE void clear_missing_boxes(Element* tile, int head_dim) {
  constexpr int vector = int(sizeof(uint4) / sizeof(Element));
  const int first = (last_wide_box(head_dim) + wide_box_columns) * kRows;
  auto* vectors = reinterpret_cast<uint4*>(tile);
  for (int i = first / vector + threadIdx.x; i < kRows * kColumns / vector; i += blockDim.x)
    vectors[i] = {0, 0, 0, 0};
  cutlass::arch::fence_view_async_shared();
}

// The boxes of a tile that exist, by one thread.
template <int kRows, class Element>
CUTE_DEVICE void load_existing_boxes(CUtensorMap const& map, std::uint64_t* full, Element* tile,
                                     RowSpan const& span, int head_dim) {
  constexpr int box_bytes = kRows * wide_box_columns * int(sizeof(Element));
  const int last_box = last_wide_box(head_dim);
  FullBarrier::arrive_and_expect_tx(full, (last_box / wide_box_columns + 1) * box_bytes);
  CUTE_NO_UNROLL
  for (int column = 0; column <= last_box; column += wide_box_columns) {
    load_tile<kRows, wide_box_columns>(map, full, tile + column * kRows, span, last_box, kRows,
                                       column);
  }
}

}  // namespace flash_attn_cuda::sm90
