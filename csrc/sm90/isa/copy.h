// Shared-memory tiles as TMA writes and wgmma reads them, and the loads themselves.
// docs/architecture.md says which other files know sm90 instructions.
#pragma once

#include <cuda.h>

#include <cute/arch/copy_sm90_tma.hpp>
#include <cute/atom/mma_traits_sm90_gmma.hpp>
#include <cute/tensor.hpp>

#include "flash_attn/config.h"

namespace flash_attn_cuda::sm90 {

using namespace cute;

// Columns that one TMA box holds, which is the width of the swizzle: 128 bytes, or 64 or 32 where
// the width is no multiple of that.
template <int kColumns, class Element = cutlass::half_t>
inline constexpr int box_columns = [] {
  constexpr int bytes = kColumns * int(sizeof(Element));
  return (bytes % 128 == 0 ? 128 : bytes % 64 == 0 ? 64 : 32) / int(sizeof(Element));
}();

template <class Element, int kBoxColumns, int kBytes = kBoxColumns * int(sizeof(Element))>
using SwizzleAtom =
    std::conditional_t<kBytes == 128, GMMA::Layout_K_SW128_Atom<Element>,
                       std::conditional_t<kBytes == 64, GMMA::Layout_K_SW64_Atom<Element>,
                                          GMMA::Layout_K_SW32_Atom<Element>>>;

// (rows, columns, stages): boxes of all rows, one after the other.
template <class Element, int kRows, int kColumns, int kStages,
          int kBoxColumns = box_columns<kColumns, Element>>
using TileLayout = decltype(tile_to_shape(SwizzleAtom<Element, kBoxColumns>{},
                                          Shape<Int<kRows>, Int<kColumns>, Int<kStages>>{}));

template <class Layout, class Element>
CUTE_DEVICE auto smem_tile(Element* data) {
  return make_tensor(make_smem_ptr(data), Layout{});
}

// The tile's memory read as (columns, rows, stages), of the first kColumns columns, or all.
template <int kColumns = 0, class SmemTensor>
CUTE_DEVICE auto transposed(SmemTensor const& tile) {
  constexpr int rows = decltype(size<0>(tile))::value;
  constexpr int columns = decltype(size<1>(tile))::value;
  constexpr int stages = decltype(size<2>(tile))::value;
  using Swap = Layout<Shape<Int<kColumns == 0 ? columns : kColumns>, Int<rows>, Int<stages>>,
                      Stride<Int<rows>, _1, Int<rows * columns>>>;
  using Transposed = decltype(composition(tile.layout(), Swap{}));
  return make_tensor(tile.data(), Transposed{});
}

// Rows [row, row + rows) of one head and batch entry, rows > 0: calls with a box that has none
// ended now and then in an illegal access.
struct RowSpan {
  int batch;
  int head;
  int row;
  int rows;
};

// Starts the load of a tile whose first row is span.row, or of box_rows of its rows, those from
// `tile` on, by one thread. Rows beyond the span and columns beyond the tensor become zeros and are
// not read; the barrier counts them all. A box beyond last_box, the last one with a column of the
// tensor, gets that one's columns. first_column: of the tensor, that of the tile's first box.
template <int kRows, int kColumns, int kBoxColumns = 0, class Element>
CUTE_DEVICE void load_tile(CUtensorMap const& map, std::uint64_t* barrier, Element* tile,
                           RowSpan const& span, int last_box = kColumns, int box_rows = kRows,
                           int first_column = 0) {
  constexpr auto hint = static_cast<std::uint64_t>(TMA::CacheHintSm90::EVICT_NORMAL);
  constexpr int box = kBoxColumns == 0 ? box_columns<kColumns, Element> : kBoxColumns;
  const int rows = min(span.rows, box_rows);
  CUTE_UNROLL
  for (int column = 0; column < kColumns; column += box) {
    const int first = column == 0 ? first_column : min(first_column + column, last_box);
    SM90_TMA_LOAD_5D::copy(&map, barrier, hint, tile + column * kRows, first, box_rows - rows,
                           span.row + rows, span.head, span.batch);
  }
}

// Starts the store of the span's first kRows rows, by one thread, which may go on writing to the
// tile after wait_stores. Rows beyond the span and columns beyond the tensor are left alone, and so
// are boxes beyond last_box.
template <int kRows, int kColumns, class Element>
CUTE_DEVICE void store_tile(CUtensorMap const& map, Element const* tile, RowSpan const& span,
                            int last_box = kColumns) {
  const int rows = min(span.rows, kRows);
  CUTE_UNROLL
  for (int column = 0; column < kColumns; column += box_columns<kColumns>) {
    if (column > 0 && column > last_box) break;
    SM90_TMA_STORE_5D::copy(&map, tile + column * kRows, column, kRows - rows, span.row + rows,
                            span.head, span.batch);
  }
  tma_store_arrive();
}

// Waits until the stores that this thread started have read shared memory.
CUTE_DEVICE void wait_stores() { tma_store_wait<0>(); }

}  // namespace flash_attn_cuda::sm90
