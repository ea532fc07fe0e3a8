// The producer of a forward CTA: one thread that finds the CTA's tiles and loads their Q, K and V
// and a bias, in the order in which the consumers want them. In some kernels another one finds
// them, of pages two warps load K and V, and with lists a thread loads a mask's bits.
#pragma once

#include "shared/schedule/marked_counter.h"
#include "shared/schedule/tile_parts.h"
#include "sm90/forward/arguments.h"
#include "sm90/forward/epilogue.h"
#include "sm90/forward/page_load.h"
#include "sm90/forward/tile.h"
#include "sm90/forward/traits.h"

namespace flash_attn_cuda::sm90 {

// Tile `id` and what it, or a split of it, visits; false where there is none.
template <class Traits, class Item>
CUTE_DEVICE bool find_tile(ForwardArguments const& args, int id, int split, Item& item) {
  ForwardParams const& params = args.params;
  TileWork& work = item.work;
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
  item.range = block_range(band_from_queries(params.window, work.sequence.shift), query_begin,
                           query_last, seqlen_k, Traits::block_n);
  if constexpr (Traits::is_sparse) {
    const auto list = BlockList<Traits::block_n>::of(
        params.sparsity.lists, work.sequence.index, work.head, query_begin / list_tile, item.range);
    item.visits = {.list = list, .window = item.range};
    item.range.begin = list.begin;
    item.range.end = list.end;
  }
  if constexpr (Traits::can_split) {
    const int blocks = max(0, item.range.end - item.range.begin);
    const int splits = args.splits.num_splits;
    const int begin = item.range.begin;
    item.split = split;
    item.range.begin = begin + first_step_of_part(blocks, split, splits);
    item.range.end = begin + first_step_of_part(blocks, split + 1, splits);
  }
  return true;
}

// One tile after the other: those of a CTA's own in a fixed order, or, where it takes tickets, one
// of its own and then one for each ticket.
template <class Traits>
struct TileWalk {
  ForwardArguments const& args;
  MarkedCounter tickets;  // without a word: it takes none
  int round = 0;

  // Which split a number is in; takes the splits before it from the number.
  CUTE_DEVICE int take_splits(unsigned& number, std::int64_t of_a_split) const {
    if constexpr (!Traits::can_split) return 0;
    const unsigned split = number / static_cast<unsigned>(of_a_split);
    number -= split * static_cast<unsigned>(of_a_split);
    return static_cast<int>(split);
  }

  // A ticket's number, after the CTAs' own: every CTA takes one in vain, and the last leaves the
  // counter for the same launch, replayed. A packed call may have fewer tiles than CTAs.
  CUTE_DEVICE unsigned draw(std::int64_t tiles) {
    if (round == 1) tickets.mark(args.call_mark);
    round = 2;
    const int ticket = tickets.draw();
    if (ticket == max(tiles, std::int64_t{gridDim.x}) - 1) tickets.reset();
    return gridDim.x + static_cast<unsigned>(ticket);
  }

  // Every other round runs backwards, so that a CTA with a tile in a last round that ends on low
  // tiles (end_with_low_tiles) has one in the round before as well.
  CUTE_DEVICE unsigned next_of_own() {
    const unsigned turn = round % 2 == 0 ? blockIdx.x : gridDim.x - 1 - blockIdx.x;
    return static_cast<unsigned>(round++) * gridDim.x + turn;
  }

