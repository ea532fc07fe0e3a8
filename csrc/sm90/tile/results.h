// Where the results of a forward tile lie, and those of a tile without keys.
#pragma once

#include "shared/write_rounding.h"
#include "sm90/tile/arguments.h"
#include "sm90/tile/traits.h"

namespace flash_attn_cuda::sm90 {

// Where row `query` of the sequence lies in out, or a tensor like it, of elements of any size, and
// in lse.
CUTE_DEVICE std::int64_t output_offset(TensorView const& view, Sequence const& sequence, int head,
                                       int query) {
  return sequence.batch_q * view.batch_stride + head * view.head_stride +
         (sequence.row_q + query) * view.row_stride;
}

CUTE_DEVICE float* lse_row(ForwardParams const& params, Sequence const& sequence, int head,
                           int query) {
  return params.lse.data + sequence.batch_q * params.lse.batch_stride +
         head * params.lse.head_stride + sequence.row_q + query;
}

// Where a row of a split's results is, in out_partial, head_dim_v apart, and in lse_partial.
CUTE_DEVICE std::int64_t split_row(ForwardArguments const& args, Sequence const& sequence,
                                   int split, int head, int query) {
  AttentionShape const& shape = args.params.shape;
  const std::int64_t row = split * args.splits.rows +
                           std::int64_t{sequence.batch_q} * shape.seqlen_q + sequence.row_q + query;
  return row * shape.num_heads_q + head;
}

// What rounding takes from a warpgroup's rows of O, where it is wanted: of columns from
// first_column on.
template <class Traits, class Output>
CUTE_DEVICE void write_rounding_of_rows(ForwardParams const& params, Sequence const& sequence,
                                        int head, int query_begin, Output const& output, int thread,
                                        int first_column = 0) {
  if constexpr (Traits::keeps_rounding) {
    TensorView const& view = params.out_rounding;
    if (view.data == nullptr) return;
    const int first_row = first_row_of(thread);
    write_rounding<Traits::config.dtype>(
        static_cast<std::int8_t*>(view.data) + output_offset(view, sequence, head, query_begin) +
            first_column,
        view.row_stride, output, sequence.rows_q - query_begin,
        params.shape.head_dim_v - first_column, [&](int i) { return first_row + 8 * i; });
  }
}

// One warp: results of a tile, or split, that sees no key: out 0, lse -inf or the sink's.
template <class Traits>
CUTE_DEVICE void write_empty_output(ForwardArguments const& args, WorkItem const& item, int lane) {
  ForwardParams const& params = args.params;
  TileWork const& work = item.work;
  const bool is_fp32 = Traits::writes_fp32 && params.fp32_results;
  const int element_bytes =
      static_cast<int>(is_fp32 ? sizeof(float) : sizeof(typename Traits::Stored));
  const float sink = sink_of(params.score, work.head);
  const int columns = params.shape.head_dim_v;
  const int query_end = min((work.tile + 1) * Traits::block_m, work.sequence.rows_q);
  for (int query = work.tile * Traits::block_m; query < query_end; ++query) {
    float lse = query < work.sequence.seqlen_q ? sink : -INFINITY;
    if constexpr (Traits::can_split) {
      if (args.splits.num_splits > 1) {
        if (item.split > 0) lse = -INFINITY;
        const std::int64_t index = split_row(args, work.sequence, item.split, work.head, query);
        if (lane == 0) args.splits.lse_partial[index] = lse;
        if (lse == -INFINITY) continue;
        float* row = args.splits.out_partial + index * columns;
        for (int column = lane; column < columns; column += 32) row[column] = 0.0f;
        continue;
      }
    }
    char* row = static_cast<char*>(params.out.data) +
                output_offset(params.out, work.sequence, work.head, query) * element_bytes;
    for (int byte = lane * int(sizeof(uint4)); byte < columns * element_bytes;
         byte += 32 * int(sizeof(uint4)))
      *reinterpret_cast<uint4*>(row + byte) = {0, 0, 0, 0};
    if (Traits::keeps_rounding && params.out_rounding.data != nullptr) {
      auto* kept = static_cast<std::int8_t*>(params.out_rounding.data) +
                   output_offset(params.out_rounding, work.sequence, work.head, query);
      for (int column = lane; column < columns; column += 32) kept[column] = 0;
    }
    if (lane == 0) *lse_row(params, work.sequence, work.head, query) = lse;
  }
}

}  // namespace flash_attn_cuda::sm90
