// The end of a tile whose keys several CTAs share: each leaves its results in global memory and
// counts itself, and the last one combines them.
#pragma once

#include <cmath>

#include "shared/schedule/marked_counter.h"
#include "sm80/decode/output.h"

namespace flash_attn_cuda::sm80 {

// Counts the splits of a tile that are there.
template <class Traits>
CUTE_DEVICE MarkedCounter arrivals_of(DecodeArguments const& args, TileWork const& work) {
  const PackedRow first_row = packed_row<Traits>(args, work, 0);
  return MarkedCounter(args.arrivals + row_index(args, work.sequence, first_row));
}

// All threads call it, when they have written what is theirs of a split.
template <class Traits>
CUTE_DEVICE bool is_last_split(MarkedCounter const& arrivals, int splits,
                               typename Traits::SharedStorage& smem) {
  __syncthreads();
  if (threadIdx.x == 0) {
    smem.is_last = arrivals.arrive() >= splits - 1;
    if (smem.is_last) arrivals.reset();
  }
  __syncthreads();
  return smem.is_last;
}

// out = sum_s exp(lse_s - lse) out_s and lse = log sum_s exp(lse_s). As in an online softmax the
// reference follows the largest lse. Empty splits after the last one with keys change no bit.
template <class Traits>
CUTE_DEVICE void combine_splits(DecodeArguments const& args, DecodeItem const& item) {
  using Element = typename Traits::Element;
  constexpr int chunks_per_row = Traits::head_dim_v / OutputChunk::columns;
  constexpr int in_flight = 16;
  Sequence const& sequence = item.work.sequence;
  const int head_dim_v = args.params.shape.head_dim_v;
#pragma unroll 1
  for (int i = threadIdx.x; i < Traits::block_m * chunks_per_row; i += Traits::threads) {
    const int column = i % chunks_per_row * OutputChunk::columns;
    const PackedRow row = packed_row<Traits>(args, item.work, i / chunks_per_row);
    if (row.query >= sequence.rows_q) break;  // as those after it
    if (column >= head_dim_v) continue;

    auto next = PartialRow<Traits>::at(args, sequence, row, 0);
    next.out += column;
    float reference = 0.0f;  // in powers of two, as lse_partial
    float sum = 0.0f;
    float largest = -INFINITY;
    OutputChunk out{};
#pragma unroll 1
    for (int left = item.splits; left > 0; left -= in_flight) {
      float lse[in_flight];
      float4 parts[in_flight];
      CUTE_UNROLL
      for (int j = 0; j < in_flight; ++j) {
        lse[j] = j < left ? __ldcg(next.lse + j) : -INFINITY;
        // A split without keys may have left anything there.
        const auto* part = reinterpret_cast<const float4*>(next.out + j * Traits::head_dim_v);
        parts[j] = j < left ? __ldcg(part) : float4{};
      }
      next.lse += in_flight;
      next.out += in_flight * Traits::head_dim_v;
      CUTE_UNROLL
      for (int j = 0; j < in_flight; ++j) largest = fmaxf(largest, lse[j]);
      const float before = reference;
      reference = isinf(largest) ? 0.0f : largest;
      const float factor = sum == 0.0f ? 0.0f : fast_exp2(before - reference);
      sum *= factor;
      out.scale(factor);
      CUTE_UNROLL
      for (int j = 0; j < in_flight; ++j) {
        const float weight = fast_exp2(lse[j] - reference);
        sum += weight;
        out.add(parts[j], weight);
      }
    }
    const Denominator total{.sum = sum, .offset = reference};
    out.scale(total.inverse());
    if (column == 0) *lse_pointer(args, sequence, row) = total.lse();
    store_output<Traits>(args, sequence, row, column, out);
  }
}

}  // namespace flash_attn_cuda::sm80
