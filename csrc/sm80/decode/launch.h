// Host side of the sm80 decode kernels: from a plan to a launch.
#pragma once

#include "shared/launch.h"
#include "shared/scores/score_scale.h"
#include "sm80/decode/kernel.h"

namespace flash_attn_cuda::sm80 {

template <class Tag>
void launch_decode(const ForwardPlan& plan, const ForwardParams& params, Stream stream) {
  using Traits = DecodeTraits<Tag>;
  const AttentionShape& shape = params.shape;
  const bool scales_scores = modifies_scores(params.score);
  const float scale = params.score.softmax_scale;
  const DecodeArguments arguments{
      .params = params,
      .schedule = plan.schedule,
      .table = SequenceTable::at(params.workspace, plan.table),
      .group = Divider::by(rows_of_query(shape, params.keys_per_list, Traits::block_m)),
      .heads_of_group = shape.heads_per_key_head(),
      .scale_log2 = scales_scores ? log2e : positive_scale(scale * log2e),
      .negate_q = !scales_scores && scale < 0.0f,
      .scales_scores = scales_scores,
      .has_vector_rows = plan.has_vector_rows,
      .lengths_decide = plan.lengths_decide,
      .num_splits = plan.num_splits,
      .ctas_per_split = static_cast<int>(plan.schedule.grid_size()),
      .keys_per_split = plan.keys_per_split,
      .resident_ctas = plan.num_ctas,
      .out_partial = plan.out_partial.in(params.workspace),
      .lse_partial = plan.lse_partial.in(params.workspace),
      .arrivals = plan.arrivals.in(params.workspace),
      .tickets = plan.item_tickets.in(params.workspace),
      .call_mark = mark_of_next_call()};
  launch_early<&decode_kernel<Tag>, Traits>(plan.grid, stream, arguments);
}

template <class Tag>
constexpr ForwardInstance make_decode_instance(const char* name) {
  return make_instance<DecodeTraits<Tag>>(name, &launch_decode<Tag>);
}

}  // namespace flash_attn_cuda::sm80
