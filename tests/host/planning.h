// Plans of calls against the whole tables of an installation on a Hopper GPU: once a program, which
// it gives the registry, too.
#pragma once

#include <string>

#include "fixtures.h"
#include "host/plan.h"
#include "no_driver.h"

// Stand in for the generated registry.
std::span<const flash_attn_cuda::ForwardInstance* const> flash_attn_cuda::forward_instances() {
  return host_tests::sm90_forward_table();
}
std::span<const flash_attn_cuda::BackwardInstance* const> flash_attn_cuda::backward_instances() {
  return host_tests::sm90_backward_table();
}

namespace host_tests {

inline ForwardPlan plan(const ForwardParams& params, const DeviceInfo& device = h200) {
  return plan_forward(params, device, sm90_forward_table());
}
inline BackwardPlan plan(const BackwardParams& params, const DeviceInfo& device = h200) {
  return plan_backward(params, device, sm90_backward_table());
}

// The row that serves the training call, or this one, on tensors of its own, after `change`.
template <class Params, class Change>
std::string chosen(Change change, const AttentionShape& shape = training, Window window = {},
                   const DeviceInfo& device = h200) {
  auto params = with_tensors(call<Params>(shape, window));
  change(params);
  return plan(params, device).instance->name;
}

// What calls come with.
inline constexpr auto nothing = [](auto&) {};
inline constexpr auto softcap = [](auto& params) { params.score.softcap = 20.0f; };
inline constexpr auto alibi = [](auto& params) { params.score.alibi_slopes = &some_float; };
inline constexpr auto dropout = [](auto& params) { params.dropout.threshold = 1; };
inline constexpr auto negative_scale = [](auto& params) { params.score.softmax_scale = -1.0f; };
inline constexpr auto lists = [](auto& params) { params.sparsity.lists.data = &some_int; };
inline constexpr auto bias = [](auto& params) {
  params.score.bias = contiguous_bias(params.shape);
};
inline constexpr auto used_lengths = [](auto& params) {
  params.sequences.seqused_q = params.sequences.seqused_k = &some_int;
};
inline constexpr auto ordered = [](BackwardParams& params) { params.deterministic = true; };

// Both changes, one after the other.
template <class First, class Second>
auto both(First first, Second second) {
  return [=](auto& params) {
    first(params);
    second(params);
  };
}

}  // namespace host_tests
