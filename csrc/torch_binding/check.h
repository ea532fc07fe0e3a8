// Checks of what a caller passed. Each throws naming the argument, the rule and the value, and
// costs a few comparisons when nothing is wrong: TypeError for a dtype, ValueError for a shape, a
// device or a number, NotImplementedError for an argument that this version refuses.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "flash_attn/params.h"

namespace flash_attn_cuda::binding {

// q (batch, seqlen_q, heads_q, head_dim), k and v (batch, seqlen_k, heads_k, head_dim), on one CUDA
// device, of one 16-bit dtype.
void check_inputs(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v);

// `tensor` has this shape and dtype and lies on the device of q.
void check_like(const char* name, const at::Tensor& tensor, at::IntArrayRef shape,
                at::ScalarType dtype, const at::Tensor& q);

// The fp32 that kernels use.
float checked_softmax_scale(double softmax_scale);

// The window of FlashAttention-2's three mask arguments, where negative means unlimited.
Window checked_window(bool is_causal, std::int64_t left, std::int64_t right);

// Arguments of FlashAttention-2 that forward and backward share and this version refuses.
void refuse_later_arguments(double p_dropout, double softcap, bool has_alibi_slopes,
                            bool has_generator);

}  // namespace flash_attn_cuda::binding
