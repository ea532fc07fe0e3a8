// The slots of a ring that right operands come through. A warpgroup of a CTA for wide heads has a
// ring of its own; a producer fills its slots in the order in which the warpgroup multiplies them.
#pragma once

#include "sm90/isa/copy.h"
#include "sm90/isa/gemm.h"

namespace flash_attn_cuda::sm90 {

// A slot holds a block's rows with some of their columns, which scores are made of, or some of its
// rows with the columns of results that the warpgroup has.
template <class kElement, int kHeadDim, int kColumns, int kRows, int kSlots>
struct WideSlots {
  using Element = kElement;
  static constexpr int block = 64;
  static constexpr int head_dim = kHeadDim;
  static constexpr int own_columns = kHeadDim / 2;
  static constexpr int columns = kColumns;
  static constexpr int rows = kRows;
  static constexpr int count = kSlots;
  static constexpr int elements = block * columns;
  static constexpr int bytes = elements * int(sizeof(Element));
  static_assert(elements == rows * own_columns && head_dim % columns == 0 && block % rows == 0);
  static_assert(count >= 2);

  using ScoresMma = SharedMma<Element, block, columns>;
  using ResultMma = RegisterMma<Element, own_columns, rows>;
  using TileLayout = sm90::TileLayout<Element, block, columns, head_dim / columns>;  // left operand
  using ColumnsLayout = sm90::TileLayout<Element, block, columns, count>;
  using RowsLayout = sm90::TileLayout<Element, rows, own_columns, count>;
};

}  // namespace flash_attn_cuda::sm90
