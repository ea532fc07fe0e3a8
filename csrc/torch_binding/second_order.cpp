// jvp and hvp of flash_attn_cuda._C: derivatives in a direction, outside autograd.
#include "flash_attn/api.h"
#include "torch_binding/backward.h"
#include "torch_binding/check.h"
#include "torch_binding/checked_call.h"
#include "torch_binding/errors.h"
#include "torch_binding/functions.h"
#include "torch_binding/launch_scope.h"
#include "torch_binding/layout.h"
#include "torch_binding/to_params.h"

namespace flash_attn_cuda::binding {
namespace {

at::DimVector row_sizes(const AttentionCall& call) {
  const at::Tensor& q = call.q;
  if (is_packed(call)) return {q.size(1), q.size(0)};
  return {q.size(0), q.size(2), q.size(1)};
}

// Raises unless each tangent is like what it is of. The result has them where kernels can address
// them.
Tangents checked_tangents(const AttentionCall& call, const Tangents& given) {
  refuse(reads_in_place(call),
         "block_table: must be None in a call that is differentiated in a "
         "direction, as must be a cache");
  refuse(has_e4m3(call),
         "k: must not be of Float8_e4m3fn in a call that is differentiated in a direction");
  refuse(call.fp32_results,
         "fp32_results: must be False in a call that is differentiated in a direction, got True");
  const at::Tensor& q = call.q;
  Tangents tangents = given;
  const auto adopt = [&q](const char* name, at::Tensor& tangent, const at::Tensor& of) {
    if (!tangent.defined()) return;
    check_like(name, tangent, of.sizes(), of.scalar_type(), q);
    tangent = with_kernel_layout(tangent);
  };
  adopt("tq", tangents.tq, call.q);
  adopt("tk", tangents.tk, call.k);
  adopt("tv", tangents.tv, call.v);
  require(call.bias.defined() || !given.tbias.defined(),
          "tbias: must be None without bias, got a tensor");
  require(call.sink.defined() || !given.tsink.defined(),
          "tsink: must be None without sink, got a tensor");
  if (given.tbias.defined()) {
    check_like("tbias", given.tbias, call.bias.sizes(), call.bias.scalar_type(), q);
    tangents.tbias = with_contiguous_rows(given.tbias);
  }
  if (given.tsink.defined()) {
    check_like("tsink", given.tsink, call.sink.sizes(), at::kFloat, q);
    tangents.tsink = contiguous(given.tsink);
  }
  if (given.tout.defined()) {
    check_like("tout", given.tout, output_sizes(call), q.scalar_type(), q);
    tangents.tout = with_kernel_layout(given.tout);
  }
  if (given.tout_rounding.defined() && given.tout_rounding.numel() > 0)
    check_like("tout_rounding", given.tout_rounding, output_sizes(call), at::kChar, q);
  tangents.tout_rounding = known_rounding(given.tout_rounding);
  if (given.tlse.defined()) {
    check_like("tlse", given.tlse, row_sizes(call), at::kFloat, q);
    tangents.tlse = contiguous(given.tlse);
  }
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
  tangents.tlse = allocate(row_sizes(call), at::kFloat, call.q);
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
  require(directions.tout.defined() && directions.tlse.defined(),
          "tout: must be given, as must be tlse, got None");
  const AttentionCall call = checked_call(given, Pass::backward);
  return run_hvp_call(call, incoming, checked_tangents(call, directions));
}

}  // namespace flash_attn_cuda::binding
