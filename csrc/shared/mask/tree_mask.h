// Hides what a tree mask (TreeMask, flash_attn/params.h) excludes. Called for boundary blocks only,
// which all that a sequence has of its queries' own keys are (block_range.h).
#pragma once

#include <cstdint>
#include <cute/tensor.hpp>

#include "flash_attn/params.h"
#include "shared/sequence/sequence.h"

namespace flash_attn_cuda {

// That of one sequence.
struct SequenceTree {
  const std::uint8_t* data;  // the first query's row
  std::int64_t row_stride;
  int queries;  // that attend
  int columns;  // of them
  int shift;    // the first of the queries' own keys

  CUTE_DEVICE static SequenceTree of(TreeMask const& mask, Sequence const& sequence) {
    return {
        .data = mask.data + sequence.batch_q * mask.batch_stride + sequence.row_q * mask.row_stride,
        .row_stride = mask.row_stride,
        .queries = sequence.seqlen_q,
        .columns = min(sequence.seqlen_q, mask.columns),
        .shift = sequence.shift};
  }

  // No query beyond those that attend has a row, nor a key beyond the last a column.
  CUTE_DEVICE bool shows(int query, int key) const {
    const int column = key - shift;
    if (column < 0) return true;
    return column < columns && query < queries && __ldg(data + query * row_stride + column) != 0;
  }

  // scores: this thread's (rows, columns) of a tile of queries and keys, of accumulators of which
  // four lanes hold a row, and each neighbouring columns (j, j + 1) of every eight. query_of(row):
  // of this thread's. All lanes together: each reads eight of a row's 32 keys for the others.
  template <class Scores, class QueryOf>
  CUTE_DEVICE void hide(Scores& scores, QueryOf query_of, int key_begin, float hidden) const {
    using namespace cute;
    constexpr int all_lanes = 0xffffffff;
    constexpr int eight = 8;  // keys that a lane reads, and columns that it has, of 32 keys
    int place = threadIdx.x % 4;
    // What follows of this and of queries is not kept from block to block: that spills.
    asm volatile("" : "+r"(place));
    CUTE_UNROLL
    for (int row = 0; row < size<0>(scores); ++row) {
      int query = query_of(row);
      asm volatile("" : "+r"(query));
      CUTE_UNROLL
      for (int begin = 0; begin < size<1>(scores); begin += eight) {
        const int first = key_begin + begin * 4 - shift;  // of the 32 keys, among own ones
        if (first + 32 <= 0) continue;
        const std::uint32_t bits = bits_of(query, first + place * eight) << place * eight;
        std::uint32_t word = bits | __shfl_xor_sync(all_lanes, bits, 1);
        word |= __shfl_xor_sync(all_lanes, word, 2);
        word >>= place * 2;
        CUTE_UNROLL
        for (int i = 0; i < eight && begin + i < size<1>(scores); ++i) {
          if ((word >> (i / 2 * 8 + i % 2) & 1) == 0) scores(row, begin + i) = hidden;
        }
      }
    }
  }

 private:
  // A bit for each of the eight keys from own key `column` on, negative ones being before them all.
  CUTE_DEVICE std::uint32_t bits_of(int query, int column) const {
    constexpr int eight = 8;
    const auto limit = static_cast<unsigned>(query < queries ? columns : 0);
    const std::uint8_t* source = data + query * row_stride + column;
    std::uint8_t bytes[eight];
    CUTE_UNROLL
    for (int i = 0; i < eight; ++i)
      bytes[i] = static_cast<unsigned>(column + i) < limit ? __ldg(source + i) : 0;
    std::uint32_t bits = (1u << min(max(-column, 0), eight)) - 1;
    CUTE_UNROLL
    for (int i = 0; i < eight; ++i) bits |= std::uint32_t{bytes[i] != 0} << i;
    return bits;
  }
};

}  // namespace flash_attn_cuda
