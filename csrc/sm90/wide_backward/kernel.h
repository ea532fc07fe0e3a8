// Backward attention on Hopper for heads so wide that 64 rows of a gradient fill half of the
// registers. sm80/backward/kernel.h has the formulas.
//
// A CTA makes 64 rows of dK, of dQ or of dV, and makes the scores that it needs anew: eight
// products instead of five. In return nothing is summed in global memory, so that the bits are
// those of every run. Threads: one producer warpgroup, of which two load by TMA (producer.h), and
// two consumer warpgroups that multiply by wgmma, with half of the columns each (consumer.h).
// Shared memory: K and V of the tile's keys, or Q and dO of its queries, 64 x head_dim each; a ring
// of slots for each consumer warpgroup, of 64 rows x 64 columns or of 16 rows with its half of the
// columns; P, dS or both, of two steps.
#pragma once

#include "sm90/frame.h"
#include "sm90/wide_backward/consumer.h"
#include "sm90/wide_backward/producer.h"

namespace flash_attn_cuda::sm90 {

template <class Tag>
__global__ void __launch_bounds__(WideBackwardTraits<Tag>::threads, 1)
    wide_backward_kernel(const __grid_constant__ WideBackwardArguments args) {
  using Traits = WideBackwardTraits<Tag>;
  extern __shared__ __align__(1024) char smem_bytes[];
  auto& smem = *reinterpret_cast<typename Traits::SharedStorage*>(smem_bytes);

  AttentionShape const& shape = args.call.params.shape;
  clear_missing_boxes<Traits::block, Traits::head_dim>(smem.tiles[0], shape.head_dim);
  clear_missing_boxes<Traits::block, Traits::head_dim>(smem.tiles[1], shape.head_dim_v);
  follow_earlier_kernels();
  if (threadIdx.x == 0) {
    for (auto& full : smem.tile_full) FullBarrier::init(&full, 1);
    for (auto& ring : smem.rings) ring.init(4);
    Partner::init(smem.told);
    publish_barriers();
    smem.job = find_job<Traits>(args);
  }
  __syncthreads();
  if (smem.job.gradient == Gradient::none) return;

  const int warp = warp_of_cta();
  const int warpgroup = warp / 4;
  if (warpgroup == producer_warpgroup) {
    set_registers<Traits, Traits::producer_registers>();
    if (static_cast<unsigned>(warp) < Traits::loaders && smem.job.steps.count() > 0 &&
        elect_one_sync())
      WideGradientProducer<Traits>{args, smem, warp}.run();
  } else {
    set_registers<Traits, Traits::consumer_registers>();
    consume_wide_backward<Traits>(args, smem, warpgroup - 1);
  }
}

}  // namespace flash_attn_cuda::sm90
