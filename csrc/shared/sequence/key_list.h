// A query's list of keys, as it lies in device memory (ForwardParams::key_lists). The only place
// that says what an entry is. Pure index logic.
#pragma once

#include "shared/mask/block_range.h"
#include "shared/sequence/sequence.h"

namespace flash_attn_cuda {

struct KeyList {
  const int* entries = nullptr;  // null: there are no lists
  int count = 0;                 // 0 for a query that does not attend
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

  // The key that an entry is, or none.
  FAC_HOST_DEVICE int key_of(int entry, DeviceErrors* errors) const {
    if (entry >= seqlen_k) report(errors, DeviceCheck::key_lists, sequence, entry, seqlen_k - 1);
    return visible.holds(entry) ? entry : none;
  }
};

}  // namespace flash_attn_cuda
