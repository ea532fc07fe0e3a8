// O and LSE of a warpgroup's 64 rows: registers -> global memory.
#pragma once

#include "shared/dropout/dropout.h"
#include "shared/online_softmax.h"
#include "sm90/epilogue.h"
#include "sm90/forward/traits.h"
#include "sm90/tile/results.h"

namespace flash_attn_cuda::sm90 {

// What has LSE -inf will not be read.
template <class Traits, class Output>
CUTE_DEVICE void write_split(ForwardArguments const& args, Sequence const& sequence, int split,
                             int head, int query_begin, Output const& output, float const* lse,
                             int thread) {
  const int columns = args.params.shape.head_dim_v;
  const int lane = thread % 32;
  CUTE_UNROLL
  for (int row = 0; row < Traits::rows_per_thread; ++row) {
    const int query = query_begin + thread / 32 * 16 + lane / 4 + 8 * row;
    if (query >= sequence.rows_q) continue;
    const std::int64_t index = split_row(args, sequence, split, head, query);
    if (lane % 4 == 0) args.splits.lse_partial[index] = lse[row];
    if (lse[row] == -INFINITY) continue;
    float* target = args.splits.out_partial + index * columns;
    CUTE_UNROLL
    for (int i = 0; i < size<1>(output); i += 2) {
      const int column = 4 * i + 2 * (lane % 4);
      if (column < columns)
        *reinterpret_cast<float2*>(target + column) = {output(row, i), output(row, i + 1)};
    }
  }
}

// A warpgroup's rows from query_begin on -> those of out that exist, as Stored.
template <class Stored, class Output>
CUTE_DEVICE void write_output_rows(ForwardParams const& params, Sequence const& sequence, int head,
                                   int query_begin, Output const& output, int thread) {
  const RowTarget<Stored> target{.first = static_cast<Stored*>(params.out.data) +
                                          output_offset(params.out, sequence, head, query_begin),
                                 .row_stride = params.out.row_stride,
                                 .rows = sequence.rows_q - query_begin,
                                 .columns = params.shape.head_dim_v};
  write_rows(output, target, thread);
}

// The warp's first of the 64 rows.
CUTE_DEVICE int first_row_of_warp(int thread) { return same_in_warp(thread / 32) * 16; }

// Rows that are the sequence's but do not attend get out 0 and lse -inf, those beyond are left
// alone. tOrO: this thread's share of the 64 rows from query_begin on. value_scale: what O is to be
// multiplied by.
template <class Traits, class Mma, class Accumulator>
CUTE_DEVICE void write_output(ForwardArguments const& args, Sequence const& sequence,
                              [[maybe_unused]] int split, int head, int query_begin, Mma const& mma,
                              Accumulator& tOrO, typename Traits::Softmax& softmax,
                              typename Traits::SharedStorage& smem, int warpgroup, int thread,
                              float value_scale = 1.0f) {
  using Stored = typename Traits::Stored;
  ForwardParams const& params = args.params;
  auto output = rows_cols_view(tOrO);
  float lse[Traits::rows_per_thread];
  const float o_scale = Traits::has(feature::dropout)
                            ? 1.0f / keep_probability(params.dropout.threshold)
                            : value_scale;
  // One split has the sink, and so their combination.
  const bool has_sink = !Traits::can_split || split == 0;
  const int first_row = first_row_of_warp(thread);
  const bool has_rows = query_begin + first_row < sequence.rows_q;
  if (has_rows) {
    softmax.normalize_softmax_lse(output, lse, has_sink ? sink_of(params.score, head) : -INFINITY,
                                  o_scale);
  }

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
  if constexpr (Traits::can_split) {
    if (args.splits.num_splits > 1) {
      write_split<Traits>(args, sequence, split, head, query_begin, output, lse, thread);
      return;
    }
  }
  // Behind the LSE or beside O it takes registers from the loop over keys.
  if (!(Traits::writes_fp32 && params.fp32_results))
    write_rounding_of_rows<Traits>(params, sequence, head, query_begin, output, thread);
  if (quad_lane == 0) {
    float* target = lse_row(params, sequence, head, first_query);
    CUTE_UNROLL
    for (int row = 0; row < Traits::rows_per_thread; ++row) {
      if (first_query + 8 * row < sequence.rows_q) target[8 * row] = lse[row];
    }
  }
  if (Traits::writes_fp32 && params.fp32_results) {
    write_output_rows<float>(params, sequence, head, query_begin, output, thread);
    return;
  }
  if constexpr (Traits::stores_tiles) {
    constexpr int stored_rows = Traits::stored_rows;
    const bool is_own = stored_rows == 16;  // a tile of the warp's
    const auto sync = [&]() { is_own ? __syncwarp() : sync_output(warpgroup); };
    const bool stores = Traits::stores(thread);
    const int first_stored = query_begin + (is_own ? first_row : 0);
    Stored* tile = smem.o + (64 * warpgroup + first_stored - query_begin) * Traits::head_dim_v;
    if (is_own && !has_rows) return;
    if (stores) wait_stores();
    sync();
    if (has_rows) accumulator_to_shared<Traits::head_dim_v, stored_rows>(mma, tOrO, tile, thread);
    tma_store_fence();
    sync();
    if (stores && first_stored < sequence.rows_q) {
      store_tile<stored_rows, Traits::head_dim_v>(
          args.out_map, tile,
          {sequence.batch_q, head, sequence.row_q + first_stored, sequence.rows_q - first_stored},
          args.last_out_box);
    }
  } else {
    write_output_rows<Stored>(params, sequence, head, query_begin, output, thread);
  }
}

}  // namespace flash_attn_cuda::sm90
