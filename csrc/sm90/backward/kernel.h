// Backward attention on Hopper, FlashAttention-2 Algorithm 2: dK and dV of one key tile after the
// other, dQ summed over key tiles in fp32. sm80/backward/kernel.h has the formulas.
//
// A CTA stays on its SM and takes tile after tile. Threads: one producer warpgroup, of which one
// thread loads by TMA (producer.h), one finds the tiles and counts additions to dQ
// (dispatcher.h), and two warps finish dq (finish.h), one of which first sums a
// sink's gradient and clears tiles that no query sees; one warpgroup for dQ (dq.h); and
// two that hold dK and dV (keys.h, separate_keys.h), to which setmaxnreg gives
// the registers of the others. Above head_dim 128, and at 128 where queries see many keys, two CTAs
// share a tile (sm90/isa/cta_pair.h), and each has half of its keys. What lies in shared memory,
// and how often: SharedStorage of traits.h.
#pragma once

#include "shared/block_sum.h"
#include "sm90/backward/dq.h"
#include "sm90/backward/finish.h"
#include "sm90/backward/producer.h"
#include "sm90/backward/separate_keys.h"
#include "sm90/frame.h"
#include "sm90/isa/cta_pair.h"

namespace flash_attn_cuda::sm90 {

// Whether no list of the tile's heads has a block of its range. All lanes together; no search, for
// which there are no registers.
template <class Traits>
CUTE_DEVICE bool is_unlisted(BackwardParams const& params, BackwardWorkItem const& item) {
  BlockLists const& lists = params.sparsity.lists;
  using List = BlockList<Traits::block_m>;
  bool is_listed = false;
  for (int head = item.first_head; head < item.end_head && item.work.tile < lists.tiles; ++head) {
    const int* row = lists.row(item.work.sequence.index, head, item.work.tile);
    const int count = detail::clamp(row[0], 0, lists.others) * List::blocks_per_entry;
    for (int position = threadIdx.x % 32; position < count; position += 32) {
      const int block = List::block_at(row, position);
      is_listed |= block >= item.range.begin && block < item.range.end;
    }
  }
  return __all_sync(0xffffffffu, !is_listed);
}

// One warp: dk = dv = 0 for the tiles that no query sees, of which the others are not told, and
// counts them.
template <class Traits>
CUTE_DEVICE void clear_unseen_tiles(BackwardKernelArguments const& args) {
  int tiles_left = 0;  // of a place
  for (std::int64_t id = blockIdx.x; id < args.num_tiles; id += tiles_left > 0 ? 0 : gridDim.x) {
    BackwardWorkItem item;
    bool exists;
    bool is_seen = find_tile<Traits>(args, static_cast<int>(id), tiles_left, item, exists);
    if (!exists) break;
    if constexpr (Traits::is_sparse)
      is_seen = is_seen && !is_unlisted<Traits>(args.call.params, item);
    if (is_seen) continue;
    if constexpr (Traits::is_sparse) {
      BackwardArguments const& call = args.call;
      if (call.additions != nullptr && threadIdx.x % 32 == 0)
        atomicAdd(call.additions + schedule_head(call.schedule, call.table, item.work),
                  call.shared_tiles.parts);
    }
    clear_key_gradients<Traits>(args.call, item, threadIdx.x % 32);
  }
}

// One warp: the gradient of a sink from what the preprocess kernel has left, a head at a time.
CUTE_DEVICE void sum_sink_shares(BackwardArguments const& call) {
  if (call.params.dsink == nullptr) return;
  const int lane = threadIdx.x % 32;
  for (int head = blockIdx.x; head < call.params.shape.num_heads_q; head += gridDim.x) {
    float const* shares = call.sink_shares + std::int64_t{head} * call.sink_shares_per_head;
    float sum = 0.0f;
    for (int i = lane; i < call.sink_shares_per_head; i += 32) sum += shares[i];
    sum = warp_sum(sum);
    if (lane == 0) call.params.dsink[head] = sum;
  }
}

// The warpgroups behind the producers'. Those that hold dK and dV are the last two: of the same
// keys one holds dV and the next one dK, or both hold both of their own.
enum BackwardWarpgroup : int {
  dq_warpgroup = producer_warpgroup + 1,
  first_key_warpgroup,
  value_warpgroup = first_key_warpgroup
};

template <class Tag>
__global__ void __launch_bounds__(BackwardTraits<Tag>::threads, 1)
    backward_kernel(const __grid_constant__ BackwardKernelArguments args) {
  using Traits = BackwardTraits<Tag>;
  extern __shared__ __align__(1024) char smem_bytes[];
  auto& smem = *reinterpret_cast<typename Traits::SharedStorage*>(smem_bytes);

  if (threadIdx.x == 0) {
    smem.key_ring.init(Traits::key_warps + Traits::dq_warps);
    smem.value_ring.init(Traits::key_warps);
    smem.q_ring.init(Traits::ctas_per_tile * Traits::key_warps);
    smem.dout_ring.init(Traits::ctas_per_tile * Traits::key_warps);
    smem.ds_ring.init(Traits::ctas_per_tile * Traits::dq_warps,
                      Traits::separate ? 4 : Traits::key_warps);
    if constexpr (Traits::in_pairs) smem.from_peer.drawn_ring.init(1);
    smem.weights_ring.init(4, 4);
    smem.work_ring.init(1 + Traits::key_warps + Traits::dq_warps);
    smem.added_ring.init(1, Traits::dq_warps);
    FullBarrier::init(&smem.tile_wanted, 1);
    smem.has_loads = 1;
    publish_barriers(args.q_map, args.k_map, args.v_map, args.dout_map);
  }
  follow_earlier_kernels();
  if constexpr (Traits::in_pairs) {
    sync_pair();
  } else {
    __syncthreads();
  }

  const int warp = warp_of_cta();
  const int warpgroup = warp / 4;
  if (warpgroup == producer_warpgroup) {
    set_registers<Traits, Traits::producer_registers>();
    if (warp == loading_warp) {
      if (elect_one_sync()) BackwardProducer<Traits>{args, smem}.run();
    } else if (warp == finding_warp) {
      if (elect_one_sync()) BackwardDispatcher<Traits>{args, smem}.run();
    } else {
      if (warp == clearing_warp) {
        sum_sink_shares(args.call);
        clear_unseen_tiles<Traits>(args);
      }
      if constexpr (Traits::finishes_dq) finish_query_gradients<Traits>(args, smem, warp / 2);
    }
  } else if (warpgroup == dq_warpgroup) {
    set_registers<Traits, Traits::dq_registers>();
    mma_dq<Traits>(args, smem);
  } else {
    if constexpr (!Traits::separate) {
      set_registers<Traits, Traits::key_registers>();
      mma_dkdv<Traits>(args, smem, warpgroup - first_key_warpgroup);
    } else if (warpgroup == value_warpgroup) {
      set_registers<Traits, Traits::value_registers>();
      mma_dv<Traits>(args, smem);
    } else {
      set_registers<Traits, Traits::key_registers>();
      mma_dk<Traits>(args, smem);
    }
  }
  if constexpr (Traits::in_pairs) sync_pair();
}

}  // namespace flash_attn_cuda::sm90
