// Which probabilities dropout drops: a function of (seed, offset, sequence, head, query, key)
// alone, so that every tile size, pass, GPU and the CPU agree. Queries and keys of a sequence count
// from Sequence::first_q and first_k, which are 0 but in shards of a longer one.
//
// One Philox block decides about 16 pairs: queries i, i + 1, i + 8 and i + 9 times keys j, j + 1,
// j + 8 and j + 9, for even i and j. Two threads hold them in a 16 x 16 tile of S or of S^T, a lane
// and the fourth from it, so each draws one block of two and they exchange halves.
//
// A pair is dropped if a number of 16 bits is below the threshold, p_dropout * 2^16. Its upper
// eight bits are the pair's own, the lower eight are shared by the block: so every pair is dropped
// with the probability asked for, and half the random bits do. What it costs is a correlation
// between the pairs of a block, of at most 1 / 256 and at p = 0.1 of 4e-5 (docs/numerics.md).
#pragma once

#include <cstdint>

#include "flash_attn/params.h"
#include "shared/dropout/philox.h"
#include "shared/host_device.h"

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

// The random bits of 16 pairs.
struct DropoutBlock {
  PhiloxBlock own;       // bit e of the lower half of word n: bit n of pair e; of the upper: 4 + n
  std::uint32_t shared;  // top eight bits: the lower eight of every pair
};

// The first half of the first word, that of the second above it; and the second halves.
FAC_HOST_DEVICE std::uint32_t join_low_halves(std::uint32_t first, std::uint32_t second) {
#if defined(__CUDA_ARCH__)
  return __byte_perm(first, second, 0x5410);
#else
  return (first & 0xffff) | second << 16;
#endif
}
FAC_HOST_DEVICE std::uint32_t join_high_halves(std::uint32_t first, std::uint32_t second) {
#if defined(__CUDA_ARCH__)
  return __byte_perm(first, second, 0x7632);
#else
  return first >> 16 | (second & 0xffff0000u);
#endif
}

// A threshold, for comparing 32 numbers at a time, of which each instruction sees one bit of all.
struct DropoutThreshold {
  std::uint32_t own[8];  // all ones where this bit of the upper eight is 0, from the lowest on
  std::uint32_t shared;  // the lower eight, at the top of the word

  FAC_HOST_DEVICE static constexpr DropoutThreshold of(std::uint32_t threshold) {
    DropoutThreshold result{.own = {}, .shared = threshold << 24};
    for (int bit = 0; bit < 8; ++bit) result.own[bit] = (threshold >> (8 + bit) & 1) - 1;
    return result;
  }

  // Bit e: whether pair e of the first block is kept; bit 16 + e: of the second. Numbers that are
  // equal from some bit down are decided by the bits below, hence from the lowest up.
  FAC_HOST_DEVICE std::uint32_t kept(const DropoutBlock& first, const DropoutBlock& second) const {
    std::uint32_t kept = join_low_halves(first.shared >= shared ? ~0u : 0u,  //
                                         second.shared >= shared ? ~0u : 0u);
#if defined(__CUDA_ARCH__)
#pragma unroll
#endif
    for (int bit = 0; bit < 8; ++bit) {
      const std::uint32_t x = first.own.words[bit % 4], y = second.own.words[bit % 4];
      const std::uint32_t bits = bit < 4 ? join_low_halves(x, y) : join_high_halves(x, y);
      kept = (bits & kept) | (own[bit] & (bits | kept));  // of 0: either, of 1: both
    }
    return kept;
  }
};

// The mask of one sequence and query head.
struct DropoutMask {
  PhiloxKey key;
  std::uint32_t offset;
  std::uint32_t stream;
  std::uint32_t threshold;

  // Rounds after which words 1 and 3 make the bits that pairs share: fewer depend on the counter
  // too little, and more are too close to the pairs' own.
  static constexpr int shared_after = 5;
  FAC_HOST_DEVICE static constexpr std::uint32_t shared_bits(const PhiloxBlock& block) {
    return block.words[1] ^ block.words[3];
  }

  // stream: the sequence's (shared/sequence/sequence.h).
  FAC_HOST_DEVICE static DropoutMask of(const RngState& rng, std::uint32_t threshold, int stream,
                                        int head) {
    return {.key = {static_cast<std::uint32_t>(rng.seed),
                    static_cast<std::uint32_t>(rng.seed >> 32) ^
                        static_cast<std::uint32_t>(rng.offset >> 32)},
            .offset = static_cast<std::uint32_t>(rng.offset),
            .stream = static_cast<std::uint32_t>(stream) + static_cast<std::uint32_t>(head),
            .threshold = threshold};
  }

  // The decisions that (query, key) is one of.
  FAC_HOST_DEVICE constexpr DropoutBlock block(int query, int key_index) const {
    const PhiloxBlock counter{{place_word(key_index), place_word(query), stream, offset}};
    const PhiloxBlock first = more_philox_rounds(counter, key, 0, shared_after);
    return {.own = more_philox_rounds(first, key, shared_after, philox_rounds - shared_after),
            .shared = shared_bits(first)};
  }

  // The word of the counter that says which queries, or which keys, a block is for.
  FAC_HOST_DEVICE static constexpr std::uint32_t place_word(int query_or_key) {
    const auto i = static_cast<std::uint32_t>(query_or_key);
    return i / 16 * 4 + i % 8 / 2;
  }

  // Which of its block's pairs (query, key) is.
  FAC_HOST_DEVICE static constexpr int pair_in_block(int query, int key_index) {
    return query % 2 * 8 + key_index % 2 * 4 + query / 8 % 2 * 2 + key_index / 8 % 2;
  }

