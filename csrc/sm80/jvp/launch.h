// Host side of the sm80 kernels of derivatives in a direction: from a plan to a launch.
#pragma once

#include "shared/launch.h"
#include "shared/scores/score_scale.h"
#include "sm80/jvp/kernel.h"

namespace flash_attn_cuda::sm80 {

template <class Tag>
void launch_jvp(const ForwardPlan& plan, const ForwardParams& params, Stream stream) {
  using Traits = JvpTraits<Tag>;
  const ScoreParams& score = params.score;
  const JvpArguments arguments{
      .params = params,
      .schedule = plan.schedule,
      .table = SequenceTable::at(params.workspace, plan.table),
      .scale_log2 = log2e * (modifies_scores(score) ? score_unit(score) : score.softmax_scale),
      .keep_probability = keep_probability(params.dropout.threshold),
      .ctas_per_row = ctas_of_columns(Tag::config.columns_per_cta, params.shape.head_dim_v)};
  launch_kernel<&jvp_kernel<Tag>, Traits>(plan.grid, stream, arguments);
}

template <class Tag>
constexpr ForwardInstance make_jvp_instance(const char* name) {
  return make_instance<JvpTraits<Tag>>(name, &launch_jvp<Tag>);
}

}  // namespace flash_attn_cuda::sm80
