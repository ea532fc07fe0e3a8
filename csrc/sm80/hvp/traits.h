// Everything a kernel of the second backward derives from its row of the kernel
// table (kernel_table/).
#pragma once

#include "sm80/backward/tile_traits.h"

namespace flash_attn_cuda::sm80 {

template <class Tag>
struct HvpTraits : KeyTileTraits<Tag> {
  using Base = KeyTileTraits<Tag>;
  using Base::block_m, Base::block_n, Base::head_dim, Base::threads;
  using typename Base::Element;

  // What files of sm80/backward/ ask: a call decides about all of it.
  static constexpr bool is_plain = false;
  static constexpr bool is_sparse = true;
  static constexpr bool has_dropout = true;
  static constexpr bool is_ordered = true;
  static constexpr bool writes_fp32 = false;

  using Bias = BiasEffect<Element>;
  using Lists = ListedPairs<block_m, block_n>;

  // What is known of each query.
  enum RowStatistic : int { lse_log2, softmax_d, tangent_lse, tangent_dot, row_statistics };
  using RowStatistics = float[row_statistics][block_m];
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

  static_assert(threads >= row_statistics * block_m / 4,
                "row statistics load in one step of 16 bytes a thread");
};

}  // namespace flash_attn_cuda::sm80
