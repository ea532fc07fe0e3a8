// Where the queries and keys of a sequence lie that TMA loads.
#pragma once

#include "shared/sequence/sequence.h"
#include "sm90/isa/copy.h"

namespace flash_attn_cuda::sm90 {

// From one of them on. head: of q, and of k and v.
CUTE_DEVICE RowSpan queries_from(Sequence const& sequence, int head, int query) {
  return {.batch = sequence.batch_q,
          .head = head,
          .row = sequence.row_q + query,
          .rows = sequence.seqlen_q - query};
}
CUTE_DEVICE RowSpan keys_from(Sequence const& sequence, int head, int key) {
  return {.batch = sequence.batch_k,
          .head = head,
          .row = sequence.row_k + key,
          .rows = sequence.seqlen_k - key};
}

// 64 queries of a tile, those of one warpgroup. Those that do not exist are read from the tile's
// first row, for nobody.
CUTE_DEVICE RowSpan queries_of_part(Sequence const& sequence, int head, int tile_query, int part) {
  const bool exists = tile_query + 64 * part < sequence.seqlen_q;
  return queries_from(sequence, head, exists ? tile_query + 64 * part : tile_query);
}

}  // namespace flash_attn_cuda::sm90
