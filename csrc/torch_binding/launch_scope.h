// Where kernels are launched from.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "flash_attn/api.h"

namespace flash_attn_cuda::binding {

// For as long as it lives: outside autograd, with the device of a tensor as the current one.
struct LaunchScope {
  explicit LaunchScope(const at::Tensor& tensor)
      : device(tensor.device().index()),
        guard(device),
        stream(c10::cuda::getCurrentCUDAStream(device).stream()) {}

  at::NoGradGuard no_grad;
  c10::DeviceIndex device;
  c10::cuda::CUDAGuard guard;
  Stream stream;  // the device's current one
};

}  // namespace flash_attn_cuda::binding
