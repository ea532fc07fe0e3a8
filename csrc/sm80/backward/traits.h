// Everything a backward kernel derives from its row of the kernel table
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
struct BackwardTraits {
  static constexpr BackwardConfig config = Tag::config;
  static constexpr Sm80BackwardConfig own = Tag::own;
  static constexpr int block_m = config.block_m;
  static constexpr int block_n = config.block_n;
  static constexpr int head_dim = config.head_dim;
  static constexpr int threads = config.num_warps * 32;
  // Columns of dK, dV and dQ. Where they are not all, other CTAs have the rest, each with the same
  // S and dP.
  static constexpr int columns_per_cta =
      config.columns_per_cta == 0 ? head_dim : config.columns_per_cta;
  static constexpr bool shares_columns = columns_per_cta < head_dim;
  static constexpr int stages_q = own.stages_q;
  static constexpr int stages_do = own.stages_do;

  static constexpr bool has(FeatureSet features) { return (config.features & features) != 0; }
  // Nothing but the softmax lies between the products.
  static constexpr bool is_plain = !has(modifier_features | feature::dropout | feature::bias);
  static constexpr bool is_sparse = has(feature::block_sparse);
  static constexpr bool has_bias = has(feature::bias);
  static constexpr bool has_dropout = has(feature::dropout);
  static constexpr bool is_ordered = has(feature::deterministic);
  static constexpr bool writes_fp32 = can_write_fp32(config.features);
  static_assert(!is_plain || !is_sparse, "what hides unlisted pairs runs beside them");

  using Element = ElementOf<config.dtype>;
  using Bias = EffectIf<has_bias, BiasEffect<Element>>;
  using Lists = EffectIf<is_sparse, ListedPairs<block_m, block_n>>;
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

  struct SharedStorage {
    alignas(128) Element k[block_n * head_dim];  // K, then dK on its way out
    alignas(128) Element v[block_n * head_dim];  // V, then dV on its way out
    alignas(128) Element q[stages_q][block_m * head_dim];
    alignas(128) Element dout[stages_do][block_m * head_dim];
    alignas(128) Element p[block_m * block_n];
    alignas(128) Element ds[block_m * block_n];
    alignas(128) float lse_log2[2][block_m];
    alignas(128) float softmax_d[2][block_m];
    TileWork work;     // what the CTA does
    BlockRange range;  // the query tiles that it visits
    int column_begin;  // of its gradients
  };

  static constexpr bool warps_tile(int warps_m, int rows, int columns) {
    return rows % (16 * warps_m) == 0 && columns % (16 * (config.num_warps / warps_m)) == 0;
  }
  static_assert(warps_tile(own.warps_m_scores, block_m, block_n), "S and dP: 16 x 16 a warp");
  static_assert(warps_tile(own.warps_n_dkdv, block_n, columns_per_cta),
                "dK and dV: 16 x 16 a warp");
  static_assert(warps_tile(own.warps_m_dq, block_m, columns_per_cta), "dQ: 16 x 16 a warp");
  static_assert(config.head_dim_v == head_dim, "narrower values are columns that do not exist");
  static_assert((block_m & (block_m - 1)) == 0, "the preprocess kernel shifts by it");
  static_assert(threads >= 2 * block_m / 4, "row statistics load in one step of 16 bytes a thread");
};

}  // namespace flash_attn_cuda::sm80
