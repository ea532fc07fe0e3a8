#include "torch_binding/backward.h"

#include <ATen/core/grad_mode.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "flash_attn/api.h"
#include "torch_binding/check.h"
#include "torch_binding/functions.h"

namespace flash_attn_cuda::binding {

at::Tensor run_backward_call(const BackwardInputs& inputs, const GradientViews& gradients,
                             Window window, float softmax_scale) {
  const c10::DeviceIndex device = inputs.q.device().index();
  const c10::cuda::CUDAGuard guard(device);
  const at::Tensor q = with_kernel_layout(inputs.q);
  const at::Tensor k = with_kernel_layout(inputs.k);
  const at::Tensor v = with_kernel_layout(inputs.v);
  const at::Tensor out = with_kernel_layout(inputs.out);
  const at::Tensor dout = with_kernel_layout(inputs.dout);
  const at::Tensor softmax_lse = inputs.softmax_lse.contiguous();
  const at::Tensor dlse = inputs.dlse.defined() ? inputs.dlse.contiguous() : at::Tensor();

  const AttentionShape shape = shape_of(q, k);
  at::Tensor softmax_d = allocate(
      {shape.batch_size, shape.num_heads_q, round_up_seqlen(shape.seqlen_q)}, at::kFloat, q);
  BackwardParams params{.dtype = dtype_of(q),
                        .shape = shape,
                        .window = window,
                        .softmax_scale = softmax_scale,
                        .q = input_view(q),
                        .k = input_view(k),
                        .v = input_view(v),
                        .out = input_view(out),
                        .dout = input_view(dout),
                        .dq = gradients.dq,
                        .dk = gradients.dk,
                        .dv = gradients.dv,
                        .lse = softmax_lse.const_data_ptr<float>(),
                        .dlse = dlse.defined() ? dlse.const_data_ptr<float>() : nullptr,
                        .softmax_d = softmax_d.mutable_data_ptr<float>()};
  const BackwardPlan plan = plan_backward(params, device_info(device));
  const at::Tensor workspace =
      allocate({static_cast<std::int64_t>(plan.workspace_bytes)}, at::kByte, q);
  params.workspace = workspace.mutable_data_ptr();
  run_backward(plan, params, c10::cuda::getCurrentCUDAStream(device).stream());
  return softmax_d;
}

std::vector<at::Tensor> bwd(const at::Tensor& dout, const at::Tensor& q, const at::Tensor& k,
                            const at::Tensor& v, const at::Tensor& out,
                            const at::Tensor& softmax_lse, const OptionalTensor& dq,
                            const OptionalTensor& dk, const OptionalTensor& dv,
                            const OptionalTensor& alibi_slopes, double p_dropout,
                            double softmax_scale, bool is_causal, std::int64_t window_left,
                            std::int64_t window_right, double softcap, bool deterministic,
                            const std::optional<at::Generator>& unused_generator,
                            const OptionalTensor& /*rng_state: of no use without dropout*/,
                            const OptionalTensor& dlse) {
  refuse_later_arguments(p_dropout, softcap, alibi_slopes.has_value(),
                         unused_generator.has_value());
  TORCH_CHECK_NOT_IMPLEMENTED(!deterministic, "deterministic: must be False, got True");
  check_inputs(q, k, v);
  const Window window = checked_window(is_causal, window_left, window_right);
  const float scale = checked_softmax_scale(softmax_scale);
  check_like("dout", dout, q.sizes(), q.scalar_type(), q);
  check_like("out", out, q.sizes(), q.scalar_type(), q);
  const std::int64_t rows[] = {q.size(0), q.size(2), q.size(1)};
  check_like("softmax_lse", softmax_lse, rows, at::kFloat, q);
  if (dlse.has_value()) check_like("dlse", *dlse, rows, at::kFloat, q);

  const at::NoGradGuard no_grad;
  OutputTensor grad_q("dq", dq, q.sizes(), q);
  OutputTensor grad_k("dk", dk, k.sizes(), q);
  OutputTensor grad_v("dv", dv, v.sizes(), q);
  at::Tensor softmax_d = run_backward_call(
      {.dout = dout,
       .q = q,
       .k = k,
       .v = v,
       .out = out,
       .softmax_lse = softmax_lse,
       .dlse = dlse.value_or(at::Tensor())},
      {.dq = grad_q.view(), .dk = grad_k.view(), .dv = grad_v.view()}, window, scale);
  return {grad_q.finish(), grad_k.finish(), grad_v.finish(), std::move(softmax_d)};
}

}  // namespace flash_attn_cuda::binding
