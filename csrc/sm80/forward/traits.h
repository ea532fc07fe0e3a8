// Everything a forward kernel derives from its row of the kernel table (kernel_table/).
#pragma once

#include "shared/mask/block_lists.h"
#include "shared/mask/block_range.h"
#include "shared/mask/pair_mask.h"
#include "shared/online_softmax.h"
#include "shared/schedule/tile_work.h"
#include "shared/scores/score_bias.h"
#include "shared/scores/score_modifiers.h"
#include "sm80/forward/e4m3.h"
#include "sm80/isa/copy.h"
#include "sm80/isa/gemm.h"

namespace flash_attn_cuda::sm80 {

template <class Tag>
struct ForwardTraits {
  static constexpr ForwardConfig config = Tag::config;
  static constexpr Sm80ForwardConfig own = Tag::own;
  static constexpr int block_m = config.block_m;
  static constexpr int block_n = config.block_n;
  static constexpr int head_dim = config.head_dim;
  static constexpr int threads = config.num_warps * 32;
  // Columns of V and O. Where they are not all, other CTAs have the rest, each with the same S.
  static constexpr int columns_per_cta =
      config.columns_per_cta == 0 ? head_dim : config.columns_per_cta;
  static constexpr bool shares_columns = columns_per_cta < head_dim;

  static constexpr bool has(FeatureSet features) { return (config.features & features) != 0; }
  static constexpr bool modifies_scores = has(modifier_features | feature::bias);
  static constexpr bool is_sparse = has(feature::block_sparse);
  static constexpr bool has_bias = has(feature::bias);
  static constexpr bool writes_fp32 = can_write_fp32(config.features);
  static constexpr bool keeps_rounding = can_keep_rounding(config.features);

  // Whether registers are left for pointers to K and V from block to block.
  static constexpr bool keeps_pointers = own.keeps_pointers;

  using Element = ElementOf<config.dtype>;
  static constexpr bool is_e4m3 = reads_e4m3(config.features);
  using Cached = std::conditional_t<is_e4m3, std::uint8_t, Element>;  // of keys and values
  using Bias = EffectIf<has_bias, BiasEffect<Element, has(feature::paged_kv)>>;
  using Lists = EffectIf<is_sparse, ListedPairs<block_m, block_n>>;
  // Warps split the queries only: a warp owns whole score rows and P never leaves its registers.
  using Mma = WarpGridMma<Element, config.num_warps, 1>;
  // Rows of the tile that one thread holds elements of: two per m16 atom.
  static constexpr int rows_per_thread = 2 * block_m / (16 * config.num_warps);
  using Softmax =
      OnlineSoftmax<rows_per_thread,
                    std::conditional_t<can_write_max_logits(config), MaximumOfScores, NoMaximum>>;

  using QueryLayout = TileLayout<block_m, head_dim>;
  using KeyLayout = TileLayout<block_n, head_dim>;
  using ValueLayout = TileLayout<block_n, columns_per_cta>;
  using OutputLayout = TileLayout<block_m, columns_per_cta>;
  using QueryLoader = TileLoader<Element, block_m, head_dim, threads>;
  using KeyLoader = TileLoader<Element, block_n, head_dim, threads>;
  // Loaders of a tile of K or of V: from rows that lie at equal distances, or anywhere.
  template <class SmemTensor>
  struct LoadersOf {
    static constexpr int columns = decltype(size<1>(std::declval<SmemTensor>()))::value;
    using Tile = TileLoader<Element, block_n, columns, threads>;
    using Rows = RowLoader<Element, block_n, columns, threads>;
  };
  using OutputWriter = TileWriter<Element, block_m, columns_per_cta, threads>;

  using E4m3Keys = E4m3Loader<Element, block_n, head_dim, threads>;
  using E4m3Values = E4m3Loader<Element, block_n, columns_per_cta, threads>;
  struct E4m3Bytes {
    typename E4m3Keys::Bytes k;
    typename E4m3Values::Bytes v;
    // Of the tokens of the tiles; the next block's arrive with its bytes.
    alignas(16) float key_scales[block_n];
    alignas(16) float value_scales[block_n];
  };
  struct NoBytes {};

  struct SharedStorage {
    alignas(128) Element q[block_m * head_dim];  // Q, then O on its way out
    alignas(128) Element k[block_n * head_dim];
    alignas(128) Element v[block_n * columns_per_cta];
    [[no_unique_address]] std::conditional_t<is_e4m3, E4m3Bytes, NoBytes> bytes;
    TileWork work;     // what the CTA does
    BlockRange range;  // the key blocks that it visits, or the positions in the list
    std::conditional_t<is_sparse, SparseVisits<block_n>, AllVisits> visits;
  };

  static_assert(block_m % (16 * config.num_warps) == 0, "every warp owns whole m16 atoms");
  static_assert(block_n % 16 == 0 && head_dim % 32 == 0);
  static_assert(config.head_dim_v == head_dim, "narrower values are columns that do not exist");
};

}  // namespace flash_attn_cuda::sm80
