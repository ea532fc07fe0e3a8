// The small kernels around the main ones.
#pragma once

#include "flash_attn/api.h"

namespace flash_attn_cuda {

// What the table is made of.
struct SequenceTableRequest {
  SequenceParams sequences;
  AttentionShape shape;
  bool is_paged;       // cu_seqlens_k, if given, tells lengths alone
  bool tiles_of_keys;  // the backward's main kernel has tiles of keys
  DeviceErrors* errors;
  void* workspace;
};

// Makes the table of a packed call (shared/sequence.h) in its workspace. Nothing to do for others.
void make_sequence_table(const SequenceTablePlan& plan, const SequenceTableRequest& request,
                         Stream stream);

// softmax_d = rowsum(dO * O) - dlse; lse in powers of two, +inf where a row has no key; zeros for
// the dQ sum.
void backward_preprocess(const BackwardPlan& plan, const BackwardParams& params, Stream stream);

// dk, dv = the sums of the splits' fp32 partials. Nothing to do when there is one split.
void reduce_dkv(const BackwardPlan& plan, const BackwardParams& params, Stream stream);

}  // namespace flash_attn_cuda
