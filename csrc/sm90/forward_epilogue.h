// O and LSE of a warpgroup's 64 rows: registers -> global memory.
#pragma once

#include "shared/dropout.h"
#include "shared/layout_views.h"
#include "shared/online_softmax.h"
#include "sm90/forward_arguments.h"
#include "sm90/forward_traits.h"

namespace flash_attn_cuda::sm90 {

// Lane l of a quad holds pair l of four neighbouring groups of eight columns; afterwards it holds
// all four pairs of group l: 16 bytes in a row.
CUTE_DEVICE void transpose_quad(std::uint32_t (&pairs)[4], int lane) {
  // The lower lane of two gives j and keeps i, the upper one the reverse.
  auto exchange = [](std::uint32_t& i, std::uint32_t& j, bool upper, int distance) {
    const std::uint32_t received = __shfl_xor_sync(0xffffffffu, upper ? i : j, distance);
    i = upper ? received : i;
    j = upper ? j : received;
  };
  const bool odd = (lane & 1) != 0;
  exchange(pairs[0], pairs[1], odd, 1);
  exchange(pairs[2], pairs[3], odd, 1);
  const bool high = (lane & 2) != 0;
  exchange(pairs[0], pairs[2], high, 2);
  exchange(pairs[1], pairs[3], high, 2);
}

// `output`: this thread's (rows, columns) of the rows from query_begin on. Rows that are the
// sequence's but do not attend get out 0 and lse -inf, those beyond are left alone.
template <class Traits, class Output>
CUTE_DEVICE void write_output(ForwardArguments const& args, Sequence const& sequence, int head,
                              int query_begin, Output& output,
                              OnlineSoftmax<Traits::rows_per_thread>& softmax, int thread) {
  using Element = typename Traits::Element;
  ForwardParams const& params = args.params;
  float lse[Traits::rows_per_thread];
  const float o_scale =
      Traits::has(feature::dropout) ? 1.0f / keep_probability(params.dropout.threshold) : 1.0f;
  softmax.normalize_softmax_lse(output, lse, o_scale);

  const int lane = thread % 32;
  const int quad_lane = lane % 4;
  CUTE_UNROLL
  for (int row = 0; row < Traits::rows_per_thread; ++row) {
    const int query = query_begin + thread / 32 * 16 + lane / 4 + 8 * row;
    const bool exists = query < sequence.rows_q;
    const bool attends = query < sequence.seqlen_q;
    if (exists && quad_lane == 0) {
      params.lse.data[sequence.batch_q * params.lse.batch_stride + head * params.lse.head_stride +
                      sequence.row_q + query] = attends ? lse[row] : -INFINITY;
    }
    Element* target = static_cast<Element*>(params.out.data) +
                      sequence.batch_q * params.out.batch_stride + head * params.out.head_stride +
                      (sequence.row_q + query) * params.out.row_stride;
    CUTE_UNROLL
    for (int column = 0; column < Traits::head_dim; column += 32) {
      std::uint32_t pairs[4];
      CUTE_UNROLL
      for (int group = 0; group < 4; ++group) {
        const int first = (column / 8 + group) * 2;
        cutlass::NumericArrayConverter<Element, float, 2> convert;
        const auto pair = convert({attends ? output(row, first) : 0.0f,
                                   attends ? output(row, first + 1) : 0.0f});
        pairs[group] = reinterpret_cast<std::uint32_t const&>(pair);
      }
      transpose_quad(pairs, lane);
      const int first_column = column + 8 * quad_lane;
      if (exists && first_column < params.shape.head_dim) {
        *reinterpret_cast<uint4*>(target + first_column) = {pairs[0], pairs[1], pairs[2], pairs[3]};
      }
    }
  }
}

}  // namespace flash_attn_cuda::sm90
