// Where a sequence's keys lie: in consecutive rows of one batch entry, or in pages of a pool that a
// block table lists. The only place that reads block tables. Pure index logic.
#pragma once

#include <cstdint>

#include "shared/sequence/sequence.h"

#if defined(__CUDACC__)
#include <cute/tensor.hpp>
#endif

namespace flash_attn_cuda {

// Division of non-negative ints by a divisor that many of them share: a multiplication and a
// correction.
struct Divider {
  std::uint32_t divisor = 1;
  std::uint32_t multiplier = 0;  // ceil(2^32 / divisor); 0 for 1, where it does not fit

  FAC_HOST_DEVICE static constexpr Divider by(int divisor) {
    const auto d = static_cast<std::uint32_t>(divisor);
    return {.divisor = d, .multiplier = d <= 1 ? 0 : 0xffff'ffffu / d + 1};
  }

  FAC_HOST_DEVICE constexpr int quotient(int dividend) const {
    if (multiplier == 0) return dividend;
    const auto n = static_cast<std::uint32_t>(dividend);
    // Below 2^31 the rounding of the multiplier adds less than 1 / 2.
    const auto q = static_cast<std::uint32_t>((std::uint64_t{n} * multiplier) >> 32);
    return static_cast<int>(q * divisor > n ? q - 1 : q);
  }

  FAC_HOST_DEVICE constexpr int remainder(int dividend) const {
    return dividend - quotient(dividend) * static_cast<int>(divisor);
  }
};

// A row of k and v: the batch entry, which is the page of a paged cache, and the row in it.
struct KeyPlace {
  int batch = none;
  int row = 0;

  static constexpr int none = -1;  // nothing is there, and nothing may be read

  FAC_HOST_DEVICE constexpr bool exists() const { return batch != none; }

  // The offset in elements from the tensor's first; the same for every column.
  FAC_HOST_DEVICE constexpr std::int64_t offset(const TensorView& view, int head) const {
    return batch * view.batch_stride + row * view.row_stride + head * view.head_stride;
  }
};

// The keys of one sequence.
struct KeyRows {
  const int* pages = nullptr;  // the sequence's row of the block table; null: not paged
  Divider page_size;
  int max_pages = 0;
  int num_pages = 0;
  int batch = 0;
  int first_row = 0;

  FAC_HOST_DEVICE static KeyRows of(const PagedKvParams& paged, const Sequence& sequence) {
    return of(paged, sequence, Divider::by(paged.page_size));
  }
  FAC_HOST_DEVICE static KeyRows of(const PagedKvParams& paged, const Sequence& sequence,
                                    const Divider& page_size) {
    KeyRows rows;
    rows.batch = sequence.batch_k;
    rows.first_row = sequence.row_k;
    if (paged.block_table != nullptr) {
      rows.pages = paged.block_table + sequence.batch_k * paged.table_stride;
      rows.page_size = page_size;
      rows.max_pages = paged.max_pages;
      rows.num_pages = paged.num_pages;
    }
    return rows;
  }

  FAC_HOST_DEVICE bool is_paged() const { return pages != nullptr; }

  // The place of key `key`, from 0 to seqlen_k - 1, as the block table says it. Apart from the
  // check, so that a loader can ask for it long before it needs it.
  FAC_HOST_DEVICE KeyPlace look_up(int key) const {
    const int row = first_row + key;
    if (!is_paged()) return {batch, row};
    const int page = page_size.quotient(row);
    if (page >= max_pages) return {};
    return {pages[page], row - page * static_cast<int>(page_size.divisor)};
  }

  // `place`, or nowhere if it is no page of the pool.
  FAC_HOST_DEVICE KeyPlace checked(KeyPlace place, DeviceErrors* errors) const {
    if (!is_paged() || (place.batch >= 0 && place.batch < num_pages)) return place;
    report(errors, DeviceCheck::block_table, batch, place.batch, num_pages - 1);
    return {};
  }

  FAC_HOST_DEVICE KeyPlace find(int key, DeviceErrors* errors) const {
    return checked(look_up(key), errors);
  }

  FAC_HOST_DEVICE bool has(int key) const { return find(key, nullptr).exists(); }

  // The first element of key `key` of one head, or null where no such key is.
  template <class Element>
  FAC_HOST_DEVICE Element* row(const TensorView& view, int head, int key,
                               DeviceErrors* errors) const {
    const KeyPlace place = find(key, errors);
    if (!place.exists()) return nullptr;
    return static_cast<Element*>(view.data) + place.offset(view, head);
  }
};

#if defined(__CUDACC__)
// Hides those of 32 keys from `first` on of which `present` has no bit. coords as in
// shared/mask/mask.h.
template <class Scores, class Coords>
__device__ __forceinline__ void hide_absent_keys(unsigned present, Scores& scores,
                                                 Coords const& coords, int first, float hidden) {
  using namespace cute;
  CUTE_UNROLL
  for (int col = 0; col < size<1>(scores); ++col) {
    const unsigned bit = get<1>(coords(0, col)) - first;
    if (bit >= 32 || (present >> bit & 1) != 0) continue;
    CUTE_UNROLL
    for (int row = 0; row < size<0>(scores); ++row) scores(row, col) = hidden;
  }
}

// Hides keys that no page holds, among the kKeys from key_begin on: for tiles whose loader met one,
// which a right block table never lets happen. Called by whole warps.
template <int kKeys, class Scores, class Coords>
__device__ __forceinline__ void hide_missing_keys(const KeyRows& rows, Scores& scores,
                                                  Coords const& coords, int key_begin, int seqlen_k,
                                                  float hidden) {
  const int lane = threadIdx.x % 32;
  CUTE_UNROLL
  for (int first = 0; first < kKeys; first += 32) {
    const int key = key_begin + first + lane;
    const unsigned present = __ballot_sync(0xffffffffu, key < seqlen_k && rows.has(key));
    hide_absent_keys(present, scores, coords, first, hidden);
  }
}
#endif

// Tiles of keys in boxes of rows, each in one page, as TMA loads them.
struct PageBox {
  KeyPlace place;  // of its first row; nowhere if the block table has no page for it
  int rows = 0;    // that are there, at least one
};

// Box `index` of the tile whose first key is key_begin, a multiple of box_rows, which divides the
// size of a page; the sequence has no left padding then. Without pages a tile is one box. After
// the sequence's last key that one stands for the others, because a box needs a row
// (sm90/isa/copy.h). seqlen_k > 0.
FAC_HOST_DEVICE PageBox look_up_box(KeyRows const& keys, int index, int box_rows, int key_begin,
                                    int seqlen_k) {
  const int key = key_begin + index * box_rows;
  if (key >= seqlen_k) return {.place = keys.look_up(seqlen_k - 1), .rows = 1};
  const int keys_left = seqlen_k - key;
  return {.place = keys.look_up(key), .rows = keys_left < box_rows ? keys_left : box_rows};
}

// look_up_box() where the block table has been checked.
FAC_HOST_DEVICE PageBox find_box(KeyRows const& keys, int index, int box_rows, int key_begin,
                                 int seqlen_k, DeviceErrors* errors) {
  PageBox box = look_up_box(keys, index, box_rows, key_begin, seqlen_k);
  box.place = keys.checked(box.place, errors);
  return box;
}

}  // namespace flash_attn_cuda
