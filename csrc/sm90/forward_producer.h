// The producer of a forward CTA: one thread that finds the CTA's tiles and loads their Q, K and V
// and a bias, in the order in which the consumers want them.
#pragma once

#include "sm90/forward_arguments.h"
#include "sm90/forward_epilogue.h"
#include "sm90/forward_traits.h"

namespace flash_attn_cuda::sm90 {

// Tile `id` and what it visits; false where there is none.
template <class Traits, class Item>
CUTE_DEVICE bool find_tile(ForwardArguments const& args, int id, Item& item) {
  ForwardParams const& params = args.params;
  TileWork work;
  if (Traits::is_sparse && args.table.counts == nullptr) id = longest_first(args.schedule, id);
  if (!find_work(args.schedule, args.table, params, id, work)) return false;
  if constexpr (Traits::is_sparse) {
    work.tile =
        ranked_tile<Traits::block_m>(params, args.table, work.sequence.index, work.head, work.tile);
  }
  const int seqlen_q = work.sequence.seqlen_q;
  const int seqlen_k = work.sequence.seqlen_k;
  const int query_begin = work.tile * Traits::block_m;
  const int query_last = min(query_begin + Traits::block_m, seqlen_q) - 1;
  item.work = work;
  item.range = block_range(band_from_queries(params.window, seqlen_q, seqlen_k), query_begin,
                           query_last, seqlen_k, Traits::block_n);
  if constexpr (Traits::is_sparse) {
    const auto list = BlockList<Traits::block_n>::of(
        params.sparsity.lists, work.sequence.index, work.head, query_begin / list_tile, item.range);
    item.visits = {.list = list, .window = item.range};
    item.range.begin = list.begin;
    item.range.end = list.end;
  }
  return true;
}

// One tile after the other, those of a CTA's own in a fixed order, or, with tickets, the next one
// that nobody has drawn.
template <class Traits>
struct TileWalk {
  ForwardArguments const& args;
  int* tickets;
  int round = 0;

  // False at the end.
  template <class Item>
  CUTE_DEVICE bool next(Item& item) {
    for (;;) {
      int id;
      if (tickets != nullptr) {
        // As unsigned, because every CTA draws once in vain.
        const auto ticket = static_cast<unsigned>(atomicAdd(tickets, 1));
        if (ticket >= args.num_tiles) return false;
        id = static_cast<int>(ticket);
      } else {
        // As unsigned, which the last round of the largest grid stays within.
        const unsigned first = static_cast<unsigned>(round) * gridDim.x;
        if (first >= args.num_places) return false;
        // Every other round runs backwards: with long tiles first, who had the longest of one round
        // gets the shortest of the next.
        const unsigned place = first + (round % 2 == 0 ? blockIdx.x : gridDim.x - 1 - blockIdx.x);
        ++round;
        if (place >= args.num_places) continue;
        id = block_at(args.schedule, static_cast<int>(place));
      }
      if (id >= 0 && find_tile<Traits>(args, id, item)) return true;
    }
  }
};

// One warp: out 0 and lse -inf for the tiles that see no key, which the others never hear of.
template <class Traits>
CUTE_DEVICE void clear_empty_tiles(ForwardArguments const& args) {
  TileWalk<Traits> walk{args, nullptr};
  std::remove_reference_t<decltype(Traits::SharedStorage::work[0])> item;
  while (walk.next(item)) {
    if (item.range.empty()) write_empty_output<Traits>(args, item.work, threadIdx.x % 32);
  }
}

template <class Traits>
struct Producer {
  static constexpr int block_m = Traits::block_m;
  static constexpr int block_n = Traits::block_n;
  static constexpr int head_dim = Traits::head_dim;
  static constexpr int head_dim_v = Traits::head_dim_v;

  ForwardArguments const& args;
  typename Traits::SharedStorage& smem;
  TileWalk<Traits> walk{args, args.tickets};
  RingPlace<Traits::q_stages> q_place{};
  RingPlace<Traits::stages> k_place{}, v_place{};
  RingPlace<Traits::bias_stages> bias_place{};
  RingPlace<Traits::work_stages> work_place{};

  // Tells the consumers of the next tile that sees a key: its stage, or -1 when there is none, of
  // which they are told as well.
  CUTE_DEVICE int next_tile() {
    const int stage = work_place.stage;
    wait_empty(smem.work_ring, work_place);
    auto& item = smem.work[stage];
    bool found;
    do {
      found = walk.next(item);
    } while (found && item.range.empty());
    if (!found) item.work.tile = no_tile;
    FullBarrier::arrive(&smem.work_ring.full[stage]);
    work_place.advance();
    return found ? stage : -1;
  }

