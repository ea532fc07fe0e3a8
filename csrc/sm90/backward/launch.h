// Host side of the sm90 backward kernels: from a plan to launches.
#pragma once

#include <algorithm>
#include <cfloat>
#include <cmath>

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
  const TensorExtent queries = query_extent(params.shape, params.sequences);
  const TensorExtent outputs = output_extent(params.shape, params.sequences);
  const TensorExtent keys = key_extent(params.shape, params.sequences);
  const TensorExtent values = value_extent(params.shape, params.sequences);
  const auto key_map = [&](const TensorView& view) {
    return make_tensor_map(view, params.dtype, keys, {64, Traits::key_box_columns});
  };
  const auto value_map = [&](const TensorView& view) {
    return make_tensor_map(view, params.dtype, values, {64, columns_v});
  };
  BackwardKernelArguments arguments{
      .q_map = make_tensor_map(params.q, params.dtype, queries, {rows, columns}),
      .k_map = key_map(params.k),
      .v_map = value_map(params.v),
      .dout_map = make_tensor_map(params.dout, params.dtype, outputs, {rows, columns_v}),
      .dk_map = key_map(params.dk),
      .dv_map = value_map(params.dv),
      .bias_map = {},
      .dbias_map = {},
      .call = backward_arguments(plan, params, Traits::has_score_modifiers || Traits::has_bias),
      .num_tiles = plan.schedule.grid_size(),
      .num_tickets = count_tickets(plan)};
  if constexpr (Traits::has_bias) {
    constexpr TensorBox box{.rows = Traits::block_m, .columns = box_keys};
    const BiasParams& bias = params.score.bias;
    arguments.bias_map = make_pair_map(pair_tensor(bias, params.shape), params.dtype, box);
    if (params.dbias.data != nullptr && !params.dbias.is_summed) {
      arguments.dbias_map =
          make_pair_map(pair_tensor(params.dbias, bias, params.shape), params.dtype, box);
    }
  }
  // A zero would turn the -inf of a hidden score into NaN; this one leaves exp2(0) = 1.
  arguments.call.scale_log2 = std::fmax(arguments.call.scale_log2, FLT_MIN);
  launch_early<&backward_kernel<Tag>>(launched_ctas(plan), Traits::threads,
                                      sizeof(typename Traits::SharedStorage), stream, arguments,
                                      Traits::ctas_per_tile);
}

template <class Tag>
void launch_convert_dq(const BackwardPlan& plan, const BackwardParams& params, Stream stream) {
  using Traits = BackwardTraits<Tag>;
  const ConvertDqArguments arguments = convert_dq_arguments(plan, params);
  constexpr int rows = convert_dq_threads / 32 * Strip::rows;
  const std::int64_t most =
      std::int64_t{plan.q_tiles} * params.shape.num_heads_q * (Traits::block_m / rows);
  // How much is left after a kernel that finishes is for the device to know.
  const std::int64_t resident = std::int64_t{plan.num_ctas} * (2048 / convert_dq_threads);
  launch_early<&convert_dq_kernel<Tag>>(
      arguments.strips_drawn == nullptr ? most : std::min(most, resident), convert_dq_threads, 0,
      stream, arguments);
}

template <class Tag>
constexpr BackwardInstance make_backward_instance(const char* name) {
  using Traits = BackwardTraits<Tag>;
  return {.name = name,
          .config = Tag::config,
          .smem_bytes = static_cast<int>(sizeof(typename Traits::SharedStorage)),
          .launch = &launch_backward<Tag>,
          .convert_dq = &launch_convert_dq<Tag>,
          .writes_dq = Traits::writes_dq};
}

}  // namespace flash_attn_cuda::sm90
