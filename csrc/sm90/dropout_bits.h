// Dropout's decisions as bits, drawn by one thread for another: a word of them is what a thread
// needs for up to 64 columns of its share of a wgmma accumulator. Which pairs are kept is up to
// shared/dropout.h; here is how the same is worked out in fewer instructions, and where the bits
// lie. Index maths and arithmetic that the host's tests compile as well.
#pragma once

#include <cstdint>

#include "shared/dropout.h"

namespace flash_attn_cuda::sm90 {

// -- where the bits lie --------------------------------------------------------------------------

// A Philox block decides about rows (i, i + 8) and columns (j, j + 1, j + 8, j + 9) of a thread's
// share, so 16 columns of the tile take one, and a word holds up to four of them. In a word, byte c
// is about column number c of those four in every block; its bit 2 * b + r about row r and block b.
template <int kColumns>
struct WordLayout {
  static_assert(kColumns % 16 == 0 && kColumns <= 128);
  static constexpr int blocks = kColumns / 16;
  static constexpr int words = (blocks + 3) / 4;
  static constexpr int blocks_per_word = blocks / words;
  static constexpr int columns_per_word = 16 * blocks_per_word;
  static_assert(blocks % words == 0);

  static constexpr bool is_used(int bit) { return bit % 8 < 2 * blocks_per_word; }
  // Numbers among the thread's rows, 0 and 1, and among its columns, two of every eight.
  static constexpr int row_of(int bit) { return bit % 2; }
  static constexpr int column_of(int word, int bit) {
    return 4 * (blocks_per_word * word + bit % 8 / 2) + bit / 8;
  }
};

// How warps that draw for a consumer warpgroup share its words: each has one word of every thread
// of the warps first_warp, first_warp + step, ...
template <int kDrawingWarps, int kWords>
struct WordShare {
  static_assert(kDrawingWarps % kWords == 0 && 4 % (kDrawingWarps / kWords) == 0);
  static constexpr int step = kDrawingWarps / kWords;

  int word;
  int first_warp;

  FAC_HOST_DEVICE static constexpr WordShare of(int drawing_warp) {
    return {.word = drawing_warp % kWords, .first_warp = drawing_warp / kWords};
  }
};

// -- decisions of whole words --------------------------------------------------------------------

// On two halves of 16 bits each: min(x + summand, bound).
FAC_HOST_DEVICE std::uint32_t add_and_bound_halves(std::uint32_t x, std::uint32_t summand,
                                                   std::uint32_t bound) {
#if defined(__CUDA_ARCH__)
  std::uint32_t sum, result;
  asm("add.u16x2 %0, %1, %2;" : "=r"(sum) : "r"(x), "r"(summand));
  asm("min.u16x2 %0, %1, %2;" : "=r"(result) : "r"(sum), "r"(bound));
  return result;
#else
  const auto half = [&](int shift) {
    const std::uint32_t sum = ((x >> shift) + (summand >> shift)) & 0xffff;
    const std::uint32_t limit = bound >> shift & 0xffff;
    return (sum < limit ? sum : limit) << shift;
  };
  return half(0) | half(16);
#endif
}

// The top bits of both words' halves, a byte of ones or zeros for each, the first word's first.
FAC_HOST_DEVICE std::uint32_t top_bits_as_bytes(std::uint32_t first, std::uint32_t second) {
#if defined(__CUDA_ARCH__)
  std::uint32_t bytes;
  asm("prmt.b32 %0, %1, %2, 0xfdb9;" : "=r"(bytes) : "r"(first), "r"(second));
  return bytes;
#else
  const auto byte = [](std::uint32_t word, int bit) { return (word >> bit & 1) * 0xffu; };
  return byte(first, 15) | byte(first, 31) << 8 | byte(second, 15) << 16 | byte(second, 31) << 24;
#endif
}

// x >= threshold for both halves x of a random word at once, as the top bits of the halves: x is
// cut off at the threshold, and what then carries into the top bit is the threshold alone. From
// 2^15 on nothing is left to carry, but x - threshold is, modulo 2^16: that is below
// 2^16 - threshold if x is not below the threshold, and cut off there it does not borrow.
struct HalvesThreshold {
  std::uint32_t summand;
  std::uint32_t bound;
  std::uint32_t sign;  // 1 or -1: a multiply-add, as additions are what drawing has enough of
  std::uint32_t raise;

