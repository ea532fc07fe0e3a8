// The largest score of every query head, ForwardParams::max_logits, without a look at most scores.
//
// All warps of a head raise one number in memory. A block's largest P of a row is at most a lane's
// sum of the row's P, which the softmax has: where no sum exceeds what P of the largest known score
// would be, there is no larger score, and nobody looks for it. What a warp knows decides which
// blocks it looks at, and never the result.
#pragma once

#include <cstdint>
#include <cute/config.hpp>

#include "flash_attn/params.h"

namespace flash_attn_cuda {

// Of all lanes; none is NaN. ptxas does not see that they have the same.
CUTE_DEVICE float warp_max(float x) {
  CUTE_UNROLL
  for (int distance = 16; distance > 0; distance /= 2)
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, distance));
  return x;
}

// A place that ptxas takes for one of each lane, which have the same x. Else it keeps what is read
// there in a uniform register, and waits for it; and has lanes elect one before they write.
CUTE_DEVICE float* not_uniform(float* place, float x) { return place + static_cast<int>(x != x); }

// The largest score of a head so far, which others raise meanwhile.
CUTE_DEVICE float read_maximum(const float* place) {
  float x;
  asm volatile("ld.relaxed.gpu.global.f32 %0, [%1];" : "=f"(x) : "l"(place) : "memory");
  return x;
}

// By one lane of a warp, in which all have the same x.
CUTE_DEVICE void raise_maximum(float* place, float x) {
  if (threadIdx.x % 32 != 0) return;
  const int bits = __float_as_int(x + 0.0f);  // in their order, and behind a sign in reverse
  if (bits >= 0) {
    asm volatile("red.relaxed.gpu.global.max.s32 [%0], %1;" ::"l"(place), "r"(bits) : "memory");
  } else {
    asm volatile("red.relaxed.gpu.global.min.u32 [%0], %1;" ::"l"(place), "r"(bits) : "memory");
  }
}

// What a softmax knows of its head's maximum: nothing, as its kernel does not write it;
struct NoMaximum {
  static constexpr bool exists = false;
  static constexpr bool is_of_sums = false;

  CUTE_DEVICE static bool is_below(float /*score*/) { return false; }
};

// of scores that it looks at anyhow, its warp's;
struct MaximumOfScores {
  static constexpr bool exists = true;
  static constexpr bool is_of_sums = false;

  float known = INFINITY;  // as the softmax counts scores; inf: not wanted, or there is no larger

  CUTE_DEVICE void start(const float* /*place*/) { known = -INFINITY; }
  CUTE_DEVICE bool is_below(float score) const { return score > known; }
};

// or, where it has sums of P, the head's as it was a while ago.
template <int kRows>
struct MaximumOfSums {
  static constexpr bool exists = true;
  static constexpr bool is_of_sums = true;

  // Natural, and maybe on its way from memory; inf: not wanted, or there is no larger.
  float known = INFINITY;
  float limits[kRows];  // a lane's sum up to it has no larger score

  CUTE_DEVICE void start(const float* place) { known = read_maximum(place); }
  CUTE_DEVICE static bool is_below(float /*score*/) { return true; }
};

// Of a call whose maximum is not wanted. Others have, beside are_wanted(),
//
//   place()        where the head's maximum is
//   attends(row)   whether a thread's row is a query's
struct NoRows {
  CUTE_DEVICE static bool are_wanted() { return false; }
};

CUTE_DEVICE float* place_of_maximum(ForwardParams const& params, int sequence, int head) {
  return params.max_logits + std::int64_t{sequence} * params.shape.num_heads_q + head;
}

}  // namespace flash_attn_cuda
