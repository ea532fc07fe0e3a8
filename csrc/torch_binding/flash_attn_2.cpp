// FlashAttention-2's functions, for callers that know its compiled module: its arguments in its
// order. Each describes the call, which then goes the way of forward and backward.
#include <ATen/core/grad_mode.h>

#include "torch_binding/backward.h"
#include "torch_binding/check.h"
#include "torch_binding/checked_call.h"
#include "torch_binding/forward.h"
#include "torch_binding/functions.h"
#include "torch_binding/to_params.h"

namespace flash_attn_cuda::binding {
namespace {

at::Tensor or_empty(at::Tensor tensor, at::ScalarType dtype, const at::Tensor& q) {
  return tensor.defined() ? tensor : allocate({0}, dtype, q);
}

at::Tensor or_undefined(const OptionalTensor& tensor) { return tensor.value_or(at::Tensor()); }

// [out, softmax_lse, S_dmask, rng_state]
std::vector<at::Tensor> forward_outputs(const AttentionCall& call) {
  const at::NoGradGuard no_grad;
  Results results = run_forward_call(checked_call(call, Pass::forward, "p_dropout"));
  return {std::move(results.out), std::move(results.softmax_lse),
          or_empty(std::move(results.S_dmask), call.q.scalar_type(), call.q),
          or_empty(std::move(results.rng_state), at::kLong, call.q)};
}

// [dq, dk, dv, softmax_d]
std::vector<at::Tensor> backward_outputs(const AttentionCall& call, Incoming incoming) {
  incoming.wants_softmax_d = true;
  const at::NoGradGuard no_grad;
  Gradients results = run_backward_call(checked_call(call, Pass::backward, "p_dropout"), incoming);
  return {std::move(results.dq), std::move(results.dk), std::move(results.dv),
          std::move(results.softmax_d)};
}

}  // namespace

std::vector<at::Tensor> fwd(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            const OptionalTensor& out, const OptionalTensor& alibi_slopes,
                            double p_dropout, double softmax_scale, bool is_causal,
                            std::int64_t window_left, std::int64_t window_right, double softcap,
                            bool return_softmax, const OptionalGenerator& unused_generator) {
  refuse_generator(unused_generator.has_value());
  return forward_outputs({.q = q,
                          .k = k,
                          .v = v,
                          .dropout_p = p_dropout,
                          .softmax_scale = softmax_scale,
                          .causal = is_causal,
                          .window_size_left = window_left,
                          .window_size_right = window_right,
                          .softcap = softcap,
                          .alibi_slopes = or_undefined(alibi_slopes),
                          .return_softmax = return_softmax,
                          .out = or_undefined(out)});
}

std::vector<at::Tensor> varlen_fwd(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const OptionalTensor& out,
    const at::Tensor& cu_seqlens_q, const OptionalTensor& cu_seqlens_k,
    const OptionalTensor& seqused_k, const OptionalTensor& leftpad_k,
    const OptionalTensor& block_table, const OptionalTensor& alibi_slopes,
    std::int64_t max_seqlen_q, std::int64_t max_seqlen_k, double p_dropout, double softmax_scale,
    bool /*zero_tensors: every row is written anyway*/, bool is_causal, std::int64_t window_left,
    std::int64_t window_right, double softcap, bool return_softmax,
    const OptionalGenerator& unused_generator, std::int64_t num_splits) {
  refuse_generator(unused_generator.has_value());
  return forward_outputs({.q = q,
                          .k = k,
                          .v = v,
                          .dropout_p = p_dropout,
                          .softmax_scale = softmax_scale,
                          .causal = is_causal,
                          .window_size_left = window_left,
                          .window_size_right = window_right,
                          .softcap = softcap,
                          .alibi_slopes = or_undefined(alibi_slopes),
                          .cu_seqlens_q = cu_seqlens_q,
                          .cu_seqlens_k = or_undefined(cu_seqlens_k),
                          .seqused_k = or_undefined(seqused_k),
                          .leftpad_k = or_undefined(leftpad_k),
                          .max_seqlen_q = max_seqlen_q,
                          .max_seqlen_k = max_seqlen_k,
                          .block_table = or_undefined(block_table),
                          .return_softmax = return_softmax,
                          .num_splits = num_splits,
                          .out = or_undefined(out)});
}

std::vector<at::Tensor> bwd(const at::Tensor& dout, const at::Tensor& q, const at::Tensor& k,
                            const at::Tensor& v, const at::Tensor& out,
                            const at::Tensor& softmax_lse, const OptionalTensor& dq,
                            const OptionalTensor& dk, const OptionalTensor& dv,
                            const OptionalTensor& alibi_slopes, double p_dropout,
                            double softmax_scale, bool is_causal, std::int64_t window_left,
                            std::int64_t window_right, double softcap, bool deterministic,
                            const OptionalGenerator& unused_generator,
                            const OptionalTensor& rng_state) {
  refuse_generator(unused_generator.has_value());
  return backward_outputs({.q = q,
                           .k = k,
                           .v = v,
                           .dropout_p = p_dropout,
                           .softmax_scale = softmax_scale,
                           .causal = is_causal,
                           .window_size_left = window_left,
                           .window_size_right = window_right,
                           .softcap = softcap,
                           .alibi_slopes = or_undefined(alibi_slopes),
                           .deterministic = deterministic},
                          {.dout = dout,
                           .out = out,
                           .softmax_lse = softmax_lse,
                           .rng_state = or_undefined(rng_state),
                           .dq = or_undefined(dq),
                           .dk = or_undefined(dk),
                           .dv = or_undefined(dv)});
}

std::vector<at::Tensor> varlen_bwd(
    const at::Tensor& dout, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
    const at::Tensor& out, const at::Tensor& softmax_lse, const OptionalTensor& dq,
    const OptionalTensor& dk, const OptionalTensor& dv, const at::Tensor& cu_seqlens_q,
    const at::Tensor& cu_seqlens_k, const OptionalTensor& alibi_slopes, std::int64_t max_seqlen_q,
    std::int64_t max_seqlen_k, double p_dropout, double softmax_scale,
    bool /*zero_tensors: every row is written anyway*/, bool is_causal, std::int64_t window_left,
    std::int64_t window_right, double softcap, bool deterministic,
    const OptionalGenerator& unused_generator, const OptionalTensor& rng_state) {
  refuse_generator(unused_generator.has_value());
  return backward_outputs({.q = q,
                           .k = k,
                           .v = v,
                           .dropout_p = p_dropout,
                           .softmax_scale = softmax_scale,
                           .causal = is_causal,
                           .window_size_left = window_left,
                           .window_size_right = window_right,
                           .softcap = softcap,
                           .alibi_slopes = or_undefined(alibi_slopes),
                           .deterministic = deterministic,
                           .cu_seqlens_q = cu_seqlens_q,
                           .cu_seqlens_k = cu_seqlens_k,
                           .max_seqlen_q = max_seqlen_q,
                           .max_seqlen_k = max_seqlen_k},
                          {.dout = dout,
                           .out = out,
                           .softmax_lse = softmax_lse,
                           .rng_state = or_undefined(rng_state),
                           .dq = or_undefined(dq),
                           .dk = or_undefined(dk),
                           .dv = or_undefined(dv)});
}

std::vector<at::Tensor> fwd_kvcache(
    const at::Tensor& q, const at::Tensor& kcache, const at::Tensor& vcache,
    const OptionalTensor& k, const OptionalTensor& v, const OptionalTensor& seqlens_k,
    const OptionalTensor& rotary_cos, const OptionalTensor& rotary_sin,
    const OptionalTensor& cache_batch_idx, const OptionalTensor& leftpad_k,
    const OptionalTensor& block_table, const OptionalTensor& alibi_slopes,
    const OptionalTensor& out, double softmax_scale, bool is_causal, std::int64_t window_left,
    std::int64_t window_right, double softcap, bool is_rotary_interleaved,
    std::int64_t num_splits) {
  std::vector<at::Tensor> results =
      forward_outputs({.q = q,
                       .k = kcache,
                       .v = vcache,
                       .softmax_scale = softmax_scale,
                       .causal = is_causal,
                       .window_size_left = window_left,
                       .window_size_right = window_right,
                       .softcap = softcap,
                       .alibi_slopes = or_undefined(alibi_slopes),
                       .seqused_k = or_undefined(seqlens_k),
                       .leftpad_k = or_undefined(leftpad_k),
                       .block_table = or_undefined(block_table),
                       .num_splits = num_splits,
                       .over_cache = true,
                       .cache_batch_idx = or_undefined(cache_batch_idx),
                       .k_new = or_undefined(k),
                       .v_new = or_undefined(v),
                       .rotary_cos = or_undefined(rotary_cos),
                       .rotary_sin = or_undefined(rotary_sin),
                       .rotary_interleaved = is_rotary_interleaved,
                       .out = or_undefined(out)});
  results.resize(2);  // no dropout
  return results;
}

}  // namespace flash_attn_cuda::binding
