// The end of a tile whose keys several CTAs share: each leaves its results in global memory, and
// the last one combines them.
//
// A word of the workspace says which one is last: in it the CTAs of a tile count themselves. Nobody
// has zeroed it, which would take a launch. Instead the count is valid only beside the mark of the
// call, and each CTA writes the mark, with a count of 0, if it does not find it. The last one
// leaves a zero.
#pragma once

#include <cmath>
#include <cstdint>

#include "sm80/decode_output.h"

namespace flash_attn_cuda::sm80 {

// The upper bits of an arrival word: a NaN in every type, which data hardly are, and the number of
// the call.
inline constexpr int arrival_bits = 24;
inline constexpr std::uint64_t arrival_count = (std::uint64_t{1} << arrival_bits) - 1;

inline std::uint64_t mark_of_call(std::uint32_t number) {
  return std::uint64_t{0x7ff5} << 48 | (number & arrival_count) << arrival_bits;
}

// The arrival word of a tile, for one thread of each of its CTAs.
class Arrivals {
 public:
  template <class Traits>
  CUTE_DEVICE static Arrivals at(DecodeArguments const& args, TileWork const& work) {
    const PackedRow first_row = packed_row<Traits>(args, work, 0);
    return Arrivals{args.arrivals + partial_index(args, work.sequence, first_row, 0)};
  }

  // look() starts the load of the word, mark() uses it: work in between hides the latency.
  CUTE_DEVICE void look() {
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(found_) : "l"(word_) : "memory");
  }
  CUTE_DEVICE void mark(unsigned long long mark) const {
    // If this fails, another CTA has marked the word since.
    if ((found_ & ~arrival_count) != mark) atomicCAS(word_, found_, mark);
  }

  // Whether this CTA is the last of so many. A barrier has to come before, behind what its threads
  // have written, and another one after, before they read what other CTAs have.
  CUTE_DEVICE bool arrive(int arrivals) const {
    unsigned long long before;
    asm volatile("atom.acq_rel.gpu.global.add.u64 %0, [%1], 1;"
                 : "=l"(before)
                 : "l"(word_)
                 : "memory");
    const bool is_last = int(before & arrival_count) >= arrivals - 1;
    if (is_last) *word_ = 0;
    return is_last;
  }

 private:
  CUTE_DEVICE explicit Arrivals(unsigned long long* word) : word_(word) {}

  unsigned long long* word_;
  unsigned long long found_ = 0;
};

// By all threads, when they have written what is theirs of a split.
template <class Traits>
CUTE_DEVICE bool is_last_split(Arrivals const& arrivals, int splits,
                               typename Traits::SharedStorage& smem) {
  __syncthreads();
  if (threadIdx.x == 0) smem.is_last = arrivals.arrive(splits);
  __syncthreads();
  return smem.is_last;
}

// out = sum_s exp(lse_s - lse) out_s and lse = log sum_s exp(lse_s). As in an online softmax the
// reference follows the largest lse. Empty splits behind the last one with keys change no bit.
template <class Traits>
CUTE_DEVICE void combine_splits(DecodeArguments const& args, DecodeItem const& item) {
  using Element = typename Traits::Element;
  using Chunk = OutputChunk<4>;
  constexpr int chunks_per_row = Traits::head_dim / Chunk::columns;
  // As registers allow.
  constexpr int in_flight = Traits::head_dim <= 128 ? 16 : Traits::head_dim == 192 ? 4 : 8;
  Sequence const& sequence = item.work.sequence;
  const int head_dim_v = args.params.shape.head_dim_v;
  for (int i = threadIdx.x; i < Traits::block_m * chunks_per_row; i += Traits::threads) {
    const int column = i % chunks_per_row * Chunk::columns;
    const PackedRow row = packed_row<Traits>(args, item.work, i / chunks_per_row);
    if (row.query >= sequence.rows_q || column >= head_dim_v) continue;
    const int count = head_dim_v - column;
    const std::int64_t own = partial_index(args, sequence, row, 0);
    const std::int64_t stride = args.partial_rows * args.params.shape.num_heads_q;  // of a split

    float reference = 0.0f;
    float sum = 0.0f;
    float largest = -INFINITY;
    Chunk out{};
    for (int first = 0; first < item.splits; first += in_flight) {
      float lse[in_flight];
      Chunk parts[in_flight];
      CUTE_UNROLL
      for (int j = 0; j < in_flight; ++j) {
        lse[j] = -INFINITY;
        if (first + j >= item.splits) continue;
        const std::int64_t index = own + (first + j) * stride;
        lse[j] = __ldcg(args.lse_partial + index);
        parts[j].load_partial(args.out_partial + index * head_dim_v + column, count,
                              head_dim_v % 4 == 0);
      }
      CUTE_UNROLL
      for (int j = 0; j < in_flight; ++j) largest = fmaxf(largest, lse[j]);
      const float before = reference;
      reference = isinf(largest) ? 0.0f : largest;
      const float factor = sum == 0.0f ? 0.0f : expf(before - reference);
      sum *= factor;
      out.scale(factor);
      CUTE_UNROLL
      for (int j = 0; j < in_flight; ++j) {
        if (lse[j] == -INFINITY) continue;  // what is there may be anything
        const float weight = expf(lse[j] - reference);
        sum += weight;
        out.add(parts[j], weight);
      }
    }
    out.scale(sum == 0.0f ? 0.0f : 1.0f / sum);
    if (column == 0) *lse_pointer(args, sequence, row) = reference + logf(sum);
    out.store(row_pointer<Element>(args.params.out, sequence.batch_q, row.head,
                                   sequence.row_q + row.query) +
                  column,
              count, args.has_vector_rows);
  }
}

}  // namespace flash_attn_cuda::sm80
