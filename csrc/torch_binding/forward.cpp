#include "torch_binding/forward.h"

#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include <limits>
#include <mutex>

#include "flash_attn/api.h"
#include "host/choose_forward.h"
#include "torch_binding/append.h"
#include "torch_binding/check.h"
#include "torch_binding/errors.h"
#include "torch_binding/launch_scope.h"
#include "torch_binding/layout.h"
#include "torch_binding/over_pairs.h"
#include "torch_binding/to_params.h"

namespace flash_attn_cuda::binding {
namespace {

// Advances the default generator of a CUDA device. While a CUDA graph is captured the source is
// memory that torch fills before every replay.
RngSource draw_rng(c10::DeviceIndex device) {
  // Two calls need two offsets, no more: the rest of the counter is the pair's place.
  constexpr std::uint64_t increment = 4;  // the least that torch's generator counts in
  at::Generator generator = at::cuda::detail::getDefaultCUDAGenerator(device);
  const std::lock_guard<std::mutex> lock(generator.mutex());
  const at::PhiloxCudaState state =
      generator.get<at::CUDAGeneratorImpl>()->philox_cuda_state(increment);
  if (!state.captured_) return {.seed = state.seed_.val, .offset = state.offset_.val};
  return {.seed_pointer = state.seed_.ptr,
          .offset_pointer = state.offset_.ptr,
          .offset_in_graph = state.offset_intragraph_};
}

// S_dmask: (batch, heads_q, rows, columns).
at::Tensor probabilities_of(const ForwardParams& params, const AttentionCall& call,
                            const at::Tensor& rng_state, Stream stream) {
  const PairExtent extent = extent_of(call);
  const AttentionShape& shape = params.shape;
  at::Tensor probabilities = at::zeros(
      {shape.batch_size, shape.num_heads_q, extent.seqlen_q, extent.seqlen_k}, call.q.options());
  if (probabilities.numel() == 0) return probabilities;
  DebugProbabilitiesParams debug{.forward = params,
                                 .probabilities = probabilities.mutable_data_ptr(),
                                 .rows = static_cast<int>(extent.seqlen_q),
                                 .columns = static_cast<int>(extent.seqlen_k)};
  debug.forward.dropout.rng = rng_of_state(rng_state);
  debug.forward.dropout.rng_state = nullptr;
  run_debug_probabilities(debug, stream);
  return probabilities;
}

// forward_params() with an out that is not there yet.
ForwardParams params_without_memory(const AttentionCall& call) {
  ForwardParams params = forward_params(call);
  params.out = output_view(without_memory(output_sizes(call), call.q));
  return params;
}

// A rotation rounds to 16 bits.
bool has_e4m3_products(const AttentionCall& call, const DeviceInfo& device) {
  return !call.rotary_cos.defined() &&
         flash_attn_cuda::has_e4m3_products(params_without_memory(call), device,
                                            forward_instances());
}

// All numbers of e4m3 are such.
AttentionCall with_queries_in_16_bits(AttentionCall call) {
  call.q = call.q.to(dtype_in_16_bits(call));
  return call;
}

}  // namespace

Results run_forward_call(const AttentionCall& call, bool keeps_rounding) {
  const LaunchScope scope(call.q);
  if (multiplies_fp8(call) && !has_e4m3_products(call, device_of_call(call)))
    return run_forward_call(with_queries_in_16_bits(call), keeps_rounding);
  if (call.rng_state.defined()) check_rng_state(call.rng_state, call.dropout_p, call.q);
  OutputTensor output("out", call.out, output_sizes(call), result_dtype(call), call.q);
  const Append append = begin_append(call);
  const at::Tensor& q = append.rotated_q.defined() ? append.rotated_q : call.q;

  Results results{.softmax_lse = allocate_rows(q, q.size(q.dim() - 3))};
  ForwardParams params = forward_params(call);
  params.q = input_view(q);
  params.out = output.view();
  params.lse = output_rows(results.softmax_lse);
  if (keeps_rounding && has_rounding(call)) {
    results.out_rounding = allocate(output_sizes(call), at::kChar, q);
    params.out_rounding = output_view(results.out_rounding);
  }
  if (call.return_max_logits) {
    results.max_logits =
        at::full({params.shape.batch_size, params.shape.num_heads_q},
                 -std::numeric_limits<float>::infinity(), q.options().dtype(at::kFloat));
    params.max_logits = results.max_logits.mutable_data_ptr<float>();
  }
  params.errors = has_device_contents(call) ? device_record(scope.device) : nullptr;
  const ForwardPlan plan = plan_forward(params, device_of_call(call));
  at::Tensor workspace;
  if (plan.workspace_bytes > 0) {
    workspace = allocate({static_cast<std::int64_t>(plan.workspace_bytes)}, at::kByte, q);
    params.workspace = workspace.mutable_data_ptr();
  }
  if (drops(call)) {
    results.rng_state = allocate({2}, at::kLong, q);  // written by run_forward
    params.dropout.rng =
        call.rng_state.defined() ? rng_of_state(call.rng_state) : draw_rng(scope.device);
    params.dropout.rng_state = results.rng_state.mutable_data_ptr<std::int64_t>();
  }
  const auto& [k, v, k_scale, v_scale] = append.written;
  count_writes({&output.given(), &k, &v, &k_scale, &v_scale});
  if (append.params.has_value()) run_append(*append.params, scope.stream);
  run_forward(plan, params, scope.stream);
  if (wants_s_dmask(call))
    results.S_dmask = probabilities_of(params, call, results.rng_state, scope.stream);
  if (has_device_contents(call)) raise_if_checking(scope.device, scope.stream, names_of(call));
  results.out = output.finish();
  return results;
}

ForwardPlan plan_forward_call(const AttentionCall& call, const DeviceInfo& device,
                              bool with_tangents) {
  if (multiplies_fp8(call) && !has_e4m3_products(call, device))
    return plan_forward_call(with_queries_in_16_bits(call), device, with_tangents);
  ForwardParams params = params_without_memory(call);
  float nowhere = 0.0f;
  if (call.return_max_logits) params.max_logits = &nowhere;
  params.tangents = tangents_without_memory(params, with_tangents);
  return plan_forward(params, device);
}

}  // namespace flash_attn_cuda::binding
