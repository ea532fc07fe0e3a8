// Everything a kernel of derivatives in a direction derives from its row of the kernel
// table (kernel_table/).
#pragma once

#include "shared/mask/block_lists.h"
#include "shared/mask/block_range.h"
#include "shared/mask/pair_mask.h"
#include "shared/schedule/tile_work.h"
#include "shared/scores/score_bias.h"
#include "shared/scores/score_modifiers.h"
#include "sm80/isa/copy.h"
#include "sm80/isa/gemm.h"

namespace flash_attn_cuda::sm80 {

template <class Tag>
struct JvpTraits {
  static constexpr ForwardConfig config = Tag::config;
  static constexpr int block_m = config.block_m;
  static constexpr int block_n = config.block_n;
  static constexpr int head_dim = config.head_dim;
  static constexpr int threads = config.num_warps * 32;
  // Columns of V and O, as of ForwardTraits (sm80/forward/traits.h).
  static constexpr int columns_per_cta =
      config.columns_per_cta == 0 ? head_dim : config.columns_per_cta;
  static constexpr bool shares_columns = columns_per_cta < head_dim;

  using Element = ElementOf<config.dtype>;
  using Bias = BiasEffect<Element>;
  using Lists = ListedPairs<block_m, block_n>;
  // Warps split the queries only: P and its tangent never leave a warp's registers.
  using Mma = WarpGridMma<Element, config.num_warps, 1>;
  static constexpr int rows_per_thread = 2 * block_m / (16 * config.num_warps);

  using QueryLayout = TileLayout<block_m, head_dim>;
  using KeyLayout = TileLayout<block_n, head_dim>;
  using ValueLayout = TileLayout<block_n, columns_per_cta>;
  using OutputLayout = TileLayout<block_m, columns_per_cta>;
  using QueryLoader = TileLoader<Element, block_m, head_dim, threads>;
  using KeyLoader = TileLoader<Element, block_n, head_dim, threads>;
  using ValueLoader = TileLoader<Element, block_n, columns_per_cta, threads>;
  using OutputWriter = TileWriter<Element, block_m, columns_per_cta, threads>;

  struct SharedStorage {
    alignas(128) Element q[block_m * head_dim];  // Q, then the tangent of O on its way out
    alignas(128) Element k[block_n * head_dim];
    alignas(128) Element v[block_n * columns_per_cta];
    alignas(128) Element tangent_q[block_m * head_dim];
    alignas(128) Element tangent_k[block_n * head_dim];
    alignas(128) Element tangent_v[block_n * columns_per_cta];
    TileWork work;     // what the CTA does
    BlockRange range;  // the key blocks that it visits, or the positions in the list
    SparseVisits<block_n> visits;
  };

  static_assert(block_m % (16 * config.num_warps) == 0, "every warp owns whole m16 atoms");
  static_assert(block_n % 16 == 0 && head_dim % 32 == 0);
  static_assert(config.head_dim_v == head_dim, "narrower values are columns that do not exist");
};

}  // namespace flash_attn_cuda::sm80
