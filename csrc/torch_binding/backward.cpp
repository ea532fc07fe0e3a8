#include "torch_binding/backward.h"

#include <ATen/ops/zeros_like.h>

#include "flash_attn/api.h"
#include "torch_binding/check.h"
#include "torch_binding/checked_call.h"
#include "torch_binding/errors.h"
#include "torch_binding/generated_rules.h"
#include "torch_binding/launch_scope.h"
#include "torch_binding/layout.h"
#include "torch_binding/listed_queries.h"
#include "torch_binding/to_params.h"

namespace flash_attn_cuda::binding {
namespace {

at::Tensor allocate_softmax_d(const at::Tensor& q) {
  if (q.dim() == 3) return allocate_rows(q, q.size(0));
  const std::int64_t seqlen = q.size(1);
  const std::int64_t rounded = round_up_seqlen(static_cast<int>(seqlen));
  at::Tensor softmax_d = allocate_rows(q, rounded);
  // No kernel writes there, and what a function returns must be the same every time.
  if (rounded > seqlen) softmax_d.narrow(2, seqlen, rounded - seqlen).zero_();
  return softmax_d;
}

Gradients run(const AttentionCall& call, const Incoming& given, const TangentParams& tangents) {
  check_results(given, call);
  check_rules_of_backward(call, names_of(call));
  check_rng_state(given.rng_state, call.dropout_p, call.q);
  const LaunchScope scope(call.q);
  const at::ScalarType dtype = result_dtype(call);
  OutputTensor dq("dq", given.dq, call.q.sizes(), dtype, call.q, given.accumulate);
  OutputTensor dk("dk", given.dk, call.k.sizes(), dtype, call.q, given.accumulate);
  OutputTensor dv("dv", given.dv, call.v.sizes(), dtype, call.q, given.accumulate);
  Gradients results;
  if (given.wants_softmax_d) results.softmax_d = allocate_softmax_d(call.q);
  if (given.wants_dbias) results.dbias = allocate_bias_gradient(call);
  results.dsink = allocate_sink_gradient(call);

  const at::Tensor out = with_kernel_layout(given.out);
  // dO of a loss that does not depend on the output is not one row that every row reads: strides of
  // 0 would keep the call from the Hopper kernels.
  const at::Tensor dout =
      given.dout.defined() ? with_kernel_layout(given.dout) : at::zeros_like(out);
  const at::Tensor out_rounding = known_rounding(given.out_rounding);
  const at::Tensor softmax_lse = contiguous(given.softmax_lse);
  const at::Tensor dlse = given.dlse.defined() ? contiguous(given.dlse) : at::Tensor();

  BackwardParams params = backward_params(call);
  params.out = input_view(out);
  if (out_rounding.defined()) params.out_rounding = input_view(out_rounding);
  params.dout = input_view(dout);
  params.dq = dq.view();
  params.dk = dk.view();
  params.dv = dv.view();
  params.accumulate = given.accumulate;
  params.dbias = bias_gradient(call, results.dbias);
  if (results.dsink.defined()) params.dsink = results.dsink.mutable_data_ptr<float>();
  params.lse = input_rows(softmax_lse);
  params.dlse = input_rows(dlse);
  if (results.softmax_d.defined()) params.softmax_d = output_rows(results.softmax_d);
  params.tangents = tangents;
  params.errors = has_device_contents(call) ? device_record(scope.device) : nullptr;
  if (drops(call)) params.dropout.rng = rng_of_state(given.rng_state);
  ListedTensors listed;
  if (lists_blocks(call)) {
    listed = listed_tensors(call);
    params.listed = listed_queries(call, listed);
  }
  const BackwardPlan plan = plan_backward(params, device_of_call(call));
  const at::Tensor workspace =
      allocate({static_cast<std::int64_t>(plan.workspace_bytes)}, at::kByte, call.q);
  params.workspace = workspace.mutable_data_ptr();
  count_writes({&dq.given(), &dk.given(), &dv.given()});
  if (call.leftpad_k.defined() && !given.accumulate) {  // rows that no kernel writes
    dk.written().zero_();
    dv.written().zero_();
  }
  run_backward(plan, params, scope.stream);
  if (has_device_contents(call)) raise_if_checking(scope.device, scope.stream);
  results.dq = dq.finish();
  results.dk = dk.finish();
  results.dv = dv.finish();
  if (results.dbias.defined()) results.dbias = finish_bias_gradient(call, results.dbias);
  return results;
}

}  // namespace

void check_results(const Incoming& given, const AttentionCall& call) {
  const ArgumentNames& names = names_of(call);
  check_rules_of_incoming(call, given, names);
  check_arrays_of_incoming(call, given, names);
}

Gradients run_backward_call(const AttentionCall& call, const Incoming& given) {
  return run(call, given, {});
}

Gradients run_hvp_call(const AttentionCall& call, const Incoming& given, const Tangents& tangents) {
  return run(call, given, tangent_params(call, tangents));
}

BackwardPlan plan_backward_call(const AttentionCall& call, const DeviceInfo& device,
                                bool with_tangents) {
  BackwardParams params = backward_params(call);
  params.out = output_view(without_memory(output_sizes(call), call.q));
  params.dout = params.out;
  params.dq = output_view(without_memory(call.q.sizes(), call.q));
  params.dk = output_view(without_memory(call.k.sizes(), call.k));
  params.dv = output_view(without_memory(call.v.sizes(), call.v));
  params.tangents = tangents_without_memory(params, with_tangents);
  return plan_backward(params, device);
}

}  // namespace flash_attn_cuda::binding
