// O as the sum of parts, where its products are of e4m3.
//
// wgmma adds such products in about 14 bits: of each it drops what is less than 2^-13 of the sum so
// far, always towards zero, which of values that have a mean was 3 % of O after 2,048 keys and 15 %
// after 9,000 (docs/numerics.md). So a part of O is that of few blocks, and parts are added in
// fp32, which takes the registers of a second O, and an instruction a number, with which O follows
// the softmax's references as well.
#pragma once

#include "sm90/forward/traits.h"

namespace flash_attn_cuda::sm90 {

template <class Traits, class Accumulator>
struct OutputParts {
  Accumulator part;
  float factors[Traits::rows_per_thread];  // what the rows of O are still to be multiplied by
  int steps;                               // of the part

  CUTE_DEVICE void start(Accumulator& tOrO) {
    clear(tOrO);
    for (float& factor : factors) factor = 1.0f;
    steps = 0;
  }

  // What the next product writes, and whether it is added to what is there.
  CUTE_DEVICE Accumulator& target(Accumulator&) { return part; }
  CUTE_DEVICE bool begin_step(bool) { return steps++ > 0; }

  CUTE_DEVICE void end_step(Accumulator& tOrO) {
    if (steps == Traits::steps_of_part) add(tOrO);
  }
  CUTE_DEVICE void finish(Accumulator& tOrO) {
    if (steps > 0) add(tOrO);
  }

  CUTE_DEVICE void multiply_row(Accumulator&, int row, float factor) {
    factors[row] *= factor;
    auto rows = rows_cols_view(part);
    CUTE_UNROLL
    for (int col = 0; col < size<1>(rows); ++col) rows(row, col) *= factor;
  }

 private:
  CUTE_DEVICE void add(Accumulator& tOrO) {
    auto output = rows_cols_view(tOrO);
    auto rows = rows_cols_view(part);
    CUTE_UNROLL
    for (int row = 0; row < Traits::rows_per_thread; ++row) {
      CUTE_UNROLL
      for (int col = 0; col < size<1>(rows); ++col)
        output(row, col) = output(row, col) * factors[row] + rows(row, col);
      factors[row] = 1.0f;
    }
    steps = 0;
  }
};

// Takes its place where products are added exactly enough.
template <class Traits, class Accumulator>
struct WholeOutput {
  CUTE_DEVICE static void start(Accumulator&) {}
  CUTE_DEVICE static Accumulator& target(Accumulator& tOrO) { return tOrO; }
  CUTE_DEVICE static bool begin_step(bool adds) { return adds; }
  CUTE_DEVICE static void end_step(Accumulator&) {}
  CUTE_DEVICE static void finish(Accumulator&) {}
  CUTE_DEVICE static void multiply_row(Accumulator& tOrO, int row, float factor) {
    auto output = rows_cols_view(tOrO);
    Traits::Softmax::multiply_row(output, row, factor);
  }
};

}  // namespace flash_attn_cuda::sm90
