// Rows of a tile that the query heads of a key head share: those of one query lie together.
#pragma once

#include "shared/schedule/tile_work.h"
#include "shared/sequence/paged_kv.h"

namespace flash_attn_cuda {

struct PackedRow {
  int query;  // of the sequence
  int head;   // of q
};

// group: query heads of a key head, of which work.head is one.
FAC_HOST_DEVICE constexpr PackedRow packed_row(Divider const& group, TileWork const& work,
                                               int tile_rows, int row) {
  const int index = work.tile * tile_rows + row;
  const int query = group.quotient(index);
  const int heads = static_cast<int>(group.divisor);
  return {query, work.head * heads + index - query * heads};
}

}  // namespace flash_attn_cuda
