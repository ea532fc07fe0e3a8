// attention(): the eager path, whose backward is a node of autograd's graph written directly. Of
// torch's ways to attach a gradient this is the one without per-call maps, lists and wrapping,
// which on a small call cost more than the launch.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <cmath>
#include <memory>
#include <mutex>

#include "torch_binding/backward.h"
#include "torch_binding/check.h"
#include "torch_binding/forward.h"
#include "torch_binding/functions.h"

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

// dO of a loss that does not depend on the output: one row of zeros that every row reads.
at::Tensor zero_gradient(const at::Tensor& out) {
  return at::zeros({out.size(3)}, out.options()).expand(out.sizes());
}

struct AttentionBackward : Node {
  Window window;
  float softmax_scale = 1.0f;
  SavedVariable q, k, v, out, softmax_lse;

  std::string name() const override { return "FlashAttentionBackward"; }

  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (SavedVariable* saved : {&q, &k, &v, &out, &softmax_lse}) saved->reset_data();
  }

  // The gradients of (out, softmax_lse), either of which may be undefined -> those of (q, k, v).
  variable_list apply(variable_list&& gradients) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    const bool is_differentiated = at::GradMode::is_enabled();  // create_graph=True
    const at::Tensor& dout = gradients[0];
    const at::Tensor& dlse = gradients[1];
    if (!dout.defined() && !dlse.defined()) return variable_list(3);

    const std::shared_ptr<Node> self = getptr();
    BackwardInputs inputs{.dout = dout,
                          .q = q.unpack(),
                          .k = k.unpack(),
                          .v = v.unpack(),
                          .out = out.unpack(self),
                          .softmax_lse = softmax_lse.unpack(self),
                          .dlse = dlse};
    variable_list results = compute(inputs);
    if (is_differentiated) {
      const auto refusal = std::shared_ptr<NoDoubleBackward>(
          new NoDoubleBackward(
              torch::autograd::collect_next_edges(dout, dlse, inputs.q, inputs.k, inputs.v)),
          torch::autograd::deleteNode);
      torch::autograd::set_history(results, refusal);
    }
    for (std::size_t i = 0; i < results.size(); ++i) {
      if (!task_should_compute_output(i)) results[i].reset();
    }
    return results;
  }

 private:
  variable_list compute(BackwardInputs inputs) const {
    const at::NoGradGuard no_grad;
    if (!inputs.dout.defined()) inputs.dout = zero_gradient(inputs.out);
    const at::ScalarType dtype = inputs.q.scalar_type();
    at::Tensor dq = allocate(inputs.q.sizes(), dtype, inputs.q);
    at::Tensor dk = allocate(inputs.k.sizes(), dtype, inputs.q);
    at::Tensor dv = allocate(inputs.v.sizes(), dtype, inputs.q);
    run_backward_call(inputs, {.dq = output_view(dq), .dk = output_view(dk), .dv = output_view(dv)},
                      window, softmax_scale);
    return {std::move(dq), std::move(dk), std::move(dv)};
  }
};

void check_no_forward_gradient(const char* name, const at::Tensor& tensor) {
  TORCH_CHECK_NOT_IMPLEMENTED(!torch::autograd::isFwGradDefined(tensor), name,
                              ": must not carry a forward-mode gradient, got a dual tensor");
}

}  // namespace

std::tuple<at::Tensor, at::Tensor> attention(const at::Tensor& q, const at::Tensor& k,
                                             const at::Tensor& v,
                                             std::optional<double> softmax_scale, bool causal) {
  check_inputs(q, k, v);
  check_no_forward_gradient("q", q);
  check_no_forward_gradient("k", k);
  check_no_forward_gradient("v", v);
  const Window window{.right = causal ? 0 : Window::unbounded};
  const float scale = checked_softmax_scale(
      softmax_scale.value_or(1.0 / std::sqrt(static_cast<double>(q.size(3)))));

  at::Tensor kernel_q, kernel_k, kernel_v, out, softmax_lse;
  {
    const at::NoGradGuard no_grad;
    kernel_q = with_kernel_layout(q);
    kernel_k = with_kernel_layout(k);
    kernel_v = with_kernel_layout(v);
    out = allocate(q.sizes(), q.scalar_type(), q);
    softmax_lse = run_forward_call(kernel_q, kernel_k, kernel_v, output_view(out), window, scale);
  }
  if (torch::autograd::compute_requires_grad(q, k, v)) {
    const auto node =
        std::shared_ptr<AttentionBackward>(new AttentionBackward(), torch::autograd::deleteNode);
    node->set_next_edges(torch::autograd::collect_next_edges(q, k, v));
    torch::autograd::set_history(out, node);
    torch::autograd::set_history(softmax_lse, node);
    node->window = window;
    node->softmax_scale = scale;
    // Where the layout asked for a copy, the copy is saved: the backward would need it again.
    node->q = SavedVariable(kernel_q, /*is_output=*/false);
    node->k = SavedVariable(kernel_k, /*is_output=*/false);
    node->v = SavedVariable(kernel_v, /*is_output=*/false);
    node->out = SavedVariable(out, /*is_output=*/true);
    node->softmax_lse = SavedVariable(softmax_lse, /*is_output=*/true);
  }
  return {std::move(out), std::move(softmax_lse)};
}

}  // namespace flash_attn_cuda::binding
