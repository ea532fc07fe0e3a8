// attention() and attention_full(): the eager path, whose gradient is a torch::autograd::Function.
// A call that records nothing does not go through it.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros_like.h>
#include <torch/autograd.h>

#include <cmath>
#include <vector>

#include "torch_binding/backward.h"
#include "torch_binding/check.h"
#include "torch_binding/checked_call.h"
#include "torch_binding/forward.h"
#include "torch_binding/functions.h"
#include "torch_binding/to_params.h"

namespace flash_attn_cuda::binding {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct Results {
  at::Tensor out;
  ForwardResults forward;
};

// `call` is left with the tensors that were computed with.
Results compute_results(AttentionCall& call) {
  use_kernel_layout(call);
  Results results;
  results.out = allocate(output_sizes(call), call.q.scalar_type(), call.q);
  results.forward = run_forward_call(call, output_view(results.out));
  return results;
}

// dO of a loss that does not depend on the output. Not one row that every row reads: strides of 0
// would keep the call from the Hopper kernels.
at::Tensor zero_gradient(const at::Tensor& out) { return at::zeros_like(out); }

variable_list compute_gradients(BackwardInputs inputs) {
  if (!inputs.dout.defined()) inputs.dout = zero_gradient(inputs.out);
  const AttentionCall& call = inputs.call;
  const at::ScalarType dtype = call.q.scalar_type();
  at::Tensor dq = allocate(call.q.sizes(), dtype, call.q);
  at::Tensor dk = allocate(call.k.sizes(), dtype, call.q);
  at::Tensor dv = allocate(call.v.sizes(), dtype, call.q);
  if (call.leftpad_k.defined()) {
    dk.zero_();
    dv.zero_();
  }
  run_backward_call(inputs, {.dq = output_view(dq), .dk = output_view(dk), .dv = output_view(dv)},
                    /*softmax_d=*/{});
  return {std::move(dq), std::move(dk), std::move(dv)};
}

// What autograd keeps beside tensors is a list of numbers; all of these are exact in a double.
std::vector<double> to_numbers(const CallOptions& options) {
  return {static_cast<double>(options.window.left),
          static_cast<double>(options.window.right),
          options.softmax_scale,
          options.softcap,
          options.p_dropout,
          options.deterministic ? 1.0 : 0.0};
}

CallOptions from_numbers(const std::vector<double>& numbers) {
  return {
      .window = {.left = static_cast<int>(numbers.at(0)), .right = static_cast<int>(numbers.at(1))},
      .softmax_scale = static_cast<float>(numbers.at(2)),
      .softcap = static_cast<float>(numbers.at(3)),
      .p_dropout = numbers.at(4),
      .deterministic = numbers.at(5) != 0.0};
}

void save(AutogradContext* context, const AttentionCall& call, const Results& results,
          bool has_settings) {
  const ForwardResults& forward = results.forward;
  variable_list saved = {call.q, call.k, call.v, results.out, forward.softmax_lse};
  if (has_settings) {
    saved.insert(saved.end(), {call.cu_seqlens_q, call.cu_seqlens_k, call.seqused_q, call.seqused_k,
                               call.leftpad_k, call.alibi_slopes, forward.rng_state});
  }
  context->save_for_backward(std::move(saved));
  context->saved_data["options"] = to_numbers(call.options);
}

BackwardInputs restore(const AutogradContext* context) {
  const variable_list saved = context->get_saved_variables();
  BackwardInputs inputs;
  AttentionCall& call = inputs.call;
  call.q = saved.at(0);
  call.k = saved.at(1);
  call.v = saved.at(2);
  inputs.out = saved.at(3);
  inputs.softmax_lse = saved.at(4);
  if (saved.size() > 5) {
    call.cu_seqlens_q = saved.at(5);
    call.cu_seqlens_k = saved.at(6);
    call.seqused_q = saved.at(7);
    call.seqused_k = saved.at(8);
    call.leftpad_k = saved.at(9);
    call.alibi_slopes = saved.at(10);
    inputs.rng_state = saved.at(11);
  }
  call.options = from_numbers(context->saved_data.at("options").toDoubleVector());
  return inputs;
}

void check_no_forward_gradient(const char* name, const at::Tensor& tensor) {
  const bool is_dual = tensor.defined() && tensor._fw_grad(/*level=*/0).defined();
  TORCH_CHECK_NOT_IMPLEMENTED(!is_dual, name,
                              ": must not carry a forward-mode gradient, got a dual tensor");
}

// Stands where the gradients' own gradient would: it can be built into a graph, and refuses to run.
struct NoDoubleBackward : torch::autograd::Function<NoDoubleBackward> {
  static variable_list forward(AutogradContext* /*context*/, const OptionalTensor& /*dout*/,
                               const OptionalTensor& /*dlse*/, const at::Tensor& /*q*/,
                               const at::Tensor& /*k*/, const at::Tensor& /*v*/,
                               const variable_list* gradients) {
    return *gradients;
  }

