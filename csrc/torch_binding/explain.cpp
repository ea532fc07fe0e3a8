#include "torch_binding/explain.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/cuda/CUDAFunctions.h>
#include <torch/csrc/autograd/python_variable.h>

#include "flash_attn/instance.h"
#include "host/names.h"
#include "torch_binding/aten_operators.h"
#include "torch_binding/backward.h"
#include "torch_binding/checked_call.h"
#include "torch_binding/forward.h"
#include "torch_binding/kept_call.h"
#include "torch_binding/listed_queries.h"
#include "torch_binding/to_params.h"

namespace flash_attn_cuda::binding {
namespace {

namespace py = pybind11;
using namespace pybind11::literals;

const DeviceInfo& device_or_current(std::optional<int> device) {
  return device_info(device.has_value() ? *device : c10::cuda::current_device());
}

// What autograd gives the backward of a forward of this call.
AttentionCall kept_of(const AttentionCall& given) {
  AttentionCall kept;
  restore(keep(described_call(given, Pass::both), {}), kept, {});
  return kept;
}

// An undefined tensor becomes None.
py::dict describe(AttentionCall call) {
  py::dict result;
  visit_fields(call, [&](const char* name, const auto& field, bool) { result[name] = field; });
  return result;
}

// An operator's argument: a tensor, a flag, a number or None.
c10::IValue value_of(py::handle given) {
  if (given.is_none()) return {};
  if (THPVariable_Check(given.ptr())) return given.cast<at::Tensor>();
  if (py::isinstance<py::bool_>(given)) return given.cast<bool>();
  if (py::isinstance<py::int_>(given)) return given.cast<std::int64_t>();
  return given.cast<double>();
}

py::dict describe(const TileSchedule& schedule) {
  return py::dict("num_tiles"_a = schedule.num_tiles, "num_heads"_a = schedule.num_heads,
                  "num_batch_heads"_a = schedule.num_batch_heads,
                  "heads_per_section"_a = schedule.heads_per_section,
                  "least_last_heads"_a = schedule.least_last_heads,
                  "longest_first"_a = schedule.longest_first);
}

py::object describe(const SequenceTablePlan& table) {
  if (!table.used()) return py::none();
  return py::dict("max_tiles"_a = table.tiles.count, "max_q_tiles"_a = table.q_tiles.count,
                  "swept_rows"_a = table.swept_rows);
}

template <class Plan>
py::dict describe_plan(const Plan& plan) {
  return py::dict("instance"_a = plan.instance->name, "smem_bytes"_a = plan.instance->smem_bytes,
                  "grid"_a = plan.grid, "schedule"_a = describe(plan.schedule),
                  "sequence_table"_a = describe(plan.table),
                  "workspace_bytes"_a = plan.workspace_bytes);
}

template <class Instances>
std::vector<std::string> instance_names(Instances instances) {
  std::vector<std::string> names;
  for (const auto* instance : instances) names.emplace_back(instance->name);
  return names;
}

}  // namespace

py::dict explain_forward(const AttentionCall& given, std::optional<int> device, bool tangents) {
  const AttentionCall call = described_call(given, Pass::forward);
  const ForwardPlan plan = plan_forward_call(call, device_or_current(device), tangents);
  py::dict result = describe_plan(plan);
  result["draws_tiles"] = plan.tickets.exists();
  result["num_splits"] = plan.num_splits;
  result["keys_per_split"] = plan.keys_per_split;
  return result;
}

py::dict explain_backward(const AttentionCall& given, std::optional<int> device, bool tangents) {
  const AttentionCall call = described_call(given, Pass::backward);
  const BackwardPlan plan = plan_backward_call(call, device_or_current(device), tangents);
  py::dict result = describe_plan(plan);
  result["dkdv_splits"] = plan.dkdv_splits;
  result["dq_path"] = name_of(plan.dq_path);
  result["sweeps"] = plan.sweeps;
  result["tile_parts"] = plan.shared_tiles.parts;
  result["q_tiles"] = plan.q_tiles;
  const int seqlen_q = shape_of(call).seqlen_q;
  result["seqlen_q_rounded"] = is_packed(call) ? seqlen_q : round_up_seqlen(seqlen_q);
  return result;
}

std::vector<py::dict> explain_settings(const AttentionCall& given) {
  return {describe(described_call(given, Pass::backward)), describe(kept_of(given))};
}

std::optional<py::dict> explain_aten_operator(const std::string& name, const py::tuple& arguments) {
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(("aten::" + name).c_str(), "");
  const std::size_t count = op.schema().arguments().size();
  TORCH_CHECK_VALUE(arguments.size() == count, "arguments: must be the ", count, " of ", name,
                    ", got ", arguments.size());
  torch::jit::Stack stack;
  for (const py::handle argument : arguments) stack.push_back(value_of(argument));
  const std::optional<AttentionCall> call = call_of_aten(op, stack);
  if (!call.has_value()) return std::nullopt;
  return describe(*call);
}

std::vector<std::string> forward_instance_names() { return instance_names(forward_instances()); }

std::vector<std::string> backward_instance_names() { return instance_names(backward_instances()); }

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> queries_of_lists(
    const AttentionCall& given) {
  const AttentionCall call = described_call(given, Pass::backward);
  TORCH_CHECK_VALUE(lists_blocks(call), "key_lists: must be given without qv, got None");
  const ListedTensors made = listed_tensors(call);
  return {made.places, made.rows, made.begins, made.ranks};
}

}  // namespace flash_attn_cuda::binding
