// Host side of the sm80 kernels of the second backward.
#pragma once

#include "sm80/backward/launch.h"
#include "sm80/hvp/kernel.h"

namespace flash_attn_cuda::sm80 {

template <class Tag>
constexpr BackwardInstance make_hvp_instance(const char* name) {
  return make_key_tiles_instance<&hvp_kernel<Tag>, HvpTraits<Tag>>(name);
}

}  // namespace flash_attn_cuda::sm80
