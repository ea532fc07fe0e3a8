// dQ = scale * the fp32 sum that backward_kernel left in fragment order, one query tile a CTA.
#pragma once

#include "shared/dq_accumulator.h"
#include "shared/layout_views.h"
#include "shared/tile_scheduler.h"
#include "sm80/backward_traits.h"

namespace flash_attn_cuda::sm80 {

struct ConvertDqArguments {
  TensorView dq;
  AttentionShape shape;
  float softmax_scale;
  const float* dq_accum;
  int query_tiles;
};

template <class Tag>
__global__ void __launch_bounds__(BackwardTraits<Tag>::threads)
    convert_dq_kernel(const __grid_constant__ ConvertDqArguments args) {
  using Traits = BackwardTraits<Tag>;
  using Element = typename Traits::Element;
  constexpr int block_m = Traits::block_m;
  constexpr int head_dim = Traits::head_dim;
  extern __shared__ __align__(128) char smem_bytes[];
  const int thread = threadIdx.x;

  const int batch_head = blockIdx.x / args.query_tiles;
  const int query_begin = (blockIdx.x - batch_head * args.query_tiles) * block_m;
  const int batch = batch_head / args.shape.num_heads_q;
  const int head = batch_head - batch * args.shape.num_heads_q;

  typename Traits::DqMma mma;
  auto tdQrdQ = partition_fragment_C(mma, Shape<Int<block_m>, Int<head_dim>>{});
  DqAccumulator<Traits::threads>::load(
      args.dq_accum + std::int64_t(blockIdx.x) * (block_m * head_dim), tdQrdQ, thread);
  CUTE_UNROLL
  for (int i = 0; i < size(tdQrdQ); ++i) tdQrdQ(i) *= args.softmax_scale;

  auto sdQ = smem_tile<typename Traits::QueryLayout>(reinterpret_cast<Element*>(smem_bytes));
  auto copy = make_tiled_copy_C(StoreMatrix<Element>{}, mma).get_thread_slice(thread);
  auto fragment = convert_fragment<Element>(tdQrdQ);
  cute::copy(StoreMatrix<Element>{}, copy.retile_S(fragment), copy.partition_D(sdQ));
  __syncthreads();
  Traits::QueryWriter::store(args.dq, batch, head, query_begin, args.shape.seqlen_q - query_begin,
                             args.shape.head_dim, sdQ, thread);
}

}  // namespace flash_attn_cuda::sm80
