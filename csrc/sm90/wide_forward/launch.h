// Host side of the sm90 forward kernels for wide heads: from a plan to a launch.
#pragma once

#include <algorithm>
#include <cfloat>
#include <cmath>

#include "flash_attn/instance.h"
#include "host/tensor_map.h"
#include "shared/launch.h"
#include "shared/schedule/marked_counter.h"
#include "sm90/wide_forward/kernel.h"

namespace flash_attn_cuda::sm90 {

template <class Tag>
void launch_wide_forward(const ForwardPlan& plan, const ForwardParams& params, Stream stream) {
  using Traits = WideForwardTraits<Tag>;
  constexpr float log2e = 1.44269504088896f;
  constexpr int columns = box_columns<Traits::head_dim>;
  const AttentionShape& shape = params.shape;
  const bool scales_scores = Traits::has_score_modifiers && modifies_scores(params.score);
  char* workspace = static_cast<char*>(params.workspace);
  ForwardArguments arguments{
      .q_map = make_tensor_map(params.q, params.dtype, query_extent(shape, params.sequences),
                               {Traits::block_m, columns}),
      .k_map = make_tensor_map(params.k, params.dtype, key_extent(shape, params.sequences),
                               {Traits::block_n, columns}),
      .v_map = make_tensor_map(params.v, params.dtype, value_extent(shape, params.sequences),
                               {Traits::value_rows, columns}),
      .out_map = {},
      .bias_map = {},
      .bits_map = {},
      .params = params,
      .schedule = plan.schedule,
      .table = SequenceTable::at(params.workspace, shape.batch_size, plan.table),
      .key_box_rows = Traits::block_n,
      .last_v_box = last_wide_box(shape.head_dim_v),
      .splits = {.num_splits = 1,
                 .rows = query_rows(params),
                 .out_partial = nullptr,
                 .lse_partial = nullptr},
      .tickets = nullptr,
      .call_mark = 0,
      // A zero would turn the -inf of a hidden score into NaN; this one leaves exp2(0) = 1.
      .scale_log2 = scales_scores ? score_unit(params.score) * log2e
                                  : std::fmax(params.score.softmax_scale * log2e, FLT_MIN)};
  if (plan.draws_tiles) {
    arguments.tickets = reinterpret_cast<unsigned long long*>(workspace + plan.tickets_offset);
    arguments.call_mark = mark_of_next_call();
  }
  launch_early<&wide_forward_kernel<Tag>>(
      std::min<std::int64_t>(plan.schedule.grid_size(), plan.num_ctas), Traits::threads,
      sizeof(typename Traits::SharedStorage), stream, arguments);
}

template <class Tag>
constexpr ForwardInstance make_wide_forward_instance(const char* name) {
  return {.name = name,
          .config = Tag::config,
          .smem_bytes = static_cast<int>(sizeof(typename WideForwardTraits<Tag>::SharedStorage)),
          .launch = &launch_wide_forward<Tag>};
}

}  // namespace flash_attn_cuda::sm90
