// The producer of a forward CTA: one thread that finds the CTA's tiles and loads their Q, K and V.
#pragma once

#include "sm90/forward_arguments.h"
#include "sm90/forward_traits.h"

namespace flash_attn_cuda::sm90 {

// Tile number `round` of this CTA. With the longest tiles first, every other round runs backwards:
// who had the longest of one round gets the shortest of the next.
CUTE_DEVICE std::int64_t tile_id(int round) {
  const int place = round % 2 == 0 ? blockIdx.x : gridDim.x - 1 - blockIdx.x;
  return std::int64_t{round} * gridDim.x + place;
}

template <class Traits>
CUTE_DEVICE bool find_tile(ForwardArguments const& args, int id, WorkItem& item) {
  ForwardParams const& params = args.params;
  if (!find_work(args.schedule, args.table, params, id, item.work)) return false;
  const int seqlen_q = item.work.sequence.seqlen_q;
  const int seqlen_k = item.work.sequence.seqlen_k;
  const int query_begin = item.work.tile * Traits::block_m;
  const int query_last = min(query_begin + Traits::block_m, seqlen_q) - 1;
  item.range = block_range(band_from_queries(params.window, seqlen_q, seqlen_k), query_begin,
                           query_last, seqlen_k, Traits::block_n);
  return true;
}

template <class Traits>
CUTE_DEVICE void produce(ForwardArguments const& args, typename Traits::SharedStorage& smem) {
  constexpr int block_m = Traits::block_m;
  constexpr int block_n = Traits::block_n;
  constexpr int head_dim = Traits::head_dim;
  AttentionShape const& shape = args.params.shape;
  RingPlace<1> q_place;
  RingPlace<Traits::stages> k_place, v_place;
  RingPlace<2> work_place;

  auto publish = [&](WorkItem const& item) {
    wait_empty(smem.work_ring, work_place);
    smem.work[work_place.stage] = item;
    FullBarrier::arrive(&smem.work_ring.full[work_place.stage]);
    work_place.advance();
  };

  WorkItem item;
  for (int round = 0;; ++round) {
    const std::int64_t id = tile_id(round);
    if (std::int64_t{round} * gridDim.x >= args.num_tiles) break;
    if (id >= args.num_tiles || !find_tile<Traits>(args, static_cast<int>(id), item)) continue;
    publish(item);
    BlockRange const& range = item.range;
    if (range.empty()) continue;

    Sequence const& sequence = item.work.sequence;
    const int head_k = item.work.head / (shape.num_heads_q / shape.num_heads_k);
    auto load_keys = [&](CUtensorMap const& map, auto& ring, auto& place, auto* tiles, int block) {
      wait_empty(ring, place);
      std::uint64_t* full = &ring.full[place.stage];
      FullBarrier::arrive_and_expect_tx(full, Traits::key_bytes);
      const int key = block * block_n;
      load_tile<block_n, head_dim>(
          map, full, tiles + place.stage * block_n * head_dim,
          {sequence.batch_k, head_k, sequence.row_k + key, sequence.seqlen_k - key});
      place.advance();
    };

    wait_empty(smem.q_ring, q_place);
    FullBarrier::arrive_and_expect_tx(&smem.q_ring.full[0], Traits::query_bytes);
    const int query_begin = item.work.tile * block_m;
    CUTE_UNROLL
    for (int part = 0; part < Traits::consumers; ++part) {
      // A part without queries is read from the tile's first row, for nobody.
      const int query = query_begin + 64 * part;
      const bool exists = query < sequence.seqlen_q;
      load_tile<64, head_dim>(args.q_map, &smem.q_ring.full[0], smem.q + part * 64 * head_dim,
                              {sequence.batch_q, item.work.head,
                               sequence.row_q + (exists ? query : query_begin),
                               exists ? sequence.seqlen_q - query : 1});
    }
    q_place.advance();

    load_keys(args.k_map, smem.k_ring, k_place, smem.k, range.end - 1);
    for (int block = range.end - 2; block >= range.begin; --block) {
      load_keys(args.k_map, smem.k_ring, k_place, smem.k, block);
      load_keys(args.v_map, smem.v_ring, v_place, smem.v, block + 1);
    }
    load_keys(args.v_map, smem.v_ring, v_place, smem.v, range.begin);
  }
  item.work.tile = no_tile;
  publish(item);
}

}  // namespace flash_attn_cuda::sm90
