#include "torch_binding/backward.h"

#include <ATen/core/grad_mode.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "flash_attn/api.h"
#include "torch_binding/check.h"
#include "torch_binding/checked_call.h"
#include "torch_binding/errors.h"
#include "torch_binding/functions.h"
#include "torch_binding/rng.h"
#include "torch_binding/to_params.h"

namespace flash_attn_cuda::binding {

std::vector<at::Tensor> backward_outputs(AttentionCall call, const BackwardArguments& given) {
  const at::Tensor& q = call.q;
  const at::DimVector outputs = output_sizes(call);
  check_like("dout", given.dout, outputs, q.scalar_type(), q);
  check_like("out", given.out, outputs, q.scalar_type(), q);
  const std::int64_t packed_rows[] = {q.size(1), q.size(0)};
  const std::int64_t dense_rows[] = {q.size(0), q.dim() == 4 ? q.size(2) : 0, q.size(1)};
  const at::IntArrayRef rows =
      call.is_packed() ? at::IntArrayRef(packed_rows) : at::IntArrayRef(dense_rows);
  check_like("softmax_lse", given.softmax_lse, rows, at::kFloat, q);
  if (given.dlse.has_value()) check_like("dlse", *given.dlse, rows, at::kFloat, q);
  const at::Tensor rng_state = checked_rng_state(given.rng_state, call.options.p_dropout, q);

  const at::NoGradGuard no_grad;
  OutputTensor grad_q("dq", given.dq, q.sizes(), q);
  OutputTensor grad_k("dk", given.dk, call.k.sizes(), q);
  OutputTensor grad_v("dv", given.dv, call.v.sizes(), q);
  if (call.leftpad_k.defined()) {
    grad_k.written().zero_();
    grad_v.written().zero_();
  }
  at::Tensor softmax_d;
  if (given.wants_softmax_d) softmax_d = allocate_softmax_d(q);
  run_backward_call({.call = std::move(call),
                     .dout = given.dout,
                     .out = given.out,
                     .softmax_lse = given.softmax_lse,
                     .dlse = given.dlse.value_or(at::Tensor()),
                     .rng_state = rng_state},
                    {.dq = grad_q.view(),
                     .dk = grad_k.view(),
                     .dv = grad_v.view(),
                     .dbias = given.dbias,
                     .dsink = given.dsink},
                    softmax_d);
  if (!given.wants_softmax_d) softmax_d = allocate({0}, at::kFloat, given.dout);
  return {grad_q.finish(), grad_k.finish(), grad_v.finish(), std::move(softmax_d)};
}

at::Tensor allocate_softmax_d(const at::Tensor& q) {
  if (q.dim() == 3) return allocate_rows(q, q.size(0));
  const std::int64_t seqlen = q.size(1);
  const std::int64_t rounded = round_up_seqlen(static_cast<int>(seqlen));
  at::Tensor softmax_d = allocate_rows(q, rounded);
  // No kernel writes there, and what a function returns must be the same every time.
  if (rounded > seqlen) softmax_d.narrow(2, seqlen, rounded - seqlen).zero_();
  return softmax_d;
}

void run_backward_call(const BackwardInputs& inputs, const GradientViews& gradients,
                       const at::Tensor& softmax_d) {
  AttentionCall call = inputs.call;
  const c10::DeviceIndex device = call.q.device().index();
  const c10::cuda::CUDAGuard guard(device);
  const Stream stream = c10::cuda::getCurrentCUDAStream(device).stream();
  const bool has_device_contents = call.has_device_contents();
  use_kernel_layout(call);
  const at::Tensor out = with_kernel_layout(inputs.out);
  const at::Tensor dout = with_kernel_layout(inputs.dout);
  const at::Tensor softmax_lse = contiguous(inputs.softmax_lse);
  const at::Tensor dlse = inputs.dlse.defined() ? contiguous(inputs.dlse) : at::Tensor();

  BackwardParams params{
      .dtype = dtype_of(call.q),
      .shape = shape_of(call),
      .sequences = sequence_params(call),
      .window = call.options.window,
      .score = score_params(call),
      .dropout = {.threshold = dropout_threshold(call.options.p_dropout)},
      .sparsity = sparsity_params(call),
      .deterministic = call.options.deterministic,
      .q = input_view(call.q),
      .k = input_view(call.k),
      .v = input_view(call.v),
      .out = input_view(out),
      .dout = input_view(dout),
      .dq = gradients.dq,
      .dk = gradients.dk,
      .dv = gradients.dv,
      .dbias = bias_gradient(call, gradients.dbias),
      .dsink = gradients.dsink.defined() ? gradients.dsink.mutable_data_ptr<float>() : nullptr,
      .lse = input_rows(softmax_lse),
      .dlse = input_rows(dlse),
      .softmax_d = softmax_d.defined() ? output_rows(softmax_d) : RowView<float>{},
      .errors = has_device_contents ? device_record(device) : nullptr};
  if (inputs.rng_state.defined()) params.dropout.rng = rng_of_state(inputs.rng_state);
  const BackwardPlan plan = plan_backward(params, device_info(device));
  const at::Tensor workspace =
      allocate({static_cast<std::int64_t>(plan.workspace_bytes)}, at::kByte, call.q);
  params.workspace = workspace.mutable_data_ptr();
  run_backward(plan, params, stream);
  if (has_device_contents) raise_if_checking(device, stream);
}

std::vector<at::Tensor> bwd(const at::Tensor& dout, const at::Tensor& q, const at::Tensor& k,
                            const at::Tensor& v, const at::Tensor& out,
                            const at::Tensor& softmax_lse, const OptionalTensor& dq,
                            const OptionalTensor& dk, const OptionalTensor& dv,
                            const OptionalTensor& alibi_slopes, double p_dropout,
                            double softmax_scale, bool is_causal, std::int64_t window_left,
                            std::int64_t window_right, double softcap, bool deterministic,
                            const OptionalGenerator& unused_generator,
                            const OptionalTensor& rng_state, const OptionalTensor& dlse) {
  refuse_generator(unused_generator.has_value());
  return backward_outputs(checked_call({.q = q,
                                        .k = k,
                                        .v = v,
                                        .alibi_slopes = alibi_slopes,
                                        .p_dropout = p_dropout,
                                        .softmax_scale = softmax_scale,
                                        .is_causal = is_causal,
                                        .window_left = window_left,
                                        .window_right = window_right,
                                        .softcap = softcap,
                                        .deterministic = deterministic}),
                          {dout, out, softmax_lse, dq, dk, dv, rng_state, dlse});
}

std::vector<at::Tensor> varlen_bwd(
    const at::Tensor& dout, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
    const at::Tensor& out, const at::Tensor& softmax_lse, const OptionalTensor& dq,
    const OptionalTensor& dk, const OptionalTensor& dv, const at::Tensor& cu_seqlens_q,
    const at::Tensor& cu_seqlens_k, const OptionalTensor& alibi_slopes, std::int64_t max_seqlen_q,
    std::int64_t max_seqlen_k, double p_dropout, double softmax_scale,
    bool /*zero_tensors: every row is written anyway*/, bool is_causal, std::int64_t window_left,
    std::int64_t window_right, double softcap, bool deterministic,
    const OptionalGenerator& unused_generator, const OptionalTensor& rng_state,
    const OptionalTensor& dlse, const OptionalTensor& seqused_q, const OptionalTensor& seqused_k,
    const OptionalTensor& leftpad_k) {
  refuse_generator(unused_generator.has_value());
  return backward_outputs(checked_call({.q = q,
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
                                        .p_dropout = p_dropout,
                                        .softmax_scale = softmax_scale,
                                        .is_causal = is_causal,
                                        .window_left = window_left,
                                        .window_right = window_right,
                                        .softcap = softcap,
                                        .deterministic = deterministic}),
                          {dout, out, softmax_lse, dq, dk, dv, rng_state, dlse});
}

}  // namespace flash_attn_cuda::binding
