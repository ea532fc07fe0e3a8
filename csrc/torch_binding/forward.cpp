#include "torch_binding/forward.h"

#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "flash_attn/api.h"
#include "torch_binding/append.h"
#include "torch_binding/check.h"
#include "torch_binding/checked_call.h"
#include "torch_binding/errors.h"
#include "torch_binding/rng.h"
#include "torch_binding/to_params.h"

namespace flash_attn_cuda::binding {
namespace {

at::Tensor probabilities_of(const ForwardParams& params, const ForwardResults& results,
                            const AttentionCall& call, std::int64_t rows, std::int64_t columns,
                            Stream stream) {
  const AttentionShape& shape = params.shape;
  at::Tensor probabilities =
      at::zeros({shape.batch_size, shape.num_heads_q, rows, columns}, call.q.options());
  if (probabilities.numel() == 0) return probabilities;
  DebugProbabilitiesParams debug{.forward = params,
                                 .probabilities = probabilities.mutable_data_ptr(),
                                 .rows = static_cast<int>(rows),
                                 .columns = static_cast<int>(columns)};
  debug.forward.dropout.rng = rng_of_state(results.rng_state);
  debug.forward.dropout.rng_state = nullptr;
  run_debug_probabilities(debug, stream);
  return probabilities;
}

// A packed batch fills the device without splits; a cache, or pages, may be long.
SplitParams split_params(const CallArguments& given, const AttentionCall& call) {
  const int splits = checked_num_splits(given.num_splits);
  return {.num_splits = splits == 0 && !call.cache.reads_in_place ? 1 : splits,
          .batch_invariant = given.batch_invariant};
}

}  // namespace

ForwardResults run_forward_call(const CallArguments& given, AttentionCall& call) {
  const c10::DeviceIndex device = call.q.device().index();
  const c10::cuda::CUDAGuard guard(device);
  const Stream stream = c10::cuda::getCurrentCUDAStream(device).stream();
  const SplitParams split = split_params(given, call);
  const at::Tensor given_rng =
      given.rng_state.has_value()
          ? checked_rng_state(given.rng_state, call.options.p_dropout, call.q)
          : at::Tensor();
  CacheUpdate update;
  if (given.over_cache) update = checked_update(given, call);
  OutputTensor output("out", given.out, output_sizes(call), call.result_dtype(), call.q);
  use_kernel_layout(call);
  const at::Tensor q = call.q;  // read by what rotates it
  std::optional<AppendParams> append;
  if (given.over_cache) append = append_params(call, update);

  const bool has_device_contents = call.has_device_contents();
  ForwardResults results{.softmax_lse = allocate_rows(call.q, call.q.size(call.q.dim() - 3))};
  ForwardParams params{.dtype = dtype_of(call.q),
                       .shape = shape_of(call),
                       .sequences = sequence_params(call),
                       .window = call.options.window,
                       .score = score_params(call),
                       .dropout = {.threshold = dropout_threshold(call.options.p_dropout)},
                       .sparsity = sparsity_params(call, /*by_keys=*/false),
                       .paged = paged_params(call),
                       .split = split,
                       .q = input_view(call.q),
                       .k = input_view(call.k),
                       .v = input_view(call.v),
                       .out = output.view(),
                       .fp32_results = call.options.fp32_results,
                       .lse = output_rows(results.softmax_lse),
                       .errors = has_device_contents ? device_record(device) : nullptr};
  const ForwardPlan plan = plan_forward(params, device_of_call(call));
  at::Tensor workspace;
  if (plan.workspace_bytes > 0) {
    workspace = allocate({static_cast<std::int64_t>(plan.workspace_bytes)}, at::kByte, call.q);
    params.workspace = workspace.mutable_data_ptr();
  }
  if (call.options.p_dropout > 0.0) {
    results.rng_state = allocate({2}, at::kLong, call.q);  // written by run_forward
    params.dropout.rng = given_rng.defined() ? rng_of_state(given_rng) : draw_rng(device);
    params.dropout.rng_state = results.rng_state.mutable_data_ptr<std::int64_t>();
  }
  if (append.has_value()) run_append(*append, stream);
  run_forward(plan, params, stream);
  if (given.return_softmax && call.options.p_dropout > 0.0) {
    const bool is_packed = call.is_packed();
    const std::int64_t rows = is_packed ? given.max_seqlen_q : call.q.size(1);
    const std::int64_t columns = is_packed ? given.max_seqlen_k : call.k.size(1);
    results.probabilities = probabilities_of(params, results, call, rows, columns, stream);
  }
  if (has_device_contents) {
    const ContentNames of_cache{.seqused_k = "cache_seqlens", .leftpad_k = "cache_leftpad"};
    raise_if_checking(device, stream, given.over_cache ? of_cache : ContentNames{});
  }
  results.out = output.finish();
  return results;
}

}  // namespace flash_attn_cuda::binding
