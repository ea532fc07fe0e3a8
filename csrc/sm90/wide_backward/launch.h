// Host side of the sm90 backward kernels for wide heads: from a plan to a launch.
#pragma once

#include "host/tensor_map.h"
#include "shared/launch.h"
#include "sm90/wide_backward/kernel.h"

namespace flash_attn_cuda::sm90 {

template <class Tag>
void launch_wide_backward(const BackwardPlan& plan, const BackwardParams& params, Stream stream) {
  using Traits = WideBackwardTraits<Tag>;
  const auto map = [&](const TensorView& view, const TensorExtent& extent, int rows) {
    return make_tensor_map(view, params.dtype, extent, {rows, wide_box_columns});
  };
  const auto maps = [&](const TensorView& view, const TensorExtent& extent) {
    return TensorMaps{.tile = map(view, extent, Traits::block),
                      .rows = map(view, extent, Traits::Slots::rows)};
  };
  WideBackwardArguments arguments{.q = maps(params.q, plan.extents.q),
                                  .k = maps(params.k, plan.extents.k),
                                  .dout = maps(params.dout, plan.extents.out),
                                  .v = map(params.v, plan.extents.v, Traits::block),
                                  .call = backward_arguments(plan, params, false),
                                  .key_tiles = static_cast<int>(plan.schedule.grid_size()),
                                  .query_tiles = plan.q_tiles * params.shape.num_heads_q};
  arguments.call.scale_log2 = positive_scale(arguments.call.scale_log2);
  launch_early<&wide_backward_kernel<Tag>, Traits>(plan.grid, stream, arguments);
}

template <class Tag>
constexpr BackwardInstance make_wide_backward_instance(const char* name) {
  return make_instance<WideBackwardTraits<Tag>>(name, &launch_wide_backward<Tag>, nullptr,
                                                /*writes_dq=*/true);
}

}  // namespace flash_attn_cuda::sm90
