// Absorbed latent attention on Hopper (DeepSeek-AI, "DeepSeek-V2", 2024, section 2.1.2), for few
// rows: scores are q k^T + qv v^T, of few rotary columns and of the latent ones, whose rows are the
// values as well. The time is that of reading keys once.
//
// A tile is block_m rows, the query heads of a key head of as many queries as fit. CTAs share the
// keys (share.h). With 64 rows two CTAs may have tiles of the same keys (sm90/isa/cta_pair.h): by
// TMA each loads half of them for both; rows each copies for itself, and finds in L2 what the other
// has read. Threads: a producer warpgroup (producer.h), of which one warp finds what there is to
// do, one loads queries and two load keys, by TMA or by their rows (row_loader.h), into a ring of
// pieces of 64 keys and 64 columns; of e4m3 two warpgroups more, which convert keys
// (e4m3_loader.h); and one consumer warpgroup (consumer.h), or two (pair_consumer.h). Parts of
// tiles are joined by a second kernel (join.h).
#pragma once

#include "sm90/frame.h"
#include "sm90/latent/e4m3_loader.h"
#include "sm90/latent/pair_consumer.h"
#include "sm90/latent/row_loader.h"

namespace flash_attn_cuda::sm90 {

enum LatentWarp : int {
  latent_loading_warp,
  latent_finding_warp,
  latent_query_warp,
  latent_second_loading_warp
};

// Reads the arguments, so that they are in a cache when others want them, one after the other.
CUTE_DEVICE void read_ahead(LatentArguments const& args) {
  constexpr int line = 64 / int(sizeof(int));
  auto const* words = reinterpret_cast<int const*>(&args);
  CUTE_UNROLL
  for (int i = 0; i < int(sizeof(args) / sizeof(int)); i += line) {
    const int word = words[i];
    asm volatile("" ::"r"(word));
  }
}

template <class Tag>
__global__ void __launch_bounds__(LatentTraits<Tag>::threads, 1)
    latent_kernel(const __grid_constant__ LatentArguments args) {
  using Traits = LatentTraits<Tag>;
  extern __shared__ __align__(1024) char smem_bytes[];
  auto& smem = *reinterpret_cast<typename Traits::SharedStorage*>(smem_bytes);
  constexpr bool is_e4m3 = Traits::is_e4m3;
  const bool loads_rows = !is_e4m3 && !args.loads_boxes;
  const bool in_pair = is_pair<Traits>(args);
  if (threadIdx.x == 0) {
    constexpr int consumer_warps = 4 * Traits::consumers;
    constexpr int loading_warps = Traits::loading_warps;
    // A piece is one warpgroup's to release, of each CTA that writes it.
    const int arrivals = is_e4m3 ? loading_warps : loads_rows ? RowLoader<Traits>::arrivals : 1;
    smem.ring.init(in_pair && args.loads_boxes ? 8 : 4, arrivals);
    smem.q_ring.init(consumer_warps);
    smem.item_ring.init(consumer_warps + loading_warps + 1);  // who reads items
    if constexpr (!Traits::is_swapped) smem.told.block.init();
    publish_barriers(args.q_map, args.qv_map);
    if (args.loads_boxes) publish_barriers(args.k_map, args.v_map);
  }
  follow_earlier_kernels();
  if (in_pair) {
    sync_pair();
  } else {
    __syncthreads();
  }

  const int warp = warp_of_cta();
  constexpr int first_consumer = 1 + Traits::converters;  // warpgroup
  if (warp < 4) {
    set_registers<Traits, Traits::producer_registers>();
    if (warp == latent_finding_warp) {
      find_items<Traits>(args, smem);
    } else if (warp == latent_query_warp) {
      load_queries<Traits>(args, smem);
    } else if (is_e4m3) {
      if (warp == latent_second_loading_warp) read_ahead(args);
    } else if (loads_rows) {
      RowLoader<Traits>{args, smem, int(warp == latent_second_loading_warp)}.run();
    } else {
      if (warp == latent_second_loading_warp) read_ahead(args);
      KeyLoader<Traits>{args, smem, int(warp == latent_second_loading_warp)}.run();
    }
  } else if (warp < 4 * first_consumer) {
    set_registers<Traits, Traits::producer_registers>();
    if constexpr (is_e4m3) E4m3Loader<Traits>{args, smem, warp - 4}.run();
  } else {
    set_registers<Traits, Traits::consumer_registers>();
    if constexpr (Traits::is_swapped) {
      LatentConsumer<Traits>(args, smem).run();
    } else if (warp / 4 == first_consumer) {
      LatentPairConsumer<Traits, 0>(args, smem).run();
    } else {
      LatentPairConsumer<Traits, 1>(args, smem).run();
    }
  }
  if (in_pair) sync_pair();
}

}  // namespace flash_attn_cuda::sm90
