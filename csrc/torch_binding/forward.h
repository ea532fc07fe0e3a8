// The forward of a checked call.
#pragma once

#include "flash_attn/api.h"
#include "torch_binding/call.h"

namespace flash_attn_cuda::binding {

// Outside autograd. What is undefined was not wanted, or there is no dropout. keeps_rounding: as
// AttentionCall has it.
Results run_forward_call(const AttentionCall& call, bool keeps_rounding = false);

// What it would run, of tensors without memory too. Allocates nothing.
// with_tangents: of its derivative in a direction.
ForwardPlan plan_forward_call(const AttentionCall& call, const DeviceInfo& device,
                              bool with_tangents);

}  // namespace flash_attn_cuda::binding
