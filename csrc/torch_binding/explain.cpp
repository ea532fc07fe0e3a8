#include "torch_binding/explain.h"

#include <c10/cuda/CUDAFunctions.h>

#include "flash_attn/instance.h"
#include "host/names.h"
#include "torch_binding/check.h"
#include "torch_binding/checked_call.h"
#include "torch_binding/saved_call.h"

namespace flash_attn_cuda::binding {
namespace {

namespace py = pybind11;
using namespace pybind11::literals;

// Planning asks whether there is such an array, and never reads it.
constexpr int some_int = 0;
constexpr float some_float = 0.0f;
alignas(16) constexpr float some_vector[4] = {};

Dtype parse_dtype(const std::string& dtype) {
  for (const Dtype candidate : {Dtype::fp16, Dtype::bf16}) {
    if (dtype == name_of(candidate)) return candidate;
  }
  TORCH_CHECK_VALUE(false, "dtype: must be 'fp16' or 'bf16', got '", dtype, "'");
}

// What both passes take.
struct Request {
  const std::string& dtype;
  AttentionShape shape;
  bool causal;
  std::int64_t window_left;
  std::int64_t window_right;
  bool packed;
  double softcap;
  bool alibi;
  double p_dropout;
  bool block_sparse;
  bool bias;
};

// Contiguous, as planning asks how tensors lie; no memory is behind it.
TensorView contiguous_view(int seqlen, int heads, int head_dim) {
  constexpr int elements_of_16_bytes = 8;
  const std::int64_t columns =
      (head_dim + elements_of_16_bytes - 1) / elements_of_16_bytes * elements_of_16_bytes;
  return {.batch_stride = columns * seqlen * heads,
          .row_stride = columns * heads,
          .head_stride = columns};
}

template <class Params>
Params params_of(const Request& request) {
  Params params;
  const AttentionShape& shape = request.shape;
  params.q = contiguous_view(shape.seqlen_q, shape.num_heads_q, shape.head_dim);
  params.k = contiguous_view(shape.seqlen_k, shape.num_heads_k, shape.head_dim);
  params.v = contiguous_view(shape.seqlen_k, shape.num_heads_k, shape.head_dim_v);
  params.out = contiguous_view(shape.seqlen_q, shape.num_heads_q, shape.head_dim_v);
  params.dtype = parse_dtype(request.dtype);
  params.shape = request.shape;
  params.window = checked_window(request.causal, request.window_left, request.window_right);
  params.score.softcap = checked_softcap(request.softcap);
  params.score.alibi_slopes = request.alibi ? &some_float : nullptr;
  params.dropout.threshold = dropout_threshold(checked_p_dropout("p_dropout", request.p_dropout));
  params.sparsity.lists.data = request.block_sparse ? &some_int : nullptr;
  if (request.bias) {
    // Of every head and query, in the call's dtype.
    params.score.bias = {.data = &some_vector,
                         .head_stride = std::int64_t{shape.seqlen_q} * shape.seqlen_k,
                         .row_stride = shape.seqlen_k,
                         .rows = shape.seqlen_q,
                         .columns = shape.seqlen_k};
  }
  params.sequences.cu_seqlens_q = request.packed ? &some_int : nullptr;
  params.sequences.cu_seqlens_k = params.sequences.cu_seqlens_q;
  return params;
}

const DeviceInfo& device_or_current(std::optional<int> device) {
  return device_info(device.has_value() ? *device : c10::cuda::current_device());
}

template <class Config>
py::dict common_config(const Config& config) {
  return py::dict("family"_a = name_of(config.family), "dtype"_a = name_of(config.dtype),
                  "mask"_a = name_of(config.mask), "head_dim"_a = config.head_dim,
                  "head_dim_v"_a = config.head_dim_v, "block_m"_a = config.block_m,
                  "block_n"_a = config.block_n, "num_warps"_a = config.num_warps,
                  "features"_a = config.features,
                  "feature_names"_a = flash_attn_cuda::names_of(config.features));
}

// None for an undefined tensor.
py::dict describe(const AttentionCall& call) {
  const auto& [q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, leftpad_k, origin,
               alibi_slopes, max_seqlen_q, max_seqlen_k, cache, masks, options] = call;
  const auto& [block_rows, block_columns, bits, bias, sink] = masks;
  const auto& [window, softmax_scale, softcap, p_dropout, deterministic, fp32_results, sm_margin] =
      options;
  return py::dict("q"_a = q, "k"_a = k, "v"_a = v, "cu_seqlens_q"_a = cu_seqlens_q,
                  "cu_seqlens_k"_a = cu_seqlens_k, "seqused_q"_a = seqused_q,
                  "seqused_k"_a = seqused_k, "leftpad_k"_a = leftpad_k, "origin"_a = origin,
                  "alibi_slopes"_a = alibi_slopes, "max_seqlen_q"_a = max_seqlen_q,
                  "max_seqlen_k"_a = max_seqlen_k, "reads_in_place"_a = cache.reads_in_place,
                  "block_rows"_a = block_rows, "block_columns"_a = block_columns,
                  "mask_bits"_a = bits, "bias"_a = bias, "sink"_a = sink,
                  "window_left"_a = window.left, "window_right"_a = window.right,
                  "softmax_scale"_a = softmax_scale, "softcap"_a = softcap,
                  "dropout_p"_a = p_dropout, "deterministic"_a = deterministic,
                  "fp32_results"_a = fp32_results, "sm_margin"_a = sm_margin);
}

py::dict describe(const ForwardConfig& config) {
  py::dict result = common_config(config);
  result["kind"] = name_of(config.kind);
  result["most_causal_seqlen"] = config.most_causal_seqlen;
  result["most_full_seqlen"] = config.most_full_seqlen;
  result["least_keys_full"] = config.least_keys_full;
  result["least_keys_windowed"] = config.least_keys_windowed;
  return result;
}

py::dict describe(const BackwardConfig& config) {
  py::dict result = common_config(config);
  result["ctas_per_tile"] = config.ctas_per_tile;
  result["warps_m_scores"] = config.warps_m_scores;
  result["warps_n_dkdv"] = config.warps_n_dkdv;
  result["warps_m_dq"] = config.warps_m_dq;
  result["stages_q"] = config.stages_q;
  result["stages_do"] = config.stages_do;
  result["least_keys_full"] = config.least_keys_full;
  result["least_keys_windowed"] = config.least_keys_windowed;
  return result;
}

py::dict describe(const TileSchedule& schedule) {
  return py::dict("num_tiles"_a = schedule.num_tiles, "num_heads"_a = schedule.num_heads,
                  "num_batch_heads"_a = schedule.num_batch_heads,
                  "heads_per_section"_a = schedule.heads_per_section,
                  "least_last_heads"_a = schedule.least_last_heads,
                  "longest_first"_a = schedule.longest_first);
}

py::object describe(const SequenceTablePlan& table) {
  if (!table.used) return py::none();
  return py::dict("max_tiles"_a = table.max_tiles, "max_q_tiles"_a = table.max_q_tiles,
                  "swept_rows"_a = table.swept_rows);
}

template <class Plan>
py::dict describe_plan(const Plan& plan) {
  return py::dict("instance"_a = plan.instance->name, "config"_a = describe(plan.instance->config),
                  "smem_bytes"_a = plan.instance->smem_bytes, "grid"_a = plan.schedule.grid_size(),
                  "schedule"_a = describe(plan.schedule), "sequence_table"_a = describe(plan.table),
                  "workspace_bytes"_a = plan.workspace_bytes);
}

template <class Instances>
std::vector<std::string> instance_names(Instances instances) {
  std::vector<std::string> names;
  for (const auto* instance : instances) names.emplace_back(instance->name);
  return names;
}

}  // namespace

py::dict explain_forward(const std::string& dtype, int head_dim, int batch_size, int seqlen_q,
                         int seqlen_k, int num_heads_q, int num_heads_k, bool causal,
                         std::optional<int> device, std::int64_t window_left,
                         std::int64_t window_right, bool packed, double softcap, bool alibi,
                         double p_dropout, int page_size, bool lengths_on_device, int num_splits,
                         bool batch_invariant, int max_seqlen_q, bool block_sparse, bool bias,
                         std::optional<int> head_dim_v) {
  const AttentionShape shape{.batch_size = batch_size,
                             .seqlen_q = seqlen_q,
                             .seqlen_k = seqlen_k,
                             .num_heads_q = num_heads_q,
                             .num_heads_k = num_heads_k,
                             .head_dim = head_dim,
                             .head_dim_v = head_dim_v.value_or(head_dim)};
  auto params = params_of<ForwardParams>({dtype, shape, causal, window_left, window_right, packed,
                                          softcap, alibi, p_dropout, block_sparse, bias});
  TORCH_CHECK_VALUE(page_size >= 0, "page_size: must not be negative, got ", page_size);
  if (page_size > 0) {
    const int pages = seqlen_k / page_size + (seqlen_k % page_size != 0);
    params.paged = {.block_table = &some_int,
                    .table_stride = pages,
                    .max_pages = pages,
                    .page_size = page_size,
                    .num_pages = pages};
    params.sequences.cu_seqlens_k = nullptr;
  }
  if (lengths_on_device || page_size > 0) params.sequences.seqused_k = &some_int;
  params.sequences.max_seqlen_q = packed ? max_seqlen_q : 0;
  params.split = {.num_splits = checked_num_splits(num_splits), .batch_invariant = batch_invariant};
  const ForwardPlan plan = plan_forward(params, device_or_current(device));
  py::dict result = describe_plan(plan);
  result["draws_tiles"] = plan.draws_tiles;
  result["num_splits"] = plan.num_splits;
  result["keys_per_split"] = plan.keys_per_split;
  return result;
}

py::dict explain_backward(const std::string& dtype, int head_dim, int batch_size, int seqlen_q,
                          int seqlen_k, int num_heads_q, int num_heads_k, bool causal,
                          std::optional<int> device, std::int64_t window_left,
                          std::int64_t window_right, bool packed, double softcap, bool alibi,
                          double p_dropout, bool deterministic, bool block_sparse, bool bias,
                          std::optional<int> head_dim_v) {
  const AttentionShape shape{.batch_size = batch_size,
                             .seqlen_q = seqlen_q,
                             .seqlen_k = seqlen_k,
                             .num_heads_q = num_heads_q,
                             .num_heads_k = num_heads_k,
                             .head_dim = head_dim,
                             .head_dim_v = head_dim_v.value_or(head_dim)};
  auto params = params_of<BackwardParams>({dtype, shape, causal, window_left, window_right, packed,
                                           softcap, alibi, p_dropout, block_sparse, bias});
  params.dq = params.q;
  params.dout = params.out;
  params.dk = params.k;
  params.dv = params.v;
  params.deterministic = deterministic;
  const BackwardPlan plan = plan_backward(params, device_or_current(device));
  py::dict result = describe_plan(plan);
  result["dkdv_splits"] = plan.dkdv_splits;
  result["dq_path"] = name_of(plan.dq_path);
  result["sweeps"] = plan.sweeps;
  result["tile_parts"] = plan.shared_tiles.parts;
  result["q_tiles"] = plan.q_tiles;
  result["seqlen_q_rounded"] = packed ? seqlen_q : round_up_seqlen(seqlen_q);
  return result;
}

std::vector<py::dict> explain_settings(const CallArguments& call) {
  const AttentionCall of_forward = described_call(call, Pass::both);
  AttentionCall restored{.q = of_forward.q, .k = of_forward.k, .v = of_forward.v};
  std::vector<at::Tensor> saved;
  visit_saved_tensors(of_forward, [&](const at::Tensor& tensor) { saved.push_back(tensor); });
  std::size_t next = 0;
  visit_saved_tensors(restored, [&](at::Tensor& tensor) { tensor = saved.at(next++); });
  restore_numbers(saved_numbers(of_forward), restored);
  return {describe(described_call(call, Pass::backward)), describe(restored)};
}

std::vector<std::string> forward_instance_names() { return instance_names(forward_instances()); }

std::vector<std::string> backward_instance_names() { return instance_names(backward_instances()); }

}  // namespace flash_attn_cuda::binding
