// What the two warpgroups of a CTA for wide heads tell each other: thread by thread, as both hold
// the same rows of accumulators of the same shape.
#pragma once

#include "sm90/isa/barriers.h"
#include "sm90/isa/gemm.h"

namespace flash_attn_cuda::sm90 {

// What one of them tells in a step: a left operand of 64 x 64 in 16 bits, and a number for each
// row.
struct Told {
  static constexpr int vectors = 64 * 64 / warpgroup_threads / 8;
  uint4 operand[vectors][warpgroup_threads];
  float rows[64];
  std::uint64_t full[4];  // by warps

  CUTE_DEVICE void init() {
    for (auto& barrier : full) FullBarrier::init(&barrier, 1);
  }
};

// One warpgroup's side. Two places are enough: a warpgroup that writes one anew has heard of the
// step between, which the other told when it had read this one.
struct Partner {
  Told (&told)[2][2];  // of two steps alternately, by each
  int warpgroup;
  int thread;
  unsigned told_steps = 0;
  unsigned heard_steps = 0;

  CUTE_DEVICE static void init(Told (&told)[2][2]) {
    for (auto& of_step : told) {
      for (auto& one : of_step) one.init();
    }
  }

  template <class Operand>
  CUTE_DEVICE void tell(Operand const& operand) {
    Told& own = told[told_steps % 2][warpgroup];
    auto pairs = recast<const std::uint32_t>(operand);
    CUTE_UNROLL
    for (int i = 0; i < Told::vectors; ++i) {
      own.operand[i][thread] = {pairs(4 * i), pairs(4 * i + 1), pairs(4 * i + 2), pairs(4 * i + 3)};
    }
    end_telling(own);
  }

  // rows: of the thread's two, the same in its quad.
  template <class Operand>
  CUTE_DEVICE void tell(Operand const& operand, float const (&rows)[2]) {
    leave(told[told_steps % 2][warpgroup], rows);
    tell(operand);
  }
  CUTE_DEVICE void tell(float const (&rows)[2]) {
    Told& own = told[told_steps % 2][warpgroup];
    leave(own, rows);
    end_telling(own);
  }

  // What the other tells in a step.
  template <class Operand>
  CUTE_DEVICE void hear(Operand& operand) {
    take(wait(), operand);
  }
  template <class Operand>
  CUTE_DEVICE void hear(Operand& operand, float (&rows)[2]) {
    Told const& other = wait();
    take(other, operand);
    take(other, rows);
  }
  CUTE_DEVICE void hear(float (&rows)[2]) { take(wait(), rows); }

 private:
  CUTE_DEVICE int row_of(int i) const { return first_row_of(thread) + 8 * i; }

  CUTE_DEVICE void leave(Told& own, float const (&rows)[2]) const {
    if (thread % 4 != 0) return;
    own.rows[row_of(0)] = rows[0];
    own.rows[row_of(1)] = rows[1];
  }
  CUTE_DEVICE void end_telling(Told& own) {
    __syncwarp();
    if (thread % 32 == 0) EmptyBarrier::arrive(&own.full[thread / 32]);
    ++told_steps;
  }

  CUTE_DEVICE Told const& wait() {
    Told& other = told[heard_steps % 2][1 - warpgroup];
    FullBarrier::wait(&other.full[thread / 32], heard_steps / 2 % 2);
    ++heard_steps;
    return other;
  }
  template <class Operand>
  CUTE_DEVICE void take(Told const& other, Operand& operand) const {
    auto pairs = recast<std::uint32_t>(operand);
    CUTE_UNROLL
    for (int i = 0; i < Told::vectors; ++i) {
      const uint4 vector = other.operand[i][thread];
      pairs(4 * i) = vector.x;
      pairs(4 * i + 1) = vector.y;
      pairs(4 * i + 2) = vector.z;
      pairs(4 * i + 3) = vector.w;
    }
  }
  CUTE_DEVICE void take(Told const& other, float (&rows)[2]) const {
    rows[0] = other.rows[row_of(0)];
    rows[1] = other.rows[row_of(1)];
  }
};

}  // namespace flash_attn_cuda::sm90
