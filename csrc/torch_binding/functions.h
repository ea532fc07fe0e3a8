// The functions of flash_attn_cuda._C; module.cpp binds and documents them.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <tuple>
#include <vector>

namespace flash_attn_cuda::binding {

using OptionalTensor = std::optional<at::Tensor>;

std::tuple<at::Tensor, at::Tensor> attention(const at::Tensor& q, const at::Tensor& k,
                                             const at::Tensor& v,
                                             std::optional<double> softmax_scale, bool causal);

std::vector<at::Tensor> fwd(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            const OptionalTensor& out, const OptionalTensor& alibi_slopes,
                            double p_dropout, double softmax_scale, bool is_causal,
                            std::int64_t window_left, std::int64_t window_right, double softcap,
                            bool return_softmax,
                            const std::optional<at::Generator>& unused_generator);

std::vector<at::Tensor> bwd(const at::Tensor& dout, const at::Tensor& q, const at::Tensor& k,
                            const at::Tensor& v, const at::Tensor& out,
                            const at::Tensor& softmax_lse, const OptionalTensor& dq,
                            const OptionalTensor& dk, const OptionalTensor& dv,
                            const OptionalTensor& alibi_slopes, double p_dropout,
                            double softmax_scale, bool is_causal, std::int64_t window_left,
                            std::int64_t window_right, double softcap, bool deterministic,
                            const std::optional<at::Generator>& unused_generator,
                            const OptionalTensor& rng_state, const OptionalTensor& dlse);

}  // namespace flash_attn_cuda::binding
