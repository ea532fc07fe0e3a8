// Host side of the Hopper kernels of absorbed latent attention: from a plan to launches.
#pragma once

#include <algorithm>
#include <numeric>

#include "host/tensor_map.h"
#include "shared/launch.h"
#include "shared/scores/score_scale.h"
#include "sm90/latent/join.h"
#include "sm90/latent/kernel.h"

namespace flash_attn_cuda::sm90 {

// Warps that share the parts of a tile: as many as there are about four parts for each.
inline int warps_per_join(const ForwardPlan& plan) {
  if (plan.keys_per_split > 0) return 4;  // for the same bits whatever the batch
  const std::int64_t tiles = std::max<std::int64_t>(1, plan.schedule.grid_size());
  const std::int64_t parts =
      plan.sharing == TileSharing::even ? plan.grid / tiles : plan.num_splits;
  return parts >= 24 ? 8 : parts >= 12 ? 4 : parts >= 6 ? 2 : 1;
}

// Pieces of a tile that a warp joins: one, unless warps then come in more than one go.
inline int pieces_per_join(std::int64_t warps_of_one, int pieces) {
  constexpr std::int64_t at_once = 4096;
  int each = 1;
  while (each < pieces && warps_of_one / each > at_once) each *= 2;
  return each;
}

template <class Tag>
void launch_latent(const ForwardPlan& plan, const ForwardParams& params, Stream stream) {
  using Traits = LatentTraits<Tag>;
  const bool is_paged = params.paged.block_table != nullptr;
  const int box_rows =
      is_paged ? std::gcd(params.paged.page_size, Traits::block_n) : Traits::block_n;
  // Rows of a joined cache are 1,152 bytes apart: with 256 bytes around each box they took 6 %
  // longer.
  const bool loads_boxes = !Traits::is_e4m3 && !loads_rows(params);
  const auto key_map = [&](const TensorView& view, const TensorExtent& extent) {
    if (!loads_boxes) return CUtensorMap{};
    const TensorBox box{box_rows, Traits::piece_columns, /*is_narrow_in_l2=*/true};
    return make_tensor_map(view, params.dtype, extent, box);
  };
  const int query_box_rows = std::gcd(params.shape.heads_per_key_head(), Traits::block_m);
  const auto query_map = [&](const TensorView& view, TensorExtent extent, int columns) {
    extent.head_dim = columns;
    return make_heads_map(view, params.dtype, extent, {query_box_rows, Traits::piece_columns});
  };
  const bool has_softcap = params.score.softcap > 0.0f;
  const float scale_log2 = params.score.softmax_scale * log2e;
  const int ways = warps_per_join(plan);
  const std::int64_t warps =
      plan.schedule.grid_size() * ways * (Traits::value_pieces * Traits::block_m / 8 * 4);
  const int each = pieces_per_join(warps, Traits::value_pieces);
  const LatentArguments arguments{
      .q_map = query_map(params.q, plan.extents.q, params.shape.head_dim),
      .k_map = key_map(params.k, plan.extents.k),
      .qv_map = query_map(params.qv, plan.extents.q, params.shape.head_dim_v),
      .v_map = key_map(params.v, plan.extents.v),
      .params = params,
      .table = SequenceTable::at(params.workspace, plan.table),
      .most_tiles = static_cast<int>(plan.schedule.grid_size()),
      .heads = Divider::by(params.shape.num_heads_k),
      .tiles = Divider::by(plan.schedule.num_tiles),
      .group = Divider::by(rows_of_query(params.shape, params.keys_per_list, Traits::block_m)),
      .heads_per_key_head = params.shape.heads_per_key_head(),
      .loads_boxes = loads_boxes,
      .in_pairs = plan.in_pairs,
      .query_box_rows = query_box_rows,
      .key_box_rows = box_rows,
      .scale_log2 = has_softcap ? log2e : positive_scale(scale_log2),
      .negates_scores = !has_softcap && scale_log2 < 0.0f,
      .sharing = plan.sharing,
      .parts_of_pairs = static_cast<int>((plan.grid + plan.schedule.grid_size()) / 2),
      .most_parts = plan.num_splits,
      .keys_per_part = plan.keys_per_split,
      .warps_per_join = ways,
      .pieces_per_join = each,
      .out_parts = plan.out_partial.in(params.workspace),
      .lse_parts = plan.lse_partial.in(params.workspace),
      .parts_of_tiles = plan.parts_of_tiles.in(params.workspace)};
  launch_early<&latent_kernel<Tag>, Traits>(plan.grid, stream, arguments, plan.in_pairs ? 2 : 1);
  if (plan.sharing == TileSharing::whole) return;
  launch_early<&latent_join_kernel<Tag>>((warps / each + join_warps - 1) / join_warps,
                                         32 * join_warps, 0, stream, arguments);
}

template <class Tag>
constexpr ForwardInstance make_latent_instance(const char* name) {
  return make_instance<LatentTraits<Tag>>(name, &launch_latent<Tag>);
}

}  // namespace flash_attn_cuda::sm90
