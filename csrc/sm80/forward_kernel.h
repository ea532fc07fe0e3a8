// Forward attention, FlashAttention-2 Algorithm 1: O = softmax(scale * Q K^T) V and LSE, for one
// query tile a CTA.
//
// Threads: num_warps x 32; every warp owns block_m / num_warps query rows of S, P and O, all in
// registers. Shared memory: Q block_m x head_dim, K and V block_n x head_dim each
// (forward_traits.h). One buffer each for K and V is enough: V(n) travels while S(n) multiplies,
// K(n - 1) while softmax and P V run.
#pragma once

#include "shared/block_range.h"
#include "shared/mask.h"
#include "shared/online_softmax.h"
#include "shared/tile_scheduler.h"
#include "sm80/forward_traits.h"

namespace flash_attn_cuda::sm80 {

struct ForwardArguments {
  ForwardParams params;
  TileSchedule schedule;
  float scale_log2;  // |softmax_scale| * log2(e), never zero
  bool negate_q;     // softmax_scale < 0: the sign moves into Q, so that the row maximum stays a
                     // maximum
};

// -Q in place, each thread the elements it loaded itself.
template <class Traits, class SmemTensor>
CUTE_DEVICE void negate_queries(SmemTensor& sQ, int thread) {
  constexpr std::uint32_t two_signs = 0x8000'8000;
  Traits::QueryLoader::Share::for_each(sQ, thread, [&](int, int, uint128_t& chunk) {
    auto* pairs = reinterpret_cast<std::uint32_t*>(&chunk);
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) pairs[i] ^= two_signs;
  });
}

// O and LSE of the tile: registers -> shared memory (Q's buffer) -> global memory.
template <class Traits, class Accumulator>
CUTE_DEVICE void write_output(ForwardParams const& params, TileCoord coord, Accumulator& tOrO,
                              OnlineSoftmax<Traits::rows_per_thread>& softmax,
                              typename Traits::SharedStorage& smem, int thread) {
  using Element = typename Traits::Element;
  const int query_begin = coord.tile * Traits::block_m;
  const int queries = params.shape.seqlen_q - query_begin;

  float lse[Traits::rows_per_thread];
  auto output = rows_cols_view(tOrO);
  softmax.normalize_softmax_lse(output, lse);

  typename Traits::Mma mma;
  auto cO = make_identity_tensor(Shape<Int<Traits::block_m>, Int<Traits::head_dim>>{});
  auto coords = rows_cols_view(mma.get_thread_slice(thread).partition_C(cO));
  float* head_lse =
      params.lse +
      (std::int64_t(coord.batch) * params.shape.num_heads_q + coord.head) * params.shape.seqlen_q;
  if (get<1>(coords(0, 0)) == 0) {
    CUTE_UNROLL
    for (int row = 0; row < Traits::rows_per_thread; ++row) {
      const int query = get<0>(coords(row, 0));
      if (query < queries) head_lse[query_begin + query] = lse[row];
    }
  }

  // A warp's rows of O lie where its own rows of Q lay, so only the read-back needs the barrier.
  auto sO = smem_tile<typename Traits::QueryLayout>(smem.q);
  auto copy_o = make_tiled_copy_C(StoreMatrix<Element>{}, mma).get_thread_slice(thread);
  auto rO = convert_fragment<Element>(tOrO);
  cute::copy(StoreMatrix<Element>{}, copy_o.retile_S(rO), copy_o.partition_D(sO));
  __syncthreads();
  Traits::OutputWriter::store(params.out, coord.batch, coord.head, query_begin, queries,
                              params.shape.head_dim, sO, thread);
}

