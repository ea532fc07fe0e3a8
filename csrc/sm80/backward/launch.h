// Host side of the sm80 backward kernels: from a plan to launches.
#pragma once

#include "shared/launch.h"
#include "sm80/backward/convert_dq.h"
#include "sm80/backward/kernel.h"

namespace flash_attn_cuda::sm80 {

template <class Tag>
void launch_backward(const BackwardPlan& plan, const BackwardParams& params, Stream stream) {
  using Traits = BackwardTraits<Tag>;
  const BackwardArguments arguments = backward_arguments(plan, params, !Traits::is_plain);
  launch_kernel<&backward_kernel<Tag>, Traits>(plan.grid, stream, arguments);
}

template <class Tag>
void launch_convert_dq(const BackwardPlan& plan, const BackwardParams& params, Stream stream) {
  using Traits = BackwardTraits<Tag>;
  launch_kernel<&convert_dq_kernel<Tag>>(
      plan.convert_grid, Traits::threads,
      Traits::block_m * Traits::columns_per_cta * sizeof(typename Traits::Element), stream,
      convert_dq_arguments(plan, params));
}

template <class Tag>
constexpr BackwardInstance make_backward_instance(const char* name) {
  return make_instance<BackwardTraits<Tag>>(name, &launch_backward<Tag>, &launch_convert_dq<Tag>);
}

}  // namespace flash_attn_cuda::sm80
