// Host side of the sm80 backward kernels: from a plan to launches.
#pragma once

#include <cfloat>

#include "flash_attn/instance.h"
#include "shared/launch.h"
#include "sm80/backward_convert_dq.h"
#include "sm80/backward_kernel.h"

namespace flash_attn_cuda::sm80 {

template <class Tag>
void launch_backward(const BackwardPlan& plan, const BackwardParams& params, Stream stream) {
  using Traits = BackwardTraits<Tag>;
  constexpr float log2e = 1.44269504088896f;
  char* workspace = static_cast<char*>(params.workspace);
  const BackwardArguments arguments{
      .params = params,
      .schedule = plan.schedule,
      .dkdv_splits = plan.dkdv_splits,
      .seqlen_q_rounded = plan.seqlen_q_rounded,
      .scale_log2 = params.softmax_scale * log2e,
      .lse_log2 = reinterpret_cast<const float*>(workspace + plan.lse_log2_offset),
      .dq_accum = reinterpret_cast<float*>(workspace + plan.dq_accum_offset),
      .dk_partial = reinterpret_cast<float*>(workspace + plan.dk_partial_offset),
      .dv_partial = reinterpret_cast<float*>(workspace + plan.dv_partial_offset)};
  launch_kernel<&backward_kernel<Tag>>(plan.schedule.grid_size(), Traits::threads,
                                       sizeof(typename Traits::SharedStorage), stream, arguments);
}

template <class Tag>
void launch_convert_dq(const BackwardPlan& plan, const BackwardParams& params, Stream stream) {
  using Traits = BackwardTraits<Tag>;
  const AttentionShape& shape = params.shape;
  const int query_tiles = (shape.seqlen_q + Traits::block_m - 1) / Traits::block_m;
  const ConvertDqArguments arguments{
      .dq = params.dq,
      .shape = shape,
      .softmax_scale = params.softmax_scale,
      .dq_accum = reinterpret_cast<const float*>(static_cast<const char*>(params.workspace) +
                                                 plan.dq_accum_offset),
      .query_tiles = query_tiles};
  const std::int64_t grid = std::int64_t(query_tiles) * shape.batch_size * shape.num_heads_q;
  launch_kernel<&convert_dq_kernel<Tag>>(
      grid, Traits::threads, Traits::block_m * Traits::head_dim * sizeof(typename Traits::Element),
      stream, arguments);
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
