// Shared-memory layouts and the copies between global and shared memory (cp.async, 16 bytes a
// thread).
#pragma once

#include <cute/arch/copy_sm80.hpp>
#include <cute/atom/copy_atom.hpp>
#include <cute/tensor.hpp>

#include "flash_attn/params.h"

namespace flash_attn_cuda::sm80 {

using namespace cute;

// Rows of 64 elements (128 bytes: all 32 banks) swizzled over 8 rows, so that ldmatrix and its
// transposed form read without bank conflicts; rows of 32 where the width is no multiple of 64.
template <int kColumns>
using SwizzleAtom = std::conditional_t<
    kColumns % 64 == 0,
    decltype(composition(Swizzle<3, 3, 3>{}, Layout<Shape<_8, _64>, Stride<_64, _1>>{})),
    decltype(composition(Swizzle<2, 3, 3>{}, Layout<Shape<_8, _32>, Stride<_32, _1>>{}))>;

template <int kRows, int kColumns>
using TileLayout =
    decltype(tile_to_shape(SwizzleAtom<kColumns>{}, Shape<Int<kRows>, Int<kColumns>>{}));

template <class Layout, class Element>
CUTE_DEVICE auto smem_tile(Element* data) {
  return make_tensor(make_smem_ptr(data), Layout{});
}

// The tile's memory read as its transpose.
template <class SmemTensor>
CUTE_DEVICE auto transposed(SmemTensor const& tile) {
  constexpr int rows = decltype(size<0>(tile))::value;
  constexpr int columns = decltype(size<1>(tile))::value;
  using Swap = Layout<Shape<Int<columns>, Int<rows>>, Stride<Int<rows>, _1>>;
  using Transposed = decltype(composition(tile.layout(), Swap{}));
  return make_tensor(tile.data(), Transposed{});
}

// Fragments are shaped from a plain layout: a swizzle means nothing to registers.
template <class SmemTensor>
CUTE_DEVICE auto without_swizzle(SmemTensor const& tile) {
  using Plain = decltype(get_nonswizzle_portion(tile.layout()));
  return make_tensor(tile.data(), Plain{});
}

// How the threads of a CTA share a tile: 16 bytes each, neighbours along a row of the swizzle atom.
template <class Element, int kRows, int kColumns, int kThreads>
struct TileShare {
  static constexpr int chunk = sizeof(uint128_t) / sizeof(Element);
  static constexpr int chunks_per_row = decltype(size<1>(SwizzleAtom<kColumns>{}))::value / chunk;
  static constexpr int rows_per_pass = kThreads / chunks_per_row;
  static constexpr int columns_per_pass = chunks_per_row * chunk;
  static_assert(kRows % rows_per_pass == 0, "the threads cover whole rows of the tile");
  static_assert(rows_per_pass % 8 == 0, "the swizzle, of 8 rows, is that of the first chunk");

  CUTE_DEVICE static int first_row(int thread) { return thread / chunks_per_row; }
  CUTE_DEVICE static int first_column(int thread) { return thread % chunks_per_row * chunk; }

  // visit(row, column, chunk) for each of a thread's chunks of the tile in shared memory. Row and
  // column count from its first chunk: constants once the loops are unrolled, and all chunks lie at
  // constant distances from the first.
  template <class SmemTensor, class Visit>
  CUTE_DEVICE static void for_each(SmemTensor&& tile, int thread, Visit visit) {
    auto* first = &tile(first_row(thread), first_column(thread));
    const auto distance = get_nonswizzle_portion(tile.layout());
    CUTE_UNROLL
    for (int row = 0; row < kRows; row += rows_per_pass) {
      CUTE_UNROLL
      for (int column = 0; column < kColumns; column += columns_per_pass) {
        visit(row, column, *reinterpret_cast<uint128_t*>(first + distance(row, column)));
      }
    }
  }
};

// Where row `row` of one batch and head begins in global memory.
template <class Element>
CUTE_DEVICE Element* row_pointer(TensorView const& view, int batch, int head, int row) {
  return static_cast<Element*>(view.data) + batch * view.batch_stride + head * view.head_stride +
         row * view.row_stride;
}

// The tensor from one of its columns on; where CTAs do not share them, itself.
template <class Element, bool kSharesColumns>
CUTE_DEVICE decltype(auto) from_column(TensorView const& view, [[maybe_unused]] int column) {
  if constexpr (kSharesColumns) {
    TensorView own = view;
    own.data = static_cast<Element*>(view.data) + column;
    return own;
  } else {
    return (view);
  }
}

// The tile whose first row is `row`: global memory to shared memory. Rows from `rows` on and
// columns from `columns` on become zeros, and nothing is read for them.
template <class Element, int kRows, int kColumns, int kThreads>
struct TileLoader {
  using Share = TileShare<Element, kRows, kColumns, kThreads>;

