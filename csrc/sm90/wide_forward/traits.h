// Everything a forward kernel for wide heads derives from its row of the kernel
// table (kernel_table/).
#pragma once

#include "sm90/tile/traits.h"
#include "sm90/wide/partner.h"
#include "sm90/wide/slots.h"

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
  using Slots = WideSlots<Element, head_dim, /*columns=*/128, /*rows=*/32, own.stages_kv>;
  using ScoresMma = typename Slots::ScoresMma;
  static constexpr int launch_registers = launch_registers_of(threads);

  struct SharedStorage {
    alignas(1024) Element q[block_m * head_dim];
    alignas(1024) Element slots[consumers][Slots::count * Slots::elements];
    alignas(16) Told told[2][consumers];
    Ring<1> q_ring;
    Ring<Slots::count> rings[consumers];
    Ring<work_stages> work_ring;
    std::uint64_t tile_wanted;  // the producer has little left to load: for the thread that finds
    WorkItem work[work_stages];
  };

  static_assert(consumers == 2 && head_dim_v == head_dim);
  static_assert(block_m == 64 && block_n == 64, "a warpgroup's rows, which both share");
  static_assert(sizeof(SharedStorage) <= smem_limit_of(1));
};

}  // namespace flash_attn_cuda::sm90
