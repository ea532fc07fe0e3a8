// What the host hands to a forward kernel.
#pragma once

#include <cuda.h>

#include "flash_attn/api.h"
#include "shared/sequence/sequence.h"

namespace flash_attn_cuda::sm90 {

// Where CTAs share a tile's keys: O and LSE of each split in fp32, for
// auxiliary/merge/combine_splits.cu.
struct SplitResults {
  int num_splits;      // 1: there are none
  std::int64_t rows;   // of a split: those of q over all sequences
  float* out_partial;  // (num_splits, rows, num_heads_q, head_dim_v)
  float* lse_partial;  // (num_splits, rows, num_heads_q)
};

struct ForwardArguments {
  CUtensorMap q_map;
  CUtensorMap k_map;
  CUtensorMap v_map;
  CUtensorMap out_map;
  CUtensorMap bias_map;  // of a kernel for biases
  CUtensorMap bits_map;  // of a kernel for block-sparse masks, where there are bits
  ForwardParams params;
  TileSchedule schedule;
  SequenceTable table;
  int key_box_rows;     // of a box of k or v: a tile's, or what lies in one page
  int last_v_box;       // the first column of the last box with columns of v
  int last_out_box;     // and of out
  SplitResults splits;  // all tiles of the first, then of the second, and so on
  // Tickets taken so far, in a MarkedCounter; null where CTAs have a fixed order.
  unsigned long long* tickets;
  unsigned long long call_mark;
  float scale_log2;  // from a score to powers of two: log2(e), times softmax_scale unless
                     // the kernel scales scores itself; positive
};

}  // namespace flash_attn_cuda::sm90
