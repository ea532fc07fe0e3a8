// One backward call on checked tensors.
#pragma once

#include <ATen/core/Tensor.h>

#include "flash_attn/params.h"
#include "torch_binding/call.h"

namespace flash_attn_cuda::binding {

// What the forward had and made, and what came back.
struct BackwardInputs {
  AttentionCall call;
  at::Tensor dout;
  at::Tensor out;
  at::Tensor softmax_lse;
  at::Tensor dlse;       // undefined for none
  at::Tensor rng_state;  // undefined without dropout
};

struct GradientViews {
  TensorView dq;
  TensorView dk;
  TensorView dv;
};

// softmax_d (batch, heads_q, seqlen_q rounded up to 128), packed (heads_q, total_q), for
// run_backward_call to write; zero behind seqlen_q.
at::Tensor allocate_softmax_d(const at::Tensor& q);

// Writes the gradients, and softmax_d unless it is undefined. dk and dv of left padding are not
// written: the caller fills them with zeros first.
void run_backward_call(const BackwardInputs& inputs, const GradientViews& gradients,
                       const at::Tensor& softmax_d);

}  // namespace flash_attn_cuda::binding
