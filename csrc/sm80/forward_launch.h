// Host side of the sm80 forward kernels: from a plan to a launch.
#pragma once

#include <cfloat>
#include <cmath>

#include "flash_attn/instance.h"
#include "shared/launch.h"
#include "sm80/forward_kernel.h"

namespace flash_attn_cuda::sm80 {

template <class Tag>
void launch_forward(const ForwardPlan& plan, const ForwardParams& params, Stream stream) {
  using Traits = ForwardTraits<Tag>;
  constexpr float log2e = 1.44269504088896f;
  const float magnitude = std::fabs(params.softmax_scale) * log2e;
  const ForwardArguments arguments{
      .params = params,
      .schedule = plan.schedule,
      // A zero would turn the -inf of a hidden score into NaN; this one leaves exp2(0) = 1.
      .scale_log2 = std::fmax(magnitude, FLT_MIN),
      .negate_q = params.softmax_scale < 0.0f};
  launch_kernel<&forward_kernel<Tag>>(plan.schedule.grid_size(), Traits::threads,
                                      sizeof(typename Traits::SharedStorage), stream, arguments);
}

template <class Tag>
constexpr ForwardInstance make_forward_instance(const char* name) {
  return {.name = name,
          .config = Tag::config,
          .smem_bytes = static_cast<int>(sizeof(typename ForwardTraits<Tag>::SharedStorage)),
          .launch = &launch_forward<Tag>};
}

}  // namespace flash_attn_cuda::sm80
