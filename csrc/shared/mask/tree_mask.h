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
    return {.data = mask.data + sequence.batch_q * mask.batch_stride +
                    sequence.row_q * mask.row_stride,
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

  // scores: this thread's (rows, columns) of a tile of queries and keys, of accumulators whose
  // lanes hold neighbouring columns (j, j + 1) of every eight, and whose rows lie in every four
  // lanes of a warp. query_of(row): of this thread's. All lanes together: they read 32 keys of a
  // query at a time, and a ballot tells them all.
  template <class Scores, class QueryOf>
  CUTE_DEVICE void hide(Scores& scores, QueryOf query_of, int key_begin, float hidden) const {
    using namespace cute;
    constexpr int every = 0xffffffff;
    constexpr int quads = 8;        // of lanes, each with a row
    constexpr int word_columns = 8;  // a thread's, of 32 keys
    const int lane = threadIdx.x % 32;
    CUTE_UNROLL
    for (int row = 0; row < size<0>(scores); ++row) {
      const int own_query = query_of(row);
      CUTE_UNROLL
      for (int begin = 0; begin < size<1>(scores); begin += word_columns) {
        const int key = key_begin + begin / word_columns * 32;
        if (key + 32 <= shift) continue;
        bool is_shown[quads];
        CUTE_UNROLL
        for (int quad = 0; quad < quads; ++quad)
          is_shown[quad] = shows(__shfl_sync(every, own_query, 4 * quad), key + lane);
        std::uint32_t word = 0;
        CUTE_UNROLL
        for (int quad = 0; quad < quads; ++quad) {
          const std::uint32_t of_quad = __ballot_sync(every, is_shown[quad]);
          if (lane / 4 == quad) word = of_quad;
        }
        word >>= lane % 4 * 2;
        CUTE_UNROLL
        for (int i = 0; i < word_columns && begin + i < size<1>(scores); ++i) {
          if ((word >> (i / 2 * 8 + i % 2) & 1) == 0) scores(row, begin + i) = hidden;
        }
      }
    }
  }
};

}  // namespace flash_attn_cuda
