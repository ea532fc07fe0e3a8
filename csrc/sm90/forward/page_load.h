// Loads of K and V from a cache, by a warp: each lane has a box of rows that lie in one page. Of a
// cache without pages the first lane has all of the tile.
#pragma once

#include <cutlass/arch/barrier.h>

#include "shared/sequence/paged_kv.h"
#include "sm90/isa/barriers.h"
#include "sm90/isa/copy.h"

namespace flash_attn_cuda::sm90 {

// What this lane loads of a tile of keys, and of their values.
struct PagedSpan {
  PageBox box;  // without rows where the tile has fewer boxes than a warp lanes
  int head;
  bool misses_keys;  // the same in all lanes: one's box is nowhere
};

// The span as the block table says it, for checked_span(), which a whole warp calls.
template <int kRows>
CUTE_DEVICE PagedSpan look_up_span(KeyRows const& keys, int head, int box_rows, int key_begin,
                                   int seqlen_k) {
  const int lane = threadIdx.x % 32;
  PagedSpan span{.box = {}, .head = head, .misses_keys = false};
  if (lane * box_rows < kRows) span.box = look_up_box(keys, lane, box_rows, key_begin, seqlen_k);
  return span;
}
CUTE_DEVICE PagedSpan checked_span(KeyRows const& keys, PagedSpan span, DeviceErrors* errors) {
  if (span.box.rows > 0) span.box.place = keys.checked(span.box.place, errors);
  span.misses_keys = __any_sync(0xffffffffu, span.box.rows > 0 && !span.box.place.exists());
  return span;
}

// A whole warp calls it.
template <int kRows>
CUTE_DEVICE PagedSpan find_span(KeyRows const& keys, int head, int box_rows, int key_begin,
                                int seqlen_k, DeviceErrors* errors) {
  return checked_span(keys, look_up_span<kRows>(keys, head, box_rows, key_begin, seqlen_k), errors);
}

// What of a tile lies nowhere is not read but becomes zeros, because a NaN that an earlier tile has
// left there would come out of P V, whatever P. box: this lane's.
template <int kRows, int kColumns, class Element>
CUTE_DEVICE void clear_missing_box(Element* box, PagedSpan const& span, int box_rows) {
  if (span.box.rows > 0 && !span.box.place.exists()) {
    constexpr int columns = box_columns<kColumns, Element>;
    constexpr int vectors = columns * int(sizeof(Element)) / int(sizeof(uint4));
    CUTE_NO_UNROLL
    for (int column = 0; column < kColumns; column += columns) {
      auto* zeros = reinterpret_cast<uint4*>(box + column * kRows);
      CUTE_NO_UNROLL
      for (int i = 0; i < box_rows * vectors; ++i) zeros[i] = {0, 0, 0, 0};
    }
    cutlass::arch::fence_view_async_shared();
  }
  __syncwarp();
}

// A whole warp calls it, once the tile may be written: it starts the loads that complete `full`.
template <int kRows, int kColumns, class Element>
CUTE_DEVICE void load_pages(CUtensorMap const& map, std::uint64_t* full, Element* tile,
                            PagedSpan const& span, int box_rows, int last_box) {
  constexpr int row_bytes = kColumns * int(sizeof(Element));
  const int lane = threadIdx.x % 32;
  auto const& [place, rows] = span.box;
  const bool is_loaded = rows > 0 && place.exists();
  const int boxes = __popc(__ballot_sync(0xffffffffu, is_loaded));
  tile += lane * box_rows * box_columns<kColumns, Element>;
  clear_missing_box<kRows, kColumns>(tile, span, box_rows);
  if (lane == 0) FullBarrier::arrive_and_expect_tx(full, boxes * box_rows * row_bytes);
  __syncwarp();
  const RowSpan own{place.batch, span.head, place.row, rows};
  if (is_loaded) load_tile<kRows, kColumns>(map, full, tile, own, last_box, box_rows);
}

}  // namespace flash_attn_cuda::sm90
