// Host side of the sm90 backward kernels for wide heads: from a plan to a launch.
#pragma once

#include <cfloat>
#include <cmath>

#include "host/tensor_map.h"
#include "shared/launch.h"
#include "sm90/wide_backward/kernel.h"

namespace flash_attn_cuda::sm90 {

template <class Tag>
void launch_wide_backward(const BackwardPlan& plan, const BackwardParams& params, Stream stream) {
  using Traits = WideBackwardTraits<Tag>;
  const TensorExtent queries = query_extent(params.shape, params.sequences);
  const TensorExtent outputs = output_extent(params.shape, params.sequences);
  const TensorExtent keys = key_extent(params.shape, params.sequences);
  const TensorExtent values = value_extent(params.shape, params.sequences);
  const auto map = [&](const TensorView& view, const TensorExtent& extent, int rows) {
    return make_tensor_map(view, params.dtype, extent, {rows, Traits::slot_columns});
  };
  const auto maps = [&](const TensorView& view, const TensorExtent& extent) {
    return TensorMaps{.tile = map(view, extent, Traits::block),
                      .rows = map(view, extent, Traits::slot_rows)};
  };
  WideBackwardArguments arguments{.q = maps(params.q, queries),
                                  .k = maps(params.k, keys),
                                  .dout = maps(params.dout, outputs),
                                  .v = map(params.v, values, Traits::block),
                                  .call = backward_arguments(plan, params, false),
                                  .key_tiles = static_cast<int>(plan.schedule.grid_size()),
                                  .query_tiles = plan.q_tiles * params.shape.num_heads_q};
  // A zero would turn the -inf of a hidden score into NaN; this one leaves exp2(0) = 1.
  arguments.call.scale_log2 = std::fmax(arguments.call.scale_log2, FLT_MIN);
  launch_early<&wide_backward_kernel<Tag>>(
      2 * std::int64_t{arguments.key_tiles} + arguments.query_tiles, Traits::threads,
      sizeof(typename Traits::SharedStorage), stream, arguments);
}

template <class Tag>
constexpr BackwardInstance make_wide_backward_instance(const char* name) {
  return {.name = name,
          .config = Tag::config,
          .smem_bytes = static_cast<int>(sizeof(typename WideBackwardTraits<Tag>::SharedStorage)),
          .launch = &launch_wide_backward<Tag>,
          .convert_dq = nullptr,
          .writes_dq = true};
}

}  // namespace flash_attn_cuda::sm90
