// What a call would run, for people and tests. Launches nothing, and reads no tensor: those without
// memory (torch's meta device) do.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "torch_binding/call.h"

namespace flash_attn_cuda::binding {

// device: an index; none: the current one. tangents: of a derivative in a direction.
pybind11::dict explain_forward(const AttentionCall& call, std::optional<int> device, bool tangents);
pybind11::dict explain_backward(const AttentionCall& call, std::optional<int> device,
                                bool tangents);

// What a backward is told of a call, by names of AttentionCall's fields: [by an operator, by what
// autograd keeps of a forward].
std::vector<pybind11::dict> explain_settings(const AttentionCall& call);

// The call that aten's operator of this name, such as _flash_attention_forward, runs for all its
// arguments (call_of_aten), by names of AttentionCall's fields; none: it is left to torch.
std::optional<pybind11::dict> explain_aten_operator(const std::string& name,
                                                    const pybind11::tuple& arguments);

std::vector<std::string> forward_instance_names();
std::vector<std::string> backward_instance_names();

// The key_lists of a call without qv the other way round (listed_queries.h): places, rows, begins,
// and of a deterministic one ranks.
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> queries_of_lists(
    const AttentionCall& call);

}  // namespace flash_attn_cuda::binding
