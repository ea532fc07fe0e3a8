// The end of a decode kernel: O and LSE of the warps become the tile's, in the order of the warps,
// so that the same keys give the same bits.
#pragma once

#include "shared/fragments.h"
#include "shared/online_softmax.h"
#include "shared/out_rounding.h"
#include "shared/schedule/packed_rows.h"
#include "sm80/decode/split.h"

namespace flash_attn_cuda::sm80 {

template <class Traits>
CUTE_DEVICE PackedRow packed_row(DecodeArguments const& args, TileWork const& work, int row) {
  if constexpr (Traits::has_lists)
    return padded_row(args.group, args.heads_of_group, work, Traits::block_m, row);
  else
    return flash_attn_cuda::packed_row(args.group, work, Traits::block_m, row);
}

// What a warp's O and row sum are multiplied with when its reference becomes that of `target`.
CUTE_DEVICE float warp_weight(RowState const& warp, RowState const& target, float scale_log2) {
  if (warp.sum == 0.0f) return 0.0f;
  const bool shifts = warp.shifts || target.shifts;
  return fast_exp2(shifts ? (warp.max - target.max) * scale_log2 : warp.offset - target.offset);
}

// The row over all groups of warps, and what their O have to be multiplied with.
template <class Traits>
CUTE_DEVICE RowState merged_row(typename Traits::SharedStorage const& smem, int row,
                                float scale_log2, float (&weights)[Traits::num_groups]) {
  RowState states[Traits::num_groups];
  RowState merged{.max = -INFINITY, .offset = 0.0f, .sum = 0.0f, .shifts = false};
  CUTE_UNROLL
  for (int group = 0; group < Traits::num_groups; ++group) {
    states[group] = smem.rows[group * Traits::warps_per_group][row];
    if (states[group].sum != 0.0f && states[group].max > merged.max) merged = states[group];
  }
  merged.sum = 0.0f;
  CUTE_UNROLL
  for (int group = 0; group < Traits::num_groups; ++group) {
    weights[group] = warp_weight(states[group], merged, scale_log2);
    merged.sum += states[group].sum * weights[group];
  }
  return merged;
}

CUTE_DEVICE Denominator denominator(RowState const& row, float scale_log2) {
  return {row.sum, row.shifts ? row.max * scale_log2 : row.offset};
}

// This warp's O, unscaled, and what it takes to scale it: registers -> its own shared memory.
// factor: of values of e4m3.
template <class Traits, class Accumulator>
CUTE_DEVICE void leave_output(typename Traits::SharedStorage& smem, Accumulator const& tOrO,
                              [[maybe_unused]] float factor,
                              OnlineSoftmax<Traits::rows_per_thread> const& softmax, int warp,
                              int lane) {
  auto* o = reinterpret_cast<float*>(smem.pipelines[warp]);
  typename Traits::Mma mma;
  auto cO = make_identity_tensor(Shape<Int<Traits::block_m>, Int<Traits::value_columns>>{});
  auto coords = rows_cols_view(accumulator_share(mma, cO, lane));
  auto output = rows_cols_view(tOrO);
  CUTE_UNROLL
  for (int row = 0; row < Traits::rows_per_thread; ++row) {
    const int tile_row = get<0>(coords(row, 0));
    const float sum = quad_reduce(softmax.row_sum[row], [](float a, float b) { return a + b; });
    if (lane % 4 == 0) {
      smem.rows[warp][tile_row] = {.max = softmax.row_max[row],
                                   .offset = softmax.row_offset[row],
                                   .sum = sum,
                                   .shifts = softmax.shifts};
    }
    if constexpr (Traits::is_e4m3) {
      float* target = o + tile_row * Traits::output_pitch + lane % 4 * 4;
      CUTE_UNROLL
      for (int pair = 0; pair < size<1>(output) / 4; ++pair)
        *reinterpret_cast<float4*>(target + 16 * pair) = e4m3_columns(output, row, pair, factor);
      continue;
    }
    float* target = o + tile_row * Traits::output_pitch + get<1>(coords(row, 0));
    CUTE_UNROLL
    for (int col = 0; col < size<1>(output); col += 2) {
      const int column = get<1>(coords(row, col)) - get<1>(coords(row, 0));
      *reinterpret_cast<float2*>(target + column) = {output(row, col), output(row, col + 1)};
    }
  }
}

// Some columns of one row. Beyond head_dim_v there may be anything in them.
struct OutputChunk {
  static constexpr int columns = 4;
  float values[columns];

  // A weight of 0 takes nothing from what may be no number.
  CUTE_DEVICE void add(float4 const& part, float weight) {
    if (weight == 0.0f) return;
    values[0] += weight * part.x;
    values[1] += weight * part.y;
    values[2] += weight * part.z;
    values[3] += weight * part.w;
  }
  CUTE_DEVICE void scale(float factor) {
    CUTE_UNROLL
    for (int i = 0; i < columns; ++i) values[i] *= factor;
  }
  CUTE_DEVICE float4 as_vector() const { return {values[0], values[1], values[2], values[3]}; }

