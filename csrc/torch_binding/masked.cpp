// masked_fwd and masked_bwd: attention of some pairs alone, with a bias on the scores, with a sink.
#include <ATen/core/grad_mode.h>

#include "torch_binding/backward.h"
#include "torch_binding/check.h"
#include "torch_binding/checked_call.h"
#include "torch_binding/forward.h"
#include "torch_binding/functions.h"
#include "torch_binding/to_params.h"

namespace flash_attn_cuda::binding {
namespace {

void check_gradients_exist(const AttentionCall& call, bool wants_dbias) {
  TORCH_CHECK_NOT_IMPLEMENTED(!call.options.deterministic || !call.masks.block_lists.defined(),
                              "deterministic: must be False with block_columns, got True");
  TORCH_CHECK_VALUE(!wants_dbias || call.masks.bias.defined(),
                    "wants_dbias: must be False without a bias, got True");
  TORCH_CHECK_NOT_IMPLEMENTED(!wants_dbias || call.options.softcap == 0.0f,
                              "wants_dbias: must be False with softcap (", call.options.softcap,
                              "), got True");
}

}  // namespace

std::vector<at::Tensor> masked_fwd(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                   const OptionalTensor& out, const OptionalTensor& cu_seqlens_q,
                                   const OptionalTensor& cu_seqlens_k,
                                   const OptionalTensor& seqused_q, const OptionalTensor& seqused_k,
                                   const OptionalTensor& leftpad_k, OptionalInt max_seqlen_q,
                                   OptionalInt max_seqlen_k, const OptionalTensor& alibi_slopes,
                                   double p_dropout, double softmax_scale, bool is_causal,
                                   std::int64_t window_left, std::int64_t window_right,
                                   double softcap, const OptionalTensor& block_rows,
                                   const OptionalTensor& mask_bits, const OptionalTensor& bias,
                                   const OptionalTensor& sink) {
  AttentionCall call = checked_call({.q = q,
                                     .k = k,
                                     .v = v,
                                     .cu_seqlens_q = cu_seqlens_q,
                                     .cu_seqlens_k = cu_seqlens_k,
                                     .seqused_q = seqused_q,
                                     .seqused_k = seqused_k,
                                     .leftpad_k = leftpad_k,
                                     .max_seqlen_q = max_seqlen_q,
                                     .max_seqlen_k = max_seqlen_k,
                                     .alibi_slopes = alibi_slopes,
                                     .block_rows = block_rows,
                                     .mask_bits = mask_bits,
                                     .bias = bias,
                                     .sink = sink,
                                     .p_dropout = p_dropout,
                                     .softmax_scale = softmax_scale,
                                     .is_causal = is_causal,
                                     .window_left = window_left,
                                     .window_right = window_right,
                                     .softcap = softcap});
  const at::NoGradGuard no_grad;
  OutputTensor output("out", out, output_sizes(call), q);
  use_kernel_layout(call);
  ForwardResults results = run_forward_call(call, output.view());
  if (!results.rng_state.defined()) results.rng_state = allocate({0}, at::kLong, q);
  return {output.finish(), std::move(results.softmax_lse), std::move(results.rng_state)};
}

std::vector<at::Tensor> masked_bwd(
    const at::Tensor& dout, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
    const at::Tensor& out, const at::Tensor& softmax_lse, const OptionalTensor& cu_seqlens_q,
    const OptionalTensor& cu_seqlens_k, const OptionalTensor& seqused_q,
    const OptionalTensor& seqused_k, const OptionalTensor& leftpad_k, OptionalInt max_seqlen_q,
    OptionalInt max_seqlen_k, const OptionalTensor& alibi_slopes, double p_dropout,
    double softmax_scale, bool is_causal, std::int64_t window_left, std::int64_t window_right,
    double softcap, bool deterministic, const OptionalTensor& rng_state, const OptionalTensor& dlse,
    const OptionalTensor& block_columns, const OptionalTensor& mask_bits,
    const OptionalTensor& bias, bool wants_dbias, const OptionalTensor& sink,
    bool wants_softmax_d) {
  AttentionCall call = checked_call({.q = q,
                                     .k = k,
                                     .v = v,
                                     .cu_seqlens_q = cu_seqlens_q,
                                     .cu_seqlens_k = cu_seqlens_k,
                                     .seqused_q = seqused_q,
                                     .seqused_k = seqused_k,
                                     .leftpad_k = leftpad_k,
                                     .max_seqlen_q = max_seqlen_q,
                                     .max_seqlen_k = max_seqlen_k,
                                     .alibi_slopes = alibi_slopes,
                                     .block_columns = block_columns,
                                     .mask_bits = mask_bits,
                                     .bias = bias,
                                     .sink = sink,
                                     .p_dropout = p_dropout,
                                     .softmax_scale = softmax_scale,
                                     .is_causal = is_causal,
                                     .window_left = window_left,
                                     .window_right = window_right,
                                     .softcap = softcap,
                                     .deterministic = deterministic});
  check_gradients_exist(call, wants_dbias);
  at::Tensor dbias, dsink;
  if (wants_dbias) dbias = allocate_bias_gradient(call);
  if (sink.has_value()) dsink = allocate(sink->sizes(), at::kFloat, q);
  std::vector<at::Tensor> results =
      backward_outputs(std::move(call), {.dout = dout,
                                         .out = out,
                                         .softmax_lse = softmax_lse,
                                         .dq = std::nullopt,
                                         .dk = std::nullopt,
                                         .dv = std::nullopt,
                                         .rng_state = rng_state,
                                         .dlse = dlse,
                                         .dbias = dbias,
                                         .dsink = dsink,
                                         .wants_softmax_d = wants_softmax_d});
  results.push_back(wants_dbias ? std::move(dbias) : allocate({0}, at::kFloat, q));
  results.push_back(sink.has_value() ? std::move(dsink) : allocate({0}, at::kFloat, q));
  return results;
}

}  // namespace flash_attn_cuda::binding
