// Forward attention on Hopper for heads so wide that O of 64 queries fills half of the registers:
// O = softmax(score(Q K^T)) V and LSE.
//
// A CTA stays on its SM and takes tile after tile of 64 queries. Threads: one producer warpgroup,
// of which one thread finds the tiles, two load K and V by TMA, one of them Q as well (producer.h),
// and one warp clears tiles without keys; and two consumer warpgroups that multiply by wgmma
// (consumer.h). Shared memory: Q 64 x head_dim; a ring of slots for each consumer warpgroup, of 64
// keys x 128 columns or of 32 keys with its half of the columns of V; P of both, of two steps.
#pragma once

#include "sm90/frame.h"
#include "sm90/wide_forward/consumer.h"
#include "sm90/wide_forward/producer.h"

namespace flash_attn_cuda::sm90 {

template <class Tag>
__global__ void __launch_bounds__(WideForwardTraits<Tag>::threads, 1)
    wide_forward_kernel(const __grid_constant__ ForwardArguments args) {
  using Traits = WideForwardTraits<Tag>;
  extern __shared__ __align__(1024) char smem_bytes[];
  auto& smem = *reinterpret_cast<typename Traits::SharedStorage*>(smem_bytes);

  if (threadIdx.x == 0) {
    smem.q_ring.init(Traits::consumer_warps);
    for (auto& ring : smem.rings) ring.init(4);
    smem.work_ring.init(Traits::consumer_warps + Traits::loaders);
    FullBarrier::init(&smem.tile_wanted, 1);
    Partner::init(smem.told);
    publish_barriers(args.q_map, args.k_map, args.v_map);
  }
  clear_missing_boxes<Traits::block_m, Traits::head_dim>(smem.q, args.params.shape.head_dim);
  follow_earlier_kernels();
  __syncthreads();

  const int warp = warp_of_cta();
  const int warpgroup = warp / 4;
  if (warpgroup == producer_warpgroup) {
    set_registers<Traits, Traits::producer_registers>();
    if (warp == clearing_warp) {
      clear_empty_tiles<Traits>(args);
    } else if (warp == finding_warp) {
      if (elect_one_sync()) find_tiles<Traits>(args, smem);
    } else if (elect_one_sync()) {
      WideProducer<Traits>{args, smem, warp == loading_warp ? 0 : 1}.run();
    }
  } else {
    set_registers<Traits, Traits::consumer_registers>();
    consume_wide<Traits>(args, smem, warpgroup - 1);
  }
}

}  // namespace flash_attn_cuda::sm90