  FAC_HOST_DEVICE bool keeps(int query, int key_index) const {
    const DropoutBlock bits = block(query, key_index);
    return DropoutThreshold::of(threshold).kept(bits, bits) >> pair_in_block(query, key_index) & 1;
  }
};

#if defined(__CUDACC__)
// What dropout decides about a thread's eight pairs of each of kTiles tiles of 16 x 16 pairs. In an
// accumulator of S the thread has queries i and i + 8 and four keys; kTransposed, of S^T, keys j
// and j + 8 and four queries. The lane that has the neighbouring query, or key, is the fourth from
// it: each draws one block of two, and has a use for half the bits of both.
template <int kTiles, bool kTransposed>
struct DropoutDecisions {
  static_assert(kTiles % 2 == 0 || kTiles == 1, "blocks are exchanged for blocks");
  std::uint32_t words[(kTiles + 3) / 4];

  // The even lane draws the first half of every four tiles, or of the last two.
  static constexpr bool is_of_last_two(int tile) { return tile / 4 * 4 + 2 == kTiles; }
  static constexpr int from_odd_lane(int tile) {
    return is_of_last_two(tile) ? tile % 2 : tile / 2 % 2;
  }
  static constexpr int upper_half(int tile) { return is_of_last_two(tile) ? 0 : tile % 2; }
  // In a block's 16 bits, those of an odd lane's pairs are this far above the others.
  static constexpr unsigned odd_pairs = kTransposed ? 4 : 8;
  static constexpr std::uint32_t even_bits = kTransposed ? 0x0f0f0f0f : 0x00ff00ff;

  __device__ __forceinline__ static DropoutDecisions all_kept() {
    DropoutDecisions decisions;
    for (std::uint32_t& word : decisions.words) word = ~0u;
    return decisions;
  }

  // place(tile): query and key of the thread's first pair there. All 32 lanes together.
  template <class Place>
  __device__ __forceinline__ static DropoutDecisions draw(const DropoutMask& mask, Place place) {
    constexpr unsigned all_lanes = 0xffffffffu, neighbour = 4;
    const bool is_odd = threadIdx.x / neighbour % 2 == 1;
    const std::uint32_t drawn_bits = is_odd ? ~even_bits : even_bits;
    const unsigned rotation = is_odd ? 32 - odd_pairs : odd_pairs;
    const auto threshold = DropoutThreshold::of(mask.threshold);
    const auto block_at = [&](int tile_of_even_lane, int tile_of_odd_lane) {
      const int2 even = place(tile_of_even_lane), odd = place(tile_of_odd_lane);
      return mask.block(is_odd ? odd.x : even.x, is_odd ? odd.y : even.y);
    };
    DropoutDecisions decisions;
    if constexpr (kTiles == 1) {  // nothing to exchange: both lanes draw its block
      const DropoutBlock block = block_at(0, 0);
      decisions.words[0] = threshold.kept(block, block) >> (is_odd ? odd_pairs : 0);
    } else {
      CUTE_UNROLL
      for (int tile = 0; tile < kTiles; tile += 4) {
        const DropoutBlock first = block_at(tile, tile + (is_of_last_two(tile) ? 1 : 2));
        const DropoutBlock second = is_of_last_two(tile) ? first : block_at(tile + 1, tile + 3);
        const std::uint32_t drawn = threshold.kept(first, second);
        const std::uint32_t received = __shfl_xor_sync(all_lanes, drawn, neighbour);
        decisions.words[tile / 4] =
            (drawn & drawn_bits) | (__funnelshift_l(received, received, rotation) & ~drawn_bits);
      }
    }
    return decisions;
  }

  // Whether a pair of the thread is kept: `line` tells its two queries apart (kTransposed: its two
  // keys), `number` its four keys (queries) in their order, 0, 1, 8 and 9 from the first.
  __device__ __forceinline__ bool keeps(int tile, int line, int number) const {
    const int pair = kTransposed ? number % 2 * 8 + number / 2 * 2 + line
                                 : number % 2 * 4 + line * 2 + number / 2;
    const int bit = upper_half(tile) * 16 + from_odd_lane(tile) * int(odd_pairs) + pair;
    return words[tile / 4] >> bit & 1;
  }
};

// Runs visit(element, is_kept) over a thread's (queries, keys) of a score tile whose first pair is
// (query_begin, key_begin), multiples of 16, as dropout counts them, in an accumulator of S; coords
// as in shared/mask/mask.h.
template <class Scores, class Coords, class Visit>
__device__ __forceinline__ void for_each_decision(const DropoutMask& mask, Scores& scores,
                                                  Coords const& coords, int query_begin,
                                                  int key_begin, Visit visit) {
  using namespace cute;
  constexpr int rows = decltype(size<0>(scores))::value;
  constexpr int columns = decltype(size<1>(scores))::value;
  static_assert(rows % 2 == 0 && columns % 4 == 0, "whole tiles of decisions");
  constexpr int tiles_across = columns / 4;
  using Decisions = DropoutDecisions<rows / 2 * tiles_across, false>;
  const auto decisions = Decisions::draw(mask, [&](int tile) {
    const auto coord = coords(tile / tiles_across * 2, tile % tiles_across * 4);
    return int2{query_begin + get<0>(coord), key_begin + get<1>(coord)};
  });
  CUTE_UNROLL
  for (int row = 0; row < rows; ++row) {
    CUTE_UNROLL
    for (int column = 0; column < columns; ++column) {
      const int tile = row / 2 * tiles_across + column / 4;
      visit(scores(row, column), decisions.keeps(tile, row % 2, column % 4));
    }
  }
}
#endif

}  // namespace flash_attn_cuda
