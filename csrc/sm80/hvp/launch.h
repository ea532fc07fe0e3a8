// Host side of the sm80 kernels of the second backward: from a plan to launches.
#pragma once

#include "shared/launch.h"
#include "sm80/backward/convert_dq.h"
#include "sm80/hvp/kernel.h"

namespace flash_attn_cuda::sm80 {

template <class Tag>
void launch_hvp(const BackwardPlan& plan, const BackwardParams& params, Stream stream) {
  using Traits = HvpTraits<Tag>;
  const BackwardArguments arguments = backward_arguments(plan, params, /*can_modify=*/true);
  launch_kernel<&hvp_kernel<Tag>, Traits>(plan.grid, stream, arguments);
}

template <class Tag>
void launch_convert_hvp_dq(const BackwardPlan& plan, const BackwardParams& params, Stream stream) {
  using Traits = HvpTraits<Tag>;
  launch_kernel<&convert_hvp_dq_kernel<Tag>>(
      plan.convert_grid, Traits::threads,
      Traits::block_m * Traits::columns_per_cta * sizeof(typename Traits::Element), stream,
      convert_dq_arguments(plan, params));
}

template <class Tag>
constexpr BackwardInstance make_hvp_instance(const char* name) {
  return make_instance<HvpTraits<Tag>>(name, &launch_hvp<Tag>, &launch_convert_hvp_dq<Tag>);
}

}  // namespace flash_attn_cuda::sm80