  // False at the end.
  template <class Item>
  CUTE_DEVICE bool next(Item& item) {
    const std::int64_t of_a_split = existing_tiles(args.schedule, args.table).grid_size();
    const std::int64_t tiles = of_a_split * (Traits::can_split ? args.splits.num_splits : 1);
    for (;;) {
      // Unsigned, which holds the numbers of a round beyond the largest grid.
      unsigned number;
      if (round > 0 && tickets.exists()) {
        number = draw(tiles);
        if (number >= tiles) return false;
      } else {
        if (static_cast<unsigned>(round) * gridDim.x >= tiles) return false;
        if (tickets.exists()) tickets.look();
        number = next_of_own();
        if (number >= tiles) continue;
      }
      const int split = take_splits(number, of_a_split);
      if (find_tile<Traits>(args, static_cast<int>(number), split, item)) return true;
    }
  }
};

// One warp: out 0 and lse -inf for the tiles that see no key, of which the others are not told.
template <class Traits>
CUTE_DEVICE void clear_empty_tiles(ForwardArguments const& args) {
  TileWalk<Traits> walk{args, MarkedCounter(nullptr)};
  std::remove_reference_t<decltype(Traits::SharedStorage::work[0])> item;
  while (walk.next(item)) {
    if (item.range.empty()) write_empty_output<Traits>(args, item, threadIdx.x % 32);
  }
}

// Tells the CTA of one tile after the other that sees a key, and in the end that there is none.
template <class Traits>
struct TileAnnouncer {
  ForwardArguments const& args;
  typename Traits::SharedStorage& smem;
  TileWalk<Traits> walk{args, MarkedCounter(args.tickets)};
  PipelineState<Traits::work_stages> state{};

  // False at the end.
  CUTE_DEVICE bool announce_next() {
    producer_acquire(smem.work_ring, state);
    auto& item = smem.work[state.stage];
    bool found;
    do {
      found = walk.next(item);
    } while (found && item.range.empty());
    if (!found) item.work.tile = no_tile;
    FullBarrier::arrive(&smem.work_ring.full[state.stage]);
    state.advance();
    return found;
  }
};

// One thread, where to find a tile takes longer than a load may wait. It does so when the producer
// asks and not before, so that a CTA that is done first gets the tile.
template <class Traits>
CUTE_DEVICE void find_tiles(ForwardArguments const& args, typename Traits::SharedStorage& smem) {
  TileAnnouncer<Traits> tiles{args, smem};
  for (PipelineState<1> wanted; tiles.announce_next(); wanted.advance())
    FullBarrier::wait(&smem.tile_wanted, wanted.lap);
}

// One thread, for lists with bits: one block after the other, those of each warpgroup that wants
// some.
template <class Traits>
CUTE_DEVICE void load_bits(ForwardArguments const& args, typename Traits::SharedStorage& smem) {
  PairBits const& bits = args.params.sparsity.bits;
  PipelineState<Traits::work_stages> work_state;
  PipelineState<1> places[Traits::consumers];
  for (;; work_state.advance()) {
    consumer_wait(smem.work_ring, work_state);
    auto const& item = smem.work[work_state.stage];
    TileWork const& work = item.work;
    if (work.tile == no_tile) break;
    CUTE_NO_UNROLL
    for (int position = item.range.end - 1; position >= item.range.begin; --position) {
      const Visit visit = item.visits.list.at(position);
      CUTE_UNROLL
      for (int part = 0; part < Traits::consumers; ++part) {
        if (!wants_bits(bits, visit.pieces, part)) continue;
        auto& ring = smem.sparse.bits_ring[part];
        producer_acquire(ring, places[part]);
        FullBarrier::arrive_and_expect_tx(&ring.full[0], sizeof(MaskBits));
        load_mask_bits(args.bits_map, &ring.full[0], smem.sparse.bits[part], bits,
                       work.sequence.index, work.head, work.tile * Traits::block_m + 64 * part,
                       visit.block * Traits::block_n);
        places[part].advance();
      }
    }
    EmptyBarrier::arrive(&smem.work_ring.empty[work_state.stage]);
  }
}

template <class Traits>
struct Producer {
  static constexpr int block_m = Traits::block_m;
  static constexpr int block_n = Traits::block_n;
  static constexpr int head_dim = Traits::head_dim;
  static constexpr int head_dim_v = Traits::head_dim_v;
  using KeySpan = std::conditional_t<Traits::is_paged, PagedSpan, RowSpan>;

