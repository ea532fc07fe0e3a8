// What a call of given shapes would run, for people and tests. Launches nothing.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "torch_binding/arguments.h"

namespace flash_attn_cuda::binding {

// Packed: seqlen_q and seqlen_k are the totals of batch_size sequences, max_seqlen_q a bound of
// one, 0 for none. page_size 0: not paged; else seqlen_k is what the block table can hold of a
// sequence.
pybind11::dict explain_forward(const std::string& dtype, int head_dim, int batch_size, int seqlen_q,
                               int seqlen_k, int num_heads_q, int num_heads_k, bool causal,
                               std::optional<int> device, std::int64_t window_left,
                               std::int64_t window_right, bool packed, double softcap, bool alibi,
                               double p_dropout, int page_size, bool lengths_on_device,
                               int num_splits, bool batch_invariant, int max_seqlen_q,
                               bool block_sparse, bool bias, std::optional<int> head_dim_v);

pybind11::dict explain_backward(const std::string& dtype, int head_dim, int batch_size,
                                int seqlen_q, int seqlen_k, int num_heads_q, int num_heads_k,
                                bool causal, std::optional<int> device, std::int64_t window_left,
                                std::int64_t window_right, bool packed, double softcap, bool alibi,
                                double p_dropout, bool deterministic, bool block_sparse, bool bias,
                                std::optional<int> head_dim_v);

// What a backward is told of a call, by names of AttentionCall's (call.h) fields: [by an operator,
// by what autograd keeps of a forward].
std::vector<pybind11::dict> explain_settings(const CallArguments& call);

std::vector<std::string> forward_instance_names();
std::vector<std::string> backward_instance_names();

}  // namespace flash_attn_cuda::binding
