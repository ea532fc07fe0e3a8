#include "torch_binding/forward.h"

#include <ATen/core/grad_mode.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "flash_attn/api.h"
#include "torch_binding/check.h"
#include "torch_binding/functions.h"

namespace flash_attn_cuda::binding {

at::Tensor run_forward_call(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            TensorView out, Window window, float softmax_scale) {
  const c10::DeviceIndex device = q.device().index();
  const c10::cuda::CUDAGuard guard(device);
  at::Tensor softmax_lse = allocate({q.size(0), q.size(2), q.size(1)}, at::kFloat, q);
  const ForwardParams params{.dtype = dtype_of(q),
                             .shape = shape_of(q, k),
                             .window = window,
                             .softmax_scale = softmax_scale,
                             .q = input_view(q),
                             .k = input_view(k),
                             .v = input_view(v),
                             .out = out,
                             .lse = softmax_lse.mutable_data_ptr<float>()};
  const ForwardPlan plan = plan_forward(params, device_info(device));
  run_forward(plan, params, c10::cuda::getCurrentCUDAStream(device).stream());
  return softmax_lse;
}

std::vector<at::Tensor> fwd(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            const OptionalTensor& out, const OptionalTensor& alibi_slopes,
                            double p_dropout, double softmax_scale, bool is_causal,
                            std::int64_t window_left, std::int64_t window_right, double softcap,
                            bool return_softmax,
                            const std::optional<at::Generator>& unused_generator) {
  refuse_later_arguments(p_dropout, softcap, alibi_slopes.has_value(),
                         unused_generator.has_value());
  TORCH_CHECK_NOT_IMPLEMENTED(!return_softmax, "return_softmax: must be False, got True");
  check_inputs(q, k, v);
  const Window window = checked_window(is_causal, window_left, window_right);
  const float scale = checked_softmax_scale(softmax_scale);

  const at::NoGradGuard no_grad;
  OutputTensor output("out", out, q.sizes(), q);
  at::Tensor softmax_lse = run_forward_call(with_kernel_layout(q), with_kernel_layout(k),
                                            with_kernel_layout(v), output.view(), window, scale);
  at::Tensor no_mask = allocate({0}, q.scalar_type(), q);
  at::Tensor no_rng_state = allocate({0}, at::kLong, q);
  return {output.finish(), std::move(softmax_lse), std::move(no_mask), std::move(no_rng_state)};
}

}  // namespace flash_attn_cuda::binding
