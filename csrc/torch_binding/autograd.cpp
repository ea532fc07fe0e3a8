// attention, forward and backward of flash_attn_cuda._C. The gradient of the first two is one
// torch::autograd::Function, and that of the gradient another; a call that records nothing does not
// go through them.
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/AutogradState.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/autograd.h>

#include <algorithm>
#include <initializer_list>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "torch_binding/backward.h"
#include "torch_binding/check.h"
#include "torch_binding/checked_call.h"
#include "torch_binding/forward.h"
#include "torch_binding/functions.h"
#include "torch_binding/generated_rules.h"
#include "torch_binding/kept_call.h"
#include "torch_binding/to_params.h"

namespace flash_attn_cuda::binding {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

void save(AutogradContext* context, const AttentionCall& call,
          std::initializer_list<at::Tensor> others) {
  KeptCall kept = keep(call, others);
  context->save_for_backward(std::move(kept.tensors));
  context->saved_data["numbers"] = std::move(kept.numbers);
}

void restore(const AutogradContext* context, AttentionCall& call,
             std::initializer_list<at::Tensor*> others) {
  const KeptCall kept{context->get_saved_variables(),
                      context->saved_data.at("numbers").toDoubleVector()};
  restore(kept, call, others);
}

// The inputs that have a gradient, as they were given: autograd's edges, in order.
variable_list edges_of(const AttentionCall& call) {
  variable_list edges;
  visit_differentiable(call, {}, [&](const char* /*name*/, const at::Tensor& input, const auto&) {
    if (input.defined()) edges.push_back(input);
  });
  return edges;
}

// Whether the gradient of the input of this name is wanted.
bool is_wanted(const AutogradContext* context, const AttentionCall& call, std::string_view name) {
  std::size_t edge = 0;
  bool wanted = false;
  visit_differentiable(call, {}, [&](std::string_view each, const at::Tensor& input, const auto&) {
    if (!input.defined()) return;
    if (each == name) wanted = context->needs_input_grad(edge);
    ++edge;
  });
  return wanted;
}

OptionalTensor if_defined(const at::Tensor& tensor) {
  return tensor.defined() ? OptionalTensor(tensor) : std::nullopt;
}

bool is_dual(const at::Tensor& tensor) {
  return tensor.defined() && c10::AutogradState::get_tls_state().get_fw_grad_mode() &&
         tensor._fw_grad(/*level=*/0).defined();
}

void check_no_forward_gradient(const char* name, const at::Tensor& tensor) {
  TORCH_CHECK_NOT_IMPLEMENTED(!is_dual(tensor), name,
                              ": must not carry a forward-mode gradient, got a dual tensor");
}

// Of torch.vmap and of is_grads_batched=True. Such a tensor has no memory of its own that a kernel
// could read.
constexpr c10::DispatchKeySet mapped{c10::DispatchKey::FuncTorchBatched, c10::DispatchKey::Batched};

void check_not_mapped(const char* name, const at::Tensor& tensor) {
  const bool is_mapped = tensor.defined() && tensor.key_set().has_any(mapped);
  TORCH_CHECK_NOT_IMPLEMENTED(!is_mapped, name,
                              ": must not be mapped by torch.vmap (is_grads_batched=True) in a "
                              "backward of a CUDA call that was not, got a batched tensor");
}

// As run_backward_call, by an operator that autograd differentiates
// (flash_attn_cuda/operators/derivatives.py).
Gradients differentiable_gradients(const AttentionCall& call, const Incoming& incoming) {
  static const c10::OperatorHandle attention_gradients =
      c10::Dispatcher::singleton().findSchemaOrThrow("flash_attn_cuda::attention_gradients", "");
  std::vector<c10::IValue> stack;
  visit_operator_arguments(call, incoming, [&stack]<class Field>(const Field& field) {
    if constexpr (std::is_same_v<Field, at::Tensor>) {
      stack.push_back(field.defined() ? c10::IValue(field) : c10::IValue());
    } else {
      stack.emplace_back(field);
    }
  });
  attention_gradients.callBoxed(&stack);
  return {.dq = stack.at(0).toTensor(),
          .dk = stack.at(1).toTensor(),
          .dv = stack.at(2).toTensor(),
          .dbias = stack.at(3).toTensor(),
          .dsink = stack.at(4).toTensor()};
}

// Whether nothing but autograd would see an operator of these.
bool is_plain(const variable_list& tensors) {
  constexpr c10::DispatchKeySet others =
      mapped |
      c10::DispatchKeySet{c10::DispatchKey::FuncTorchGradWrapper, c10::DispatchKey::Python};
  return !c10::impl::TorchDispatchModeTLS::any_modes_set() &&
         std::ranges::none_of(tensors, [&](const at::Tensor& x) {
           return x.defined() && (x.key_set().has_any(others) || is_dual(x));
         });
}

Gradients gradients_of_call(const AttentionCall& call, const Incoming& incoming) {
  Gradients found = run_backward_call(call, incoming);
  if (found.dbias.defined()) found.dbias = found.dbias.to(call.bias.scalar_type());
  return found;
}

// The inputs that have a gradient, dout and dlse -> the gradients that there are.
struct AttentionGradients : torch::autograd::Function<AttentionGradients> {
  static constexpr std::size_t other_arguments = 3;

