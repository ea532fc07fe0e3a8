// Planning against a given list of instances. flash_attn/api.h's functions of the same names plan
// against what is compiled.
#pragma once

#include <span>

#include "flash_attn/instance.h"

namespace flash_attn_cuda {

ForwardPlan plan_forward(const ForwardParams& params, const DeviceInfo& device,
                         std::span<const ForwardInstance* const> instances);

BackwardPlan plan_backward(const BackwardParams& params, const DeviceInfo& device,
                           std::span<const BackwardInstance* const> instances);

}  // namespace flash_attn_cuda