  static variable_list backward(AutogradContext* /*context*/, const variable_list& /*gradients*/) {
    TORCH_CHECK_NOT_IMPLEMENTED(
        false,
        "flash_attn_cuda does not implement double backward: the gradients of attention "
        "cannot be differentiated again (create_graph=True)");
  }
};

// q, k and v -> out and softmax_lse. They stand apart from the call, which has them too: a Function
// sees the tensors among its arguments, and the gradient hangs on them as they were given, while
// the call may go on with copies.
struct Attention : torch::autograd::Function<Attention> {
  static constexpr int num_arguments = 6;

  static variable_list forward(AutogradContext* context, const at::Tensor& /*q*/,
                               const at::Tensor& /*k*/, const at::Tensor& /*v*/,
                               AttentionCall* call, Results* results, bool has_settings) {
    context->set_materialize_grads(false);
    *results = compute_results(*call);
    // Where the layout asked for a copy, the copy is saved: the backward would need it again.
    save(context, *call, *results, has_settings);
    return {results->out, results->forward.softmax_lse};
  }

  // Either of the gradients may be undefined.
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const at::Tensor& dout = gradients.at(0);
    const at::Tensor& dlse = gradients.at(1);
    if (!dout.defined() && !dlse.defined()) return variable_list(num_arguments);
    check_no_forward_gradient("dout", dout);
    check_no_forward_gradient("dlse", dlse);

    BackwardInputs inputs = restore(context);
    inputs.dout = dout;
    inputs.dlse = dlse;
    variable_list results;
    {
      const at::NoGradGuard no_grad;
      results = compute_gradients(inputs);
    }
    if (at::GradMode::is_enabled()) {  // create_graph=True
      const AttentionCall& call = inputs.call;
      results = NoDoubleBackward::apply(OptionalTensor(dout), OptionalTensor(dlse), call.q, call.k,
                                        call.v, &results);
    }
    for (std::size_t i = 0; i < results.size(); ++i) {
      if (!context->needs_input_grad(i)) results[i].reset();
    }
    results.resize(num_arguments);
    return results;
  }
};

void check_no_forward_gradients(const AttentionCall& call) {
  check_no_forward_gradient("q", call.q);
  check_no_forward_gradient("k", call.k);
  check_no_forward_gradient("v", call.v);
}

void check_no_gradient(const char* name, const OptionalTensor& tensor) {
  if (!tensor.has_value()) return;
  check_no_forward_gradient(name, *tensor);
  TORCH_CHECK_NOT_IMPLEMENTED(!at::GradMode::is_enabled() || !tensor->requires_grad(), name,
                              ": must not require grad, as it has no gradient");
}

Results differentiable(AttentionCall& call, bool has_settings) {
  const bool requires_grad =
      call.q.requires_grad() || call.k.requires_grad() || call.v.requires_grad();
  if (!requires_grad || !at::GradMode::is_enabled()) {
    const at::NoGradGuard no_grad;
    return compute_results(call);
  }
  const at::Tensor q = call.q;
  const at::Tensor k = call.k;
  const at::Tensor v = call.v;
  Results results;
  const variable_list outputs = Attention::apply(q, k, v, &call, &results, has_settings);
  results.out = outputs.at(0);
  results.forward.softmax_lse = outputs.at(1);
  return results;
}

}  // namespace

std::tuple<at::Tensor, at::Tensor> attention(const at::Tensor& q, const at::Tensor& k,
                                             const at::Tensor& v,
                                             std::optional<double> softmax_scale, bool causal) {
  check_inputs(q, k, v);
  AttentionCall call{.q = q, .k = k, .v = v};
  check_no_forward_gradients(call);
  call.options.window.right = causal ? 0 : Window::unbounded;
  call.options.softmax_scale = checked_softmax_scale(
      softmax_scale.value_or(1.0 / std::sqrt(static_cast<double>(q.size(3)))));
  Results results = differentiable(call, /*has_settings=*/false);
  return {std::move(results.out), std::move(results.forward.softmax_lse)};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> attention_full(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
    const OptionalTensor& cu_seqlens_q, const OptionalTensor& cu_seqlens_k,
    const OptionalTensor& seqused_q, const OptionalTensor& seqused_k,
    const OptionalTensor& leftpad_k, OptionalInt max_seqlen_q, OptionalInt max_seqlen_k,
    double dropout_p, std::optional<double> softmax_scale, bool causal, std::int64_t window_left,
    std::int64_t window_right, double softcap, const OptionalTensor& alibi_slopes,
    bool deterministic) {
  check_no_gradient("alibi_slopes", alibi_slopes);
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
                                     .p_dropout = dropout_p,
                                     .softmax_scale = softmax_scale,
                                     .is_causal = causal,
                                     .window_left = window_left,
                                     .window_right = window_right,
                                     .softcap = softcap,
                                     .deterministic = deterministic,
                                     .p_dropout_name = "dropout_p"});
  check_no_forward_gradients(call);
  Results results = differentiable(call, /*has_settings=*/true);
  at::Tensor& rng_state = results.forward.rng_state;
  if (!rng_state.defined()) rng_state = allocate({0}, at::kLong, q);
  return {std::move(results.out), std::move(results.forward.softmax_lse), std::move(rng_state)};
}

}  // namespace flash_attn_cuda::binding
