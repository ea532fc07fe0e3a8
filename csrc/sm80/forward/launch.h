// Host side of the sm80 forward kernels: from a plan to a launch.
#pragma once

#include "shared/launch.h"
#include "shared/scores/score_scale.h"
#include "sm80/forward/kernel.h"

namespace flash_attn_cuda::sm80 {

template <class Tag>
void launch_forward(const ForwardPlan& plan, const ForwardParams& params, Stream stream) {
  using Traits = ForwardTraits<Tag>;
  const bool scales_scores = Traits::modifies_scores && modifies_scores(params.score);
  const float scale = params.score.softmax_scale;
  const ForwardArguments arguments{
      .params = params,
      .schedule = plan.schedule,
      .table = SequenceTable::at(params.workspace, plan.table),
      .scale_log2 =
          scales_scores ? score_unit(params.score) * log2e : positive_scale(scale * log2e),
      .negate_q = !scales_scores && scale < 0.0f,
      .num_splits = plan.num_splits,
      .ctas_per_split = static_cast<int>(plan.schedule.grid_size()),
      .keys_per_split = plan.keys_per_split,
      .partial_rows = query_rows(params),
      .out_partial = plan.out_partial.in(params.workspace),
      .lse_partial = plan.lse_partial.in(params.workspace),
      .ctas_per_row = ctas_of_columns(Tag::config.columns_per_cta, params.shape.head_dim_v)};
  launch_kernel<&forward_kernel<Tag>, Traits>(plan.grid, stream, arguments);
}

template <class Tag>
constexpr ForwardInstance make_forward_instance(const char* name) {
  return make_instance<ForwardTraits<Tag>>(name, &launch_forward<Tag>);
}

}  // namespace flash_attn_cuda::sm80
