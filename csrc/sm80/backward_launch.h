// Host side of the sm80 backward kernels: from a plan to launches.
#pragma once

#include <cfloat>

#include "flash_attn/instance.h"
#include "shared/dropout.h"
#include "shared/launch.h"
#include "sm80/backward_convert_dq.h"
#include "sm80/backward_kernel.h"

namespace flash_attn_cuda::sm80 {

// What backward_scores.h leaves out of dS.
inline float score_factor(const BackwardParams& params) {
  return params.score.softmax_scale / keep_probability(params.dropout.threshold);
}

template <class Tag>
void launch_backward(const BackwardPlan& plan, const BackwardParams& params, Stream stream) {
  using Traits = BackwardTraits<Tag>;
  constexpr float log2e = 1.44269504088896f;
  const AttentionShape& shape = params.shape;
  char* workspace = static_cast<char*>(params.workspace);
  const bool scales_scores = Traits::has_modifiers && has_score_modifiers(params.score);
  const BackwardArguments arguments{
      .params = params,
      .schedule = plan.schedule,
      .table = SequenceTable::at(workspace, shape.batch_size, plan.table),
      .dkdv_splits = plan.dkdv_splits,
      .q_tiles = plan.q_tiles,
      .q_tiles_per_sequence =
          plan.table.used ? 0 : (shape.seqlen_q + Traits::block_m - 1) / Traits::block_m,
      .scale_log2 = log2e * (scales_scores ? score_unit(params.score) : params.score.softmax_scale),
      .keep_probability = keep_probability(params.dropout.threshold),
      .score_factor = score_factor(params),
      .lse_log2 = reinterpret_cast<const float*>(workspace + plan.lse_log2_offset),
      .softmax_d = reinterpret_cast<const float*>(workspace + plan.softmax_d_offset),
      .dq_accum = reinterpret_cast<float*>(workspace + plan.dq_accum_offset),
      .turns = turns_of(plan, params),
      .dk_partial = reinterpret_cast<float*>(workspace + plan.dk_partial_offset),
      .dv_partial = reinterpret_cast<float*>(workspace + plan.dv_partial_offset),
      .partial_rows = key_rows(params)};
  launch_kernel<&backward_kernel<Tag>>(plan.schedule.grid_size(), Traits::threads,
                                       sizeof(typename Traits::SharedStorage), stream, arguments);
}

template <class Tag>
void launch_convert_dq(const BackwardPlan& plan, const BackwardParams& params, Stream stream) {
  using Traits = BackwardTraits<Tag>;
  const AttentionShape& shape = params.shape;
  char* workspace = static_cast<char*>(params.workspace);
  const ConvertDqArguments arguments{
      .params = params,
      .table = SequenceTable::at(workspace, shape.batch_size, plan.table),
      .q_tiles = plan.q_tiles,
      .q_tiles_per_sequence = (shape.seqlen_q + Traits::block_m - 1) / Traits::block_m,
      .factor = score_factor(params),
      .dq_accum = reinterpret_cast<const float*>(workspace + plan.dq_accum_offset)};
  launch_kernel<&convert_dq_kernel<Tag>>(
      std::int64_t{plan.q_tiles} * shape.num_heads_q, Traits::threads,
      Traits::block_m * Traits::head_dim * sizeof(typename Traits::Element), stream, arguments);
}

template <class Tag>
constexpr BackwardInstance make_backward_instance(const char* name) {
  return {.name = name,
          .config = Tag::config,
          .smem_bytes = static_cast<int>(sizeof(typename BackwardTraits<Tag>::SharedStorage)),
          .launch = &launch_backward<Tag>,
          .convert_dq = &launch_convert_dq<Tag>};
}

}  // namespace flash_attn_cuda::sm80
