// Host side of the sm90 backward kernels: from a plan to launches.
#pragma once

#include "host/tensor_map.h"
#include "shared/launch.h"
#include "sm90/backward/convert_dq.h"
#include "sm90/backward/kernel.h"

namespace flash_attn_cuda::sm90 {

template <class Tag>
void launch_backward(const BackwardPlan& plan, const BackwardParams& params, Stream stream) {
  using Traits = BackwardTraits<Tag>;
  constexpr int columns = box_columns<Traits::head_dim>;
  constexpr int columns_v = box_columns<Traits::head_dim_v>;
  constexpr int rows = Traits::block_m / Traits::ctas_per_tile;
  const auto map = [&](const TensorView& view, const TensorExtent& extent, const TensorBox& box) {
    return make_tensor_map(view, params.dtype, extent, box);
  };
  constexpr TensorBox key_box{64, Traits::key_box_columns};
  constexpr TensorBox value_box{64, columns_v};
  BackwardKernelArguments arguments{
      .q_map = map(params.q, plan.extents.q, {rows, columns}),
      .k_map = map(params.k, plan.extents.k, key_box),
      .v_map = map(params.v, plan.extents.v, value_box),
      .dout_map = map(params.dout, plan.extents.out, {rows, columns_v}),
      .dk_map = map(params.dk, plan.extents.k, key_box),
      .dv_map = map(params.dv, plan.extents.v, value_box),
      .bias_map = {},
      .dbias_map = {},
      .call = backward_arguments(plan, params, Traits::has_score_modifiers || Traits::has_bias),
      .num_tiles = plan.schedule.grid_size(),
      .num_tickets = plan.num_tickets()};
  if constexpr (Traits::has_bias) {
    constexpr TensorBox box{.rows = Traits::block_m, .columns = box_keys};
    const BiasParams& bias = params.score.bias;
    arguments.bias_map = make_pair_map(pair_tensor(bias, params.dtype, params.shape), box);
    if (params.dbias.data != nullptr && !params.dbias.is_summed) {
      arguments.dbias_map =
          make_pair_map(pair_tensor(params.dbias, bias, params.dtype, params.shape), box);
    }
  }
  arguments.call.scale_log2 = positive_scale(arguments.call.scale_log2);
  launch_early<&backward_kernel<Tag>, Traits>(plan.grid, stream, arguments, Traits::ctas_per_tile);
}

template <class Tag>
void launch_convert_dq(const BackwardPlan& plan, const BackwardParams& params, Stream stream) {
  launch_early<&convert_dq_kernel<Tag>>(plan.convert_grid, convert_dq_threads, 0, stream,
                                        convert_dq_arguments(plan, params));
}

template <class Tag>
constexpr BackwardInstance make_backward_instance(const char* name) {
  return make_instance<BackwardTraits<Tag>>(name, &launch_backward<Tag>, &launch_convert_dq<Tag>,
                                            BackwardTraits<Tag>::writes_dq);
}

}  // namespace flash_attn_cuda::sm90
