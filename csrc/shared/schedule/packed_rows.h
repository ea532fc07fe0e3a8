// Rows of a tile that the query heads of a key head share: those of one query lie together.
#pragma once

#include "shared/schedule/tile_work.h"
#include "shared/sequence/paged_kv.h"

namespace flash_attn_cuda {

struct PackedRow {
  int query;  // of the sequence
  int head;   // of q
};

inline constexpr int no_query = 1 << 30;  // behind those of every sequence

// Rows that a query has in tiles of so many. Where it has a list of keys of its own a tile has rows
// of one query, and those behind its last head are no query's.
FAC_HOST_DEVICE constexpr int rows_of_query(AttentionShape const& shape, int keys_per_list,
                                            int tile_rows) {
  const int heads = shape.heads_per_key_head();
  return keys_per_list == 0 ? heads : (heads + tile_rows - 1) / tile_rows * tile_rows;
}

// group: query heads of a key head, of which work.head is one.
FAC_HOST_DEVICE constexpr PackedRow packed_row(Divider const& group, TileWork const& work,
                                               int tile_rows, int row) {
  const int index = work.tile * tile_rows + row;
  const int query = group.quotient(index);
  const int heads = static_cast<int>(group.divisor);
  return {query, work.head * heads + index - query * heads};
}

// The same where a query may have more rows than `heads`, which are those of a key head.
// rows_per_query: rows_of_query().
FAC_HOST_DEVICE constexpr PackedRow padded_row(Divider const& rows_per_query, int heads,
                                               TileWork const& work, int tile_rows, int row) {
  const int index = work.tile * tile_rows + row;
  const int query = rows_per_query.quotient(index);
  const int head = index - query * static_cast<int>(rows_per_query.divisor);
  return {head < heads ? query : no_query, work.head * heads + head};
}

}  // namespace flash_attn_cuda
