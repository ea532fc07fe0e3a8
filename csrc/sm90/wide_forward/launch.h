// Host side of the sm90 forward kernels for wide heads: from a plan to a launch.
#pragma once

#include "host/tensor_map.h"
#include "shared/launch.h"
#include "shared/schedule/marked_counter.h"
#include "shared/scores/score_scale.h"
#include "sm90/wide_forward/kernel.h"

namespace flash_attn_cuda::sm90 {

template <class Tag>
void launch_wide_forward(const ForwardPlan& plan, const ForwardParams& params, Stream stream) {
  using Traits = WideForwardTraits<Tag>;
  const auto map = [&](const TensorView& view, const TensorExtent& extent, int rows) {
    return make_tensor_map(view, params.dtype, extent, {rows, wide_box_columns});
  };
  const bool scales_scores = Traits::has_score_modifiers && modifies_scores(params.score);
  const ForwardArguments arguments{
      .q_map = map(params.q, plan.extents.q, Traits::block_m),
      .k_map = map(params.k, plan.extents.k, Traits::block_n),
      .v_map = map(params.v, plan.extents.v, Traits::Slots::rows),
      .out_map = {},
      .bias_map = {},
      .bits_map = {},
      .params = params,
      .schedule = plan.schedule,
      .table = SequenceTable::at(params.workspace, plan.table),
      .key_box_rows = Traits::block_n,
      .last_v_box = last_wide_box(params.shape.head_dim_v),
      .splits = {.num_splits = 1,
                 .rows = query_rows(params),
                 .out_partial = nullptr,
                 .lse_partial = nullptr},
      .tickets = plan.tickets.in(params.workspace),
      .call_mark = plan.tickets.exists() ? mark_of_next_call() : 0,
      .scale_log2 = scales_scores ? score_unit(params.score) * log2e
                                  : positive_scale(params.score.softmax_scale * log2e)};
  launch_early<&wide_forward_kernel<Tag>, Traits>(plan.grid, stream, arguments);
}

template <class Tag>
constexpr ForwardInstance make_wide_forward_instance(const char* name) {
  return make_instance<WideForwardTraits<Tag>>(name, &launch_wide_forward<Tag>);
}

}  // namespace flash_attn_cuda::sm90