  ForwardArguments const& args;
  typename Traits::SharedStorage& smem;
  TileAnnouncer<Traits> tiles{args, smem};  // of no use where another thread finds them
  PipelineState<Traits::q_stages> q_state{};
  PipelineState<Traits::stages> k_state{}, v_state{};
  PipelineState<Traits::bias_stages> bias_state{};
  PipelineState<Traits::work_stages> work_state{};

  // One thread, of the warps that load pages.
  CUTE_DEVICE static bool leads() { return !Traits::is_paged || threadIdx.x % 32 == 0; }

  CUTE_DEVICE void want_next_tile() {
    if constexpr (Traits::has_finder) {
      EmptyBarrier::arrive(&smem.tile_wanted);
    } else {
      tiles.announce_next();
    }
  }

  CUTE_DEVICE void load_queries(TileWork const& work) {
    Sequence const& sequence = work.sequence;
    producer_acquire(smem.q_ring, q_state);
    const int stage = q_state.stage;
    q_state.advance();
    if (!leads()) return;
    std::uint64_t* full = &smem.q_ring.full[stage];
    FullBarrier::arrive_and_expect_tx(full, Traits::query_bytes);
    CUTE_UNROLL
    for (int part = 0; part < Traits::consumers; ++part) {
      // 64 queries that do not exist are read from the tile's first row, for nobody.
      const int tile_query = work.tile * block_m;
      const bool exists = tile_query + 64 * part < sequence.seqlen_q;
      const int query = exists ? tile_query + 64 * part : tile_query;
      load_tile<64, head_dim>(
          args.q_map, full, smem.q + (stage * Traits::consumers + part) * 64 * head_dim,
          {sequence.batch_q, work.head, sequence.row_q + query, sequence.seqlen_q - query});
    }
  }

  // Where keys and values of a block lie.
  CUTE_DEVICE KeySpan keys_of(TileWork const& work, int block) const {
    AttentionShape const& shape = args.params.shape;
    Sequence const& sequence = work.sequence;
    const int key = block * block_n;
    const int head = shape.key_head(work.head);
    if constexpr (Traits::is_paged) {
      return find_span<block_n>(KeyRows::of(args.params.paged, sequence), head, args.key_box_rows,
                                key, sequence.seqlen_k, args.params.errors);
    } else {
      return {.batch = sequence.batch_k,
              .head = head,
              .row = sequence.row_k + key,
              .rows = sequence.seqlen_k - key};
    }
  }

  // announce(stage) writes what the consumers shall find with the tile.
  template <int kColumns, class Element, class Announce>
  CUTE_DEVICE void load_keys(CUtensorMap const& map, Ring<Traits::stages>& ring,
                             PipelineState<Traits::stages>& state, Element* tiles,
                             KeySpan const& keys, int last_box, Announce announce) {
    producer_acquire(ring, state);
    announce(state.stage);
    std::uint64_t* full = &ring.full[state.stage];
    Element* tile = tiles + state.stage * block_n * kColumns;
    if constexpr (Traits::is_paged) {
      load_pages<block_n, kColumns>(map, full, tile, keys, args.key_box_rows, last_box);
    } else {
      FullBarrier::arrive_and_expect_tx(full, block_n * kColumns * int(sizeof(Element)));
      load_tile<block_n, kColumns>(map, full, tile, keys, last_box);
    }
    state.advance();
  }

