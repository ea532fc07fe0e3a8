// Host side of the sm80 forward kernels: from a plan to a launch.
#pragma once

#include <cfloat>
#include <cmath>

#include "flash_attn/instance.h"
#include "shared/launch.h"
#include "sm80/forward/kernel.h"

namespace flash_attn_cuda::sm80 {

template <class Tag>
void launch_forward(const ForwardPlan& plan, const ForwardParams& params, Stream stream) {
  using Traits = ForwardTraits<Tag>;
  constexpr float log2e = 1.44269504088896f;
  const AttentionShape& shape = params.shape;
  char* workspace = static_cast<char*>(params.workspace);
  const bool scales_scores = Traits::modifies_scores && modifies_scores(params.score);
  const float scale = params.score.softmax_scale;
  const std::int64_t ctas_per_split = plan.schedule.grid_size();
  const int ctas_per_row = (shape.head_dim_v - 1) / Traits::columns_per_cta + 1;
  const ForwardArguments arguments{
      .params = params,
      .schedule = plan.schedule,
      .table = SequenceTable::at(workspace, shape.batch_size, plan.table),
      // A zero would turn the -inf of a hidden score into NaN; this one leaves exp2(0) = 1.
      .scale_log2 = scales_scores ? score_unit(params.score) * log2e
                                  : std::fmax(std::fabs(scale) * log2e, FLT_MIN),
      .negate_q = !scales_scores && scale < 0.0f,
      .num_splits = plan.num_splits,
      .ctas_per_split = static_cast<int>(ctas_per_split),
      .keys_per_split = plan.keys_per_split,
      .partial_rows = query_rows(params),
      .out_partial = reinterpret_cast<float*>(workspace + plan.out_partial_offset),
      .lse_partial = reinterpret_cast<float*>(workspace + plan.lse_partial_offset),
      .ctas_per_row = ctas_per_row};
  launch_kernel<&forward_kernel<Tag>>(ctas_per_split * plan.num_splits * ctas_per_row,
                                      Traits::threads, sizeof(typename Traits::SharedStorage),
                                      stream, arguments);
}

template <class Tag>
constexpr ForwardInstance make_forward_instance(const char* name) {
  return {.name = name,
          .config = Tag::config,
          .smem_bytes = static_cast<int>(sizeof(typename ForwardTraits<Tag>::SharedStorage)),
          .launch = &launch_forward<Tag>};
}

}  // namespace flash_attn_cuda::sm80
