// The small kernels around the main ones.
#pragma once

#include <algorithm>
#include <bit>

#include "flash_attn/api.h"

namespace flash_attn_cuda {

// What the table is made of.
struct SequenceTableRequest {
  SequenceParams sequences;
  AttentionShape shape;
  bool is_paged;       // cu_seqlens_k, if given, tells lengths alone
  bool tiles_of_keys;  // the backward's main kernel has tiles of keys
  bool drops;          // first_q and first_k of origins count
  int most_queries;    // that a tree mask has columns for; without one 0
  DeviceErrors* errors;
  void* workspace;
};

// Makes the table of a packed call (shared/sequence/sequence.h) in its workspace. Nothing to do for
// others.
void make_sequence_table(const SequenceTablePlan& plan, const SequenceTableRequest& request,
                         Stream stream);

// How backward_preprocess goes over query rows: 16 bytes of O a lane, up to a warp's, and as many
// more lanes as keep the rows of a block in one query tile.
inline constexpr int preprocess_threads = 256;
constexpr int preprocess_lanes(const BackwardParams& params, int tile_rows) {
  const int elements = elements_of_vector(params.dtype);
  const int vectors = (params.shape.head_dim_v + elements - 1) / elements;
  const auto of_row = static_cast<int>(std::bit_ceil(static_cast<unsigned>(vectors)));
  return std::max(std::min(of_row, 32), preprocess_threads / tile_rows);
}
constexpr int preprocess_blocks_per_tile(const BackwardParams& params, int tile_rows) {
  return tile_rows * preprocess_lanes(params, tile_rows) / preprocess_threads;
}

// softmax_d = rowsum(dO * O) - dlse; lse in powers of two, +inf where a row has no key; zeros for
// the dQ sum; with dsink, the sums of its blocks' rows, and of those unless the main kernel does
// it.
void backward_preprocess(const BackwardPlan& plan, const BackwardParams& params, Stream stream);

// dk, dv = the sums of the splits' fp32 partials. Nothing to do where no partials are left.
void reduce_dkv(const BackwardPlan& plan, const BackwardParams& params, Stream stream);

}  // namespace flash_attn_cuda
