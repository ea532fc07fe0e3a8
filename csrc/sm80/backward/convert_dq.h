// dQ = scale * the fp32 sum that backward_kernel left in fragment order, one query tile a CTA.
#pragma once

#include "shared/gradient/backward_arguments.h"
#include "shared/gradient/dq_accumulator.h"
#include "shared/schedule/tile_work.h"
#include "sm80/backward/traits.h"
#include "sm80/epilogue.h"

namespace flash_attn_cuda::sm80 {

template <class Tag>
__global__ void __launch_bounds__(BackwardTraits<Tag>::threads)
    convert_dq_kernel(const __grid_constant__ ConvertDqArguments args) {
  using Traits = BackwardTraits<Tag>;
  using Element = typename Traits::Element;
  constexpr int block_m = Traits::block_m;
  constexpr int head_dim = Traits::head_dim;
  extern __shared__ __align__(128) char smem_bytes[];
  const int thread = threadIdx.x;

  const int head = blockIdx.x / args.q_tiles;
  QueryTile work;
  if (!find_query_tile(args.table, args.params, args.q_tiles_per_sequence,
                       blockIdx.x - head * args.q_tiles, work))
    return;
  Sequence const& sequence = work.sequence;
  const int query_begin = work.tile * block_m;

  typename Traits::DqMma mma;
  AccumulatorOf<decltype(mma), Shape<Int<block_m>, Int<head_dim>>> tdQrdQ;
  DqAccumulator<Traits::threads>::load(
      args.dq_accum + std::int64_t(blockIdx.x) * (block_m * head_dim), tdQrdQ, thread);
  CUTE_UNROLL
  for (int i = 0; i < size(tdQrdQ); ++i) tdQrdQ(i) *= args.factor;

  if (Traits::writes_fp32 && args.params.fp32_results) {
    fragment_to_fp32_rows<block_m, head_dim>(
        tdQrdQ, mma,
        {.first = row_pointer<float>(args.params.dq, sequence.batch_q, head,
                                     sequence.row_q + query_begin),
         .row_stride = args.params.dq.row_stride,
         .rows = sequence.rows_q - query_begin,
         .columns = args.params.shape.head_dim,
         .accumulates = args.params.accumulate},
        thread);
    return;
  }
  auto sdQ = smem_tile<typename Traits::QueryLayout>(reinterpret_cast<Element*>(smem_bytes));
  fragment_to_shared<Element>(tdQrdQ, mma, sdQ, thread);
  __syncthreads();
  Traits::QueryWriter::store(args.params.dq, sequence.batch_q, head, sequence.row_q + query_begin,
                             sequence.rows_q - query_begin, args.params.shape.head_dim, sdQ,
                             thread);
}

}  // namespace flash_attn_cuda::sm80
