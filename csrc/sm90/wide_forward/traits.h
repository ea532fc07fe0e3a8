// Everything a forward kernel for wide heads derives from its row of the kernel table
// (build_tools/kernel_table.py).
#pragma once

#include "shared/schedule/tile_work.h"
#include "shared/scores/score_modifiers.h"
#include "sm90/forward/traits.h"
#include "sm90/isa/cta.h"
#include "sm90/wide/partner.h"

namespace flash_attn_cuda::sm90 {

template <class Tag>
struct WideForwardTraits {
  static constexpr ForwardConfig config = Tag::config;
  static constexpr Sm90WideForwardConfig own = Tag::own;
  static constexpr int block_m = config.block_m;
  static constexpr int block_n = config.block_n;  // keys of a warpgroup's scores
  static constexpr int head_dim = config.head_dim;
  static constexpr int head_dim_v = config.head_dim_v;
  static constexpr int consumers = 2;
  static constexpr int consumer_warps = 4 * consumers;
  static constexpr int loaders = consumers;  // a ring of buffers for each
  static constexpr int threads = warpgroup_threads * (1 + consumers);
  static constexpr int rows_per_thread = 2;
  // The columns of V and O that one warpgroup has.
  static constexpr int columns_v = head_dim_v / consumers;

  static constexpr bool has(FeatureSet features) { return (config.features & features) != 0; }
  static constexpr bool has_score_modifiers = has(modifier_features);
  static constexpr bool has_row_bias = has(feature::alibi);
  static constexpr bool writes_fp32 = can_write_fp32(config.features);
  static constexpr bool keeps_rounding = can_keep_rounding(config.features);
  static constexpr bool has_finder = true;
  // What ForwardScores and TileWalk ask besides, and wide heads have other kernels for.
  static constexpr bool leaves_curve = false;
  static constexpr bool is_sparse = false;
  static constexpr bool is_paged = false;
  static constexpr bool is_e4m3 = false;
  static constexpr bool can_split = false;
  static constexpr bool has_bias = false;
  static constexpr bool has_dropout = false;
  static constexpr bool draws_ahead = false;
  static_assert((config.features & ~modifier_features) == 0);

  using Element = ElementOf<config.dtype>;
  using Stored = Element;
  // A slot of a ring: keys of some columns, or fewer of them with a warpgroup's columns of values.
  static constexpr int key_columns = 128;
  static constexpr int value_rows = 32;
  static constexpr int slot_elements = block_n * key_columns;
  static constexpr int slot_bytes = slot_elements * int(sizeof(Element));
  static constexpr int slots = own.stages_kv;
  static_assert(slot_elements == value_rows * columns_v && head_dim % key_columns == 0);

  using ScoresMma = SharedMma<Element, block_n, key_columns>;
  using OutputMma = RegisterMma<Element, columns_v, value_rows>;
  using QueryLayout = TileLayout<Element, block_m, key_columns, head_dim / key_columns>;
  using KeyLayout = TileLayout<Element, block_n, key_columns, slots>;
  using ValueLayout = TileLayout<Element, value_rows, columns_v, slots>;

  static constexpr int launch_registers = launch_registers_of(threads);
  static constexpr int producer_registers = own.producer_registers;
  static constexpr int consumer_registers = own.consumer_registers;
  static constexpr int work_stages = 2;  // the tile in hand and the next

  struct SharedStorage {
    alignas(1024) Element q[block_m * head_dim];
    alignas(1024) Element slots[consumers][WideForwardTraits::slots * slot_elements];
    alignas(16) Told told[2][consumers];
    Ring<1> q_ring;
    Ring<WideForwardTraits::slots> rings[consumers];
    Ring<work_stages> work_ring;
    std::uint64_t tile_wanted;  // the producer has little left to load: for the thread that finds
    WorkItem work[work_stages];
  };

  static_assert(block_m == 64 && block_n == 64, "a warpgroup's rows, which both share");
  static_assert(slots >= 2);
  static_assert(sizeof(SharedStorage) <= smem_limit_of(1));
};

}  // namespace flash_attn_cuda::sm90
