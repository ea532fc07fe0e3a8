// Everything a kernel of the second backward derives from its row of the kernel table
// (build_tools/kernel_table.py).
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
struct HvpTraits {
  static constexpr BackwardConfig config = Tag::config;
  static constexpr Sm80HvpConfig own = Tag::own;
  static constexpr int block_m = config.block_m;
  static constexpr int block_n = config.block_n;
  static constexpr int head_dim = config.head_dim;
  static constexpr int threads = config.num_warps * 32;
  // Columns of dK, dV and dQ, as of BackwardTraits (sm80/backward/traits.h).
  static constexpr int columns_per_cta =
      config.columns_per_cta == 0 ? head_dim : config.columns_per_cta;
  static constexpr bool shares_columns = columns_per_cta < head_dim;
  // What files of sm80/backward/ ask: a call decides about all of it.
  static constexpr bool is_sparse = true;
  static constexpr bool has_dropout = true;
  static constexpr bool is_ordered = true;
  static constexpr bool writes_fp32 = false;

  using Element = ElementOf<config.dtype>;
  using Bias = BiasEffect<Element>;
  using Lists = ListedPairs<block_m, block_n>;
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

  struct RowStatistics {
    float lse_log2[block_m];
    float softmax_d[block_m];
    float tangent_lse[block_m];
    float tangent_dot[block_m];
  };
  struct SharedStorage {
    alignas(128) Element k[block_n * head_dim];  // K, then dK on its way out
    alignas(128) Element v[block_n * head_dim];  // V, then dV on its way out
    alignas(128) Element tangent_k[block_n * head_dim];
    alignas(128) Element tangent_v[block_n * head_dim];
    alignas(128) Element q[block_m * head_dim];
    alignas(128) Element tangent_q[block_m * head_dim];
    alignas(128) Element dout[block_m * head_dim];
    alignas(128) Element p[block_m * block_n];   // P (T - mu), for dV
    alignas(128) Element ds[block_m * block_n];  // dS
    alignas(128) Element tangent_ds[block_m * block_n];
    alignas(128) RowStatistics rows;
    TileWork work;     // what the CTA does
    BlockRange range;  // the query tiles that it visits
    int column_begin;  // of its gradients
  };

  static constexpr bool warps_tile(int warps_m, int rows, int columns) {
    return rows % (16 * warps_m) == 0 && columns % (16 * (config.num_warps / warps_m)) == 0;
  }
  static_assert(warps_tile(own.warps_m_scores, block_m, block_n), "S and T: 16 x 16 a warp");
  static_assert(warps_tile(own.warps_n_dkdv, block_n, columns_per_cta),
                "dK and dV: 16 x 16 a warp");
  static_assert(warps_tile(own.warps_m_dq, block_m, columns_per_cta), "dQ: 16 x 16 a warp");
  static_assert(config.head_dim_v == head_dim, "narrower values are columns that do not exist");
  static_assert((block_m & (block_m - 1)) == 0, "the preprocess kernel shifts by it");
  static_assert(threads >= 4 * block_m / 4, "row statistics load in one step of 16 bytes a thread");
};

}  // namespace flash_attn_cuda::sm80
