// Hides the pairs of a score tile that the pieces of a block-sparse mask exclude. Called for blocks
// that are not wholly visible.
#pragma once

#include <cstdint>
#include <cute/tensor.hpp>

#include "shared/mask/block_lists.h"
#include "shared/scores/effect.h"

namespace flash_attn_cuda {

// The bits of one sequence and query head.
struct HeadBits {
  const std::uint32_t* data;
  std::int64_t row_stride;
  int last_row;

  CUTE_DEVICE static HeadBits of(const PairBits& bits, int sequence, int head) {
    const std::uint32_t* data = bits.data;
    if (data != nullptr) data += sequence * bits.batch_stride + head * bits.head_stride;
    return {.data = data, .row_stride = bits.row_stride, .last_row = bits.rows - 1};
  }

  // The word of `key`, of which bit j % 32 is that of key j, and those after it. Queries beyond the
  // mask belong to no sequence.
  CUTE_DEVICE const std::uint32_t* words(int query, int key) const {
    return data + min(query, last_row) * row_stride + key / 32;
  }
};

// A word of a piece, whatever its state. Where there are no bits nothing asks for them, or finds
// the pairs hidden. address(): where it lies, if there are bits.
template <class Address>
CUTE_DEVICE std::uint32_t visible_word(PieceState state, bool has_bits, Address address) {
  if (state == PieceState::by_bits && has_bits) return *address();
  return state == PieceState::visible ? ~0u : 0u;
}

// scores: this thread's (rows, columns) of a tile of queries and keys, of accumulators whose lanes
// hold neighbouring columns (j, j + 1); coords as in mask.h.
template <class Scores, class Coords>
CUTE_DEVICE void hide_pairs(Scores& scores, Coords const& coords, Pieces pieces,
                            const HeadBits& bits, int query_begin, int key_begin, float hidden) {
  using namespace cute;
  CUTE_UNROLL
  for (int row = 0; row < size<0>(scores); ++row) {
    const int query = query_begin + get<0>(coords(row, 0));
    CUTE_UNROLL
    for (int col = 0; col < size<1>(scores); col += 2) {
      const int key = key_begin + get<1>(coords(row, col));
      const PieceState state = pieces.at(query / list_piece % 2, key / list_piece % 2);
      const std::uint32_t word =
          visible_word(state, bits.data != nullptr, [&] { return bits.words(query, key); });
      const std::uint32_t seen = word >> key % 32;
      if ((seen & 1) == 0) scores(row, col) = hidden;
      if ((seen & 2) == 0) scores(row, col + 1) = hidden;
    }
  }
}

// Lists as an effect in kernels whose tiles are kQueries x kKeys. listed: what a list says of the
// tile.
template <int kQueries, int kKeys>
struct ListedPairs {
  template <class Listed, class Scores, class Coords>
  CUTE_DEVICE static void apply(SparsityParams const& params, Listed const& listed,
                                ScoreTile const& tile, Scores& scores, Coords const& coords,
                                float hidden) {
    if (params.lists.data == nullptr ||
        listed.pieces.template show_all<kQueries, kKeys>(tile.query_begin, tile.key_begin))
      return;
    const HeadBits bits = HeadBits::of(params.bits, tile.sequence.index, tile.head);
    hide_pairs(scores, coords, listed.pieces, bits, tile.query_begin, tile.key_begin, hidden);
  }
};

// A word has the bits of 32 keys.
template <int kWords>
struct PairWords {
  std::uint32_t words[kWords];
};

// For S^T of a piece, whose rows are the 16 keys of a warp, of which a thread holds `first_key` and
// the eighth after it, and whose columns are the queries (i, i + 1) of every eight: the words of
// two of kQueries queries, because registers are what is short here.
template <int kQueries>
CUTE_DEVICE PairWords<kQueries / 32> load_transposed_words(Pieces pieces, const HeadBits& bits,
                                                           int query_begin, int first_key) {
  PairWords<kQueries / 32> loaded;
  CUTE_UNROLL
  for (int i = 0; i < kQueries / 32; ++i) {
    const int query = query_begin + 32 * i + static_cast<int>(threadIdx.x % 32);
    const PieceState state = pieces.at(query / list_piece % 2, first_key / list_piece % 2);
    const std::uint32_t* word = bits.words(query, first_key);
    loaded.words[i] = visible_word(state, bits.data != nullptr, [&] { return word; });
  }
  return loaded;
}

// All lanes together: each has words that the others need.
template <int kWords, class Scores>
CUTE_DEVICE void hide_transposed_pairs(Scores& scores, PairWords<kWords> const& loaded,
                                       int first_key, float hidden) {
  using namespace cute;
  constexpr int columns_of_warp = 8;  // whose queries a warp's lanes have one word each of
  static_assert(decltype(size<0>(scores))::value == 2);
  static_assert(decltype(size<1>(scores))::value == kWords * columns_of_warp);
  const int lane = threadIdx.x % 32;
  const std::uint32_t first = 1u << first_key % 32;
  CUTE_UNROLL
  for (int column = 0; column < size<1>(scores); ++column) {
    const int i = column % columns_of_warp;
    const int source = lane % 4 * 2 + i / 2 * 8 + i % 2;
    const std::uint32_t word =
        __shfl_sync(0xffffffffu, loaded.words[column / columns_of_warp], source);
    if ((word & first) == 0) scores(0, column) = hidden;
    if ((word & first << 8) == 0) scores(1, column) = hidden;
  }
}

}  // namespace flash_attn_cuda
