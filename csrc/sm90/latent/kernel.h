// Absorbed latent attention on Hopper (DeepSeek-AI, "DeepSeek-V2", 2024, section 2.1.2), for few
// rows: scores are q k^T + qv v^T, of few rotary columns and of the latent ones, whose rows are the
// values as well. The time is that of reading keys once.
//
// A tile is block_m rows, the query heads of a key head of as many queries as fit. CTAs share the
// keys (share.h). Threads: a producer warpgroup (producer.h), of which one warp finds what there
// is to do, one loads keys by TMA, a ring of pieces of 64 keys and 64 columns, and one queries; and
// one or two consumer warpgroups (consumer.h). Parts of tiles are joined by a second kernel
// (join.h).
#pragma once

#include "sm90/frame.h"
#include "sm90/latent/consumer.h"

namespace flash_attn_cuda::sm90 {

enum LatentWarp : int { latent_loading_warp, latent_finding_warp, latent_query_warp };

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
  if (threadIdx.x == 0) {
    constexpr int consumer_warps = 4 * Traits::consumers;
    smem.ring.init(consumer_warps);
    smem.q_ring.init(consumer_warps);
    smem.item_ring.init(consumer_warps + 2);  // the loading warps read items too
    publish_barriers(args.q_map, args.k_map, args.qv_map, args.v_map);
  }
  follow_earlier_kernels();
  __syncthreads();

  const int warp = warp_of_cta();
  if (warp < 4) {
    set_registers<Traits, Traits::producer_registers>();
    if (warp == latent_loading_warp) {
      KeyLoader<Traits>{args, smem}.run();
    } else if (warp == latent_finding_warp) {
      find_items<Traits>(args, smem);
    } else if (warp == latent_query_warp) {
      load_queries<Traits>(args, smem);
    } else {
      read_ahead(args);
    }
  } else {
    set_registers<Traits, Traits::consumer_registers>();
    LatentConsumer<Traits>(args, smem, warp / 4 - 1).run();
  }
}

}  // namespace flash_attn_cuda::sm90