  static variable_list forward(AutogradContext* context, const at::TensorList& /*edges*/,
                               const AttentionCall* call, const Incoming* incoming,
                               Gradients* found) {
    context->set_materialize_grads(false);
    *found = gradients_of_call(*call, *incoming);
    save(context, *call,
         {incoming->dout, incoming->dlse, incoming->out, incoming->softmax_lse, incoming->rng_state,
          incoming->out_rounding});
    context->saved_data["wants_dbias"] = incoming->wants_dbias;
    variable_list gradients;
    visit(*call, *found, [&](at::Tensor& gradient) { gradients.push_back(gradient); });
    return gradients;
  }

  // Also of a third derivative, whose words are the operators'.
  static variable_list backward(AutogradContext* context, const variable_list& directions) {
    AttentionCall call;
    Incoming incoming;
    restore(context, call,
            {&incoming.dout, &incoming.dlse, &incoming.out, &incoming.softmax_lse,
             &incoming.rng_state, &incoming.out_rounding});
    incoming.wants_dbias = context->saved_data.at("wants_dbias").toBool();
    const variable_list edges = edges_of_gradients(call, incoming);
    variable_list results(edges.size() + other_arguments);
    if (std::ranges::none_of(directions, [](const at::Tensor& x) { return x.defined(); }))
      return results;
    // Derivatives in a direction read a mask instead of lists of blocks (masks/of_call.py).
    const bool is_last = !at::GradMode::is_enabled() && is_plain(directions) && !lists_blocks(call);
    const variable_list found = is_last ? second_gradients(context, call, incoming, directions)
                                        : by_operator(context, call, incoming, edges, directions);
    std::ranges::copy(found, results.begin());
    return results;
  }

  static variable_list edges_of_gradients(const AttentionCall& call, const Incoming& incoming) {
    variable_list edges = edges_of(call);
    if (incoming.dout.defined()) edges.push_back(incoming.dout);
    if (incoming.dlse.defined()) edges.push_back(incoming.dlse);
    return edges;
  }

  // Those of the gradients that there are, in autograd's order.
  template <class Visitor>
  static void visit(const AttentionCall& call, Gradients& found, Visitor&& visitor) {
    for (at::Tensor* gradient : {&found.dq, &found.dk, &found.dv}) visitor(*gradient);
    if (found.dbias.defined()) visitor(found.dbias);
    if (call.sink.defined()) visitor(found.dsink);
  }

  static variable_list second_gradients(const AutogradContext* context, const AttentionCall& call,
                                        Incoming incoming, const variable_list& directions) {
    auto next = directions.begin();
    Tangents along{.tq = *next++, .tk = *next++, .tv = *next++};
    if (incoming.wants_dbias) along.tbias = *next++;
    if (call.sink.defined()) along.tsink = *next++;
    std::tie(along.tout, along.tlse, along.tout_rounding) = jvp(call, incoming, along);
    variable_list results(edges_of(call).size());
    bool wants_inputs = false;
    for (std::size_t i = 0; i < results.size(); ++i)
      wants_inputs = wants_inputs || context->needs_input_grad(i);
    if (wants_inputs) {
      incoming.wants_dbias = is_wanted(context, call, "bias");
      Gradients found = hvp(call, incoming, along);
      if (found.dbias.defined()) found.dbias = found.dbias.to(call.bias.scalar_type());
      std::size_t edge = 0;
      visit_differentiable(call, found,
                           [&](const auto*, const at::Tensor& input, const at::Tensor& gradient) {
                             if (!input.defined()) return;
                             if (context->needs_input_grad(edge)) results.at(edge) = gradient;
                             ++edge;
                           });
    }
    if (incoming.dout.defined()) results.push_back(along.tout);
    if (incoming.dlse.defined()) results.push_back(along.tlse);
    return results;
  }

