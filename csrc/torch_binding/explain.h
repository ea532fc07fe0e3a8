// What a call of given shapes would run, for people and tests. Launches nothing.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <optional>
#include <string>
#include <vector>

namespace flash_attn_cuda::binding {

pybind11::dict explain_forward(const std::string& dtype, int head_dim, int batch_size, int seqlen_q,
                               int seqlen_k, int num_heads_q, int num_heads_k, bool causal,
                               std::optional<int> device);

pybind11::dict explain_backward(const std::string& dtype, int head_dim, int batch_size,
                                int seqlen_q, int seqlen_k, int num_heads_q, int num_heads_k,
                                bool causal, std::optional<int> device);

std::vector<std::string> forward_instance_names();
std::vector<std::string> backward_instance_names();

}  // namespace flash_attn_cuda::binding
