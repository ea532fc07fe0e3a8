// The small kernels around the backward's main kernel.
#pragma once

#include "flash_attn/api.h"

namespace flash_attn_cuda {

// softmax_d = rowsum(dO * O) - dlse; lse in powers of two, +inf where a row has no key; zeros for
// the dQ sum.
void backward_preprocess(const BackwardPlan& plan, const BackwardParams& params, Stream stream);

// dk, dv = the sums of the splits' fp32 partials. Nothing to do when there is one split.
void reduce_dkv(const BackwardPlan& plan, const BackwardParams& params, Stream stream);

}  // namespace flash_attn_cuda
