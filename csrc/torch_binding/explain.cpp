#include "torch_binding/explain.h"

#include <c10/cuda/CUDAFunctions.h>

#include "flash_attn/instance.h"
#include "host/names.h"

namespace flash_attn_cuda::binding {
namespace {

namespace py = pybind11;
using namespace pybind11::literals;

Dtype parse_dtype(const std::string& dtype) {
  for (const Dtype candidate : {Dtype::fp16, Dtype::bf16}) {
    if (dtype == name_of(candidate)) return candidate;
  }
  TORCH_CHECK_VALUE(false, "dtype: must be 'fp16' or 'bf16', got '", dtype, "'");
}

template <class Params>
Params params_of(const std::string& dtype, const AttentionShape& shape, bool causal) {
  Params params;
  params.dtype = parse_dtype(dtype);
  params.shape = shape;
  params.window.right = causal ? 0 : Window::unbounded;
  return params;
}

const DeviceInfo& device_or_current(std::optional<int> device) {
  return device_info(device.has_value() ? *device : c10::cuda::current_device());
}

template <class Config>
py::dict common_config(const Config& config) {
  return py::dict("family"_a = name_of(config.family), "dtype"_a = name_of(config.dtype),
                  "mask"_a = name_of(config.mask), "head_dim"_a = config.head_dim,
                  "block_m"_a = config.block_m, "block_n"_a = config.block_n,
                  "num_warps"_a = config.num_warps, "features"_a = config.features);
}

py::dict describe(const ForwardConfig& config) { return common_config(config); }

py::dict describe(const BackwardConfig& config) {
  py::dict result = common_config(config);
  result["warps_m_scores"] = config.warps_m_scores;
  result["warps_n_dkdv"] = config.warps_n_dkdv;
  result["warps_m_dq"] = config.warps_m_dq;
  result["stages_q"] = config.stages_q;
  result["stages_do"] = config.stages_do;
  return result;
}

py::dict describe(const TileSchedule& schedule) {
  return py::dict("num_tiles"_a = schedule.num_tiles, "num_heads"_a = schedule.num_heads,
                  "num_batch_heads"_a = schedule.num_batch_heads,
                  "heads_per_section"_a = schedule.heads_per_section,
                  "longest_first"_a = schedule.longest_first);
}

template <class Plan>
py::dict describe_plan(const Plan& plan, std::size_t workspace_bytes) {
  return py::dict("instance"_a = plan.instance->name, "config"_a = describe(plan.instance->config),
                  "smem_bytes"_a = plan.instance->smem_bytes, "grid"_a = plan.schedule.grid_size(),
                  "schedule"_a = describe(plan.schedule), "workspace_bytes"_a = workspace_bytes);
}

template <class Instances>
std::vector<std::string> names_of(Instances instances) {
  std::vector<std::string> names;
  for (const auto* instance : instances) names.emplace_back(instance->name);
  return names;
}

}  // namespace

py::dict explain_forward(const std::string& dtype, int head_dim, int batch_size, int seqlen_q,
                         int seqlen_k, int num_heads_q, int num_heads_k, bool causal,
                         std::optional<int> device) {
  const AttentionShape shape{.batch_size = batch_size,
                             .seqlen_q = seqlen_q,
                             .seqlen_k = seqlen_k,
                             .num_heads_q = num_heads_q,
                             .num_heads_k = num_heads_k,
                             .head_dim = head_dim};
  const auto params = params_of<ForwardParams>(dtype, shape, causal);
  return describe_plan(plan_forward(params, device_or_current(device)), 0);
}

py::dict explain_backward(const std::string& dtype, int head_dim, int batch_size, int seqlen_q,
                          int seqlen_k, int num_heads_q, int num_heads_k, bool causal,
                          std::optional<int> device) {
  const AttentionShape shape{.batch_size = batch_size,
                             .seqlen_q = seqlen_q,
                             .seqlen_k = seqlen_k,
                             .num_heads_q = num_heads_q,
                             .num_heads_k = num_heads_k,
                             .head_dim = head_dim};
  const auto params = params_of<BackwardParams>(dtype, shape, causal);
  const BackwardPlan plan = plan_backward(params, device_or_current(device));
  py::dict result = describe_plan(plan, plan.workspace_bytes);
  result["dkdv_splits"] = plan.dkdv_splits;
  result["seqlen_q_rounded"] = plan.seqlen_q_rounded;
  return result;
}

std::vector<std::string> forward_instance_names() { return names_of(forward_instances()); }

std::vector<std::string> backward_instance_names() { return names_of(backward_instances()); }

}  // namespace flash_attn_cuda::binding
