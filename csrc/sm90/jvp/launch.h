// Host side of the Hopper kernels of derivatives in a direction: from a plan to a launch.
#pragma once

#include "host/tensor_map.h"
#include "shared/launch.h"
#include "shared/scores/score_scale.h"
#include "sm90/jvp/kernel.h"

namespace flash_attn_cuda::sm90 {

template <class Tag>
void launch_jvp(const ForwardPlan& plan, const ForwardParams& params, Stream stream) {
  using Traits = JvpTraits<Tag>;
  constexpr int columns = box_columns<Traits::head_dim>;
  const auto map = [&](const TensorView& view, const TensorExtent& extent, int rows) {
    return make_tensor_map(view, params.dtype, extent, {rows, columns});
  };
  const TensorExtents& extents = plan.extents;
  const TangentParams& tangents = params.tangents;
  const JvpArguments arguments{.q_map = map(params.q, extents.q, 64),
                               .k_map = map(params.k, extents.k, Traits::block_n),
                               .v_map = map(params.v, extents.v, Traits::block_n),
                               .tangent_q_map = map(tangents.q, extents.q, 64),
                               .tangent_k_map = map(tangents.k, extents.k, Traits::block_n),
                               .tangent_v_map = map(tangents.v, extents.v, Traits::block_n),
                               .params = params,
                               .schedule = plan.schedule,
                               .table = SequenceTable::at(params.workspace, plan.table),
                               .scale_log2 = positive_scale(params.score.softmax_scale * log2e)};
  launch_early<&jvp_kernel<Tag>, Traits>(plan.grid, stream, arguments);
}

template <class Tag>
constexpr ForwardInstance make_jvp_instance(const char* name) {
  return make_instance<JvpTraits<Tag>>(name, &launch_jvp<Tag>);
}

}  // namespace flash_attn_cuda::sm90