  // By the operator's formulas, which know transforms, modes and further derivatives.
  static variable_list by_operator(const AutogradContext* context, const AttentionCall& call,
                                   const Incoming& incoming, const variable_list& edges,
                                   const variable_list& directions) {
    const bool makes_graph = at::GradMode::is_enabled();
    const at::AutoGradMode grad_mode(true);
    Gradients found = differentiable_gradients(call, incoming);
    if (!incoming.wants_dbias) found.dbias.reset();
    variable_list outputs, along, wanted;
    auto next = directions.begin();
    visit(call, found, [&](at::Tensor& gradient) {
      if (next->defined()) {
        outputs.push_back(gradient);
        along.push_back(*next);
      }
      ++next;
    });
    for (std::size_t i = 0; i < edges.size(); ++i)
      if (context->needs_input_grad(i)) wanted.push_back(edges[i]);
    const variable_list made = torch::autograd::grad(outputs, wanted, along, /*retain_graph=*/{},
                                                     makes_graph, /*allow_unused=*/true);
    variable_list results(edges.size());
    for (std::size_t i = 0, place = 0; i < edges.size(); ++i)
      if (context->needs_input_grad(i)) results[i] = made.at(place++);
    return results;
  }
};

Gradients differentiable_backward(const AttentionCall& call, const Incoming& incoming) {
  if (!is_plain({incoming.dout, incoming.dlse})) return differentiable_gradients(call, incoming);
  const variable_list edges = AttentionGradients::edges_of_gradients(call, incoming);
  Gradients found;
  const variable_list outputs =
      AttentionGradients::apply(at::TensorList(edges), &call, &incoming, &found);
  auto next = outputs.begin();
  AttentionGradients::visit(call, found, [&](at::Tensor& gradient) { gradient = *next++; });
  return found;
}

// A gradient for each edge, undefined where it is not wanted.
variable_list gradients_of(const AutogradContext* context, const AttentionCall& call,
                           Incoming incoming) {
  incoming.wants_dbias = is_wanted(context, call, "bias");
  AttentionCall asked = call;
  const bool makes_graph = at::GradMode::is_enabled();  // create_graph=True
  // What is made of a graph may want derivatives by a sink that this backward does not.
  if (!makes_graph && !is_wanted(context, call, "sink")) asked.sink.reset();
  Gradients found;
  if (makes_graph) {
    incoming.out = incoming.out.detach();
    incoming.softmax_lse = incoming.softmax_lse.detach();
    found = differentiable_backward(asked, incoming);
  } else if (is_plain({})) {
    found = gradients_of_call(asked, incoming);
  } else {  // a mode, such as one that counts, sees operators alone
    found = differentiable_gradients(asked, incoming);
  }
  variable_list gradients;
  visit_differentiable(call, found,
                       [&](const auto*, const at::Tensor& input, const at::Tensor& gradient) {
                         if (!input.defined()) return;
                         const bool wants_it = context->needs_input_grad(gradients.size());
                         gradients.push_back(wants_it ? gradient : at::Tensor());
                       });
  return gradients;
}

// The inputs that have a gradient -> out and, where it is wanted, softmax_lse: what hangs on the
// graph costs host time. They stand apart from the call, which has them too: a Function sees the
// tensors among its arguments, and the gradient hangs on them as they were given, while the call
// may go on with copies.
struct Attention : torch::autograd::Function<Attention> {
  static constexpr std::size_t other_arguments = 3;

  static variable_list forward(AutogradContext* context, const at::TensorList& /*edges*/,
                               const AttentionCall* call, Results* results, bool returns_lse) {
    context->set_materialize_grads(false);
    *results = run_forward_call(*call, !call->saves_memory);
    // Where the layout asked for a copy, the copy is saved: the backward would need it again.
    save(context, *call,
         {results->out, results->softmax_lse, results->rng_state, results->out_rounding});
    if (!returns_lse) return {results->out};
    return {results->out, results->softmax_lse};
  }

