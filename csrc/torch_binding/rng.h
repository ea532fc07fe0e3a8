// Random numbers of a call: from torch's default generator, or a state that a forward left.
#pragma once

#include <ATen/core/Tensor.h>

#include "flash_attn/params.h"

namespace flash_attn_cuda::binding {

// Advances the default generator of a CUDA device. While a CUDA graph is captured the source is
// memory that torch fills before every replay.
RngSource draw_rng(c10::DeviceIndex device);

// rng_state: int64 (2), seed and offset.
RngSource rng_of_state(const at::Tensor& rng_state);

}  // namespace flash_attn_cuda::binding
