// Dropout's decisions as bits, drawn by one thread for another: two words of them are what a thread
// needs for 128 columns of its share of a wgmma accumulator. Which pairs are kept is up to
// shared/dropout/dropout.h; here is how the same is worked out in fewer instructions, and where the
// bits lie. Index maths and arithmetic that the host's tests compile as well.
#pragma once

#include <cstdint>

#include "shared/dropout/dropout.h"

namespace flash_attn_cuda::sm90 {

// -- where the bits lie --------------------------------------------------------------------------

// A thread's share of 64 columns is eight pairs in each of four tiles of 16, a byte of a word for
// each tile. In a byte bit 4 * c + 2 * r + e is about row r of the two, and about column c of the
// two neighbours in the tile's first eight columns (e = 0) or its last.
template <int kColumns>
struct WordLayout {
  static_assert(kColumns == 128, "a lane draws the tiles of one word, its neighbour the other's");
  static constexpr int words = 2;
  static constexpr int tiles_per_word = 4;
  static constexpr int columns_per_word = 16 * tiles_per_word;

  // Numbers among the thread's rows, 0 and 1, and among its columns, two of every eight.
  static constexpr int row_of(int bit) { return bit / 2 % 2; }
  static constexpr int column_of(int word, int bit) {
    return 4 * (tiles_per_word * word + bit / 8) + bit % 2 * 2 + bit / 4 % 2;
  }
};

// -- blocks that share rounds --------------------------------------------------------------------

// nvcc takes the halves of a 64-bit product apart by additions of zeros. Said in PTX it does not,
// but neither sees what is the same in all passes of a loop; hence the two structs below.
FAC_HOST_DEVICE std::uint64_t wide_product(std::uint32_t a, std::uint32_t b) {
#if defined(__CUDA_ARCH__)
  std::uint64_t product;
  asm("mul.wide.u32 %0, %1, %2;" : "=l"(product) : "r"(a), "r"(b));
  return product;
#else
  return std::uint64_t{a} * b;
#endif
}

FAC_HOST_DEVICE std::uint32_t low_word(std::uint64_t x) { return static_cast<std::uint32_t>(x); }
FAC_HOST_DEVICE std::uint32_t high_word(std::uint64_t x) {
  return static_cast<std::uint32_t>(x >> 32);
}

// The counter's word 0 is the columns', word 1 the rows', so in the first three rounds most is the
// same for all blocks of the same columns or for all blocks of the same rows.
struct ColumnRounds {
  std::uint32_t first;   // word 3 after one round
  std::uint32_t second;  // word 1 after two
  std::uint64_t third;   // the product with word 0 in the third

  FAC_HOST_DEVICE static ColumnRounds of(const DropoutMask& mask, int key) {
    const PhiloxKey second_key = next_philox_key(mask.key);
    const std::uint64_t stream = wide_product(philox_second_multiplier, mask.stream);
    const std::uint64_t column =
        wide_product(philox_first_multiplier, DropoutMask::place_word(key));
    const std::uint64_t product =
        wide_product(philox_second_multiplier, high_word(column) ^ (mask.offset ^ mask.key.high));
    return {.first = low_word(column),
            .second = low_word(product),
            .third = wide_product(philox_first_multiplier,
                                  high_word(product) ^ (low_word(stream) ^ second_key.low))};
  }
};

struct RowRounds {
  std::uint32_t second;  // what word 2 gets of them in the second round
  std::uint32_t third;   // and in the third

  FAC_HOST_DEVICE static RowRounds of(const DropoutMask& mask, int query) {
    const PhiloxKey second_key = next_philox_key(mask.key);
    const std::uint64_t stream = wide_product(philox_second_multiplier, mask.stream);
    const std::uint64_t row = wide_product(
        philox_first_multiplier, high_word(stream) ^ mask.key.low ^ DropoutMask::place_word(query));
    return {.second = high_word(row) ^ second_key.high,
            .third = low_word(row) ^ next_philox_key(second_key).high};
  }
};

// mask.block(query, key) from the rounds of its row and of its column.
FAC_HOST_DEVICE DropoutBlock join_rounds(const DropoutMask& mask, const RowRounds& row,
                                         const ColumnRounds& column) {
  PhiloxKey key = next_philox_key(next_philox_key(mask.key));
  const std::uint64_t product = wide_product(philox_second_multiplier, row.second ^ column.first);
  PhiloxBlock block{{high_word(product) ^ column.second ^ key.low, low_word(product),
                     high_word(column.third) ^ row.third, low_word(column.third)}};
  std::uint32_t shared = 0;
#if defined(__CUDA_ARCH__)
#pragma unroll
#endif
  for (int round = 3; round < philox_rounds; ++round) {
    if (round == DropoutMask::shared_after) shared = DropoutMask::shared_bits(block);
    key = next_philox_key(key);
    const std::uint64_t first = wide_product(philox_first_multiplier, block.words[0]);
    const std::uint64_t second = wide_product(philox_second_multiplier, block.words[2]);
    block = {{high_word(second) ^ block.words[1] ^ key.low, low_word(second),
              high_word(first) ^ block.words[3] ^ key.high, low_word(first)}};
  }
  return {.own = block, .shared = shared};
}

// Decisions about four tiles of 16 columns, and two rows each of two threads.
struct DrawnTiles {
  std::uint32_t first, second;  // two tiles each; bytes are alternately about even and odd rows

  // The word of the thread with even rows, and of that with odd ones.
  FAC_HOST_DEVICE std::uint32_t word(int row_parity) const {
#if defined(__CUDA_ARCH__)
    return __byte_perm(first, second, row_parity == 0 ? 0x6420 : 0x7531);
#else
    const auto byte = [&](std::uint32_t x, int n) { return x >> (16 * n + 8 * row_parity) & 0xff; };
    return byte(first, 0) | byte(first, 1) << 8 | byte(second, 0) << 16 | byte(second, 1) << 24;
#endif
  }
};

// Four tiles of 16 columns, for any of the rows.
struct TileColumns {
  ColumnRounds columns[4];

  // `key`: the thread's first column.
  FAC_HOST_DEVICE static TileColumns of(const DropoutMask& mask, int key) {
    TileColumns tiles{};
#if defined(__CUDA_ARCH__)
#pragma unroll
#endif
    for (int n = 0; n < 4; ++n) tiles.columns[n] = ColumnRounds::of(mask, key + 16 * n);
    return tiles;
  }

  // `query`: the first of its rows.
  FAC_HOST_DEVICE DrawnTiles draw(const DropoutMask& mask, const DropoutThreshold& threshold,
                                  int query) const {
    const RowRounds row = RowRounds::of(mask, query);
    const auto block = [&](int n) { return join_rounds(mask, row, columns[n]); };
    return {.first = threshold.kept(block(0), block(1)),
            .second = threshold.kept(block(2), block(3))};
  }
};

}  // namespace flash_attn_cuda::sm90
