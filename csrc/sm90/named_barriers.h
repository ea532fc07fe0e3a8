// The CTA's named barriers, by the event they stand for.
#pragma once

#include <cutlass/arch/barrier.h>

#include <cute/tensor.hpp>

namespace flash_attn_cuda::sm90 {

enum class NamedBarrier : std::uint32_t {
  first_turn = 0,    // + w: warpgroup w may start its products
  first_output = 3,  // + w: the buffer for warpgroup w's results is free; they are in there
  dq = 6,            // whose turn it is to add dQ has come
};

// Turns of the consumer warpgroups at the tensor cores: the barrier of a warpgroup opens when the
// one before it has started its products. Where a call is better off without, none are taken.
template <int kWarpgroups, bool kMayGoWithout>
struct PingPong {
  int warpgroup;
  bool goes_without;

  static constexpr int threads = 2 * 128;  // those that pass the turn on and those that take it

  CUTE_DEVICE static std::uint32_t barrier(int warpgroup) {
    return static_cast<std::uint32_t>(NamedBarrier::first_turn) + warpgroup;
  }

  // Once before the first turn.
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
  cutlass::arch::NamedBarrier::sync(128, static_cast<std::uint32_t>(NamedBarrier::dq));
}

// All threads of a consumer warpgroup, about its results.
CUTE_DEVICE void sync_output(int warpgroup) {
  cutlass::arch::NamedBarrier::sync(
      128, static_cast<std::uint32_t>(NamedBarrier::first_output) + warpgroup);
}

}  // namespace flash_attn_cuda::sm90
