// One backward call on checked tensors.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "flash_attn/params.h"
#include "torch_binding/call.h"
#include "torch_binding/check.h"

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
  at::Tensor dbias;  // of allocate_bias_gradient; undefined: not wanted
  at::Tensor dsink;  // fp32 (heads_q), of the call's sink; undefined: not wanted
};

// What the backward functions share beyond the forward's arguments, as a caller gave it.
struct BackwardArguments {
  const at::Tensor& dout;
  const at::Tensor& out;
  const at::Tensor& softmax_lse;
  const OptionalTensor& dq;
  const OptionalTensor& dk;
  const OptionalTensor& dv;
  const OptionalTensor& rng_state;
  const OptionalTensor& dlse;
  at::Tensor dbias = {};  // as in GradientViews
  at::Tensor dsink = {};
  bool wants_softmax_d = true;
};

// softmax_d (batch, heads_q, seqlen_q rounded up to 128), packed (heads_q, total_q), for
// run_backward_call to write; zero behind seqlen_q.
at::Tensor allocate_softmax_d(const at::Tensor& q);

// Writes the gradients, and softmax_d unless it is undefined. dk and dv of left padding are not
// written: the caller fills them with zeros first.
void run_backward_call(const BackwardInputs& inputs, const GradientViews& gradients,
                       const at::Tensor& softmax_d);

// Checks what is given and runs the call: [dq, dk, dv, softmax_d], FlashAttention-2's outputs; the
// last is empty where it is not wanted.
std::vector<at::Tensor> backward_outputs(AttentionCall call, const BackwardArguments& given);

}  // namespace flash_attn_cuda::binding
