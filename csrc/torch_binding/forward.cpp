#include "torch_binding/forward.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "flash_attn/api.h"
#include "torch_binding/check.h"
#include "torch_binding/checked_call.h"
#include "torch_binding/functions.h"
#include "torch_binding/rng.h"
#include "torch_binding/to_params.h"

namespace flash_attn_cuda::binding {
namespace {

at::Tensor probabilities_of(const ForwardParams& params, const ForwardResults& results,
                            const at::Tensor& q, const ForwardExtras& extras, Stream stream) {
  const AttentionShape& shape = params.shape;
  at::Tensor probabilities =
      at::zeros({shape.batch_size, shape.num_heads_q, extras.rows, extras.columns}, q.options());
  if (probabilities.numel() == 0) return probabilities;
  DebugProbabilitiesParams debug{.forward = params,
                                 .probabilities = probabilities.mutable_data_ptr(),
                                 .rows = static_cast<int>(extras.rows),
                                 .columns = static_cast<int>(extras.columns)};
  debug.forward.dropout.rng = rng_of_state(results.rng_state);
  debug.forward.dropout.rng_state = nullptr;
  run_debug_probabilities(debug, stream);
  return probabilities;
}

// The outputs of FlashAttention-2's forward functions.
std::vector<at::Tensor> run(AttentionCall call, const OptionalTensor& out,
                            const ForwardExtras& extras) {
  const at::NoGradGuard no_grad;
  OutputTensor output("out", out, output_sizes(call), call.q);
  use_kernel_layout(call);
  ForwardResults results = run_forward_call(call, output.view(), extras);
  const auto or_empty = [&call](at::Tensor& tensor, at::ScalarType dtype) {
    return tensor.defined() ? std::move(tensor) : allocate({0}, dtype, call.q);
  };
  return {output.finish(), std::move(results.softmax_lse),
          or_empty(results.probabilities, call.q.scalar_type()),
          or_empty(results.rng_state, at::kLong)};
}

}  // namespace

ForwardResults run_forward_call(const AttentionCall& call, TensorView out,
                                const ForwardExtras& extras) {
  const c10::DeviceIndex device = call.q.device().index();
  const c10::cuda::CUDAGuard guard(device);
  const Stream stream = c10::cuda::getCurrentCUDAStream(device).stream();
  const bool has_device_contents = call.has_device_contents();
  ForwardResults results{.softmax_lse = allocate_rows(call.q, call.q.size(call.q.dim() - 3))};
  ForwardParams params{.dtype = dtype_of(call.q),
                       .shape = shape_of(call),
                       .sequences = sequence_params(call),
                       .window = call.options.window,
                       .score = score_params(call),
                       .dropout = {.threshold = dropout_threshold(call.options.p_dropout)},
                       .sparsity = sparsity_params(call),
                       .paged = paged_params(call),
                       .split = extras.split,
                       .q = input_view(call.q),
                       .k = input_view(call.k),
                       .v = input_view(call.v),
                       .out = out,
                       .lse = output_rows(results.softmax_lse),
                       .errors = has_device_contents ? device_record(device) : nullptr};
  const ForwardPlan plan = plan_forward(params, device_info(device));
  at::Tensor workspace;
  if (plan.workspace_bytes > 0) {
    workspace = allocate({static_cast<std::int64_t>(plan.workspace_bytes)}, at::kByte, call.q);
    params.workspace = workspace.mutable_data_ptr();
  }
  if (call.options.p_dropout > 0.0) {
    results.rng_state = allocate({2}, at::kLong, call.q);  // written by run_forward
    params.dropout.rng = draw_rng(device);
    params.dropout.rng_state = results.rng_state.mutable_data_ptr<std::int64_t>();
  }
  if (extras.append != nullptr) run_append(*extras.append, stream);
  run_forward(plan, params, stream);
  if (extras.wants_probabilities && call.options.p_dropout > 0.0)
    results.probabilities = probabilities_of(params, results, call.q, extras, stream);
  if (has_device_contents) raise_if_checking(device, stream, extras.names);
  return results;
}

std::vector<at::Tensor> fwd(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            const OptionalTensor& out, const OptionalTensor& alibi_slopes,
                            double p_dropout, double softmax_scale, bool is_causal,
                            std::int64_t window_left, std::int64_t window_right, double softcap,
                            bool return_softmax, const OptionalGenerator& unused_generator) {
  refuse_generator(unused_generator.has_value());
  const AttentionCall call = checked_call({.q = q,
                                           .k = k,
                                           .v = v,
                                           .alibi_slopes = alibi_slopes,
                                           .p_dropout = p_dropout,
                                           .softmax_scale = softmax_scale,
                                           .is_causal = is_causal,
                                           .window_left = window_left,
                                           .window_right = window_right,
                                           .softcap = softcap});
  return run(call, out,
             {.wants_probabilities = return_softmax, .rows = q.size(1), .columns = k.size(1)});
}

std::vector<at::Tensor> varlen_fwd(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const OptionalTensor& out,
    const at::Tensor& cu_seqlens_q, const OptionalTensor& cu_seqlens_k,
    const OptionalTensor& seqused_k, const OptionalTensor& leftpad_k,
    const OptionalTensor& block_table, const OptionalTensor& alibi_slopes,
    std::int64_t max_seqlen_q, std::int64_t max_seqlen_k, double p_dropout, double softmax_scale,
    bool /*zero_tensors: every row is written anyway*/, bool is_causal, std::int64_t window_left,
    std::int64_t window_right, double softcap, bool return_softmax,
    const OptionalGenerator& unused_generator, std::int64_t num_splits,
    const OptionalTensor& seqused_q, bool batch_invariant, const OptionalTensor& sink) {
  refuse_generator(unused_generator.has_value());
  const AttentionCall call = checked_call({.q = q,
                                           .k = k,
                                           .v = v,
                                           .cu_seqlens_q = cu_seqlens_q,
                                           .cu_seqlens_k = cu_seqlens_k,
                                           .seqused_q = seqused_q,
                                           .seqused_k = seqused_k,
                                           .leftpad_k = leftpad_k,
                                           .block_table = block_table,
                                           .max_seqlen_q = max_seqlen_q,
                                           .max_seqlen_k = max_seqlen_k,
                                           .alibi_slopes = alibi_slopes,
                                           .sink = sink,
                                           .p_dropout = p_dropout,
                                           .softmax_scale = softmax_scale,
                                           .is_causal = is_causal,
                                           .window_left = window_left,
                                           .window_right = window_right,
                                           .softcap = softcap});
  TORCH_CHECK_NOT_IMPLEMENTED(p_dropout == 0.0 || !block_table.has_value(),
                              "p_dropout: must be 0 with a block_table, got ", p_dropout);
  // A packed batch fills the device without splits; a long cache may not.
  const int splits = checked_num_splits(num_splits);
  const int wanted = splits == 0 && !call.is_paged() ? 1 : splits;
  return run(call, out,
             {.split = {.num_splits = wanted, .batch_invariant = batch_invariant},
              .wants_probabilities = return_softmax,
              .rows = max_seqlen_q,
              .columns = max_seqlen_k});
}

}  // namespace flash_attn_cuda::binding
