// Everything a Hopper kernel of derivatives in a direction derives from its row of the kernel
// table (kernel_table/).
#pragma once

#include "shared/mask/block_range.h"
#include "shared/schedule/tile_work.h"
#include "sm90/isa/barriers.h"
#include "sm90/isa/copy.h"
#include "sm90/isa/cta.h"
#include "sm90/isa/gemm.h"

namespace flash_attn_cuda::sm90 {

template <class Tag>
struct JvpTraits {
  static constexpr ForwardConfig config = Tag::config;
  static constexpr Sm90JvpConfig own = Tag::own;
  static constexpr int block_m = config.block_m;
  static constexpr int block_n = config.block_n;
  static constexpr int head_dim = config.head_dim;
  static constexpr int consumers = config.num_warps / 4;  // warpgroups that multiply
  static constexpr int threads = warpgroup_threads * (1 + consumers);
  static constexpr int rows_per_thread = 2;
  static constexpr int stages = own.stages_kv;
  static constexpr int launch_registers = launch_registers_of(threads);
  static constexpr int producer_registers = own.producer_registers;
  static constexpr int consumer_registers = own.consumer_registers;
  static_assert(config.features == feature::tangent, "other calls have sm80/jvp/");

  using Element = ElementOf<config.dtype>;
  using ScoresMma = SharedMma<Element, block_n, head_dim>;
  using OutputMma = RegisterMma<Element, head_dim, block_n>;
  using QueryLayout = TileLayout<Element, 64, head_dim, consumers>;
  using KeyLayout = TileLayout<Element, block_n, head_dim, stages>;
  static constexpr int query_bytes = block_m * head_dim * int(sizeof(Element));
  static constexpr int key_bytes = block_n * head_dim * int(sizeof(Element));

  struct SharedStorage {
    alignas(1024) Element q[block_m * head_dim];
    alignas(1024) Element tangent_q[block_m * head_dim];
    alignas(1024) Element k[stages * block_n * head_dim];
    alignas(1024) Element tangent_k[stages * block_n * head_dim];
    alignas(1024) Element v[stages * block_n * head_dim];
    alignas(1024) Element tangent_v[stages * block_n * head_dim];
    Ring<1> q_ring;       // Q and its tangent
    Ring<stages> k_ring;  // K and its tangent
    Ring<stages> v_ring;
    TileWork work;     // what the CTA does
    BlockRange range;  // the key blocks that it visits
  };

  static_assert(block_m == 64 * consumers && config.head_dim_v == head_dim);
  static_assert(instruction_columns<ScoresMma> == block_n, "instructions as wide as a step");
  static_assert(sizeof(SharedStorage) <= smem_limit_of(1));
};

}  // namespace flash_attn_cuda::sm90
