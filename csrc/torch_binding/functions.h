// The functions of flash_attn_cuda._C that this package calls, which module.cpp binds and
// documents. FlashAttention-2's are in flash_attn_2.cpp.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <tuple>
#include <vector>

#include "torch_binding/call.h"

namespace flash_attn_cuda::binding {

std::tuple<at::Tensor, OptionalTensor> attention(const at::Tensor& q, const at::Tensor& k,
                                                 const at::Tensor& v,
                                                 std::optional<double> softmax_scale, bool causal,
                                                 bool returns_lse);

Results forward(const AttentionCall& call, bool returns_lse);

Gradients backward(const AttentionCall& call, const Incoming& incoming);

std::tuple<at::Tensor, at::Tensor, at::Tensor> jvp(const AttentionCall& call,
                                                   const Incoming& incoming,
                                                   const Tangents& tangents);

Gradients hvp(const AttentionCall& call, const Incoming& incoming, const Tangents& tangents);

std::vector<at::Tensor> combine(const at::Tensor& out_partial, const at::Tensor& lse_partial,
                                const OptionalTensor& out, std::optional<at::ScalarType> out_dtype);

void merge(const at::Tensor& out, const at::Tensor& softmax_lse, const at::Tensor& part,
           const at::Tensor& part_lse, const OptionalTensor& result,
           const OptionalTensor& rounding);

at::Tensor rotary(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin,
                  std::int64_t seqlen_offset, const OptionalTensor& seqlen_offsets,
                  const OptionalTensor& cu_seqlens, bool interleaved, bool inplace, bool conjugate);

}  // namespace flash_attn_cuda::binding
