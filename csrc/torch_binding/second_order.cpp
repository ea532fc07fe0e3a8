// jvp and hvp of flash_attn_cuda._C: derivatives in a direction, outside autograd.
#include "flash_attn/api.h"
#include "torch_binding/backward.h"
#include "torch_binding/check.h"
#include "torch_binding/checked_call.h"
#include "torch_binding/errors.h"
#include "torch_binding/functions.h"
#include "torch_binding/generated_rules.h"
#include "torch_binding/launch_scope.h"
#include "torch_binding/layout.h"
#include "torch_binding/to_params.h"

namespace flash_attn_cuda::binding {
namespace {

// Raises unless each tangent is like what it is of. The result has them where kernels can address
// them.
Tangents checked_tangents(const AttentionCall& call, Tangents tangents) {
  const ArgumentNames& names = names_of(call);
  check_rules_of_direction(call, names);
  check_rules_of_tangents(call, tangents, names);
  check_arrays_of_tangents(call, tangents, names);
  for (at::Tensor* const x : {&tangents.tq, &tangents.tk, &tangents.tv, &tangents.tout})
    if (x->defined()) *x = with_kernel_layout(*x);
  for (at::Tensor* const x : {&tangents.tsink, &tangents.tlse})
    if (x->defined()) *x = contiguous(*x);
  if (tangents.tbias.defined()) tangents.tbias = with_contiguous_rows(tangents.tbias);
  tangents.tout_rounding = known_rounding(tangents.tout_rounding);
  return tangents;
}

}  // namespace

std::tuple<at::Tensor, at::Tensor, at::Tensor> jvp(const AttentionCall& given,
                                                   const Incoming& incoming,
                                                   const Tangents& directions) {
  const AttentionCall call = checked_call(given, Pass::forward);
  check_results(incoming, call);
  check_rng_state(incoming.rng_state, call.dropout_p, call.q);
  Tangents tangents = checked_tangents(call, directions);
  const LaunchScope scope(call.q);
  tangents.tout = allocate(output_sizes(call), call.q.scalar_type(), call.q);
  tangents.tlse = allocate(lse_sizes(call), at::kFloat, call.q);
  const at::Tensor out = with_kernel_layout(incoming.out);
  const at::Tensor out_rounding = known_rounding(incoming.out_rounding);
  if (out_rounding.defined())
    tangents.tout_rounding = allocate(output_sizes(call), at::kChar, call.q);
  const at::Tensor softmax_lse = contiguous(incoming.softmax_lse);

  ForwardParams params = forward_params(call);
  params.out = input_view(out);
  if (out_rounding.defined()) params.out_rounding = input_view(out_rounding);
  params.lse = output_rows(softmax_lse);
  params.tangents = tangent_params(call, tangents);
  params.errors = has_device_contents(call) ? device_record(scope.device) : nullptr;
  if (drops(call)) params.dropout.rng = rng_of_state(incoming.rng_state);
  const ForwardPlan plan = plan_forward(params, device_of_call(call));
  at::Tensor workspace;
  if (plan.workspace_bytes > 0) {
    workspace = allocate({static_cast<std::int64_t>(plan.workspace_bytes)}, at::kByte, call.q);
    params.workspace = workspace.mutable_data_ptr();
  }
  run_forward(plan, params, scope.stream);
  if (has_device_contents(call)) raise_if_checking(scope.device, scope.stream);
  return {tangents.tout, tangents.tlse, tangents.tout_rounding};
}

Gradients hvp(const AttentionCall& given, const Incoming& incoming, const Tangents& directions) {
  TORCH_CHECK_VALUE(directions.tout.defined() && directions.tlse.defined(),
                    "tout: must be given, as must be tlse, got None");
  const AttentionCall call = checked_call(given, Pass::backward);
  return run_hvp_call(call, incoming, checked_tangents(call, directions));
}

}  // namespace flash_attn_cuda::binding