template <class Tag>
__global__ void __launch_bounds__(ForwardTraits<Tag>::threads)
    forward_kernel(const __grid_constant__ ForwardArguments args) {
  using Traits = ForwardTraits<Tag>;
  using Element = typename Traits::Element;
  constexpr int block_m = Traits::block_m;
  constexpr int block_n = Traits::block_n;
  constexpr int head_dim = Traits::head_dim;

  extern __shared__ __align__(128) char smem_bytes[];
  auto& smem = *reinterpret_cast<typename Traits::SharedStorage*>(smem_bytes);
  ForwardParams const& params = args.params;
  AttentionShape const& shape = params.shape;
  const int thread = threadIdx.x;

  const TileCoord coord = tile_coord(args.schedule, blockIdx.x);
  const int head_k = coord.head / (shape.num_heads_q / shape.num_heads_k);
  const int query_begin = coord.tile * block_m;
  const int query_last = min(query_begin + block_m, shape.seqlen_q) - 1;
  const Band band = band_from_queries(params.window, shape.seqlen_q, shape.seqlen_k);
  const BlockRange range = block_range(band, query_begin, query_last, shape.seqlen_k, block_n);

  auto sQ = smem_tile<typename Traits::QueryLayout>(smem.q);  // (block_m, head_dim)
  auto sK = smem_tile<typename Traits::KeyLayout>(smem.k);    // (block_n, head_dim)
  auto sV = smem_tile<typename Traits::KeyLayout>(smem.v);    // (block_n, head_dim)

  auto load_keys = [&](TensorView const& view, auto& tile, int block) {
    const int key = block * block_n;
    Traits::KeyLoader::load(view, coord.batch, head_k, key, shape.seqlen_k - key, shape.head_dim,
                            tile, thread);
    commit_loads();
  };

  typename Traits::Mma mma;
  auto q = operand_a(LoadMatrix<Element>{}, mma, sQ, thread);
  auto k = operand_b(LoadMatrix<Element>{}, mma, sK, thread);
  auto v = operand_b(LoadMatrixTransposed<Element>{}, mma, transposed(sV), thread);
  auto cS = make_identity_tensor(Shape<Int<block_m>, Int<block_n>>{});
  // This thread's (rows, columns) of S -> (query, key)
  auto tScS = rows_cols_view(mma.get_thread_slice(thread).partition_C(cS));

  auto tOrO = partition_fragment_C(mma, Shape<Int<block_m>, Int<head_dim>>{});
  clear(tOrO);
  const ScoreMask<Traits::config.mask> mask{.band = band, .seqlen_k = shape.seqlen_k};
  OnlineSoftmax<Traits::rows_per_thread> softmax(args.scale_log2);

  auto step = [&](int block) {
    wait_for_loads();  // K(block) is here; V's buffer is free
    load_keys(params.v, sV, block);
    auto tSrS = partition_fragment_C(mma, Shape<Int<block_m>, Int<block_n>>{});
    clear(tSrS);
    gemm(mma, tSrS, q, k);

    wait_for_loads();  // V(block) is here; K's buffer is free
    if (block > range.begin) load_keys(params.k, sK, block - 1);

    auto scores = rows_cols_view(tSrS);
    if (!range.is_interior(block)) {
      mask.apply(scores, tScS, query_begin, block * block_n, -INFINITY);
    }
    auto output = rows_cols_view(tOrO);
    softmax.softmax_rescale_o(scores, output);
    auto rP = convert_fragment<Element>(tSrS);
    gemm_registers_a(mma, tOrO, a_operand_view(rP), v);
  };

  if (!range.empty()) {
    Traits::QueryLoader::load(params.q, coord.batch, coord.head, query_begin,
                              shape.seqlen_q - query_begin, shape.head_dim, sQ, thread);
    load_keys(params.k, sK, range.end - 1);
    if (args.negate_q) {
      cp_async_wait<0>();
      negate_queries<Traits>(sQ, thread);
    }
    for (int block = range.end - 1; block >= range.begin; --block) step(block);
  }
  write_output<Traits>(params, coord, tOrO, softmax, smem, thread);
}

}  // namespace flash_attn_cuda::sm80
