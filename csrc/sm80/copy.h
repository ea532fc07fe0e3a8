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

// The same memory read as its transpose.
template <class SmemTensor>
CUTE_DEVICE auto transposed(SmemTensor const& tile) {
  constexpr int rows = decltype(size<0>(tile))::value;
  constexpr int columns = decltype(size<1>(tile))::value;
  using Swap = Layout<Shape<Int<columns>, Int<rows>>, Stride<Int<rows>, _1>>;
  return make_tensor(tile.data(), composition(tile.layout(), Swap{}));
}

// Fragments are shaped from a plain layout: a swizzle means nothing to registers.
template <class SmemTensor>
CUTE_DEVICE auto without_swizzle(SmemTensor const& tile) {
  return make_tensor(tile.data(), get_nonswizzle_portion(tile.layout()));
}

// Threads over a tile, 8 elements each: as many as cover one swizzle row lie along a row.
template <int kColumns>
inline constexpr int threads_per_row = decltype(size<1>(SwizzleAtom<kColumns>{}))::value / 8;

template <class Element, int kThreads, int kColumns, class CopyOp,
          int kThreadsPerRow = threads_per_row<kColumns>>
using TileCopy =
    decltype(make_tiled_copy(Copy_Atom<CopyOp, Element>{},
                             Layout<Shape<Int<kThreads / kThreadsPerRow>, Int<kThreadsPerRow>>,
                                    Stride<Int<kThreadsPerRow>, _1>>{},
                             Layout<Shape<_1, _8>>{}));

// The (rows, head_dim) matrix of one batch and head, its rows from `row` on.
template <class Element, int kRows, int kColumns>
CUTE_DEVICE auto global_tile(TensorView const& view, int batch, int head, int row) {
  Element* data = static_cast<Element*>(view.data) + batch * view.batch_stride +
                  head * view.head_stride + row * view.row_stride;
  return make_tensor(make_gmem_ptr(data), Shape<Int<kRows>, Int<kColumns>>{},
                     make_stride(view.row_stride, _1{}));
}

// One thread's share of the tiles of a tensor, global memory to shared memory.
template <class Element, int kRows, int kColumns, int kThreads>
struct TileLoader {
  using Copy = TileCopy<Element, kThreads, kColumns, SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<uint128_t>>;
  static_assert(kRows % (kThreads / threads_per_row<kColumns>) == 0,
                "the threads cover whole rows of the tile");

  // Rows from `rows` on and columns from `columns` on become zeros, and nothing is read for them.
  template <class SmemTensor>
  CUTE_DEVICE static void load(TensorView const& view, int batch, int head, int row, int rows,
                               int columns, SmemTensor&& smem, int thread) {
    auto thread_copy = Copy{}.get_thread_slice(thread);
    auto source =
        thread_copy.partition_S(global_tile<Element, kRows, kColumns>(view, batch, head, row));
    auto target = thread_copy.partition_D(smem);
    auto coords = thread_copy.partition_S(make_identity_tensor(Shape<Int<kRows>, Int<kColumns>>{}));
    CUTE_UNROLL
    for (int m = 0; m < size<1>(target); ++m) {
      const bool row_exists = get<0>(coords(0, m, 0)) < rows;
      CUTE_UNROLL
      for (int k = 0; k < size<2>(target); ++k) {
        const bool exists = row_exists && get<1>(coords(0, m, k)) < columns;
        cute::copy(Copy{}.with(exists), source(_, m, k), target(_, m, k));
      }
    }
  }
};

// Shared memory to global memory, 16 bytes a thread, rows and columns beyond the tensor left alone.
template <class Element, int kRows, int kColumns, int kThreads>
struct TileWriter {
  using Copy = TileCopy<Element, kThreads, kColumns, UniversalCopy<uint128_t>>;
  static_assert(kRows % (kThreads / threads_per_row<kColumns>) == 0,
                "the threads cover whole rows of the tile");

  template <class SmemTensor>
  CUTE_DEVICE static void store(TensorView const& view, int batch, int head, int row, int rows,
                                int columns, SmemTensor const& smem, int thread) {
    auto thread_copy = Copy{}.get_thread_slice(thread);
    auto source = thread_copy.partition_S(smem);
    auto target =
        thread_copy.partition_D(global_tile<Element, kRows, kColumns>(view, batch, head, row));
    auto coords = thread_copy.partition_D(make_identity_tensor(Shape<Int<kRows>, Int<kColumns>>{}));
    CUTE_UNROLL
    for (int m = 0; m < size<1>(target); ++m) {
      CUTE_UNROLL
      for (int k = 0; k < size<2>(target); ++k) {
        if (get<0>(coords(0, m, 0)) < rows && get<1>(coords(0, m, k)) < columns) {
          cute::copy(Copy{}, source(_, m, k), target(_, m, k));
        }
      }
    }
  }
};

CUTE_DEVICE void commit_loads() { cp_async_fence(); }

// All loads of this CTA have landed and every thread may read them.
CUTE_DEVICE void wait_for_loads() {
  cp_async_wait<0>();
  __syncthreads();
}

}  // namespace flash_attn_cuda::sm80
