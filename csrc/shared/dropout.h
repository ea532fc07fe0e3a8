// Which probabilities dropout drops: a function of (seed, offset, sequence, head, query, key)
// alone, so that every tile size, pass, GPU and the CPU agree.
//
// One Philox block decides about eight pairs: queries i and i + 8 times keys j, j + 1, j + 8 and
// j + 9, which is what one thread holds of two neighbouring m16n8 accumulators. Each pair has 16
// bits and is dropped if they are below the threshold, p_dropout * 2^16.
#pragma once

#include <cstdint>

#include "flash_attn/params.h"
#include "shared/host_device.h"
#include "shared/philox.h"

#if defined(__CUDACC__)
#include <cute/tensor.hpp>
#endif

namespace flash_attn_cuda {

// What a kept probability is divided by: exact, as the threshold is what is really dropped.
FAC_HOST_DEVICE constexpr float keep_probability(std::uint32_t threshold) {
  return 1.0f - static_cast<float>(threshold) / 65536.0f;
}

struct RngState {
  std::uint64_t seed;
  std::uint64_t offset;
};

FAC_HOST_DEVICE RngState read_rng(const RngSource& source) {
  if (source.seed_pointer == nullptr) return {source.seed, source.offset};
  return {static_cast<std::uint64_t>(*source.seed_pointer),
          static_cast<std::uint64_t>(*source.offset_pointer) + source.offset_in_graph};
}

// For the backward: what this call's random numbers were made of. Before anything can end a CTA.
FAC_HOST_DEVICE void publish_rng(const DropoutParams& params, int block_id, int thread) {
  if (params.rng_state == nullptr || block_id != 0 || thread != 0) return;
  const RngState rng = read_rng(params.rng);
  params.rng_state[0] = static_cast<std::int64_t>(rng.seed);
  params.rng_state[1] = static_cast<std::int64_t>(rng.offset);
}

// The mask of one sequence and query head.
struct DropoutMask {
  PhiloxKey key;
  std::uint32_t offset;
  std::uint32_t stream;
  std::uint32_t threshold;

  FAC_HOST_DEVICE static DropoutMask of(const RngState& rng, std::uint32_t threshold, int sequence,
                                        int num_heads, int head) {
    return {.key = {static_cast<std::uint32_t>(rng.seed),
                    static_cast<std::uint32_t>(rng.seed >> 32) ^
                        static_cast<std::uint32_t>(rng.offset >> 32)},
            .offset = static_cast<std::uint32_t>(rng.offset),
            .stream = static_cast<std::uint32_t>(sequence) * static_cast<std::uint32_t>(num_heads) +
                      static_cast<std::uint32_t>(head),
            .threshold = threshold};
  }

  // The eight decisions that (query, key) is one of.
  FAC_HOST_DEVICE constexpr PhiloxBlock block(int query, int key_index) const {
    return philox({{key_word(key_index), query_word(query), stream, offset}}, key);
  }

  // Of the counter: which keys and which queries a block is for.
  FAC_HOST_DEVICE static constexpr std::uint32_t key_word(int key_index) {
    const auto j = static_cast<std::uint32_t>(key_index);
    return j / 16 * 4 + j % 8 / 2;
  }
  FAC_HOST_DEVICE static constexpr std::uint32_t query_word(int query) {
    const auto i = static_cast<std::uint32_t>(query);
    return i / 16 * 8 + i % 8;
  }

  // Decision number `lane` of a block: (query / 8 % 2) * 4 + (key / 8 % 2) * 2 + key % 2.
  FAC_HOST_DEVICE constexpr bool keeps(const PhiloxBlock& block, int lane) const {
    return passes(block.words[lane / 2], lane % 2);
  }

  // By the lower or the upper 16 bits.
  FAC_HOST_DEVICE constexpr bool passes(std::uint32_t word, int half) const {
    // The upper half compares as it stands: its low bits never decide.
    return half == 1 ? word >= threshold << 16 : (word << 16) >= threshold << 16;
  }

