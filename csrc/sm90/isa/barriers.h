// Pipelines, rings of shared-memory buffers between the warp that fills them, the producer, and the
// warps that read them, the consumers; and the named barriers of a CTA.
#pragma once

#include <cutlass/arch/barrier.h>

#include <cute/tensor.hpp>

#include "sm90/isa/cta.h"

namespace flash_attn_cuda::sm90 {

using FullBarrier = cutlass::arch::ClusterTransactionBarrier;
using EmptyBarrier = cutlass::arch::ClusterBarrier;

template <int kStages>
struct Ring {
  static constexpr int stages = kStages;
  std::uint64_t full[kStages];   // the buffer may be read
  std::uint64_t empty[kStages];  // it may be written

  CUTE_DEVICE void init(int consumers, int producers = 1) {
    CUTE_UNROLL
    for (int stage = 0; stage < kStages; ++stage) {
      FullBarrier::init(&full[stage], producers);
      EmptyBarrier::init(&empty[stage], consumers);
    }
  }
};

// Which stage one side of a pipeline is at, and in which lap: passes through the ring so far.
template <int kStages>
struct PipelineState {
  int stage = 0;
  std::uint32_t lap = 0;  // its parity is the phase of the barriers

  CUTE_DEVICE void advance() {
    if (++stage == kStages) {
      stage = 0;
      lap ^= 1;
    }
  }

  // After up to kStages more.
  CUTE_DEVICE PipelineState plus(int stages) const {
    PipelineState later{stage + stages, lap};
    if (later.stage >= kStages) {
      later.stage -= kStages;
      later.lap ^= 1;
    }
    return later;
  }
};

// The producer's side: producer_acquire; fill, which completes full[stage]; advance.
template <int kStages>
CUTE_DEVICE void producer_acquire(Ring<kStages>& ring, PipelineState<kStages> const& state) {
  EmptyBarrier::wait(&ring.empty[state.stage], state.lap ^ 1);  // passes in the first lap
}

// Where the producers are warps: instead of completing full[stage], by each of them.
template <int kStages>
CUTE_DEVICE void producer_commit(Ring<kStages>& ring, PipelineState<kStages> const& state) {
  if (threadIdx.x % 32 == 0) EmptyBarrier::arrive(&ring.full[state.stage]);
}

// The consumers' side: consumer_wait; read; consumer_release, by every warp; advance.
template <int kStages>
CUTE_DEVICE void consumer_wait(Ring<kStages>& ring, PipelineState<kStages> const& state) {
  FullBarrier::wait(&ring.full[state.stage], state.lap);
}

// Between reads by ordinary loads (not by wgmma) of what TMA fills and its release: an arrival does
// not wait for a warp's loads, and TMA may overwrite what they have not read yet. A proxy fence
// does.
CUTE_DEVICE void finish_reads() {
  cutlass::arch::fence_view_async_shared();
  __syncwarp();
}

template <int kStages>
CUTE_DEVICE void consumer_release(Ring<kStages>& ring, PipelineState<kStages> const& state) {
  if (threadIdx.x % 32 == 0) EmptyBarrier::arrive(&ring.empty[state.stage]);
}

// Warpgroups that multiply.
inline constexpr int most_consumers = 4;

// The CTA's named barriers, by the event they stand for.
enum class NamedBarrier : std::uint32_t {
  first_turn = 0,                 // forward, + w: warpgroup w may start its products
  first_output = most_consumers,  // + w: the buffer for its results is free; they are in there
  dq = 0,                         // backward: whose turn it is to add dQ has come
  partner = 0,                    // latent, + 2 t + w: warpgroup w of two has come, in turn t
};
// Beside those that CUTLASS keeps for itself.
static_assert(2 * most_consumers + cutlass::arch::NamedBarrier::ReservedNamedBarrierCount <= 16,
              "a CTA has 16");

// Turns of the consumer warpgroups at the tensor cores: the barrier of a warpgroup opens when the
// one before it has started its products. Where a call is better off without, none are taken.
template <int kWarpgroups, bool kMayGoWithout>
struct PingPong {
  int warpgroup;
  bool goes_without;

  // Those that pass the turn on and those that take it.
  static constexpr int threads = 2 * warpgroup_threads;

  CUTE_DEVICE static std::uint32_t barrier(int warpgroup) {
    return static_cast<std::uint32_t>(NamedBarrier::first_turn) + warpgroup;
  }

  // The last warpgroup passes the turn on once, before the first turn.
  CUTE_DEVICE void open() const {
    if (warpgroup == kWarpgroups - 1) pass();
  }
  CUTE_DEVICE void take() const {
    if (kMayGoWithout && goes_without) return;
    cutlass::arch::NamedBarrier::sync(threads, barrier(warpgroup));
  }
  CUTE_DEVICE void take_and_pass() const {
    take();
    pass();
  }
  CUTE_DEVICE void pass() const {
    if (kMayGoWithout && goes_without) return;
    const int next = warpgroup == kWarpgroups - 1 ? 0 : warpgroup + 1;
    cutlass::arch::NamedBarrier::arrive(threads, barrier(next));
  }
};

// All threads of the dQ warpgroup.
CUTE_DEVICE void sync_dq() {
  cutlass::arch::NamedBarrier::sync(warpgroup_threads,
                                    static_cast<std::uint32_t>(NamedBarrier::dq));
}

// All threads of two consumer warpgroups, whose code is not the same: each comes to its own barrier
// and waits at the other's. Turns 0 and 1 alternate: who has heard of the other may come again
// before the other has begun to wait, and at the same barrier would stand for it.
template <int kWarpgroup, int kTurn>
CUTE_DEVICE void sync_with_partner() {
  constexpr auto first = static_cast<std::uint32_t>(NamedBarrier::partner) + 2 * kTurn;
  cutlass::arch::NamedBarrier::arrive(2 * warpgroup_threads, first + kWarpgroup);
  cutlass::arch::NamedBarrier::sync(2 * warpgroup_threads, first + 1 - kWarpgroup);
}

// All threads of a consumer warpgroup, about its results, and about its Q where it converts that.
CUTE_DEVICE void sync_output(int warpgroup) {
  cutlass::arch::NamedBarrier::sync(
      warpgroup_threads, static_cast<std::uint32_t>(NamedBarrier::first_output) + warpgroup);
}

// sync_output(), and whether any of them says so.
CUTE_DEVICE bool sync_any(int warpgroup, bool says_so) {
  std::uint32_t any;
  asm volatile(
      "{\n"
      ".reg .pred own, all;\n"
      "setp.ne.u32 own, %1, 0;\n"
      "barrier.cta.red.or.pred all, %2, %3, own;\n"
      "selp.u32 %0, 1, 0, all;\n"
      "}\n"
      : "=r"(any)
      : "r"(std::uint32_t(says_so)),
        "r"(static_cast<std::uint32_t>(NamedBarrier::first_output) + warpgroup +
            cutlass::arch::NamedBarrier::ReservedNamedBarrierCount),
        "n"(warpgroup_threads)
      : "memory");
  return any != 0;
}

}  // namespace flash_attn_cuda::sm90
