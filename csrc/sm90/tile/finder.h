// Which tiles a forward CTA takes, and how its warps learn of them.
#pragma once

#include "shared/schedule/marked_counter.h"
#include "shared/schedule/tile_parts.h"
#include "sm90/tile/results.h"

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

}  // namespace flash_attn_cuda::sm90
