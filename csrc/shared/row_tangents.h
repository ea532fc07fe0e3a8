// What kernels of derivatives in a direction read of a query row, whatever their family.
#pragma once

#include "flash_attn/params.h"
#include "shared/online_softmax.h"
#include "shared/scores/score_scale.h"
#include "shared/sequence/sequence.h"

namespace flash_attn_cuda {

// Where a head's rows of LSE, or of its tangent, begin.
CUTE_DEVICE float* lse_rows(RowView<float> const& view, Sequence const& sequence, int head) {
  return view.data + sequence.batch_q * view.batch_stride + head * view.head_stride +
         sequence.row_q;
}

// LSE of a row in powers of two: +inf, of which P is 0, for a row without a key, one that does not
// attend, and one of which it says too little.
CUTE_DEVICE float telling_lse_log2(float const* rows, Sequence const& sequence, int query) {
  const float lse = query < sequence.seqlen_q ? rows[query] : -INFINITY;
  return fabsf(lse) > largest_lse ? INFINITY : lse * log2e;
}

// The sink's probability times its tangent, what it adds to that of LSE; by the first lane of a
// row's four.
CUTE_DEVICE float tangent_of_sink(ForwardParams const& params, int head, float lse_log2) {
  if (params.tangents.sink == nullptr || params.score.sink == nullptr || threadIdx.x % 4 != 0)
    return 0.0f;
  return fast_exp2(params.score.sink[head] * log2e - lse_log2) * params.tangents.sink[head];
}

}  // namespace flash_attn_cuda
