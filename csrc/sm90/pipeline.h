// Pipelines: rings of shared-memory buffers between the warp that fills them, the producer, and the
// warps that read them, the consumers.
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

  CUTE_DEVICE void init(int consumers, int producers = 1) {
    CUTE_UNROLL
    for (int stage = 0; stage < kStages; ++stage) {
      FullBarrier::init(&full[stage], producers);
      EmptyBarrier::init(&empty[stage], consumers);
    }
  }
};

// Which stage one side of a pipeline is at, and in which round of the ring.
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

}  // namespace flash_attn_cuda::sm90