  FAC_HOST_DEVICE static constexpr HalvesThreshold of(std::uint32_t threshold) {
    constexpr std::uint32_t top = 0x8000, both_halves = 0x10001;
    if (threshold <= top) {
      return {.summand = 0,
              .bound = threshold * both_halves,
              .sign = 1,
              .raise = (top - threshold) * both_halves};
    }
    const std::uint32_t rest = 2 * top - threshold;
    return {.summand = rest * both_halves,
            .bound = rest * both_halves,
            .sign = ~0u,
            .raise = (top - 1 + rest) * both_halves};
  }

  FAC_HOST_DEVICE std::uint32_t top_bits(std::uint32_t word) const {
    return add_and_bound_halves(word, summand, bound) * sign + raise;
  }
};

// -- blocks that share rounds --------------------------------------------------------------------

// nvcc takes the halves of a 64-bit product apart by additions of zeros. Said in PTX it does not,
// but neither sees what is the same in all passes of a loop; hence the parts below.
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
// same for all blocks of a pair of columns or for all blocks of a pair of rows (i, i + 8).
struct ColumnRounds {
  std::uint32_t first;   // word 3 after one round
  std::uint32_t second;  // word 1 after two
  std::uint64_t third;   // the product with word 0 in the third

  FAC_HOST_DEVICE static ColumnRounds of(const DropoutMask& mask, int key) {
    const PhiloxKey second_key = next_philox_key(mask.key);
    const std::uint64_t stream = wide_product(philox_second_multiplier, mask.stream);
    const std::uint64_t column = wide_product(philox_first_multiplier, DropoutMask::key_word(key));
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
        philox_first_multiplier, high_word(stream) ^ mask.key.low ^ DropoutMask::query_word(query));
    return {.second = high_word(row) ^ second_key.high,
            .third = low_word(row) ^ next_philox_key(second_key).high};
  }
};

// mask.block(query, key) from the parts of its row and its column.
FAC_HOST_DEVICE PhiloxBlock join_rounds(const DropoutMask& mask, const RowRounds& row,
                                        const ColumnRounds& column) {
  PhiloxKey key = next_philox_key(next_philox_key(mask.key));
  const std::uint64_t product = wide_product(philox_second_multiplier, row.second ^ column.first);
  PhiloxBlock block{{high_word(product) ^ column.second ^ key.low, low_word(product),
                     high_word(column.third) ^ row.third, low_word(column.third)}};
#if defined(__CUDA_ARCH__)
#pragma unroll
#endif
  for (int round = 3; round < philox_rounds; ++round) {
    key = next_philox_key(key);
    const std::uint64_t first = wide_product(philox_first_multiplier, block.words[0]);
    const std::uint64_t second = wide_product(philox_second_multiplier, block.words[2]);
    block = {{high_word(second) ^ block.words[1] ^ key.low, low_word(second),
              high_word(first) ^ block.words[3] ^ key.high, low_word(first)}};
  }
  return block;
}

// Words of 16 * kBlocks columns, for any of the rows.
template <int kBlocks>
struct WordColumns {
  ColumnRounds columns[kBlocks];

  // `key`: the first of the thread's columns.
  FAC_HOST_DEVICE static WordColumns of(const DropoutMask& mask, int key) {
    WordColumns word{};
#if defined(__CUDA_ARCH__)
#pragma unroll
#endif
    for (int b = 0; b < kBlocks; ++b) word.columns[b] = ColumnRounds::of(mask, key + 16 * b);
    return word;
  }

  // `query`: the first of its rows.
  FAC_HOST_DEVICE std::uint32_t draw(const DropoutMask& mask, const HalvesThreshold& threshold,
                                     int query) const {
    const RowRounds row = RowRounds::of(mask, query);
    std::uint32_t word = 0;
#if defined(__CUDA_ARCH__)
#pragma unroll
#endif
    for (int b = 0; b < kBlocks; ++b) {
      const PhiloxBlock block = join_rounds(mask, row, columns[b]);
      for (int r = 0; r < 2; ++r) {
        const std::uint32_t kept = top_bits_as_bytes(threshold.top_bits(block.words[2 * r]),
                                                     threshold.top_bits(block.words[2 * r + 1]));
        const std::uint32_t bits = 0x01010101u << (2 * b + r);
        word = (kept & bits) | (word & ~bits);
      }
    }
    return word;
  }
};

}  // namespace flash_attn_cuda::sm90
