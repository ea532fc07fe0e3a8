// The bits of a block-sparse mask in a forward CTA: those of a warpgroup's 64 queries and a block's
// 128 keys in shared memory, four words a query, and what a thread makes of them.
//
// A thread of a warp of its own loads them (sm90/forward/producer.h): to look for them took the
// thread that loads K and V time that it does not have where a tile ends and the next one begins.
#pragma once

#include "shared/mask/block_lists.h"
#include "sm90/isa/copy.h"

namespace flash_attn_cuda::sm90 {

struct MaskBits {
  static constexpr int queries = list_piece;
  static constexpr int elements = list_tile / 16;  // of 16 bits, for each query
  static_assert(elements * 2 == sizeof(uint4));

  alignas(128) uint4 rows[queries];
};

// Whether the queries that are the first or the second half of a block have bits to look at.
CUTE_DEVICE bool wants_bits(const PairBits& bits, Pieces pieces, int query_half) {
  return bits.data != nullptr && (pieces.at(query_half, 0) == PieceState::by_bits ||
                                  pieces.at(query_half, 1) == PieceState::by_bits);
}

// Starts the load, by one thread. What lies beyond the tensor becomes zeros; no box lies wholly
// beyond it.
CUTE_DEVICE void load_mask_bits(CUtensorMap const& map, std::uint64_t* barrier, MaskBits& tile,
                                const PairBits& bits, int sequence, int head, int query, int key) {
  constexpr auto hint = static_cast<std::uint64_t>(TMA::CacheHintSm90::EVICT_NORMAL);
  const int element = min(key / 16, 2 * bits.words - MaskBits::elements);
  SM90_TMA_LOAD_4D::copy(&map, barrier, hint, tile.rows, element, min(query, bits.rows - 1),
                         bits.head_stride == 0 ? 0 : head, bits.batch_stride == 0 ? 0 : sequence);
}

// What a thread of a wgmma accumulator of 64 queries and 128 keys sees of the pieces that are to be
// looked up: of each 32 pairs, of one word after the other, alternately of its two rows.
struct SeenPairs {
  static constexpr int pieces = 2;
  std::uint32_t of_piece[pieces];
};

// The columns j, j + 1, j + 8, j + 9, .. of 32, j even and less than 8, that a thread has of a
// wgmma accumulator.
struct ThreadColumns {
  std::uint32_t own;     // their bits of a word
  std::uint32_t gather;  // own bits times this have them side by side in the upper byte

  CUTE_DEVICE explicit ThreadColumns(int first)
      : own(0x03030303u << first), gather((1u << 24 | 1u << 18 | 1u << 12 | 1u << 6) >> first) {}

  // A byte for each of four words.
  CUTE_DEVICE std::uint32_t of(std::uint32_t const (&words)[4]) const {
    std::uint32_t bytes[4];
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) bytes[i] = (words[i] & own) * gather;
    const std::uint32_t low = __byte_perm(bytes[0], bytes[1], 0x0073);
    const std::uint32_t high = __byte_perm(bytes[2], bytes[3], 0x7300);
    return __byte_perm(low, high, 0x7610);
  }
};

// The thread's bits of the pieces that have bits; 0 for others. coords: as in shared/mask/mask.h.
template <class Coords>
CUTE_DEVICE SeenPairs read_mask_bits(MaskBits const& tile, Pieces pieces, int query_half,
                                     Coords const& coords) {
  const ThreadColumns columns{get<1>(coords(0, 0))};
  const uint4 rows[2] = {tile.rows[get<0>(coords(0, 0))], tile.rows[get<0>(coords(1, 0))]};
  const std::uint32_t words[SeenPairs::pieces][4] = {{rows[0].x, rows[1].x, rows[0].y, rows[1].y},
                                                     {rows[0].z, rows[1].z, rows[0].w, rows[1].w}};
  SeenPairs seen{};
  CUTE_UNROLL
  for (int piece = 0; piece < SeenPairs::pieces; ++piece) {
    if (pieces.at(query_half, piece) == PieceState::by_bits)
      seen.of_piece[piece] = columns.of(words[piece]);
  }
  return seen;
}

// scores: (rows, columns) of the accumulator.
template <class Scores>
CUTE_DEVICE void hide_unseen_pairs(Scores& scores, Pieces pieces, int query_half,
                                   SeenPairs const& seen, float hidden) {
  constexpr int columns_of_word = 8;
  constexpr int pairs = 32;
  static_assert(decltype(size(scores))::value == SeenPairs::pieces * pairs);
  CUTE_UNROLL
  for (int piece = 0; piece < SeenPairs::pieces; ++piece) {
    if (pieces.at(query_half, piece) == PieceState::visible) continue;
    CUTE_UNROLL
    for (int i = 0; i < pairs; ++i) {
      const int row = i / columns_of_word % 2;
      const int word = piece * 2 + i / (2 * columns_of_word);
      const int column = word * columns_of_word + i % columns_of_word;
      if ((seen.of_piece[piece] >> i & 1) == 0) scores(row, column) = hidden;
    }
  }
}

}  // namespace flash_attn_cuda::sm90
