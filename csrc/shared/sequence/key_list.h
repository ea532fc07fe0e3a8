// A query's list of keys, as it lies in device memory (ForwardParams::key_lists). The only place
// that says what an entry is. Pure index logic.
#pragma once

#include "shared/mask/block_range.h"
#include "shared/sequence/sequence.h"

namespace flash_attn_cuda {

struct KeyList {
  const int* entries = nullptr;  // null: there are no lists
  int count = 0;                 // of keys that it may name, 0 for a query that does not attend
  Reach visible{};               // keys that lengths, causal and window leave
  int seqlen_k = 0;
  int sequence = 0;

  static constexpr int none = -1;

  // That of a query of the sequence and a key head. params.window is a normalised one.
  FAC_HOST_DEVICE static KeyList of(const ForwardParams& params, const Sequence& sequence,
                                    int query, int head) {
    if (params.keys_per_list == 0) return {};
    const TensorView& view = params.key_lists;
    const Band band = band_from_queries(params.window, sequence.shift);
    const std::int64_t row = std::int64_t{sequence.row_q} + query;
    return {.entries = static_cast<const int*>(view.data) + sequence.batch_q * view.batch_stride +
                       row * view.row_stride + head * view.head_stride,
            .count = query < sequence.seqlen_q ? params.keys_per_list : 0,
            .visible = reach_of(band, query, query, sequence.seqlen_k),
            .seqlen_k = sequence.seqlen_k,
            .sequence = sequence.index};
  }

  // The key that an entry is, or none, where blocks are of one key.
  FAC_HOST_DEVICE int key_of(int entry, DeviceErrors* errors) const {
    if (entry >= seqlen_k) report(errors, DeviceCheck::key_lists, sequence, entry, seqlen_k - 1);
    return visible.holds(entry) ? entry : none;
  }
};

// Entries as blocks of keys. Place p of a list is key p % size of the block that entry p / size is.
struct ListedBlocks {
  int log2_size = 0;

  FAC_HOST_DEVICE static ListedBlocks of(int size) {
    ListedBlocks blocks;
    while ((2 << blocks.log2_size) <= size) ++blocks.log2_size;
    return blocks;
  }

  FAC_HOST_DEVICE int entry_of(int place) const { return place >> log2_size; }

  // The key at a place of a list whose entry there is `entry`, seen or not, or none.
  FAC_HOST_DEVICE int key_at(const KeyList& list, int entry, int place) const {
    const bool is_block = entry >= 0 && entry <= last_block(list);
    return is_block ? (entry << log2_size) + (place & ((1 << log2_size) - 1)) : KeyList::none;
  }

  // Notes an entry for which it is none. sequence: the list's, which a kernel may have no register
  // for.
  FAC_HOST_DEVICE void tell(const KeyList& list, int entry, int sequence,
                            DeviceErrors* errors) const {
    if (entry != KeyList::none)
      report(errors, DeviceCheck::key_lists, sequence, entry, last_block(list));
  }

 private:
  FAC_HOST_DEVICE int last_block(const KeyList& list) const {
    return (list.seqlen_k - 1) >> log2_size;
  }
};

// Which of `count` keys from `first` on, at most 32, a list's query sees: bits.
FAC_HOST_DEVICE unsigned seen_keys(const Reach& visible, int first, int count) {
  const auto below = [&](int end) {
    const int keys = detail::clamp(end - first, 0, count);
    return keys == 32 ? ~0u : (1u << keys) - 1;
  };
  return below(visible.end) & ~below(visible.begin);
}

}  // namespace flash_attn_cuda
