// Rings of shared-memory buffers between the warp that fills them and the warps that read them.
#pragma once

#include <cutlass/arch/barrier.h>

#include <cute/tensor.hpp>

namespace flash_attn_cuda::sm90 {

using FullBarrier = cutlass::arch::ClusterTransactionBarrier;
using EmptyBarrier = cutlass::arch::ClusterBarrier;

template <int kStages>
struct Ring {
  static constexpr int stages = kStages;
  std::uint64_t full[kStages];   // the buffer may be read
  std::uint64_t empty[kStages];  // it may be written

  CUTE_DEVICE void init(int readers, int writers = 1) {
    CUTE_UNROLL
    for (int stage = 0; stage < kStages; ++stage) {
      FullBarrier::init(&full[stage], writers);
      EmptyBarrier::init(&empty[stage], readers);
    }
  }
};

// One side's place in a ring.
template <int kStages>
struct RingPlace {
  int stage = 0;
  std::uint32_t lap = 0;  // its parity is the phase of the barriers

  CUTE_DEVICE void advance() {
    if (++stage == kStages) {
      stage = 0;
      lap ^= 1;
    }
  }
};

// The writer's side: wait_empty; fill, which completes full[stage]; advance.
template <int kStages>
CUTE_DEVICE void wait_empty(Ring<kStages>& ring, RingPlace<kStages> const& place) {
  EmptyBarrier::wait(&ring.empty[place.stage], place.lap ^ 1);  // passes in the first lap
}

// The writers' side where they are warps: instead of completing full[stage], by each of them.
template <int kStages>
CUTE_DEVICE void publish(Ring<kStages>& ring, RingPlace<kStages> const& place) {
  if (threadIdx.x % 32 == 0) EmptyBarrier::arrive(&ring.full[place.stage]);
}

// The readers' side: wait_full; read; release, by every warp; advance.
template <int kStages>
CUTE_DEVICE void wait_full(Ring<kStages>& ring, RingPlace<kStages> const& place) {
  FullBarrier::wait(&ring.full[place.stage], place.lap);
}

// Between reads by ordinary loads (not by wgmma) of what TMA fills and its release: an arrival does
// not wait for a warp's loads, and TMA may overwrite what they have not read yet. A proxy fence
// does.
CUTE_DEVICE void finish_reads() {
  cutlass::arch::fence_view_async_shared();
  __syncwarp();
}

template <int kStages>
CUTE_DEVICE void release(Ring<kStages>& ring, RingPlace<kStages> const& place) {
  if (threadIdx.x % 32 == 0) EmptyBarrier::arrive(&ring.empty[place.stage]);
}

}  // namespace flash_attn_cuda::sm90
