// Host side of the sm80 kernels that walk query tiles, the backward's and those of the second
// backward (sm80/hvp/): from a plan to launches.
#pragma once

#include "shared/launch.h"
#include "sm80/backward/convert_dq.h"
#include "sm80/backward/kernel.h"

namespace flash_attn_cuda::sm80 {

template <auto kKernel, class Traits>
void launch_key_tiles(const BackwardPlan& plan, const BackwardParams& params, Stream stream) {
  const BackwardArguments arguments = backward_arguments(plan, params, !Traits::is_plain);
  launch_kernel<kKernel, Traits>(plan.grid, stream, arguments);
}

template <class Traits>
void launch_convert_dq(const BackwardPlan& plan, const BackwardParams& params, Stream stream) {
  launch_kernel<&convert_dq_kernel<Traits>>(
      plan.convert_grid, Traits::threads,
      Traits::block_m * Traits::columns_per_cta * sizeof(typename Traits::Element), stream,
      convert_dq_arguments(plan, params));
}

template <auto kKernel, class Traits>
constexpr BackwardInstance make_key_tiles_instance(const char* name) {
  return make_instance<Traits>(name, &launch_key_tiles<kKernel, Traits>,
                               &launch_convert_dq<Traits>);
}

template <class Tag>
constexpr BackwardInstance make_backward_instance(const char* name) {
  return make_key_tiles_instance<&backward_kernel<Tag>, BackwardTraits<Tag>>(name);
}

}  // namespace flash_attn_cuda::sm80
