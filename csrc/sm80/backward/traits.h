// Everything a backward kernel derives from its row of the kernel table (kernel_table/).
#pragma once

#include "sm80/backward/tile_traits.h"

namespace flash_attn_cuda::sm80 {

template <class Tag>
struct BackwardTraits : KeyTileTraits<Tag> {
  using Base = KeyTileTraits<Tag>;
  using Base::config, Base::own, Base::block_m, Base::block_n, Base::head_dim, Base::threads;
  using typename Base::Element;

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

  using Bias = EffectIf<has_bias, BiasEffect<Element>>;
  using Lists = EffectIf<is_sparse, ListedPairs<block_m, block_n>>;

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

  static_assert(threads >= 2 * block_m / 4, "row statistics load in one step of 16 bytes a thread");
};

}  // namespace flash_attn_cuda::sm80
