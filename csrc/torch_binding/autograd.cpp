// attention, forward and backward of flash_attn_cuda._C. The gradient of the first two is one
// torch::autograd::Function; a call that records nothing does not go through it.
#include <ATen/core/grad_mode.h>
#include <torch/autograd.h>

#include <cmath>
#include <vector>

#include "torch_binding/backward.h"
#include "torch_binding/check.h"
#include "torch_binding/checked_call.h"
#include "torch_binding/forward.h"
#include "torch_binding/functions.h"
#include "torch_binding/saved_call.h"
#include "torch_binding/to_params.h"

namespace flash_attn_cuda::binding {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

void save(AutogradContext* context, const AttentionCall& call, const ForwardResults& results,
          bool has_settings) {
  variable_list saved = {call.q, call.k, call.v, results.out, results.softmax_lse};
  if (has_settings) {
    saved.push_back(results.rng_state);
    visit_saved_tensors(call, [&saved](const at::Tensor& tensor) { saved.push_back(tensor); });
  }
  context->save_for_backward(std::move(saved));
  context->saved_data["numbers"] = saved_numbers(call);
}

struct Saved {
  AttentionCall call;
  GradientArguments incoming;
};

Saved restore(const AutogradContext* context) {
  const variable_list saved = context->get_saved_variables();
  std::size_t next = 0;
  Saved restored;
  AttentionCall& call = restored.call;
  call.q = saved.at(next++);
  call.k = saved.at(next++);
  call.v = saved.at(next++);
  restored.incoming.out = saved.at(next++);
  restored.incoming.softmax_lse = saved.at(next++);
  if (saved.size() > next) {
    if (const at::Tensor& rng_state = saved.at(next++); rng_state.defined())
      restored.incoming.rng_state = rng_state;
    visit_saved_tensors(call, [&](at::Tensor& tensor) { tensor = saved.at(next++); });
  }
  restore_numbers(context->saved_data.at("numbers").toDoubleVector(), call);
  return restored;
}

OptionalTensor if_defined(const at::Tensor& tensor) {
  return tensor.defined() ? OptionalTensor(tensor) : std::nullopt;
}

void check_no_forward_gradient(const char* name, const at::Tensor& tensor) {
  const bool is_dual = tensor.defined() && tensor._fw_grad(/*level=*/0).defined();
  TORCH_CHECK_NOT_IMPLEMENTED(!is_dual, name,
                              ": must not carry a forward-mode gradient, got a dual tensor");
}

// Such a tensor has no memory of its own that a kernel could read.
void check_not_mapped(const char* name, const at::Tensor& tensor) {
  const bool is_mapped =
      tensor.defined() && tensor.key_set().has(c10::DispatchKey::FuncTorchBatched);
  TORCH_CHECK_NOT_IMPLEMENTED(!is_mapped, name,
                              ": must not be mapped by torch.vmap (is_grads_batched=True) in a "
                              "backward of a CUDA call that was not, got a batched tensor");
}

// Stands where the gradients' own gradient would: it can be built into a graph, and refuses to run.
struct NoDoubleBackward : torch::autograd::Function<NoDoubleBackward> {
  static variable_list forward(AutogradContext* /*context*/, const OptionalTensor& /*dout*/,
                               const OptionalTensor& /*dlse*/, const at::Tensor& /*q*/,
                               const at::Tensor& /*k*/, const at::Tensor& /*v*/,
                               const OptionalTensor& /*bias*/, const OptionalTensor& /*sink*/,
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

// The tensors that have a gradient -> out and, where it is wanted, softmax_lse: what hangs on the
// graph costs host time. They stand apart from the call, which has them too: a Function sees the
// tensors among its arguments, and the gradient hangs on them as they were given, while the call
// may go on with copies.
struct Attention : torch::autograd::Function<Attention> {
  static constexpr int num_arguments = 10;

  static variable_list forward(AutogradContext* context, const at::Tensor& /*q*/,
                               const at::Tensor& /*k*/, const at::Tensor& /*v*/,
                               const OptionalTensor& /*bias*/, const OptionalTensor& /*sink*/,
                               const CallArguments* given, AttentionCall* call,
                               ForwardResults* results, bool has_settings, bool returns_lse) {
    context->set_materialize_grads(false);
    *results = run_forward_call(*given, *call);
    // Where the layout asked for a copy, the copy is saved: the backward would need it again.
    save(context, *call, *results, has_settings);
    if (!returns_lse) return {results->out};
    return {results->out, results->softmax_lse};
  }

  // Either of the gradients may be undefined.
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const at::Tensor& dout = gradients.at(0);
    const at::Tensor dlse = gradients.size() > 1 ? gradients.at(1) : at::Tensor();
    if (!dout.defined() && !dlse.defined()) return variable_list(num_arguments);
    check_no_forward_gradient("dout", dout);
    check_no_forward_gradient("dlse", dlse);
    check_not_mapped("dout", dout);
    check_not_mapped("dlse", dlse);

    auto [call, incoming] = restore(context);
    incoming.dout = if_defined(dout);
    incoming.dlse = if_defined(dlse);
    const OptionalTensor bias = if_defined(call.masks.bias);
    const OptionalTensor sink = if_defined(call.masks.sink);
    // Edges are those of the arguments that were given.
    const std::size_t bias_edge = 3;
    const std::size_t sink_edge = bias.has_value() ? 4 : 3;
    incoming.wants_dbias = bias.has_value() && context->needs_input_grad(bias_edge);
    const bool wants_dsink = sink.has_value() && context->needs_input_grad(sink_edge);
    if (!wants_dsink) call.masks.sink.reset();
    variable_list results;
    {
      const at::NoGradGuard no_grad;
      BackwardResults found = run_backward_call(incoming, call);
      if (found.dbias.defined()) found.dbias = found.dbias.to(bias->scalar_type());
      results = {std::move(found.dq), std::move(found.dk), std::move(found.dv),
                 std::move(found.dbias), std::move(found.dsink)};
    }
    if (at::GradMode::is_enabled()) {  // create_graph=True
      variable_list made;
      for (const at::Tensor& result : results) {
        if (result.defined()) made.push_back(result);
      }
      const variable_list marked = NoDoubleBackward::apply(incoming.dout, incoming.dlse, call.q,
                                                           call.k, call.v, bias, sink, &made);
      std::size_t next = 0;
      for (at::Tensor& result : results) {
        if (result.defined()) result = marked.at(next++);
      }
    }
    for (std::size_t i = 0; i < 3; ++i) {
      if (!context->needs_input_grad(i)) results[i].reset();
    }
    results.resize(num_arguments);
    return results;
  }
};

void check_no_forward_gradients(const CallArguments& given) {
  check_no_forward_gradient("q", given.q);
  check_no_forward_gradient("k", given.k);
  check_no_forward_gradient("v", given.v);
  if (given.bias.has_value()) check_no_forward_gradient("bias", *given.bias);
  if (given.sink.has_value()) check_no_forward_gradient("sink", *given.sink);
}

void check_no_gradient(const char* name, const OptionalTensor& tensor) {
  if (!tensor.has_value()) return;
  check_no_forward_gradient(name, *tensor);
  TORCH_CHECK_NOT_IMPLEMENTED(!at::GradMode::is_enabled() || !tensor->requires_grad(), name,
                              ": must not require grad, as it has no gradient");
}

bool requires_grad(const OptionalTensor& tensor) {
  return tensor.has_value() && tensor->requires_grad();
}

bool records(const CallArguments& given) {
  return at::GradMode::is_enabled() &&
         (given.q.requires_grad() || given.k.requires_grad() || given.v.requires_grad() ||
          requires_grad(given.bias) || requires_grad(given.sink));
}

// returns_lse: else the results have no softmax_lse.
ForwardResults differentiable(const CallArguments& given, AttentionCall& call, bool is_recorded,
                              bool has_settings, bool returns_lse) {
  ForwardResults results;
  if (is_recorded) {
    variable_list outputs = Attention::apply(given.q, given.k, given.v, given.bias, given.sink,
                                             &given, &call, &results, has_settings, returns_lse);
    results.out = std::move(outputs.at(0));
    if (returns_lse) results.softmax_lse = std::move(outputs.at(1));
  } else {
    const at::NoGradGuard no_grad;
    results = run_forward_call(given, call);
  }
  if (!returns_lse) results.softmax_lse.reset();
  return results;
}

}  // namespace

std::tuple<at::Tensor, OptionalTensor> attention(const at::Tensor& q, const at::Tensor& k,
                                                 const at::Tensor& v,
                                                 std::optional<double> softmax_scale, bool causal,
                                                 bool returns_lse) {
  check_inputs(q, k, v);
  const CallArguments given{.q = q, .k = k, .v = v};
  check_no_forward_gradients(given);
  AttentionCall call{.q = q, .k = k, .v = v};
  call.options.window.right = causal ? 0 : Window::unbounded;
  call.options.softmax_scale = checked_softmax_scale(
      softmax_scale.value_or(1.0 / std::sqrt(static_cast<double>(q.size(3)))));
  ForwardResults results =
      differentiable(given, call, records(given), /*has_settings=*/false, returns_lse);
  return {std::move(results.out), if_defined(results.softmax_lse)};
}

std::vector<at::Tensor> forward(const CallArguments& given, bool returns_lse) {
  check_no_gradient("alibi_slopes", given.alibi_slopes);
  check_no_forward_gradients(given);
  const bool is_recorded = records(given);
  TORCH_CHECK_VALUE(!is_recorded || given.block_rows.has_value() == given.block_columns.has_value(),
                    "block_rows: must be given with block_columns where gradients are wanted");
  TORCH_CHECK_VALUE(!is_recorded || !given.out.has_value(),
                    "out: must be None where gradients are wanted, got a tensor");
  TORCH_CHECK_NOT_IMPLEMENTED(
      !is_recorded || !given.fp32_results,
      "fp32_results: must be False in a call whose gradients are wanted, got True");
  AttentionCall call = checked_call(given, is_recorded ? Pass::both : Pass::forward);
  if (is_recorded) check_gradients_exist(call, requires_grad(given.bias));
  ForwardResults results =
      differentiable(given, call, is_recorded, /*has_settings=*/true, returns_lse);
  return {std::move(results.out), std::move(results.softmax_lse), std::move(results.probabilities),
          std::move(results.rng_state)};
}

std::vector<at::Tensor> backward(const CallArguments& given, const GradientArguments& incoming) {
  const at::NoGradGuard no_grad;
  BackwardResults results = run_backward_call(incoming, checked_call(given, Pass::backward));
  return {std::move(results.dq),        std::move(results.dk),    std::move(results.dv),
          std::move(results.softmax_d), std::move(results.dbias), std::move(results.dsink)};
}

}  // namespace flash_attn_cuda::binding
