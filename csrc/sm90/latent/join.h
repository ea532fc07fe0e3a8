// The parts of tiles whose keys several CTAs share become their results: a kernel of its own, which
// starts while the main one runs. A warp joins 16 bytes a lane of one tile's accumulators; where
// there are many parts several warps share them.
#pragma once

#include "shared/kernel_order.h"
#include "sm90/latent/consumer.h"

namespace flash_attn_cuda::sm90 {

inline constexpr int join_warps = 8;

// Some parts of what a warp joins: two rows, each of two columns.
struct JoinedParts {
  float largest[2] = {-INFINITY, -INFINITY};  // lse, in powers of two
  float sum[2] = {0.0f, 0.0f};                // of 2^(lse - largest)
  float out[2][2] = {};                       // (row, column), relative to `largest`

  // From here on relative to this lse, if it is larger.
  CUTE_DEVICE void raise(int row, float lse) {
    if (!(lse > largest[row])) return;
    const float factor = fast_exp2(largest[row] - lse);
    largest[row] = lse;
    sum[row] *= factor;
    out[row][0] *= factor;
    out[row][1] *= factor;
  }
  // After raise(). What a lse of -inf belongs to adds nothing, whatever it is. But parts whose lse
  // is NaN have raised nothing, and of those the weight is NaN.
  CUTE_DEVICE void add(int row, float lse, float weight, float first, float second) {
    if (lse == -INFINITY && !isnan(weight)) return;
    const float factor = fast_exp2(lse - largest[row]);
    sum[row] += weight * factor;
    out[row][0] += first * factor;
    out[row][1] += second * factor;
  }
};

template <class Tag>
__global__ void __launch_bounds__(32 * join_warps)
    latent_join_kernel(const __grid_constant__ LatentArguments args) {
  using Traits = LatentTraits<Tag>;
  using Element = typename Traits::Element;
  constexpr int block_m = Traits::block_m;
  constexpr int eights = block_m / 8;
  constexpr int in_flight = 8;
  __shared__ JoinedParts shared_parts[join_warps][32];

  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int ways = args.warps_per_join;
  const int way = warp % ways;
  const int place = (static_cast<int>(blockIdx.x) * join_warps + warp) / ways;
  // A quarter of an accumulator, which is a warp's, of eight of its columns and some pieces of a
  // tile.
  const int thread = place % 4 * 32 + lane;
  const int eight = place / 4 % eights;
  const int groups = Traits::value_pieces / args.pieces_per_join;
  const int first_piece = place / (4 * eights) % groups * args.pieces_per_join;
  const int index = place / (4 * eights) / groups;
  // Two rows, each of two columns of a piece.
  constexpr bool is_swapped = Traits::is_swapped;
  constexpr int row_step = is_swapped ? 1 : 8;
  constexpr int column_step = is_swapped ? 8 : 1;
  const int along = thread / 32 * 16 + lane / 4;
  const int across = 8 * eight + lane % 4 * 2;
  const int row = is_swapped ? across : along;
  const auto tiles = LatentTiles<Traits>::of(args);
  // What the main kernel reads is there before it ends, as it has waited for it.
  const bool exists = index < tiles.count;
  TileWork work{};
  if (exists) work = tiles[index].work;
  follow_earlier_kernels();
  PartsOfTile parts{0, 0};
  if (exists) parts = args.parts_of_tiles[index];
  if (parts.count <= 1) parts.count = 0;  // the tile's results are written
  const bool writes = parts.count > 0 && way == 0;

  CUTE_NO_UNROLL
  for (int piece = first_piece; piece < first_piece + args.pieces_per_join; ++piece) {
    JoinedParts joined;
    CUTE_NO_UNROLL
    for (int first = way; first < parts.count; first += in_flight * ways) {
      float2 lse[in_flight];
      float4 out[in_flight];
      CUTE_UNROLL
      for (int i = 0; i < in_flight; ++i) {
        const int part = first + i * ways;
        const std::int64_t at = parts.first + part;
        lse[i] = float2{-INFINITY, -INFINITY};
        out[i] = float4{};
        if (part >= parts.count) continue;
        const float* lse_row = args.lse_parts + at * block_m + row;
        lse[i] = is_swapped ? *reinterpret_cast<const float2*>(lse_row)
                            : float2{lse_row[0], lse_row[row_step]};
        const std::int64_t fragment = (at * Traits::value_pieces + piece) * eights + eight;
        out[i] =
            reinterpret_cast<const float4*>(args.out_parts)[fragment * warpgroup_threads + thread];
      }
      float2 largest = lse[0];
      CUTE_UNROLL
      for (int i = 1; i < in_flight; ++i)
        largest = {fmaxf(largest.x, lse[i].x), fmaxf(largest.y, lse[i].y)};
      joined.raise(0, largest.x);
      joined.raise(1, largest.y);
      CUTE_UNROLL
      for (int i = 0; i < in_flight; ++i) {
        joined.add(0, lse[i].x, 1.0f, out[i].x, is_swapped ? out[i].z : out[i].y);
        joined.add(1, lse[i].y, 1.0f, is_swapped ? out[i].y : out[i].z, out[i].w);
      }
    }
    if (ways > 1) {
      __syncthreads();
      shared_parts[warp][lane] = joined;
      __syncthreads();
      for (int other = 1; way == 0 && other < ways; ++other) {
        JoinedParts const& more = shared_parts[warp + other][lane];
        CUTE_UNROLL
        for (int i = 0; i < 2; ++i) {
          joined.raise(i, more.largest[i]);
          joined.add(i, more.largest[i], more.sum[i], more.out[i][0], more.out[i][1]);
        }
      }
    }
    if (!writes) continue;

    TensorView const& out = args.params.out;
    const int column = piece * Traits::piece_columns + (is_swapped ? along : across);
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) {
      const PackedRow place_of_row = latent_row<Traits>(args, work, row + i * row_step);
      if (place_of_row.query >= work.sequence.rows_q) continue;
      const Denominator total{joined.sum[i], joined.sum[i] == 0.0f ? 0.0f : joined.largest[i]};
      auto* target = static_cast<Element*>(out.data) + column +
                     output_offset(out, work.sequence, place_of_row.head, place_of_row.query);
      const int columns = args.params.shape.head_dim_v - column;  // from here on
      if (columns > 0) target[0] = Element(joined.out[i][0] * total.inverse());
      if (columns > column_step) target[column_step] = Element(joined.out[i][1] * total.inverse());
      if (column == 0)
        *lse_row(args.params, work.sequence, place_of_row.head, place_of_row.query) = total.lse();
    }
  }
}

}  // namespace flash_attn_cuda::sm90