  // Either of the gradients may be undefined.
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    AttentionCall call;
    Incoming incoming;
    restore(context, call,
            {&incoming.out, &incoming.softmax_lse, &incoming.rng_state, &incoming.out_rounding});
    incoming.dout = gradients.at(0);
    if (gradients.size() > 1) incoming.dlse = gradients.at(1);
    const variable_list edges = edges_of(call);
    if (!incoming.dout.defined() && !incoming.dlse.defined())
      return variable_list(edges.size() + other_arguments);
    check_no_forward_gradient("dout", incoming.dout);
    check_no_forward_gradient("dlse", incoming.dlse);
    check_not_mapped("dout", incoming.dout);
    check_not_mapped("dlse", incoming.dlse);
    incoming.dout = unwrapped("dout", incoming.dout);
    incoming.dlse = unwrapped("dlse", incoming.dlse);

    variable_list results = gradients_of(context, call, incoming);
    results.resize(edges.size() + other_arguments);
    return results;
  }
};

void check_no_forward_gradients(const AttentionCall& call) {
  visit_differentiable(call, {}, [](const char* name, const at::Tensor& input, const auto&) {
    check_no_forward_gradient(name, input);
  });
}

void check_no_gradient(const char* name, const at::Tensor& tensor) {
  if (!tensor.defined()) return;
  check_no_forward_gradient(name, tensor);
  TORCH_CHECK_NOT_IMPLEMENTED(!at::GradMode::is_enabled() || !tensor.requires_grad(), name,
                              ": must not require grad, as it has no gradient");
}

bool requires_grad(const at::Tensor& tensor) { return tensor.defined() && tensor.requires_grad(); }

bool records(const AttentionCall& call) {
  if (!at::GradMode::is_enabled()) return false;
  bool found = false;
  visit_differentiable(call, {}, [&](const char* /*name*/, const at::Tensor& input, const auto&) {
    found = found || requires_grad(input);
  });
  return found;
}

// given: with the tensors that gradients hang on. returns_lse: else the results have no
// softmax_lse.
Results differentiable(const AttentionCall& given, const AttentionCall& call, bool is_recorded,
                       bool returns_lse) {
  Results results;
  if (is_recorded) {
    const variable_list edges = edges_of(given);
    variable_list outputs = Attention::apply(at::TensorList(edges), &call, &results, returns_lse);
    results.out = std::move(outputs.at(0));
    if (returns_lse) results.softmax_lse = std::move(outputs.at(1));
  } else {
    results = run_forward_call(call, call.keeps_rounding);
  }
  if (!returns_lse) results.softmax_lse.reset();
  return results;
}

}  // namespace

std::tuple<at::Tensor, OptionalTensor> attention(const at::Tensor& q, const at::Tensor& k,
                                                 const at::Tensor& v,
                                                 std::optional<double> softmax_scale, bool causal,
                                                 bool returns_lse) {
  AttentionCall given{.q = unwrapped("q", q),
                      .k = unwrapped("k", k),
                      .v = unwrapped("v", v),
                      .softmax_scale = softmax_scale,
                      .causal = causal,
                      .num_splits = 1};
  check_inputs(given);
  check_numbers(given, names_of_fields);
  given.softmax_scale = softmax_scale_of(given);
  check_no_forward_gradients(given);
  Results results = differentiable(given, with_kernel_layouts(given), records(given), returns_lse);
  return {std::move(results.out), if_defined(results.softmax_lse)};
}

Results forward(const AttentionCall& given, bool returns_lse) {
  check_no_gradient("alibi_slopes", given.alibi_slopes);
  check_no_gradient("q_descale", given.q_descale);
  check_no_gradient("k_descale", given.k_descale);
  check_no_gradient("v_descale", given.v_descale);
  check_no_forward_gradients(given);
  const bool is_recorded = records(given);
  if (is_recorded) {
    check_rules_of_recorded(given, names_of(given));
    check_rules_of_backward(given, names_of(given));
  }
  const AttentionCall call = checked_call(given, is_recorded ? Pass::both : Pass::forward);
  return differentiable(given, call, is_recorded, returns_lse);
}

Gradients backward(const AttentionCall& call, const Incoming& incoming) {
  return run_backward_call(checked_call(call, Pass::backward), incoming);
}

}  // namespace flash_attn_cuda::binding
