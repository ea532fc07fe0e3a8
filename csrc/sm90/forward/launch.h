// Host side of the sm90 forward kernels: from a plan to a launch.
#pragma once

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <numeric>

#include "flash_attn/instance.h"
#include "host/tensor_map.h"
#include "shared/launch.h"
#include "shared/schedule/marked_counter.h"
#include "sm90/forward/kernel.h"

namespace flash_attn_cuda::sm90 {

template <class Tag>
void launch_forward(const ForwardPlan& plan, const ForwardParams& params, Stream stream) {
  using Traits = ForwardTraits<Tag>;
  constexpr float log2e = 1.44269504088896f;
  constexpr int columns = box_columns<Traits::head_dim>;
  constexpr int columns_v = box_columns<Traits::head_dim_v>;
  const AttentionShape& shape = params.shape;
  const TensorExtent queries = query_extent(shape, params.sequences);
  const TensorExtent keys = in_pages(key_extent(shape, params.sequences), params.paged);
  const TensorExtent values = in_pages(value_extent(shape, params.sequences), params.paged);
  // Without pages, whose size is 0 then, all of the tile.
  const int key_rows =
      Traits::is_paged ? std::gcd(params.paged.page_size, Traits::block_n) : Traits::block_n;
  const TensorExtent outputs = output_extent(shape, params.sequences);
  const bool scales_scores =
      (Traits::has_score_modifiers || Traits::has_bias) && modifies_scores(params.score);
  char* workspace = static_cast<char*>(params.workspace);
  ForwardArguments arguments{
      .q_map = make_tensor_map(params.q, params.dtype, queries, {64, columns}),
      .k_map = make_tensor_map(params.k, params.dtype, keys, {key_rows, columns}),
      .v_map = make_tensor_map(params.v, params.dtype, values, {key_rows, columns_v}),
      .out_map =
          make_tensor_map(params.out, params.dtype, outputs, {Traits::stored_rows, columns_v}),
      .bias_map = {},
      .bits_map = {},
      .params = params,
      .schedule = plan.schedule,
      .table = SequenceTable::at(params.workspace, shape.batch_size, plan.table),
      .key_box_rows = key_rows,
      .last_v_box = (shape.head_dim_v - 1) / columns_v * columns_v,
      .splits = {.num_splits = plan.num_splits,
                 .rows = query_rows(params),
                 .out_partial = reinterpret_cast<float*>(workspace + plan.out_partial_offset),
                 .lse_partial = reinterpret_cast<float*>(workspace + plan.lse_partial_offset)},
      .tickets = nullptr,
      .call_mark = 0,
      // A zero would turn the -inf of a hidden score into NaN; this one leaves exp2(0) = 1.
      .scale_log2 = scales_scores ? score_unit(params.score) * log2e
                                  : std::fmax(params.score.softmax_scale * log2e, FLT_MIN)};
  if constexpr (Traits::has_bias) {
    arguments.bias_map = make_pair_map(pair_tensor(params.score.bias, shape), params.dtype,
                                       {Traits::block_m, box_keys});
  }
  if (Traits::is_sparse && params.sparsity.bits.data != nullptr) {
    arguments.bits_map = make_bits_map(pair_tensor(params.sparsity.bits, shape),
                                       {MaskBits::queries, MaskBits::elements});
  }
  if (plan.draws_tiles) {
    arguments.tickets = reinterpret_cast<unsigned long long*>(workspace + plan.tickets_offset);
    arguments.call_mark = mark_of_next_call();
  }
  const std::int64_t tiles = plan.schedule.grid_size() * plan.num_splits;
  launch_early<&forward_kernel<Tag>>(std::min<std::int64_t>(tiles, plan.num_ctas), Traits::threads,
                                     sizeof(typename Traits::SharedStorage), stream, arguments);
}

template <class Tag>
constexpr ForwardInstance make_forward_instance(const char* name) {
  return {.name = name,
          .config = Tag::config,
          .smem_bytes = static_cast<int>(sizeof(typename ForwardTraits<Tag>::SharedStorage)),
          .launch = &launch_forward<Tag>};
}

}  // namespace flash_attn_cuda::sm90
