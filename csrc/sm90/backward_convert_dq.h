// dQ = scale * the fp32 sum that backward_kernel left in fragment order, 64 query rows a CTA, where
// that kernel has not done it itself (backward_finish.h).
#pragma once

#include "shared/backward_arguments.h"
#include "shared/dq_accumulator.h"
#include "shared/kernel_order.h"
#include "shared/tile_work.h"
#include "sm90/backward_traits.h"
#include "sm90/epilogue.h"

namespace flash_attn_cuda::sm90 {

template <class Tag>
__global__ void __launch_bounds__(128)
    convert_dq_kernel(const __grid_constant__ ConvertDqArguments args) {
  using Traits = BackwardTraits<Tag>;
  using Element = typename Traits::Element;
  constexpr int parts = Traits::block_m / 64;
  constexpr int dq_columns = Traits::dq_columns;
  TensorView const& dq = args.params.dq;
  const int thread = threadIdx.x;

  wait_for_earlier_kernels();
  // Backwards, from what the main kernel has added to last and L2 still has.
  const unsigned place = gridDim.x - 1 - blockIdx.x;
  const int tile = place / parts;
  const int part = place - tile * parts;
  const int head = tile / args.q_tiles;
  QueryTile work;
  if (!find_query_tile(args.table, args.params, args.q_tiles_per_sequence,
                       tile - head * args.q_tiles, work))
    return;
  Sequence const& sequence = work.sequence;
  if constexpr (Traits::writes_dq) {
    if (Traits::has_one_key_tile(sequence)) return;
    if (adders_of<Traits::block_m, Traits::block_n>(args.params.window, sequence, work.tile)
            .empty())
      return;
  }
  const int query_begin = work.tile * Traits::block_m + 64 * part;
  Element* rows = static_cast<Element*>(dq.data) + sequence.batch_q * dq.batch_stride +
                  (std::int64_t{sequence.row_q} + query_begin) * dq.row_stride +
                  head * dq.head_stride;
  const float* sums = args.dq_accum + std::int64_t(place) * (64 * Traits::head_dim);

  typename Traits::DqMma mma;
  CUTE_UNROLL
  for (int column = 0; column < Traits::head_dim; column += dq_columns) {
    auto tQrdQ = partition_fragment_C(mma, Shape<_64, Int<dq_columns>>{});
    DqAccumulator<128>::load(sums + 64 * column, tQrdQ, thread);
    CUTE_UNROLL
    for (int i = 0; i < size(tQrdQ); ++i) tQrdQ(i) *= args.factor;
    const RowTarget<Element> target{.first = rows + column,
                                    .row_stride = dq.row_stride,
                                    .rows = sequence.rows_q - query_begin,
                                    .columns = args.params.shape.head_dim - column};
    write_rows(rows_cols_view(tQrdQ), target, thread);
  }
}

}  // namespace flash_attn_cuda::sm90
