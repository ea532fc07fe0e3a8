// The transposition of values of e4m3, by warps of a forward CTA's producer.
//
// wgmma takes operands of 8 bits along the sum alone, which of P V runs over keys. TMA leaves a
// block's values as rows of keys; these warps make rows of columns of them, in which the keys of
// every 16 stand in the order of P: a thread has scores of keys 2 q, 2 q + 1, 2 q + 8 and 2 q + 9,
// and its word of a left operand is of keys 4 q to 4 q + 3. So P needs no shuffle, and neither do
// the values: a lane that has read the transposed matrices of keys 0 to 7 and 8 to 15 holds these
// four keys of two columns, in two words.
#pragma once

#include "sm90/forward/traits.h"

namespace flash_attn_cuda::sm90 {

template <class Traits>
class Transposer {
  using Element = typename Traits::Element;
  static constexpr int keys_at_once = 32;
  static constexpr int columns_at_once = 16;
  static constexpr int groups = Traits::block_n / keys_at_once;
  static constexpr int chunk = 16;  // bytes, of a row of a matrix
  static_assert(Traits::block_n % keys_at_once == 0 && Traits::head_dim_v % columns_at_once == 0);

  // Of a box of ValueRows, and of ValueLayout.
  static constexpr int row_bytes = box_columns<Traits::head_dim_v, Element>;
  static constexpr int row_chunks = row_bytes / chunk;
  static constexpr int row_box_bytes = row_bytes * Traits::block_n;
  static constexpr int column_bytes = box_columns<Traits::block_n, Element>;
  static constexpr int column_chunks = column_bytes / chunk;
  static constexpr int column_box_bytes = column_bytes * Traits::head_dim_v;

  // For __byte_perm: the bytes of two words that are of the first column, of the second.
  static constexpr unsigned of_first = 0x6420, of_second = 0x7531;

  typename Traits::SharedStorage& smem;
  const int part;       // of the groups of keys
  const bool is_lower;  // half of the warp
  const unsigned rows;  // addresses of this lane's row of the first matrices
  const unsigned columns;
  PipelineState<Traits::value_row_stages> rows_state{};
  PipelineState<Traits::stages> state{};

  // Where a chunk of a row lies in a box: in place chunk ^ row, of as many rows as have 128 bytes.
  CUTE_DEVICE static unsigned place(int row, int chunk_of_row, int bytes) {
    return row * bytes + (chunk_of_row ^ row * bytes / 128 % (bytes / chunk)) * chunk;
  }

  // Half of a store's eight lanes have their first column and half the second, so that it meets
  // every bank once. matrix: of four, two for 16 keys.
  CUTE_DEVICE static int column_of(int row, int matrix) {
    return 2 * row + ((row / 4) ^ (matrix % 2));
  }

  // 32 keys, of all columns. What differs from the lane's own addresses by a chunk alone differs in
  // bits that these leave alone.
  CUTE_DEVICE void transpose(unsigned source, unsigned target) const {
    constexpr int at_once = 4;  // so that a read does not wait for the one before
    const unsigned first = is_lower ? of_first : of_second;
    const unsigned second = is_lower ? of_second : of_first;
    CUTE_UNROLL
    for (int begin = 0; begin < Traits::head_dim_v / columns_at_once; begin += at_once) {
      std::uint32_t words[at_once][4];
      CUTE_UNROLL
      for (int i = 0; i < at_once; ++i) {
        const int c = begin + i;
        auto& w = words[i];
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3])
                     : "r"((source ^ c % row_chunks * chunk) + c / row_chunks * row_box_bytes));
      }
      CUTE_UNROLL
      for (int i = 0; i < at_once; ++i) {
        auto const& w = words[i];
        asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                         target + (begin + i) * columns_at_once * column_bytes),
                     "r"(__byte_perm(w[0], w[1], first)), "r"(__byte_perm(w[0], w[1], second)),
                     "r"(__byte_perm(w[2], w[3], first)), "r"(__byte_perm(w[2], w[3], second))
                     : "memory");
      }
    }
  }

  CUTE_DEVICE void transpose_block() {
    consumer_wait(smem.value_rows_ring, rows_state);
    producer_acquire(smem.v_ring, state);
    CUTE_NO_UNROLL
    for (int group = part; group < groups; group += Traits::transposers) {
      const int first_chunk = group * keys_at_once / chunk;
      transpose(rows + rows_state.stage * Traits::value_bytes + group * keys_at_once * row_bytes,
                (columns ^ first_chunk % column_chunks * chunk) +
                    first_chunk / column_chunks * column_box_bytes +
                    state.stage * Traits::value_bytes);
    }
    finish_reads();  // and writes, for wgmma
    consumer_release(smem.value_rows_ring, rows_state);
    producer_commit(smem.v_ring, state);
    rows_state.advance();
    state.advance();
  }

 public:
  // A lane reads a key's row of four matrices, one behind the other, and stores a column's of two
  // for each 16 of their keys.
  CUTE_DEVICE Transposer(typename Traits::SharedStorage& smem, int part)
      : smem(smem),
        part(part),
        is_lower(threadIdx.x % 32 < 16),
        rows(cast_smem_ptr_to_uint(smem.bytes) + place(threadIdx.x % 32, 0, row_bytes)),
        columns(cast_smem_ptr_to_uint(smem.v) +
                place(column_of(threadIdx.x % 8, threadIdx.x % 32 / 8), threadIdx.x % 32 / 16,
                      column_bytes)) {}

  // The blocks of all tiles.
  CUTE_DEVICE void run() {
    for (PipelineState<Traits::work_stages> work_state;; work_state.advance()) {
      consumer_wait(smem.work_ring, work_state);
      auto const& item = smem.work[work_state.stage];
      if (item.work.tile == no_tile) break;
      int blocks = item.range.end - item.range.begin;
      __syncwarp();
      consumer_release(smem.work_ring, work_state);
      CUTE_NO_UNROLL
      for (; blocks > 0; --blocks) transpose_block();
    }
  }
};

}  // namespace flash_attn_cuda::sm90