  // The first `count` of them; Element may be float.
  template <class Element>
  CUTE_DEVICE void store(Element* target, int count, bool aligned) const {
    if constexpr (std::is_same_v<Element, float>) {
      if (aligned) {
        *reinterpret_cast<float4*>(target) = as_vector();
        return;
      }
    } else if (aligned) {
      static_assert(sizeof(uint2) == columns * sizeof(Element));
      auto source = make_tensor(&values[0], Layout<Int<columns>>{});
      auto converted = convert_fragment<Element>(source);
      *reinterpret_cast<uint2*>(target) = *reinterpret_cast<const uint2*>(converted.data());
      return;
    }
    CUTE_UNROLL
    for (int i = 0; i < columns; ++i) {
      if (i < count) target[i] = static_cast<Element>(values[i]);
    }
  }
};

// The index of one row, among those of all sequences and heads.
CUTE_DEVICE std::int64_t row_index(DecodeArguments const& args, Sequence const& sequence,
                                   PackedRow const& row) {
  AttentionShape const& shape = args.params.shape;
  const std::int64_t tensor_row =
      std::int64_t(sequence.batch_q) * shape.seqlen_q + sequence.row_q + row.query;
  return tensor_row * shape.num_heads_q + row.head;
}

// What a split leaves of a row.
template <class Traits>
struct PartialRow {
  float* lse;
  float* out;

  CUTE_DEVICE static PartialRow at(DecodeArguments const& args, Sequence const& sequence,
                                   PackedRow const& row, int split) {
    const std::int64_t index = row_index(args, sequence, row) * args.num_splits + split;
    return {args.lse_partial + index, args.out_partial + index * Traits::head_dim_v};
  }
};

CUTE_DEVICE float* lse_pointer(DecodeArguments const& args, Sequence const& sequence,
                               PackedRow const& row) {
  RowView<float> const& lse = args.params.lse;
  return lse.data + sequence.batch_q * lse.batch_stride + row.head * lse.head_stride +
         sequence.row_q + row.query;
}

// Columns of a row -> out, in its dtype.
template <class Traits>
CUTE_DEVICE void store_output(DecodeArguments const& args, Sequence const& sequence,
                              PackedRow const& row, int column, OutputChunk const& chunk) {
  ForwardParams const& params = args.params;
  const int count = params.shape.head_dim_v - column;
  const auto store_as = [&](auto stored) {
    auto* target = row_pointer<decltype(stored)>(params.out, sequence.batch_q, row.head,
                                                 sequence.row_q + row.query);
    chunk.store(target + column, count, args.has_vector_rows);
  };
  if (params.fp32_results) {
    store_as(float{});
    return;
  }
  store_as(typename Traits::Element{});
  if (!can_keep_rounding(Traits::config.features) || params.out_rounding.data == nullptr) return;
  auto* kept = row_pointer<std::int8_t>(params.out_rounding, sequence.batch_q, row.head,
                                        sequence.row_q + row.query);
  store_rounding<Traits::config.dtype>(kept + column, chunk.values);
}

// All warps must have left theirs. is_alone: the tile has no other split.
template <class Traits>
CUTE_DEVICE void write_merged(DecodeArguments const& args, TileWork const& work, int split,
                              bool is_alone, typename Traits::SharedStorage const& smem) {
  using Element = typename Traits::Element;
  Sequence const& sequence = work.sequence;
  const int head_dim_v = args.params.shape.head_dim_v;
  constexpr int chunks_per_row = Traits::head_dim_v / OutputChunk::columns;
#pragma unroll 1
  for (int i = threadIdx.x; i < Traits::block_m * chunks_per_row; i += Traits::threads) {
    const int tile_row = i / chunks_per_row;
    const int column = i % chunks_per_row * OutputChunk::columns;
    const PackedRow row = packed_row<Traits>(args, work, tile_row);
    if (row.query >= sequence.rows_q) break;  // as those after it
    if (column >= head_dim_v) continue;

    OutputChunk chunk{};
    Denominator total{.sum = 0.0f, .offset = 0.0f};
    if (row.query < sequence.seqlen_q) {
      float weights[Traits::num_groups];
      const RowState merged = merged_row<Traits>(smem, tile_row, args.scale_log2, weights);
      // One split has it, and so their combination.
      const float sink = split == 0 ? sink_of(args.params.score, row.head) : -INFINITY;
      total = denominator(merged, args.scale_log2).with_sink(sink);
      CUTE_UNROLL
      for (int group = 0; group < Traits::num_groups; ++group) {
        const int warp = group * Traits::warps_per_group + column / Traits::value_columns;
        const auto* o = reinterpret_cast<const float*>(smem.pipelines[warp]);
        const auto* part = reinterpret_cast<const float4*>(o + tile_row * Traits::output_pitch +
                                                           column % Traits::value_columns);
        chunk.add(*part, weights[group]);
      }
      chunk.scale(total.inverse());
    }
    if (!is_alone) {
      const auto partial = PartialRow<Traits>::at(args, sequence, row, split);
      if (column == 0) *partial.lse = total.lse_log2();
      *reinterpret_cast<float4*>(partial.out + column) = chunk.as_vector();
    } else {
      if (column == 0) *lse_pointer(args, sequence, row) = total.lse();
      store_output<Traits>(args, sequence, row, column, chunk);
    }
  }
}

// The split holds no keys.
template <class Traits>
CUTE_DEVICE void write_unused_split(DecodeArguments const& args, TileWork const& work, int split) {
  if (threadIdx.x >= Traits::block_m) return;
  const PackedRow row = packed_row<Traits>(args, work, threadIdx.x);
  if (row.query < work.sequence.rows_q)
    *PartialRow<Traits>::at(args, work.sequence, row, split).lse = -INFINITY;
}

}  // namespace flash_attn_cuda::sm80
