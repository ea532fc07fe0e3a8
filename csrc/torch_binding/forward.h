// The forward of a checked call.
#pragma once

#include "torch_binding/call.h"

namespace flash_attn_cuda::binding {

// Outside autograd. What is undefined was not wanted, or there is no dropout.
Results run_forward_call(const AttentionCall& call);

}  // namespace flash_attn_cuda::binding
