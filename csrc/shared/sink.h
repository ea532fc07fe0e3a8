// The logit that only the softmax's denominator knows of (OpenAI, "gpt-oss-120b & gpt-oss-20b Model
// Card", 2025, section 2.2).
#pragma once

#include "flash_attn/params.h"
#include "shared/online_softmax.h"

namespace flash_attn_cuda {

// -inf for none.
CUTE_DEVICE float sink_of(const ScoreParams& params, int head) {
  return params.sink == nullptr ? -INFINITY : params.sink[head];
}

}  // namespace flash_attn_cuda
