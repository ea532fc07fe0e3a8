// What kernels that walk the query tiles of a key tile derive from their rows: the backward, and
// the second one (sm80/hvp/).
#pragma once

#include "flash_attn/api.h"
#include "shared/mask/block_range.h"
#include "shared/mask/pair_mask.h"
#include "shared/schedule/tile_work.h"
#include "shared/scores/score_bias.h"
#include "shared/scores/score_modifiers.h"
#include "sm80/isa/copy.h"
#include "sm80/isa/gemm.h"

namespace flash_attn_cuda::sm80 {

template <class Tag>
struct KeyTileTraits {
  static constexpr BackwardConfig config = Tag::config;
  static constexpr auto own = Tag::own;
  static constexpr int block_m = config.block_m;
  static constexpr int block_n = config.block_n;
  static constexpr int head_dim = config.head_dim;
  static constexpr int threads = config.num_warps * 32;
  // Columns of dK, dV and dQ. Where they are not all, other CTAs have the rest, each with the same
  // S and dP.
  static constexpr int columns_per_cta =
      config.columns_per_cta == 0 ? head_dim : config.columns_per_cta;
  static constexpr bool shares_columns = columns_per_cta < head_dim;

  using Element = ElementOf<config.dtype>;
  using ScoresMma = WarpGridMma<Element, own.warps_m_scores, config.num_warps / own.warps_m_scores>;
  using DkdvMma = WarpGridMma<Element, own.warps_n_dkdv, config.num_warps / own.warps_n_dkdv>;
  using DqMma = WarpGridMma<Element, own.warps_m_dq, config.num_warps / own.warps_m_dq>;

  using QueryLayout = TileLayout<block_m, head_dim>;
  using KeyLayout = TileLayout<block_n, head_dim>;
  using ScoresLayout = TileLayout<block_m, block_n>;
  using QueryLoader = TileLoader<Element, block_m, head_dim, threads>;
  using KeyLoader = TileLoader<Element, block_n, head_dim, threads>;
  // Layouts of the columns that a CTA makes gradients of, which lie together in a tile.
  using OwnQueryLayout = TileLayout<block_m, columns_per_cta>;
  using OwnKeyLayout = TileLayout<block_n, columns_per_cta>;
  using KeyWriter = TileWriter<Element, block_n, columns_per_cta, threads>;
  using QueryWriter = TileWriter<Element, block_m, columns_per_cta, threads>;

  static constexpr bool warps_tile(int warps_m, int rows, int columns) {
    return rows % (16 * warps_m) == 0 && columns % (16 * (config.num_warps / warps_m)) == 0;
  }
  static_assert(warps_tile(own.warps_m_scores, block_m, block_n), "scores: 16 x 16 a warp");
  static_assert(warps_tile(own.warps_n_dkdv, block_n, columns_per_cta),
                "dK and dV: 16 x 16 a warp");
  static_assert(warps_tile(own.warps_m_dq, block_m, columns_per_cta), "dQ: 16 x 16 a warp");
  static_assert(config.head_dim_v == head_dim, "narrower values are columns that do not exist");
  static_assert((block_m & (block_m - 1)) == 0, "the preprocess kernel shifts by it");
};

}  // namespace flash_attn_cuda::sm80
