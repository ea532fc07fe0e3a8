// dQ = scale * the fp32 sum that a backward left in fragment order, one query tile a CTA.
#pragma once

#include "shared/gradient/backward_arguments.h"
#include "shared/gradient/dq_accumulator.h"
#include "shared/schedule/tile_work.h"
#include "sm80/epilogue.h"
#include "sm80/isa/copy.h"
#include "sm80/isa/gemm.h"

namespace flash_attn_cuda::sm80 {

template <class Traits>
__global__ void __launch_bounds__(Traits::threads)
    convert_dq_kernel(const __grid_constant__ ConvertDqArguments args) {
  using Element = typename Traits::Element;
  constexpr int block_m = Traits::block_m;
  constexpr int own_columns = Traits::columns_per_cta;
  extern __shared__ __align__(128) char smem_bytes[];
  const int thread = threadIdx.x;

  const int index = Traits::shares_columns ? blockIdx.x / args.ctas_per_tile : blockIdx.x;
  const int column_begin =
      Traits::shares_columns ? (blockIdx.x - index * args.ctas_per_tile) * own_columns : 0;
  const int head = index / args.q_tiles;
  QueryTile work;
  if (!find_query_tile(args.table, args.params, args.q_tiles_per_sequence,
                       index - head * args.q_tiles, work))
    return;
  Sequence const& sequence = work.sequence;
  const int query_begin = work.tile * block_m;

  typename Traits::DqMma mma;
  AccumulatorOf<decltype(mma), Shape<Int<block_m>, Int<own_columns>>> tdQrdQ;
  DqAccumulator<Traits::threads>::load(
      args.dq_accum + std::int64_t(index) * (block_m * Traits::head_dim) + column_begin * block_m,
      tdQrdQ, thread);
  CUTE_UNROLL
  for (int i = 0; i < size(tdQrdQ); ++i) tdQrdQ(i) *= args.factor;

  if (Traits::writes_fp32 && args.params.fp32_results) {
    fragment_to_fp32_rows<block_m, own_columns>(
        tdQrdQ, mma,
        {.first = row_pointer<float>(args.params.dq, sequence.batch_q, head,
                                     sequence.row_q + query_begin) +
                  column_begin,
         .row_stride = args.params.dq.row_stride,
         .rows = sequence.rows_q - query_begin,
         .columns = args.params.shape.head_dim - column_begin,
         .accumulates = args.params.accumulate},
        thread);
    return;
  }
  auto sdQ = smem_tile<typename Traits::OwnQueryLayout>(reinterpret_cast<Element*>(smem_bytes));
  fragment_to_shared<Element>(tdQrdQ, mma, sdQ, thread);
  __syncthreads();
  Traits::QueryWriter::store(
      from_column<Element, Traits::shares_columns>(args.params.dq, column_begin), sequence.batch_q,
      head, sequence.row_q + query_begin, sequence.rows_q - query_begin,
      args.params.shape.head_dim - column_begin, sdQ, thread);
}

}  // namespace flash_attn_cuda::sm80
