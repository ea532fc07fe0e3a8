// What two warpgroups of a CTA that share the columns of O tell each other: thread by thread, as
// both hold the same rows of accumulators of the same shape.
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

  template <class Operand>
  CUTE_DEVICE void put(Operand const& all, int thread) {
    auto pairs = recast<const std::uint32_t>(all);
    CUTE_UNROLL
    for (int i = 0; i < vectors; ++i)
      operand[i][thread] = {pairs(4 * i), pairs(4 * i + 1), pairs(4 * i + 2), pairs(4 * i + 3)};
  }
  template <class Operand>
  CUTE_DEVICE void take(Operand& all, int thread) const {
    auto pairs = recast<std::uint32_t>(all);
    CUTE_UNROLL
    for (int i = 0; i < vectors; ++i) {
      const uint4 vector = operand[i][thread];
      pairs(4 * i) = vector.x;
      pairs(4 * i + 1) = vector.y;
      pairs(4 * i + 2) = vector.z;
      pairs(4 * i + 3) = vector.w;
    }
  }

  // Of the thread's two rows, the same in its quad.
  CUTE_DEVICE void put(float const (&own)[2], int thread) {
    if (thread % 4 != 0) return;
    rows[first_row_of(thread)] = own[0];
    rows[first_row_of(thread) + 8] = own[1];
  }
  CUTE_DEVICE void take(float (&own)[2], int thread) const {
    own[0] = rows[first_row_of(thread)];
    own[1] = rows[first_row_of(thread) + 8];
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
    own.put(operand, thread);
    end_telling(own);
  }

  // rows: of the thread's two, the same in its quad.
  template <class Operand>
  CUTE_DEVICE void tell(Operand const& operand, float const (&rows)[2]) {
    told[told_steps % 2][warpgroup].put(rows, thread);
    tell(operand);
  }
  CUTE_DEVICE void tell(float const (&rows)[2]) {
    Told& own = told[told_steps % 2][warpgroup];
    own.put(rows, thread);
    end_telling(own);
  }

  // What the other tells in a step.
  template <class Operand>
  CUTE_DEVICE void hear(Operand& operand) {
    wait().take(operand, thread);
  }
  template <class Operand>
  CUTE_DEVICE void hear(Operand& operand, float (&rows)[2]) {
    Told const& other = wait();
    other.take(operand, thread);
    other.take(rows, thread);
  }
  CUTE_DEVICE void hear(float (&rows)[2]) { wait().take(rows, thread); }

 private:
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
};

// One side of two that tell in turn. One place is enough: who writes it anew has heard what it was.
// Who told last and begins again has met the other between.
struct PartnerInTurn {
  Told& told;
  int thread;
  unsigned turns = 0;  // of both, so far

  template <class Operand>
  CUTE_DEVICE void tell(Operand const& operand, float const (&rows)[2]) {
    told.put(rows, thread);
    told.put(operand, thread);
    __syncwarp();
    if (thread % 32 == 0) EmptyBarrier::arrive(&told.full[thread / 32]);
    __syncwarp();  // no lane waits for the next turn before this one has ended
    ++turns;
  }

  template <class Operand>
  CUTE_DEVICE void hear(Operand& operand, float (&rows)[2]) {
    FullBarrier::wait(&told.full[thread / 32], turns % 2);
    told.take(operand, thread);
    told.take(rows, thread);
    ++turns;
  }
};

}  // namespace flash_attn_cuda::sm90
