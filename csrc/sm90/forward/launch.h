// Host side of the sm90 forward kernels: from a plan to a launch.
#pragma once

#include <numeric>

#include "host/tensor_map.h"
#include "shared/launch.h"
#include "shared/schedule/marked_counter.h"
#include "shared/scores/score_scale.h"
#include "sm90/forward/kernel.h"

namespace flash_attn_cuda::sm90 {

template <class Tag>
void launch_forward(const ForwardPlan& plan, const ForwardParams& params, Stream stream) {
  using Traits = ForwardTraits<Tag>;
  // A tensor of what is multiplied, and out.
  using Multiplied = std::conditional_t<Traits::multiplies_e4m3, typename Traits::Element,
                                        typename Traits::Stored>;
  constexpr int columns = box_columns<Traits::head_dim, Multiplied>;
  constexpr int columns_v = box_columns<Traits::head_dim_v, Multiplied>;
  constexpr int columns_out = box_columns<Traits::head_dim_v>;
  const Dtype dtype = Traits::multiplies_e4m3 ? Dtype::e4m3 : params.dtype;
  const AttentionShape& shape = params.shape;
  const auto map = [&](const TensorView& view, const TensorExtent& extent, const TensorBox& box) {
    return make_tensor_map(view, dtype, extent, box);
  };
  // Without pages, whose size is 0 then, a box has all of the tile.
  const int key_rows =
      Traits::is_paged ? std::gcd(params.paged.page_size, Traits::block_n) : Traits::block_n;
  const auto keys_map = [&](const TensorView& view, const TensorExtent& extent, int box_columns) {
    if constexpr (Traits::converts_e4m3) return CUtensorMap{};
    return map(view, extent, {key_rows, box_columns});
  };
  const bool scales_scores =
      (Traits::has_score_modifiers || Traits::has_bias) && modifies_scores(params.score);
  ForwardArguments arguments{
      .q_map = map(params.q, plan.extents.q, {64, columns}),
      .k_map = keys_map(params.k, plan.extents.k, columns),
      .v_map = keys_map(params.v, plan.extents.v, columns_v),
      .out_map = make_tensor_map(params.out, params.dtype, plan.extents.out,
                                 {Traits::stored_rows, columns_out}),
      .bias_map = {},
      .bits_map = {},
      .params = params,
      .schedule = plan.schedule,
      .table = SequenceTable::at(params.workspace, plan.table),
      .key_box_rows = key_rows,
      .last_v_box = (shape.head_dim_v - 1) / columns_v * columns_v,
      .last_out_box = (shape.head_dim_v - 1) / columns_out * columns_out,
      .splits = {.num_splits = plan.num_splits,
                 .rows = query_rows(params),
                 .out_partial = plan.out_partial.in(params.workspace),
                 .lse_partial = plan.lse_partial.in(params.workspace)},
      .tickets = plan.tickets.in(params.workspace),
      .call_mark = plan.tickets.exists() ? mark_of_next_call() : 0,
      .scale_log2 = scales_scores ? score_unit(params.score) * log2e
                                  : positive_scale(params.score.softmax_scale * log2e)};
  if constexpr (Traits::has_bias) {
    arguments.bias_map = make_pair_map(pair_tensor(params.score.bias, params.dtype, shape),
                                       {Traits::block_m, box_keys});
  }
  if (Traits::is_sparse && params.sparsity.bits.data != nullptr) {
    arguments.bits_map = make_pair_map(pair_tensor(params.sparsity.bits, shape),
                                       {MaskBits::queries, MaskBits::elements});
  }
  launch_early<&forward_kernel<Tag>, Traits>(plan.grid, stream, arguments);
}

template <class Tag>
constexpr ForwardInstance make_forward_instance(const char* name) {
  return make_instance<ForwardTraits<Tag>>(name, &launch_forward<Tag>);
}

}  // namespace flash_attn_cuda::sm90
