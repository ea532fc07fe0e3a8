// Keys and values of e4m3 in a forward kernel: their bytes come by cp.async, as tiles of 16 bits
// do, and every thread makes what it loaded itself into 16 bits of such a tile. These hold the
// numbers of e4m3 exactly, whatever the scales are, which multiply scores, P and O in fp32.
#pragma once

#include <cute/arch/copy_sm80.hpp>

#include "shared/e4m3_units.h"
#include "shared/sequence/paged_kv.h"
#include "sm80/isa/copy.h"

namespace flash_attn_cuda::sm80 {

template <class Element, int kRows, int kColumns, int kThreads>
struct E4m3Loader {
  static constexpr int chunk = 16;  // bytes
  static constexpr int chunks_per_row = kColumns / chunk;
  static constexpr int chunks = kRows * chunks_per_row;
  static constexpr int rows_per_pass = kThreads / chunks_per_row;
  static_assert(kThreads % chunks_per_row == 0, "a thread has the same columns of its rows");

  struct Bytes {
    alignas(128) uint4 chunks[E4m3Loader::chunks];
    alignas(16) float scales[kRows];  // of tokens
  };

  // Rows whose place_at(row) is nowhere, and columns from `columns` on, become zeros, unread.
  template <class PlaceAt>
  CUTE_DEVICE static void load(TensorView const& view, ScaleView const& scales, int head,
                               int columns, Bytes& bytes, int thread, PlaceAt place_at) {
    const int column = thread % chunks_per_row * chunk;
    CUTE_NO_UNROLL
    for (int row = thread / chunks_per_row; row < kRows; row += rows_per_pass) {
      const int index = row * chunks_per_row + column / chunk;
      const KeyPlace place = place_at(row);
      const bool exists = place.exists() && column < columns;
      const auto* data = static_cast<const std::uint8_t*>(view.data);
      SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<uint4>::copy(
          *reinterpret_cast<const uint4*>(exists ? data + place.offset(view, head) + column : data),
          bytes.chunks[index], exists);
      if (scales.per_token && column == 0) {
        const std::int64_t offset = place.batch * scales.batch_stride +
                                    place.row * scales.row_stride + head * scales.head_stride;
        SM80_CP_ASYNC_CACHEALWAYS_ZFILL<float>::copy(scales.data[place.exists() ? offset : 0],
                                                     bytes.scales[row], place.exists());
      }
    }
  }

  // Once the bytes are there: the tile, and the scales of its tokens, where they have their own.
  template <class SmemTensor>
  CUTE_DEVICE static void convert(Bytes const& bytes, bool has_scales, SmemTensor& tile,
                                  float (&scales)[kRows], int thread) {
    const int column = thread % chunks_per_row * chunk;
    CUTE_NO_UNROLL
    for (int row = thread / chunks_per_row; row < kRows; row += rows_per_pass) {
      const int index = row * chunks_per_row + column / chunk;
      if (has_scales && column == 0) scales[row] = bytes.scales[row];
      const uint4 own = bytes.chunks[index];
      const std::uint32_t words[] = {own.x, own.y, own.z, own.w};
      CUTE_UNROLL
      for (int half = 0; half < 2; ++half) {
        const auto pair = [&](int i) {
          const std::uint32_t word = words[2 * half + i / 2];
          return pair_of_e4m3<Element>(static_cast<std::uint16_t>(word >> i % 2 * 16));
        };
        *reinterpret_cast<uint4*>(&tile(row, column + 8 * half)) = {pair(0), pair(1), pair(2),
                                                                    pair(3)};
      }
    }
  }
};

}  // namespace flash_attn_cuda::sm80
