#include "torch_binding/backward.h"

#include <ATen/ops/zeros_like.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "flash_attn/api.h"
#include "torch_binding/check.h"
#include "torch_binding/checked_call.h"
#include "torch_binding/errors.h"
#include "torch_binding/rng.h"
#include "torch_binding/to_params.h"

namespace flash_attn_cuda::binding {
namespace {

void check_accumulate(const GradientArguments& given, const AttentionCall& call) {
  TORCH_CHECK_VALUE(call.options.fp32_results,
                    "accumulate: must be False without fp32_results, got True");
  const auto check = [](const char* name, const OptionalTensor& target) {
    TORCH_CHECK_VALUE(target.has_value(), name, ": must be given with accumulate, got None");
  };
  check("dq", given.dq);
  check("dk", given.dk);
  check("dv", given.dv);
}

void check_given(const GradientArguments& given, const AttentionCall& call) {
  const at::Tensor& q = call.q;
  const at::DimVector outputs = output_sizes(call);
  if (given.dout.has_value()) check_like("dout", *given.dout, outputs, q.scalar_type(), q);
  check_like("out", given.out, outputs, q.scalar_type(), q);
  const std::int64_t packed_rows[] = {q.size(1), q.size(0)};
  const std::int64_t dense_rows[] = {q.size(0), q.dim() == 4 ? q.size(2) : 0, q.size(1)};
  const at::IntArrayRef rows =
      call.is_packed() ? at::IntArrayRef(packed_rows) : at::IntArrayRef(dense_rows);
  check_like("softmax_lse", given.softmax_lse, rows, at::kFloat, q);
  if (given.dlse.has_value()) check_like("dlse", *given.dlse, rows, at::kFloat, q);
  if (given.accumulate) check_accumulate(given, call);
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

}  // namespace

BackwardResults run_backward_call(const GradientArguments& given, AttentionCall call) {
  check_given(given, call);
  check_gradients_exist(call, given.wants_dbias);
  const at::Tensor rng_state = checked_rng_state(given.rng_state, call.options.p_dropout, call.q);
  const c10::DeviceIndex device = call.q.device().index();
  const c10::cuda::CUDAGuard guard(device);
  const Stream stream = c10::cuda::getCurrentCUDAStream(device).stream();

  const at::ScalarType dtype = call.result_dtype();
  OutputTensor dq("dq", given.dq, call.q.sizes(), dtype, call.q, given.accumulate);
  OutputTensor dk("dk", given.dk, call.k.sizes(), dtype, call.q, given.accumulate);
  OutputTensor dv("dv", given.dv, call.v.sizes(), dtype, call.q, given.accumulate);
  if (call.leftpad_k.defined() && !given.accumulate) {  // rows that no kernel writes
    dk.written().zero_();
    dv.written().zero_();
  }
  BackwardResults results;
  if (given.wants_softmax_d) results.softmax_d = allocate_softmax_d(call.q);
  if (given.wants_dbias) results.dbias = allocate_bias_gradient(call);
  if (call.masks.sink.defined())
    results.dsink = allocate(call.masks.sink.sizes(), at::kFloat, call.q);

  const bool has_device_contents = call.has_device_contents();
  use_kernel_layout(call);
  const at::Tensor out = with_kernel_layout(given.out);
  // dO of a loss that does not depend on the output is not one row that every row reads: strides of
  // 0 would keep the call from the Hopper kernels.
  const at::Tensor dout =
      given.dout.has_value() ? with_kernel_layout(*given.dout) : at::zeros_like(out);
  const at::Tensor softmax_lse = contiguous(given.softmax_lse);
  const at::Tensor dlse = given.dlse.has_value() ? contiguous(*given.dlse) : at::Tensor();

  BackwardParams params{
      .dtype = dtype_of(call.q),
      .shape = shape_of(call),
      .sequences = sequence_params(call),
      .window = call.options.window,
      .score = score_params(call),
      .dropout = {.threshold = dropout_threshold(call.options.p_dropout)},
      .sparsity = sparsity_params(call, /*by_keys=*/true),
      .deterministic = call.options.deterministic,
      .q = input_view(call.q),
      .k = input_view(call.k),
      .v = input_view(call.v),
      .out = input_view(out),
      .dout = input_view(dout),
      .dq = dq.view(),
      .dk = dk.view(),
      .dv = dv.view(),
      .fp32_results = call.options.fp32_results,
      .accumulate = given.accumulate,
      .dbias = bias_gradient(call, results.dbias),
      .dsink = results.dsink.defined() ? results.dsink.mutable_data_ptr<float>() : nullptr,
      .lse = input_rows(softmax_lse),
      .dlse = input_rows(dlse),
      .softmax_d = results.softmax_d.defined() ? output_rows(results.softmax_d) : RowView<float>{},
      .errors = has_device_contents ? device_record(device) : nullptr};
  if (rng_state.defined()) params.dropout.rng = rng_of_state(rng_state);
  const BackwardPlan plan = plan_backward(params, device_of_call(call));
  const at::Tensor workspace =
      allocate({static_cast<std::int64_t>(plan.workspace_bytes)}, at::kByte, call.q);
  params.workspace = workspace.mutable_data_ptr();
  run_backward(plan, params, stream);
  if (has_device_contents) raise_if_checking(device, stream);
  results.dq = dq.finish();
  results.dk = dk.finish();
  results.dv = dv.finish();
  return results;
}

}  // namespace flash_attn_cuda::binding
