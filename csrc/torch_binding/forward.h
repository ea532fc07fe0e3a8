// The forward of a checked call.
#pragma once

#include <ATen/core/Tensor.h>

#include "torch_binding/arguments.h"
#include "torch_binding/call.h"

namespace flash_attn_cuda::binding {

// Beside the output. What is undefined was not wanted, or there is no dropout.
struct ForwardResults {
  at::Tensor out;
  at::Tensor softmax_lse;
  at::Tensor probabilities;  // S_dmask
  at::Tensor rng_state;
};

// `call` is what checked_call made of `given`, and is left with the tensors that were computed
// with. Outside autograd.
ForwardResults run_forward_call(const CallArguments& given, AttentionCall& call);

}  // namespace flash_attn_cuda::binding