  // K of a position in the order of visits, or in the tile's list; where its values lie.
  CUTE_DEVICE KeySpan load_k(int tile, VisitOrder const& order, int position) {
    int block = order.block_at(position);
    [[maybe_unused]] VisitedKeys visited{};
    if constexpr (Traits::is_sparse) {
      auto const& visits = smem.work[tile].visits;
      const Visit visit = visits.list.at(position);
      block = visit.block;
      const bool is_in_window = visits.window.is_interior(block);
      unsigned hides_from = 0;
      CUTE_UNROLL
      for (int part = 0; part < Traits::consumers; ++part) {
        const bool shows_all = visit.pieces.template show_all<64, block_n>(64 * part, 0);
        if (!is_in_window || !shows_all) hides_from |= 1u << part;
      }
      visited = {block, visit.pieces, hides_from, is_in_window};
    }
    const KeySpan keys = keys_of(smem.work[tile].work, block);
    load_keys<head_dim>(args.k_map, smem.k_ring, k_state, smem.k, keys, head_dim, [&](int stage) {
      if constexpr (Traits::is_sparse) smem.sparse.visited[stage] = visited;
      if constexpr (Traits::is_paged) {
        if (leads()) smem.misses_keys[stage][0] = keys.misses_keys;
      }
    });
    if constexpr (Traits::has_bias) load_bias_tile(smem.work[tile].work, block);
    return keys;
  }

  CUTE_DEVICE void load_bias_tile(TileWork const& work, int block) {
    BiasParams const& bias = args.params.score.bias;
    producer_acquire(smem.bias_ring, bias_state);
    std::uint64_t* full = &smem.bias_ring.full[bias_state.stage];
    FullBarrier::arrive_and_expect_tx(full, Traits::bias_bytes);
    load_bias<block_m, block_n>(
        args.bias_map, full, smem.bias + bias_state.stage * block_m * block_n,
        PairBox::of(bias, block * block_n, work.tile * block_m, work.head, work.sequence.index),
        bias);
    bias_state.advance();
  }

  // Columns of O that are made of what a box without values holds are not stored.
  CUTE_DEVICE void load_v(KeySpan const& values) {
    load_keys<head_dim_v>(args.v_map, smem.v_ring, v_state, smem.v, values, args.last_v_box,
                          [](int) {});
  }

  // What each of the two loading warps does over a cache, in pages or not. To start a tile's boxes
  // takes a warp as long as its products take, so that K and V have one each.
  CUTE_DEVICE void run_over_cache(bool loads_values) {
    for (;; work_state.advance()) {
      consumer_wait(smem.work_ring, work_state);
      const int tile = work_state.stage;
      TileWork const& work = smem.work[tile].work;
      if (work.tile == no_tile) break;
      const BlockRange range = smem.work[tile].range;
      const VisitOrder order = visit_order<Traits>(args.params, work, range);
      if (!loads_values) load_queries(work);
      CUTE_NO_UNROLL
      for (int position = range.end - 1; position >= range.begin; --position) {
        if (loads_values) {
          load_v(keys_of(work, order.block_at(position)));
        } else {
          load_k(tile, order, position);
        }
      }
      if (!leads()) continue;
      if (!loads_values) want_next_tile();
      EmptyBarrier::arrive(&smem.work_ring.empty[tile]);
    }
  }

  CUTE_DEVICE void run() {
    if constexpr (!Traits::has_finder) tiles.announce_next();
    for (;; work_state.advance()) {
      consumer_wait(smem.work_ring, work_state);
      const int tile = work_state.stage;
      if (smem.work[tile].work.tile == no_tile) break;
      const BlockRange range = smem.work[tile].range;
      const VisitOrder order = visit_order<Traits>(args.params, smem.work[tile].work, range);
      load_queries(smem.work[tile].work);
      KeySpan keys = load_k(tile, order, range.end - 1);
      CUTE_NO_UNROLL
      for (int position = range.end - 2; position >= range.begin; --position) {
        const KeySpan values = keys;
        keys = load_k(tile, order, position);
        load_v(values);
      }
      // It asks before there is room for the last values: to find a tile takes as long as a step.
      want_next_tile();
      load_v(keys);
      if constexpr (Traits::has_finder) EmptyBarrier::arrive(&smem.work_ring.empty[tile]);
    }
  }
};

}  // namespace flash_attn_cuda::sm90
