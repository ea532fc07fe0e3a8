// O and LSE of a warpgroup's 64 rows: registers -> global memory.
#pragma once

#include <cute/arch/copy_sm90.hpp>
#include <cute/atom/copy_atom.hpp>

#include "shared/dropout.h"
#include "shared/layout_views.h"
#include "shared/online_softmax.h"
#include "sm90/forward_arguments.h"
#include "sm90/forward_traits.h"
#include "sm90/named_barriers.h"

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

// Where row `query` of the sequence lies in out and in lse.
template <class Element>
CUTE_DEVICE Element* output_row(ForwardParams const& params, Sequence const& sequence, int head,
                                int query) {
  return static_cast<Element*>(params.out.data) + sequence.batch_q * params.out.batch_stride +
         head * params.out.head_stride + (sequence.row_q + query) * params.out.row_stride;
}

CUTE_DEVICE float* lse_row(ForwardParams const& params, Sequence const& sequence, int head,
                           int query) {
  return params.lse.data + sequence.batch_q * params.lse.batch_stride +
         head * params.lse.head_stride + sequence.row_q + query;
}

// Of this thread's (rows, columns), whose first row is first_query, those that exist.
template <class Traits, class Output>
CUTE_DEVICE void write_rows(ForwardParams const& params, Sequence const& sequence, int head,
                            int first_query, Output const& output, int lane) {
  using Element = typename Traits::Element;
  CUTE_UNROLL
  for (int row = 0; row < Traits::rows_per_thread; ++row) {
    const int query = first_query + 8 * row;
    Element* target = output_row<Element>(params, sequence, head, query);
    CUTE_UNROLL
    for (int column = 0; column < Traits::head_dim; column += 32) {
      std::uint32_t pairs[4];
      CUTE_UNROLL
      for (int group = 0; group < 4; ++group) {
        const int first = (column / 8 + group) * 2;
        cutlass::NumericArrayConverter<Element, float, 2> convert;
        const auto pair = convert({output(row, first), output(row, first + 1)});
        pairs[group] = reinterpret_cast<std::uint32_t const&>(pair);
      }
      transpose_quad(pairs, lane);
      const int first_column = column + 8 * (lane % 4);
      if (query < sequence.rows_q && first_column < params.shape.head_dim) {
        *reinterpret_cast<uint4*>(target + first_column) = {pairs[0], pairs[1], pairs[2], pairs[3]};
      }
    }
  }
}

// Rows that are the sequence's but do not attend get out 0 and lse -inf, those beyond are left
// alone. `output`: this thread's (rows, columns) of the 64 rows from query_begin on.
template <class Traits, class Mma, class Accumulator>
CUTE_DEVICE void write_output(ForwardArguments const& args, Sequence const& sequence, int head,
                              int query_begin, Mma const& mma, Accumulator& tOrO,
                              OnlineSoftmax<Traits::rows_per_thread>& softmax,
                              typename Traits::SharedStorage& smem, int warpgroup, int thread) {
  using Element = typename Traits::Element;
  ForwardParams const& params = args.params;
  auto output = rows_cols_view(tOrO);
  float lse[Traits::rows_per_thread];
  const float o_scale =
      Traits::has(feature::dropout) ? 1.0f / keep_probability(params.dropout.threshold) : 1.0f;
  softmax.normalize_softmax_lse(output, lse, o_scale);

  const int lane = thread % 32;
  const int quad_lane = lane % 4;
  const int first_query = query_begin + thread / 32 * 16 + lane / 4;
  if (sequence.seqlen_q < sequence.rows_q) {
    CUTE_UNROLL
    for (int row = 0; row < Traits::rows_per_thread; ++row) {
      if (first_query + 8 * row < sequence.seqlen_q) continue;
      lse[row] = -INFINITY;
      CUTE_UNROLL
      for (int column = 0; column < size<1>(output); ++column) output(row, column) = 0.0f;
    }
  }
  if (quad_lane == 0) {
    float* target = lse_row(params, sequence, head, first_query);
    CUTE_UNROLL
    for (int row = 0; row < Traits::rows_per_thread; ++row) {
      if (first_query + 8 * row < sequence.rows_q) target[8 * row] = lse[row];
    }
  }
  if constexpr (Traits::stores_tiles) {
    using StoreMatrix = Copy_Atom<SM90_U32x4_STSM_N, Element>;
    if (thread == 0) wait_stores();
    sync_output(warpgroup);
    auto sO = smem_tile<typename Traits::OutputLayout>(smem.o)(_, _, warpgroup);
    auto copy = make_tiled_copy_C(StoreMatrix{}, mma).get_thread_slice(thread);
    auto fragment = convert_fragment<Element>(tOrO);
    cute::copy(StoreMatrix{}, copy.retile_S(fragment), copy.partition_D(sO));
    tma_store_fence();
    sync_output(warpgroup);
    if (thread == 0 && query_begin < sequence.rows_q) {
      store_tile<64, Traits::head_dim>(
          args.out_map, smem.o + warpgroup * 64 * Traits::head_dim,
          {sequence.batch_q, head, sequence.row_q + query_begin, sequence.rows_q - query_begin});
    }
  } else {
    write_rows<Traits>(params, sequence, head, first_query, output, lane);
  }
}

// The same of a whole tile that sees no key, by one warp: out 0, lse -inf.
template <class Traits>
CUTE_DEVICE void write_empty_output(ForwardArguments const& args, TileWork const& work, int lane) {
  using Element = typename Traits::Element;
  constexpr int elements = sizeof(uint4) / sizeof(Element);
  ForwardParams const& params = args.params;
  const int query_end = min((work.tile + 1) * Traits::block_m, work.sequence.rows_q);
  for (int query = work.tile * Traits::block_m; query < query_end; ++query) {
    Element* row = output_row<Element>(params, work.sequence, work.head, query);
    for (int column = lane * elements; column < params.shape.head_dim; column += 32 * elements) {
      *reinterpret_cast<uint4*>(row + column) = {0, 0, 0, 0};
    }
    if (lane == 0) *lse_row(params, work.sequence, work.head, query) = -INFINITY;
  }
}

}  // namespace flash_attn_cuda::sm90
