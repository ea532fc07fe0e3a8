// One backward call on checked tensors.
#pragma once

#include <ATen/core/Tensor.h>

#include "flash_attn/params.h"
#include "torch_binding/to_params.h"

namespace flash_attn_cuda::binding {

// What the forward had and made, and what came back. Inputs as check_inputs leaves them.
struct BackwardInputs {
  at::Tensor dout;
  at::Tensor q;
  at::Tensor k;
  at::Tensor v;
  at::Tensor out;
  at::Tensor softmax_lse;
  at::Tensor dlse;  // undefined for none
};

struct GradientViews {
  TensorView dq;
  TensorView dk;
  TensorView dv;
};

// Writes the gradients; returns softmax_d (batch, heads_q, seqlen_q rounded up to 128).
at::Tensor run_backward_call(const BackwardInputs& inputs, const GradientViews& gradients,
                             Window window, float softmax_scale);

}  // namespace flash_attn_cuda::binding
