// Which queries list a block of keys (ListedQueries, flash_attn/params.h). Pure index logic.
#pragma once

#include "shared/sequence/sequence.h"

namespace flash_attn_cuda {

// A block of keys that some queries list.
struct ListedBlock {
  Sequence sequence;
  int head;       // of k
  int key_begin;  // of the sequence, the block's first; negative: there is no such block
};

// The sequence that a row of k is of, where it is one's.
FAC_HOST_DEVICE int sequence_of_key_row(const SequenceTable& table, const AttentionShape& shape,
                                        int row) {
  if (table.counts == nullptr) return row / shape.seqlen_k;
  int low = 0, high = shape.batch_size - 1;  // the last that begins at the row or before it
  while (low < high) {
    const int middle = low + (high - low + 1) / 2;
    if (table.sequences[middle].row_k <= row)
      low = middle;
    else
      high = middle - 1;
  }
  return low;
}

// What stands at a place of ListedQueries::places. tiles_per_sequence: of queries, without a table.
template <class Params>
FAC_HOST_DEVICE ListedBlock listed_block(const Params& params, const SequenceTable& table,
                                         int tiles_per_sequence, int place) {
  ListedBlock found;
  found.head = place / params.listed.key_rows;
  const int row = place - found.head * params.listed.key_rows;
  const int index = sequence_of_key_row(table, params.shape, row);
  if (table.counts != nullptr) {
    found.sequence = table.sequences[index];
    found.key_begin = row - found.sequence.row_k;
  } else {
    found.sequence = read_sequence(params.sequences, params.shape, index, params.errors);
    found.sequence.first_q_tile = index * tiles_per_sequence;
    found.key_begin = row - index * params.shape.seqlen_k;
  }
  if (found.key_begin % params.listed.block != 0) found.key_begin = -1;
  return found;
}

}  // namespace flash_attn_cuda
