// A consumer warpgroup of a forward CTA: S, P and O of 64 query rows of every tile, in registers.
//
// The scores of a block are multiplied together with P V of the block before it, and while P V
// still runs the warpgroup is already in the softmax of the new scores (Shah et al.,
// "FlashAttention-3", 2024, section 3.2). The other warpgroups take turns, so that one multiplies
// while another exponentiates (section 3.1).
#pragma once

#include "shared/block_range.h"
#include "shared/dropout.h"
#include "shared/mask.h"
#include "shared/online_softmax.h"
#include "shared/score_modifiers.h"
#include "sm90/forward_epilogue.h"
#include "sm90/named_barriers.h"

namespace flash_attn_cuda::sm90 {

template <class Traits>
struct ConsumerPlaces {
  RingPlace<1> q;
  RingPlace<Traits::stages> k, v;
  RingPlace<2> work;
};

template <class Traits>
CUTE_DEVICE void consume_tile(ForwardArguments const& args, TileWork const& work, BlockRange range,
                              typename Traits::SharedStorage& smem,
                              ConsumerPlaces<Traits>& places, int warpgroup) {
  using Element = typename Traits::Element;
  constexpr int block_n = Traits::block_n;
  constexpr int head_dim = Traits::head_dim;
  ForwardParams const& params = args.params;
  Sequence const& sequence = work.sequence;
  const int thread = threadIdx.x % 128;
  const int query_begin = work.tile * Traits::block_m + 64 * warpgroup;
  const Turns<Traits::consumers> turns{warpgroup};

  auto sQ = smem_tile<typename Traits::QueryLayout>(smem.q);  // (64, head_dim, consumers)
  auto sK = smem_tile<typename Traits::KeyLayout>(smem.k);    // (block_n, head_dim, stages)
  auto sV = transposed(smem_tile<typename Traits::KeyLayout>(smem.v));  // (head_dim, block_n, ..)

  typename Traits::ScoresMma scores_mma;
  typename Traits::OutputMma output_mma;
  auto scores_share = scores_mma.get_thread_slice(thread);
  auto output_share = output_mma.get_thread_slice(thread);
  auto tSrQ = scores_share.partition_fragment_A(sQ)(_, _, _, warpgroup);
  auto tSrK = scores_share.partition_fragment_B(sK);  // (atom, n, k, stages)
  auto tOrV = output_share.partition_fragment_B(sV);  // (atom, n, k, stages)
  auto tSrS = partition_fragment_C(scores_mma, Shape<_64, Int<block_n>>{});
  auto tOrO = partition_fragment_C(output_mma, Shape<_64, Int<head_dim>>{});
  auto tOrP = make_tensor_like<Element>(a_operand_view(tSrS));
  auto scores = rows_cols_view(tSrS);
  auto output = rows_cols_view(tOrO);
  // This thread's (rows, columns) of S -> (query, key)
  auto tScS =
      rows_cols_view(scores_share.partition_C(make_identity_tensor(Shape<_64, Int<block_n>>{})));
  OnlineSoftmax<Traits::rows_per_thread> softmax(args.scale_log2);
  clear(tOrO);

  auto start_scores = [&]() {
    wait_full(smem.k_ring, places.k);
    start_product(scores_mma, tSrQ, tSrK(_, _, _, places.k.stage), tSrS, false);
  };
  auto start_output = [&]() {
    wait_full(smem.v_ring, places.v);
    start_product(output_mma, tOrP, tOrV(_, _, _, places.v.stage), tOrO, true);
  };
  auto release_keys = [&]() {
    release(smem.k_ring, places.k);
    places.k.advance();
  };
  auto release_values = [&]() {
    release(smem.v_ring, places.v);
    places.v.advance();
  };
  // S -> P in fp32; whether O has to be rescaled before this P is used.
  auto probabilities = [&](int block) {
    const int key_begin = block * block_n;
    if (args.negate_scores) {
      CUTE_UNROLL
      for (int i = 0; i < size(tSrS); ++i) tSrS(i) = -tSrS(i);
    }
    if (!range.is_interior(block)) {
      const ScoreMask<Traits::config.mask> mask{
          .band = band_from_queries(params.window, sequence.seqlen_q, sequence.seqlen_k),
          .seqlen_k = sequence.seqlen_k};
      mask.apply(scores, tScS, query_begin, key_begin, -INFINITY);
    }
    return softmax.softmax(scores);
  };
  auto keep_probabilities = [&]() {
    cute::copy(convert_fragment<Element>(a_operand_view(tSrS)), tOrP);
  };

  if (!range.empty()) {
    wait_full(smem.q_ring, places.q);
    start_scores();
    wait_products<0>(tSrS);
    release_keys();
    probabilities(range.end - 1);
    keep_probabilities();
    for (int block = range.end - 2; block >= range.begin; --block) {
      if constexpr (Traits::takes_turns) turns.take();
      start_scores();
      start_output();
      if constexpr (Traits::takes_turns) turns.pass();
      wait_products<1>(tSrS);
      release_keys();
      const bool rescales = probabilities(block);
      wait_products<0>(tOrO);
      release_values();
      if (rescales) softmax.rescale_o(output);
      keep_probabilities();
    }
    release(smem.q_ring, places.q);
    places.q.advance();
    start_output();
    wait_products<0>(tOrO);
    release_values();
  }
  write_output<Traits>(args, sequence, work.head, query_begin, output, softmax, thread);
}

template <class Traits>
CUTE_DEVICE void consume(ForwardArguments const& args, typename Traits::SharedStorage& smem,
                         int warpgroup) {
  ConsumerPlaces<Traits> places;
  if constexpr (Traits::takes_turns) Turns<Traits::consumers>{warpgroup}.open();
  for (;;) {
    wait_full(smem.work_ring, places.work);
    WorkItem const& item = smem.work[places.work.stage];
    if (item.work.tile == no_tile) break;
    consume_tile<Traits>(args, item.work, item.range, smem, places, warpgroup);
    __syncwarp();
    release(smem.work_ring, places.work);
    places.work.advance();
  }
}

}  // namespace flash_attn_cuda::sm90
