// dQ in a fixed order: the key tiles that add to a query tile do so one after the other, in the
// order in which their CTAs started, so that the sum has the same bits every run.
//
// A CTA waits for CTAs that drew their tickets earlier only, hence always for one that runs. Key
// tiles start together and add to the same query tiles, each a little behind the one before it.
// Under a causal mask the last query tile is the only one that all key tiles see, so they walk
// towards the diagonal, where each of them ends; with a left bound alone it is the other way
// round.
#pragma once

#include <cstdint>

#include "flash_attn/api.h"
#include "shared/block_range.h"
#include "shared/host_device.h"

namespace flash_attn_cuda {

struct Turns {
  int* counters = nullptr;  // (heads, query tiles): additions so far; null: no order is asked for
  int* tickets = nullptr;   // CTAs that have started
  bool tiles_descend = false;  // CTAs start with a sequence's last key tile

  FAC_HOST_DEVICE constexpr bool used() const { return counters != nullptr; }

  // Whose turn it is to be number `index` of `adders`.
  FAC_HOST_DEVICE constexpr int turn_of(const BlockRange& adders, int tile) const {
    return tiles_descend ? adders.end - 1 - tile : tile - adders.begin;
  }

#if defined(__CUDACC__)
  // The number of this CTA in the order of starts.
  __device__ int draw_ticket() const { return atomicAdd(tickets, 1); }

  __device__ void wait(std::int64_t counter, const BlockRange& adders, int tile, int thread) const {
    if (thread == 0) {
      const int turn = turn_of(adders, tile);
      int done;
      do {
        asm volatile("ld.acquire.gpu.global.s32 %0, [%1];"
                     : "=r"(done)
                     : "l"(counters + counter)
                     : "memory");
      } while (done != turn);
    }
    __syncthreads();
  }

  __device__ void pass_on(std::int64_t counter, int thread) const {
    __threadfence();
    __syncthreads();
    if (thread == 0) {
      asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(counters + counter) : "memory");
    }
  }
#endif
};

// Without queries nobody zeroes the counters, and nobody adds.
inline Turns turns_of(const BackwardPlan& plan, const BackwardParams& params) {
  if (!params.deterministic || plan.q_tiles == 0) return {};
  int* counters = reinterpret_cast<int*>(static_cast<char*>(params.workspace) + plan.turns_offset);
  return {.counters = counters,
          .tickets = counters + std::int64_t{params.shape.num_heads_q} * plan.q_tiles,
          .tiles_descend = plan.tiles_descend};
}

}  // namespace flash_attn_cuda
