// FlashAttention-2's functions, for callers that know its compiled module: its arguments in its
// order. Each describes the call, which then goes the way of forward and backward.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace flash_attn_cuda::binding {

void define_flash_attn_2(pybind11::module& module);

}  // namespace flash_attn_cuda::binding