  FAC_HOST_DEVICE constexpr bool keeps(int query, int key_index) const {
    return keeps(block(query, key_index),
                 query / 8 % 2 * 4 + key_index / 8 % 2 * 2 + key_index % 2);
  }
};

#if defined(__CUDACC__)
namespace detail {

// For a thread's share of S^T, keys (j, j + 8) and pairs (i, i + 1) of every eight queries, but
// seen as (queries, keys). Its decisions lie in the blocks of queries i and i + 1, half in each,
// and the other halves are those of the lane with the neighbouring key: each of the two draws one
// block.
template <class Scores, class Coords, class Visit>
__device__ __forceinline__ void for_each_decision_transposed(const DropoutMask& mask,
                                                             Scores& scores, Coords const& coords,
                                                             int query_begin, int key_begin,
                                                             Visit visit) {
  using namespace cute;
  constexpr int neighbour = 4;  // lanes away is the next key
  const unsigned own = threadIdx.x / neighbour % 2;
  const unsigned low_halves = 0x5410;
  const unsigned high_halves = 0x7632;
  const unsigned kept_halves = own == 1 ? high_halves : low_halves;
  const unsigned sent_halves = own == 1 ? low_halves : high_halves;
  const int first_query = query_begin + static_cast<int>(own) + get<0>(coords(0, 0));
  const int key = key_begin + get<1>(coords(0, 0));
  CUTE_UNROLL
  for (int row = 0; row < size<0>(scores); row += 4) {
    const int distance = get<0>(coords(row, 0)) - get<0>(coords(0, 0));
    const PhiloxBlock block = mask.block(first_query + distance, key);
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) {  // queries from the first eight of sixteen, and from the others
      const std::uint32_t first = block.words[2 * i];
      const std::uint32_t second = block.words[2 * i + 1];
      const std::uint32_t kept = __byte_perm(first, second, kept_halves);
      const std::uint32_t received =
          __shfl_xor_sync(0xffffffffu, __byte_perm(first, second, sent_halves), neighbour);
      CUTE_UNROLL
      for (int query = 0; query < 2; ++query) {
        const std::uint32_t word = (own == 1) == (query == 1) ? kept : received;
        CUTE_UNROLL
        for (int column = 0; column < 2; ++column)
          visit(scores(row + 2 * i + query, column), mask.passes(word, column));
      }
    }
  }
}

}  // namespace detail

// Runs visit(element, is_kept) over a thread's (queries, keys) of a score tile whose first pair is
// (query_begin, key_begin), multiples of 16, in an accumulator of S or of S^T; coords as in mask.h.
template <class Scores, class Coords, class Visit>
__device__ __forceinline__ void for_each_decision(const DropoutMask& mask, Scores& scores,
                                                  Coords const& coords, int query_begin,
                                                  int key_begin, Visit visit) {
  using namespace cute;
  constexpr int rows = decltype(size<0>(scores))::value;
  constexpr int columns = decltype(size<1>(scores))::value;
  if constexpr (columns == 2) {
    static_assert(rows % 4 == 0, "whole blocks of decisions");
    detail::for_each_decision_transposed(mask, scores, coords, query_begin, key_begin, visit);
  } else {
    static_assert(rows % 2 == 0 && columns % 4 == 0, "whole blocks of decisions");
    CUTE_UNROLL
    for (int row = 0; row < rows; row += 2) {
      CUTE_UNROLL
      for (int column = 0; column < columns; column += 4) {
        const PhiloxBlock block = mask.block(query_begin + get<0>(coords(row, column)),
                                             key_begin + get<1>(coords(row, column)));
        CUTE_UNROLL
        for (int lane = 0; lane < 8; ++lane) {
          visit(scores(row + lane / 4, column + lane % 4), mask.keeps(block, lane));
        }
      }
    }
  }
}
#endif

}  // namespace flash_attn_cuda