  CUTE_DEVICE void load_queries(TileWork const& work) {
    Sequence const& sequence = work.sequence;
    wait_empty(smem.q_ring, q_place);
    std::uint64_t* full = &smem.q_ring.full[q_place.stage];
    FullBarrier::arrive_and_expect_tx(full, Traits::query_bytes);
    CUTE_UNROLL
    for (int part = 0; part < Traits::consumers; ++part) {
      // A part without queries is read from the tile's first row, for nobody.
      const int tile_query = work.tile * block_m;
      const bool exists = tile_query + 64 * part < sequence.seqlen_q;
      const int query = exists ? tile_query + 64 * part : tile_query;
      load_tile<64, head_dim>(
          args.q_map, full, smem.q + (q_place.stage * Traits::consumers + part) * 64 * head_dim,
          {sequence.batch_q, work.head, sequence.row_q + query, sequence.seqlen_q - query});
    }
    q_place.advance();
  }

  CUTE_DEVICE RowSpan keys_of(TileWork const& work, int block) const {
    AttentionShape const& shape = args.params.shape;
    Sequence const& sequence = work.sequence;
    const int key = block * block_n;
    return {.batch = sequence.batch_k,
            .head = work.head / (shape.num_heads_q / shape.num_heads_k),
            .row = sequence.row_k + key,
            .rows = sequence.seqlen_k - key};
  }

  // announce(stage): what the consumers shall find with the tile.
  template <int kColumns, class Element, class Announce>
  CUTE_DEVICE void load_keys(CUtensorMap const& map, Ring<Traits::stages>& ring,
                             RingPlace<Traits::stages>& place, Element* tiles, RowSpan const& keys,
                             int last_box, Announce announce) {
    wait_empty(ring, place);
    announce(place.stage);
    std::uint64_t* full = &ring.full[place.stage];
    FullBarrier::arrive_and_expect_tx(full, block_n * kColumns * int(sizeof(Element)));
    load_tile<block_n, kColumns>(map, full, tiles + place.stage * block_n * kColumns, keys,
                                 last_box);
    place.advance();
  }

  // K of a block, or of a position in the tile's list; where its values lie.
  CUTE_DEVICE RowSpan load_k(int tile, int position) {
    int block = position;
    VisitedKeys visited{};
    if constexpr (Traits::is_sparse) {
      auto const& visits = smem.work[tile].visits;
      const Visit visit = visits.list.at(position);
      block = visit.block;
      visited = {block, visit.pieces, visits.window.is_interior(block)};
    }
    const RowSpan keys = keys_of(smem.work[tile].work, block);
    load_keys<head_dim>(args.k_map, smem.k_ring, k_place, smem.k, keys, head_dim, [&](int stage) {
      if constexpr (Traits::is_sparse) smem.visited[stage] = visited;
    });
    if constexpr (Traits::has_bias) load_bias_tile(smem.work[tile].work, block);
    return keys;
  }

  CUTE_DEVICE void load_bias_tile(TileWork const& work, int block) {
    BiasParams const& bias = args.params.score.bias;
    wait_empty(smem.bias_ring, bias_place);
    std::uint64_t* full = &smem.bias_ring.full[bias_place.stage];
    FullBarrier::arrive_and_expect_tx(full, Traits::bias_bytes);
    load_bias<block_m, block_n>(
        args.bias_map, full, smem.bias + bias_place.stage * block_m * block_n,
        PairBox::of(bias, block * block_n, work.tile * block_m, work.head, work.sequence.index),
        bias);
    bias_place.advance();
  }

  // Columns of O that are made of what a box without values holds are not stored.
  CUTE_DEVICE void load_v(RowSpan const& values) {
    load_keys<head_dim_v>(args.v_map, smem.v_ring, v_place, smem.v, values, args.last_v_box,
                          [](int) {});
  }

  CUTE_DEVICE void run() {
    int next = next_tile();
    while (next >= 0) {
      const int tile = next;
      const BlockRange range = smem.work[tile].range;
      load_queries(smem.work[tile].work);
      RowSpan keys = load_k(tile, range.end - 1);
      CUTE_NO_UNROLL
      for (int position = range.end - 2; position >= range.begin; --position) {
        const RowSpan values = keys;
        keys = load_k(tile, position);
        load_v(values);
      }
      // Before there is room for the last values: finding a tile takes as long as a step.
      next = next_tile();
      load_v(keys);
    }
  }
};

}  // namespace flash_attn_cuda::sm90
