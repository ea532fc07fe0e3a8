// One forward call on checked tensors.
#pragma once

#include <ATen/core/Tensor.h>

#include "flash_attn/params.h"
#include "torch_binding/to_params.h"

namespace flash_attn_cuda::binding {

// q, k, v as check_inputs and with_kernel_layout leave them. Writes `out`; returns softmax_lse.
at::Tensor run_forward_call(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            TensorView out, Window window, float softmax_scale);

}  // namespace flash_attn_cuda::binding
