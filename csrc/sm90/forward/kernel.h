// Forward attention on Hopper: O = softmax(score(Q K^T)) V and LSE.
//
// A CTA stays on its SM and takes tile after tile. Threads: one producer warpgroup (producer.h), of
// which one thread finds the tiles and loads them by TMA, or two of its warps load what lies in
// pages and another thread finds the tiles, or all four warps make fp16 of e4m3 (e4m3_producer.h),
// or those without loads transpose values of e4m3 (transposer.h), one thread loads the bits of a
// block-sparse mask, and one warp clears tiles without keys; and
// block_m / 64 consumer warpgroups that multiply by wgmma (consumer.h, of two CTAs on an SM
// two_ctas.h); setmaxnreg gives the producer's registers to them. Kernels with dropout have warps
// that draw its decisions for the consumers (dropout.h). Shared memory: Q block_m x head_dim, twice
// where there is room, so that the next tile's is there in time; K block_n x head_dim and V block_n
// x head_dim_v in `stages` buffers each; O block_m x head_dim_v where there is room; two places for
// tiles of work; for a bias two tiles block_m x block_n, for a mask the bits of one, for e4m3 the
// bytes of a block (traits.h).
#pragma once

#include "sm90/forward/consumer.h"
#include "sm90/forward/dropout.h"
#include "sm90/forward/e4m3_producer.h"
#include "sm90/forward/producer.h"
#include "sm90/forward/transposer.h"
#include "sm90/forward/two_ctas.h"
#include "sm90/frame.h"

namespace flash_attn_cuda::sm90 {

template <class Tag>
__global__ void __launch_bounds__(ForwardTraits<Tag>::threads, ForwardTraits<Tag>::ctas_per_sm)
    forward_kernel(const __grid_constant__ ForwardArguments args) {
  using Traits = ForwardTraits<Tag>;
  extern __shared__ __align__(1024) char smem_bytes[];
  auto& smem = *reinterpret_cast<typename Traits::SharedStorage*>(smem_bytes);

  const bool draws = Traits::draws_ahead && args.params.dropout.threshold > 0;
  const bool has_bits = Traits::is_sparse && args.params.sparsity.bits.data != nullptr;
  if (threadIdx.x == 0) {
    smem.q_ring.init(Traits::consumer_warps);
    constexpr int writers = Traits::converts_e4m3 ? Traits::e4m3_writers : 1;
    smem.k_ring.init(Traits::consumer_warps, writers);
    constexpr int value_writers = Traits::multiplies_e4m3 ? Traits::transposers : writers;
    smem.v_ring.init(Traits::consumer_warps, value_writers);
    smem.value_rows_ring.init(Traits::transposers);
    smem.bias_ring.init(Traits::consumer_warps);
    smem.work_ring.init(Traits::consumer_warps + (draws ? Traits::drawing_warps : 0) +
                        Traits::told_warps + (has_bits ? 1 : 0));
    FullBarrier::init(&smem.tile_wanted, 1);
    if constexpr (Traits::draws_ahead) init_word_rings<Traits>(smem);
    if constexpr (Traits::is_sparse) {
      for (auto& ring : smem.sparse.bits_ring) ring.init(4);
    }
    if constexpr (Traits::converts_e4m3) {
      publish_barriers(args.q_map);
    } else {
      publish_barriers(args.q_map, args.k_map, args.v_map);
    }
  }
  follow_earlier_kernels();
  if constexpr (Traits::has_dropout) publish_rng(args.params.dropout, blockIdx.x, threadIdx.x);
  __syncthreads();

  const int warp = warp_of_cta();
  const int warpgroup = warp / 4;
  if (warpgroup == producer_warpgroup) {
    set_registers<Traits, Traits::producer_registers>();
    if constexpr (Traits::converts_e4m3) {
      produce_from_e4m3<Traits>(args, smem, warp);
      if (warp == clearing_warp) clear_empty_tiles<Traits>(args);
    } else if constexpr (Traits::multiplies_e4m3) {
      if (warp == clearing_warp) clear_empty_tiles<Traits>(args);
      // One place in the code: copies of it would not fit the instruction cache beside the rest.
      const int part = warp - clearing_warp;
      if (part >= 0 && part < Traits::transposers) {
        Transposer<Traits>(smem, part).run();
      } else if constexpr (Traits::is_paged) {
        Producer<Traits>{args, smem}.run_over_cache(warp == assisting_warp);
      } else {
        if (elect_one_sync()) Producer<Traits>{args, smem}.run();
      }
    } else if (warp == clearing_warp) {
      clear_empty_tiles<Traits>(args);
    } else if (Traits::has_finder && warp == finding_warp) {
      if (elect_one_sync()) find_tiles<Traits>(args, smem);
    } else if constexpr (Traits::is_paged) {
      Producer<Traits>{args, smem}.run_over_cache(warp == assisting_warp);
    } else if (warp == loading_warp) {
      if (elect_one_sync()) Producer<Traits>{args, smem}.run();
    } else if constexpr (Traits::is_sparse) {
      if (has_bits && elect_one_sync()) load_bits<Traits>(args, smem);
    }
  } else if (!Traits::draws_ahead || warpgroup <= Traits::consumers) {
    set_registers<Traits, Traits::consumer_registers>();
    if constexpr (Traits::overlaps_softmax) {
      consume<Traits>(args, smem, warpgroup - 1);
    } else {
      consume_beside_a_cta<Traits>(args, smem, warpgroup - 1);
    }
  } else if constexpr (Traits::draws_ahead) {
    set_registers<Traits, Traits::drawing_registers>();
    if (draws) draw_words<Traits>(args, smem, warp % 4);
  }
}

}  // namespace flash_attn_cuda::sm90
