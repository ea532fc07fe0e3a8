// attention() and attention_full(): the eager path, whose backward is a node of autograd's graph
// written directly. Of torch's ways to attach a gradient this is the one without per-call maps,
// lists and wrapping, which on a small call cost more than the launch.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <cmath>
#include <memory>
#include <mutex>

#include "torch_binding/backward.h"
#include "torch_binding/check.h"
#include "torch_binding/checked_call.h"
#include "torch_binding/forward.h"
#include "torch_binding/functions.h"
#include "torch_binding/to_params.h"

namespace flash_attn_cuda::binding {
namespace {

using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

// Stands where the gradients' own gradient would: it can be built into a graph, and refuses to run.
struct NoDoubleBackward : Node {
  using Node::Node;
  std::string name() const override { return "FlashAttentionNoDoubleBackward"; }
  variable_list apply(variable_list&& /*gradients*/) override {
    TORCH_CHECK_NOT_IMPLEMENTED(
        false,
        "flash_attn_cuda does not implement double backward: the gradients of attention "
        "cannot be differentiated again (create_graph=True)");
  }
};

// dO of a loss that does not depend on the output. Not one row that every row reads: strides of 0
// would keep the call from the Hopper kernels.
at::Tensor zero_gradient(const at::Tensor& out) { return at::zeros_like(out); }

// The tensors of a call that have no gradient.
struct SavedSettings {
  SavedVariable cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, leftpad_k;
  SavedVariable alibi_slopes, rng_state;

  explicit SavedSettings(const AttentionCall& call, const at::Tensor& rng)
      : cu_seqlens_q(call.cu_seqlens_q, /*is_output=*/false),
        cu_seqlens_k(call.cu_seqlens_k, /*is_output=*/false),
        seqused_q(call.seqused_q, /*is_output=*/false),
        seqused_k(call.seqused_k, /*is_output=*/false),
        leftpad_k(call.leftpad_k, /*is_output=*/false),
        alibi_slopes(call.alibi_slopes, /*is_output=*/false),
        rng_state(rng, /*is_output=*/false) {}

  void unpack(BackwardInputs& inputs) const {
    inputs.call.cu_seqlens_q = cu_seqlens_q.unpack();
    inputs.call.cu_seqlens_k = cu_seqlens_k.unpack();
    inputs.call.seqused_q = seqused_q.unpack();
    inputs.call.seqused_k = seqused_k.unpack();
    inputs.call.leftpad_k = leftpad_k.unpack();
    inputs.call.alibi_slopes = alibi_slopes.unpack();
    inputs.rng_state = rng_state.unpack();
  }

  void reset() {
    for (SavedVariable* saved : {&cu_seqlens_q, &cu_seqlens_k, &seqused_q, &seqused_k, &leftpad_k,
                                 &alibi_slopes, &rng_state})
      saved->reset_data();
  }
};

void check_no_forward_gradient(const char* name, const at::Tensor& tensor) {
  TORCH_CHECK_NOT_IMPLEMENTED(!torch::autograd::isFwGradDefined(tensor), name,
                              ": must not carry a forward-mode gradient, got a dual tensor");
}

struct AttentionBackward : Node {
  CallOptions options;
  SavedVariable q, k, v, out, softmax_lse;
  std::unique_ptr<SavedSettings> settings;  // null where the call has none

  std::string name() const override { return "FlashAttentionBackward"; }

  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (SavedVariable* saved : {&q, &k, &v, &out, &softmax_lse}) saved->reset_data();
    if (settings) settings->reset();
  }

  // The gradients of (out, softmax_lse), either of which may be undefined -> those of (q, k, v).
  variable_list apply(variable_list&& gradients) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    const bool is_differentiated = at::GradMode::is_enabled();  // create_graph=True
    const at::Tensor& dout = gradients[0];
    const at::Tensor& dlse = gradients[1];
    if (!dout.defined() && !dlse.defined()) return variable_list(3);
    check_no_forward_gradient("dout", dout);
    check_no_forward_gradient("dlse", dlse);

    const std::shared_ptr<Node> self = getptr();
    BackwardInputs inputs{.dout = dout,
                          .out = out.unpack(self),
                          .softmax_lse = softmax_lse.unpack(self),
                          .dlse = dlse};
    inputs.call.q = q.unpack();
    inputs.call.k = k.unpack();
    inputs.call.v = v.unpack();
    inputs.call.options = options;
    if (settings) settings->unpack(inputs);
    variable_list results = compute(inputs);
    if (is_differentiated) {
      const auto refusal = std::shared_ptr<NoDoubleBackward>(
          new NoDoubleBackward(torch::autograd::collect_next_edges(dout, dlse, inputs.call.q,
                                                                   inputs.call.k, inputs.call.v)),
          torch::autograd::deleteNode);
      torch::autograd::set_history(results, refusal);
    }
    for (std::size_t i = 0; i < results.size(); ++i) {
      if (!task_should_compute_output(i)) results[i].reset();
    }
    return results;
  }

 private:
  static variable_list compute(BackwardInputs inputs) {
    const at::NoGradGuard no_grad;
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

struct Results {
  at::Tensor out;
  ForwardResults forward;
};

// Runs the call and, where q, k or v require it, hangs its backward into the graph. `call` is left
// with the tensors that were computed with.
Results differentiable(AttentionCall& call, bool has_settings) {
  // The node hangs on the tensors as they were given; what is saved may be copies.
  const bool requires_grad = torch::autograd::compute_requires_grad(call.q, call.k, call.v);
  torch::autograd::edge_list edges;
  if (requires_grad) edges = torch::autograd::collect_next_edges(call.q, call.k, call.v);

  Results results;
  {
    const at::NoGradGuard no_grad;
    use_kernel_layout(call);
    results.out = allocate(output_sizes(call), call.q.scalar_type(), call.q);
    results.forward = run_forward_call(call, output_view(results.out));
  }
  if (requires_grad) {
    const auto node =
        std::shared_ptr<AttentionBackward>(new AttentionBackward(), torch::autograd::deleteNode);
    node->set_next_edges(std::move(edges));
    torch::autograd::set_history(results.out, node);
    torch::autograd::set_history(results.forward.softmax_lse, node);
    node->options = call.options;
    // Where the layout asked for a copy, the copy is saved: the backward would need it again.
    node->q = SavedVariable(call.q, /*is_output=*/false);
    node->k = SavedVariable(call.k, /*is_output=*/false);
    node->v = SavedVariable(call.v, /*is_output=*/false);
    node->out = SavedVariable(results.out, /*is_output=*/true);
    node->softmax_lse = SavedVariable(results.forward.softmax_lse, /*is_output=*/true);
    if (has_settings)
      node->settings = std::make_unique<SavedSettings>(call, results.forward.rng_state);
  }
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
