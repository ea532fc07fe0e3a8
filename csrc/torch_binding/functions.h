// The functions of flash_attn_cuda._C. attention, forward and backward are what this package calls;
// the others have FlashAttention-2's arguments and go the same way (flash_attn_2.cpp). module.cpp
// binds and documents them.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <tuple>
#include <vector>

#include "torch_binding/call.h"

namespace flash_attn_cuda::binding {

using OptionalGenerator = std::optional<at::Generator>;

std::tuple<at::Tensor, OptionalTensor> attention(const at::Tensor& q, const at::Tensor& k,
                                                 const at::Tensor& v,
                                                 std::optional<double> softmax_scale, bool causal,
                                                 bool returns_lse);

Results forward(const AttentionCall& call, bool returns_lse);

Gradients backward(const AttentionCall& call, const Incoming& incoming);

std::vector<at::Tensor> fwd(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            const OptionalTensor& out, const OptionalTensor& alibi_slopes,
                            double p_dropout, double softmax_scale, bool is_causal,
                            std::int64_t window_left, std::int64_t window_right, double softcap,
                            bool return_softmax, const OptionalGenerator& unused_generator);

std::vector<at::Tensor> varlen_fwd(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const OptionalTensor& out,
    const at::Tensor& cu_seqlens_q, const OptionalTensor& cu_seqlens_k,
    const OptionalTensor& seqused_k, const OptionalTensor& leftpad_k,
    const OptionalTensor& block_table, const OptionalTensor& alibi_slopes,
    std::int64_t max_seqlen_q, std::int64_t max_seqlen_k, double p_dropout, double softmax_scale,
    bool zero_tensors, bool is_causal, std::int64_t window_left, std::int64_t window_right,
    double softcap, bool return_softmax, const OptionalGenerator& unused_generator,
    std::int64_t num_splits);

std::vector<at::Tensor> bwd(const at::Tensor& dout, const at::Tensor& q, const at::Tensor& k,
                            const at::Tensor& v, const at::Tensor& out,
                            const at::Tensor& softmax_lse, const OptionalTensor& dq,
                            const OptionalTensor& dk, const OptionalTensor& dv,
                            const OptionalTensor& alibi_slopes, double p_dropout,
                            double softmax_scale, bool is_causal, std::int64_t window_left,
                            std::int64_t window_right, double softcap, bool deterministic,
                            const OptionalGenerator& unused_generator,
                            const OptionalTensor& rng_state);

std::vector<at::Tensor> varlen_bwd(
    const at::Tensor& dout, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
    const at::Tensor& out, const at::Tensor& softmax_lse, const OptionalTensor& dq,
    const OptionalTensor& dk, const OptionalTensor& dv, const at::Tensor& cu_seqlens_q,
    const at::Tensor& cu_seqlens_k, const OptionalTensor& alibi_slopes, std::int64_t max_seqlen_q,
    std::int64_t max_seqlen_k, double p_dropout, double softmax_scale, bool zero_tensors,
    bool is_causal, std::int64_t window_left, std::int64_t window_right, double softcap,
    bool deterministic, const OptionalGenerator& unused_generator, const OptionalTensor& rng_state);

std::vector<at::Tensor> fwd_kvcache(
    const at::Tensor& q, const at::Tensor& kcache, const at::Tensor& vcache,
    const OptionalTensor& k, const OptionalTensor& v, const OptionalTensor& seqlens_k,
    const OptionalTensor& rotary_cos, const OptionalTensor& rotary_sin,
    const OptionalTensor& cache_batch_idx, const OptionalTensor& leftpad_k,
    const OptionalTensor& block_table, const OptionalTensor& alibi_slopes,
    const OptionalTensor& out, double softmax_scale, bool is_causal, std::int64_t window_left,
    std::int64_t window_right, double softcap, bool is_rotary_interleaved, std::int64_t num_splits);

std::vector<at::Tensor> combine(const at::Tensor& out_partial, const at::Tensor& lse_partial,
                                const OptionalTensor& out, std::optional<at::ScalarType> out_dtype);

void merge(const at::Tensor& out, const at::Tensor& softmax_lse, const at::Tensor& part,
           const at::Tensor& part_lse, const OptionalTensor& result);

at::Tensor rotary(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin,
                  std::int64_t seqlen_offset, const OptionalTensor& seqlen_offsets,
                  const OptionalTensor& cu_seqlens, bool interleaved, bool inplace, bool conjugate);

}  // namespace flash_attn_cuda::binding
