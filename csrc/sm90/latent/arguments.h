// What the host hands to a kernel of absorbed latent attention.
#pragma once

#include <cuda.h>

#include "flash_attn/api.h"
#include "shared/sequence/paged_kv.h"
#include "shared/sequence/sequence.h"

namespace flash_attn_cuda::sm90 {

struct LatentArguments {
  CUtensorMap q_map, k_map;   // of the rotary columns
  CUtensorMap qv_map, v_map;  // of the latent columns
  ForwardParams params;
  SequenceTable table;
  int most_tiles;  // of all heads; of packed sequences an upper bound
  Divider heads;   // of k: tiles of one sequence and place are neighbours by head
  Divider tiles;   // of a sequence that is not packed
  Divider group;   // rows of a query (rows_of_query)
  int heads_per_key_head;
  bool loads_boxes;     // of keys: else one by one, by lists, of e4m3 or in pages that no box fits
  bool in_pairs;        // of CTAs (sm90/isa/cta_pair.h), which visit the same keys together
  int query_box_rows;   // of a box of q or qv: heads of one query
  int key_box_rows;     // of a box of k or v: a block's, or what lies in one page
  float scale_log2;     // from a score to powers of two, positive: hidden scores are -inf
  bool negates_scores;  // softmax_scale < 0
  TileSharing sharing;
  int parts_of_pairs;   // in pairs and even sharing: those of all first tiles, at most
  int most_parts;       // of a tile, where sharing is in parts
  int keys_per_part;    // 0: what most_parts leave each
  int warps_per_join;   // that share the parts of what a warp joins
  int pieces_per_join;  // that a warp joins one after the other
  float* out_parts;     // (parts, columns, rows), in the order of the accumulators
  float* lse_parts;     // (parts, rows), in powers of two
  PartsOfTile* parts_of_tiles;
};

}  // namespace flash_attn_cuda::sm90
