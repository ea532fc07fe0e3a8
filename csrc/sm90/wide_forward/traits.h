// Everything a forward kernel for wide heads derives from its row of the kernel table
// (build_tools/kernel_table.py).
#pragma once

#include "sm90/tile/traits.h"
#include "sm90/wide/partner.h"

namespace flash_attn_cuda::sm90 {

template <class Tag>
struct WideForwardTraits : TileTraits<Tag> {
  using Base = TileTraits<Tag>;
  using Base::config, Base::own, Base::block_m, Base::block_n, Base::head_dim, Base::head_dim_v,
      Base::consumers, Base::work_stages;
  using typename Base::Element;
  static_assert((config.features & ~modifier_features) == 0, "wide heads have no other effects");

  static constexpr int loaders = consumers;  // a ring of buffers for each
  static constexpr int threads = warpgroup_threads * (1 + consumers);
  // The columns of V and O that one warpgroup has.
  static constexpr int columns_v = head_dim_v / consumers;

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

  static_assert(consumers == 2);
  static_assert(block_m == 64 && block_n == 64, "a warpgroup's rows, which both share");
  static_assert(slots >= 2);
  static_assert(sizeof(SharedStorage) <= smem_limit_of(1));
};

}  // namespace flash_attn_cuda::sm90
