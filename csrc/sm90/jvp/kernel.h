// The derivative of attention in a direction on Hopper, as sm80/jvp/kernel.h says it: the tangents
// of O and LSE, for one query tile a CTA, of calls whose scores nothing but a window changes.
//
// Threads: one producer warpgroup, of which one thread loads by TMA (producer.h), and block_m / 64
// consumer warpgroups that multiply by wgmma (consumer.h); setmaxnreg gives the producer's
// registers to them. Shared memory: Q and its tangent block_m x head_dim each; K, V and their
// tangents block_n x head_dim each in `stages` buffers (traits.h).
#pragma once

#include "sm90/frame.h"
#include "sm90/jvp/consumer.h"
#include "sm90/jvp/producer.h"

namespace flash_attn_cuda::sm90 {

// What this CTA does, for all its threads.
template <class Traits>
CUTE_DEVICE void find_jvp_tile(JvpArguments const& args, typename Traits::SharedStorage& smem) {
  ForwardParams const& params = args.params;
  TileWork work;
  if (!find_work(args.schedule, args.table, params, blockIdx.x, work)) {
    smem.work.tile = no_tile;
    return;
  }
  const int query_begin = work.tile * Traits::block_m;
  const int query_last = min(query_begin + Traits::block_m, work.sequence.seqlen_q) - 1;
  smem.work = work;
  smem.range = block_range(band_from_queries(params.window, work.sequence.shift), query_begin,
                           query_last, work.sequence.seqlen_k, Traits::block_n);
}

template <class Tag>
__global__ void __launch_bounds__(JvpTraits<Tag>::threads, 1)
    jvp_kernel(const __grid_constant__ JvpArguments args) {
  using Traits = JvpTraits<Tag>;
  extern __shared__ __align__(1024) char smem_bytes[];
  auto& smem = *reinterpret_cast<typename Traits::SharedStorage*>(smem_bytes);
  follow_earlier_kernels();
  if (threadIdx.x == 0) {
    smem.q_ring.init(1);
    smem.k_ring.init(4 * Traits::consumers);
    smem.v_ring.init(4 * Traits::consumers);
    publish_barriers();
    find_jvp_tile<Traits>(args, smem);
  }
  __syncthreads();
  if (smem.work.tile == no_tile) return;

  const int warp = warp_of_cta();
  if (warp < 4) {
    set_registers<Traits, Traits::producer_registers>();
    if (warp == loading_warp && elect_one_sync()) JvpProducer<Traits>{args, smem}.run();
  } else {
    set_registers<Traits, Traits::consumer_registers>();
    consume_jvp<Traits>(args, smem, warp / 4 - 1);
  }
}

}  // namespace flash_attn_cuda::sm90
