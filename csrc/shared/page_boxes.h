// Tiles of a paged cache's keys in boxes of rows, each in one page, as TMA loads them.
// Pure index logic.
#pragma once

#include "shared/paged_kv.h"

namespace flash_attn_cuda {

struct PageBox {
  KeyPlace place;  // of its first row; nowhere if the block table has no page for it
  int rows = 0;    // that are there, at least one
};

// Box `index` of the tile whose first key is key_begin, a multiple of box_rows, which divides the
// size of a page; the sequence has no left padding then. Without pages a tile is one box. Behind
// the sequence's last key that one stands for the others, because a box needs a row
// (sm90/copy.h). seqlen_k > 0.
FAC_HOST_DEVICE PageBox find_box(KeyRows const& keys, int index, int box_rows, int key_begin,
                                 int seqlen_k, DeviceErrors* errors) {
  const int key = key_begin + index * box_rows;
  if (key >= seqlen_k) return {.place = keys.find(seqlen_k - 1, errors), .rows = 1};
  const int keys_left = seqlen_k - key;
  return {.place = keys.find(key, errors), .rows = keys_left < box_rows ? keys_left : box_rows};
}

}  // namespace flash_attn_cuda
