// How many keys a query of a call sees, about: what a row of the kernel table for long calls is
// chosen by.
#pragma once

#include <algorithm>
#include <cstdint>

#include "flash_attn/params.h"
#include "shared/mask/block_range.h"

namespace flash_attn_cuda {

// Of some queries, or, of packed sequences, of one of average length.
inline int average_keys(const AttentionShape& shape, const SequenceParams& sequences,
                        const Window& window) {
  int seqlen_q = shape.seqlen_q;
  int seqlen_k = shape.seqlen_k;
  if (sequences.cu_seqlens_q != nullptr) seqlen_q /= std::max(1, shape.batch_size);
  if (sequences.cu_seqlens_k != nullptr) seqlen_k /= std::max(1, shape.batch_size);
  constexpr int samples = 16;
  const Band band = band_from_queries(window, seqlen_k - seqlen_q);
  std::int64_t keys = 0;
  for (int sample = 0; sample < samples; ++sample) {
    const auto query = static_cast<int>((2 * sample + 1) * std::int64_t{seqlen_q} / (2 * samples));
    const Reach reach = reach_of(band, query, query, seqlen_k);
    if (!reach.empty()) keys += reach.end - reach.begin;
  }
  return static_cast<int>(keys / samples);
}

}  // namespace flash_attn_cuda