  // Where a thread's share begins. Apart from the load, for a kernel that has time for it before
  // it may load.
  struct Source {
    const Element* first;
    int rows;
  };

  CUTE_DEVICE static Source source(TensorView const& view, int batch, int head, int row, int rows,
                                   int thread) {
    const int m = Share::first_row(thread);
    return {row_pointer<Element>(view, batch, head, row + m) + Share::first_column(thread),
            rows - m};
  }

  template <class SmemTensor>
  CUTE_DEVICE static void load(TensorView const& view, Source const& source, int columns,
                               SmemTensor&& tile, int thread) {
    const int k = Share::first_column(thread);
    Share::for_each(tile, thread, [&](int next_m, int next_k, uint128_t& target) {
      const bool exists = next_m < source.rows && next_k < columns - k;
      SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<uint128_t>::copy(
          *reinterpret_cast<const uint128_t*>(source.first + next_m * view.row_stride + next_k),
          target, exists);
    });
  }

  template <class SmemTensor>
  CUTE_DEVICE static void load(TensorView const& view, int batch, int head, int row, int rows,
                               int columns, SmemTensor&& tile, int thread) {
    load(view, source(view, batch, head, row, rows, thread), columns, tile, thread);
  }
};

// TileLoader where the rows lie anywhere: row_at(row) points to the first element of a row of the
// tile, or is null for zeros.
template <class Element, int kRows, int kColumns, int kThreads>
struct RowLoader {
  using Share = TileShare<Element, kRows, kColumns, kThreads>;

  template <class SmemTensor, class RowAt>
  CUTE_DEVICE static void load(int columns, SmemTensor&& tile, int thread, RowAt row_at) {
    const int m = Share::first_row(thread);
    const int k = Share::first_column(thread);
    const Element* source = nullptr;
    Share::for_each(tile, thread, [&](int next_m, int next_k, uint128_t& target) {
      if (next_k == 0) source = row_at(m + next_m);
      const bool exists = source != nullptr && next_k < columns - k;
      const Element* from = exists ? source + k + next_k : nullptr;
      SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<uint128_t>::copy(*reinterpret_cast<const uint128_t*>(from),
                                                       target, exists);
    });
  }
};

// TileLoader's reverse. Rows and columns beyond the tensor are left alone.
template <class Element, int kRows, int kColumns, int kThreads>
struct TileWriter {
  using Share = TileShare<Element, kRows, kColumns, kThreads>;

  template <class SmemTensor>
  CUTE_DEVICE static void store(TensorView const& view, int batch, int head, int row, int rows,
                                int columns, SmemTensor&& tile, int thread) {
    const int m = Share::first_row(thread);
    const int k = Share::first_column(thread);
    Element* target = row_pointer<Element>(view, batch, head, row + m) + k;
    Share::for_each(tile, thread, [&](int next_m, int next_k, const uint128_t& source) {
      if (next_m >= rows - m || next_k >= columns - k) return;
      *reinterpret_cast<uint128_t*>(target + next_m * view.row_stride + next_k) = source;
    });
  }
};

CUTE_DEVICE void commit_loads() { cp_async_fence(); }

// All loads of this CTA have landed and every thread may read them.
CUTE_DEVICE void wait_for_loads() {
  cp_async_wait<0>();
  __syncthreads();
}

}  // namespace flash_attn_cuda::sm80
