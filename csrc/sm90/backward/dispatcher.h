// The dispatcher of a backward CTA: one thread that takes tickets for the CTA's or its pair's
// tiles, finds what their steps are and tells the others, a little ahead, because it takes as long
// as a step or two; and counts additions to dQ (finish.h).
#pragma once

#include "sm90/backward/arguments.h"
#include "sm90/backward/traits.h"
#include "sm90/isa/cta_pair.h"

namespace flash_attn_cuda::sm90 {

template <class Traits>
CUTE_DEVICE HeadVisits<Traits::block_m> visits_of(BackwardParams const& params,
                                                  BackwardWorkItem const& item) {
  return {.lists = params.sparsity.lists,
          .sequence = item.work.sequence.index,
          .tile = item.work.tile,
          .range = item.range,
          .end_head = item.end_head};
}

// Which of an item's steps are part `part`; false where none are.
template <class Traits>
CUTE_DEVICE bool find_part(BackwardArguments const& call, TilePart const& part,
                           BackwardWorkItem& item) {
  const int tiles = item.range.end - item.range.begin;
  item.part = part.part;
  item.parts = part.is_one_of_several ? parts_of_steps(tiles, 1, call.shared_tiles.parts) : 1;
  item.first_place = part.first_place;
  if (item.part >= item.parts) return false;
  if (item.parts > 1) {
    const int begin = item.range.begin;
    item.range.begin = begin + first_step_of_part(tiles, item.part, item.parts);
    item.range.end = begin + first_step_of_part(tiles, item.part + 1, item.parts);
    item.first_tile = item.direction > 0 ? item.range.begin : item.range.end - 1;
    item.last_tile = item.direction > 0 ? item.range.end - 1 : item.range.begin;
  }
  return true;
}

template <class Traits>
CUTE_DEVICE bool find_part(BackwardArguments const& call, TilePart const& part,
                           SparseBackwardWorkItem& item) {
  const int steps = visits_of<Traits>(call.params, item).count(item.first_head);
  item.part = part.part;
  item.parts = 1;
  item.first_place = part.first_place;
  if (part.is_one_of_several) {
    // The next rank's tile shall be a usual one.
    SparseBackwardWorkItem other = item;
    const int rank = min(ranks_in_parts(call.schedule), call.schedule.num_tiles - 1);
    other.work.tile = ranked_tile<Traits::block_n>(call.params, call.table,
                                                   item.work.sequence.index, item.first_head, rank);
    const int usual_steps = visits_of<Traits>(call.params, other).count(item.first_head);
    item.parts = parts_of_steps(steps, max(usual_steps, least_part_steps), call.shared_tiles.parts);
  }
  item.first_step = first_step_of_part(steps, item.part, item.parts);
  item.num_steps = first_step_of_part(steps, item.part + 1, item.parts) - item.first_step;
  return item.part < item.parts && item.num_steps > 0;
}

// Whether a CTA takes all key tiles of a head of the sequence, one after the other.
template <class Traits>
CUTE_DEVICE bool sweeps(BackwardArguments const& call, Sequence const& sequence) {
  return Traits::sweeps && (call.sweep_tiles > 1 || is_swept(sequence, call.swept_rows));
}

// The next tile of a swept sequence. tiles_left: those after it; before the first, none.
template <class Traits>
CUTE_DEVICE int next_swept_tile(BackwardArguments const& call, Sequence const& sequence,
                                int& tiles_left) {
  const int last = (sequence.rows_k - 1) / Traits::block_n;
  tiles_left = tiles_left > 0 ? tiles_left - 1 : last;
  return call.tiles_descend ? tiles_left : last - tiles_left;
}

// The tile at place `id` of the schedule or, where that stands for all tiles of a swept sequence,
// the next of them. False for one of which the window hides all, or after the end of a packed
// call's list, where all others follow; then `exists` tells the two apart. What lists hide is not
// looked at.
template <class Traits>
CUTE_DEVICE bool find_tile(BackwardKernelArguments const& args, int id, int& tiles_left,
                           BackwardWorkItem& item, bool& exists) {
  BackwardArguments const& call = args.call;
  BackwardParams const& params = call.params;
  // The tile is found in place, for want of registers; with lists that takes more of them.
  TileWork own;
  TileWork& work = Traits::is_sparse ? own : item.work;
  if (Traits::is_sparse && call.table.counts == nullptr) id = longest_first(call.schedule, id);
  exists = find_work(call.schedule, call.table, params, id, work);
  if (!exists) return false;
  Sequence& sequence = work.sequence;
  sequence.first_q_tile += sequence.index * call.q_tiles_per_sequence;
  if (Traits::sweeps && is_swept(sequence, call.swept_rows))
    work.tile = next_swept_tile<Traits>(call, sequence, tiles_left);
  if constexpr (Traits::is_sparse) {
    // The first of the query heads that share the key head.
    const int head = work.head / call.dkdv_splits * params.shape.heads_per_key_head();
    work.tile = ranked_tile<Traits::block_n>(params, call.table, sequence.index, head, work.tile);
  }
  const int key_begin = work.tile * Traits::block_n;
  const int key_last = min(key_begin + Traits::block_n, sequence.seqlen_k) - 1;
  const int heads = heads_per_tile(call);
  if constexpr (Traits::is_sparse) item.work = work;
  item.head_k = work.head / call.dkdv_splits;
  item.split = work.head - item.head_k * call.dkdv_splits;
  item.first_head = work.head * heads;
  item.end_head = item.first_head + heads;
  item.range = tiles_that_see<Traits::block_m>(params.window, sequence, key_begin, key_last);
  // Where tiles take turns, key tiles that start early must not wait for what others do last
  // (shared/schedule/turns.h). A CTA that takes one tile after the other goes back and forth, if
  // all see the same queries.
  const bool descends = sweeps<Traits>(call, sequence)
                            ? work.tile % 2 == 1 && params.window.is_full()
                            : call.turns.used() && !call.tiles_descend;
  item.first_tile = descends ? item.range.end - 1 : item.range.begin;
  item.last_tile = descends ? item.range.begin : item.range.end - 1;
  item.direction = descends ? -1 : 1;
  item.half_starts_later = false;
  if constexpr (Traits::skips_hidden_half) {
    // Keys that the sequence does not have might be seen after the last step.
    const BlockRange of_half =
        tiles_that_see<Traits::block_m>(params.window, sequence, key_begin + 64, key_last);
    item.half_starts_later = !descends && !of_half.empty() && of_half.begin > item.range.begin;
  }
  return !item.range.empty();
}

// Where an item's dQ goes, and which other key tiles add to it.
template <class Traits>
CUTE_DEVICE void find_sums(BackwardArguments const& call, BackwardWorkItem& item) {
  Sequence const& sequence = item.work.sequence;
  const bool has_own_sums = call.sweep_tiles > 1;
  const int heads = item.end_head - item.first_head;
  item.sums_per_head = has_own_sums ? call.q_tiles_per_sequence : call.q_tiles;
  item.first_sum = has_own_sums ? static_cast<int>(blockIdx.x) * heads * call.q_tiles_per_sequence
                                : item.first_head * call.q_tiles + sequence.first_q_tile;
  if (call.dq_path == DqPath::ordered || sweeps<Traits>(call, sequence)) {
    // Key tiles that see a query tile are neighbours, so the next ones on both sides tell.
    const int next = call.tiles_descend ? -1 : 1;
    const auto visited_by = [&](int tile) {
      return visited_tiles<Traits::block_m, Traits::block_n>(call.params.window, sequence, tile);
    };
    item.added_before = visited_by(item.work.tile - next);
    item.added_after = visited_by(item.work.tile + next);
  } else {
    item.added_before = {.begin = 0, .end = Traits::has_one_key_tile(sequence) ? 0 : call.q_tiles};
    item.added_after = item.added_before;
  }
}

// A thread that acquires the counter then sees all that this one has seen.
CUTE_DEVICE void count_released(int* counter, int number = 1) {
  asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(counter), "r"(number) : "memory");
}

// The next ticket is taken when so many steps are left: few, so that a CTA that is done gets it.
constexpr int loads_before_next = 6;  // with lists: steps of the last tile, to load
constexpr int steps_before_next = 3;  // else: steps of all tiles taken so far, to add to dQ
// In turns a CTA that has a ticket and does not begin keeps others waiting.
constexpr int steps_before_next_in_turns = 1;
constexpr int no_next = 1 << 30;  // for the steps of no tile: so many that no ticket is taken

template <class Traits>
struct BackwardDispatcher {
  BackwardKernelArguments const& args;
  typename Traits::SharedStorage& smem;
  PipelineState<Traits::work_stages> next_state{};
  PipelineState<Traits::added_stages> added_state{};
  PipelineState<Traits::drawn_stages> drawn_state{};
  unsigned last_number = 0;  // the last tile's
  int tiles_left = 0;        // after it, of those that were taken with it

  // The next ticket. Every CTA takes one in vain, which must not make tickets negative.
  CUTE_DEVICE unsigned draw() {
    if constexpr (!Traits::writes_dq) {
      return static_cast<unsigned>(atomicAdd(args.call.tickets, 1));
    } else if constexpr (Traits::in_pairs) {
      return draw_in_pair();
    } else {
      const int at_once = args.call.sweep_tiles;
      if (tiles_left == 0) {
        tiles_left = at_once - 1;
        last_number = static_cast<unsigned>(atomicAdd(args.call.tickets, at_once));
      } else if (at_once > 1) {
        --tiles_left;
        ++last_number;
      }
      return last_number;
    }
  }

  // draw() for both CTAs of a pair: one takes the ticket, and tells the other.
  CUTE_DEVICE unsigned draw_in_pair() {
    auto& ring = smem.from_peer.drawn_ring;
    std::uint32_t* drawn = &smem.from_peer.drawn[drawn_state.stage];
    std::uint64_t* full = &ring.full[drawn_state.stage];
    std::uint32_t ticket;
    if (rank_in_pair() == 0) {
      ticket = static_cast<unsigned>(atomicAdd(args.call.tickets, 1));
      producer_acquire(ring, drawn_state);
      send_to_peer(drawn, ticket, full);
    } else {
      FullBarrier::arrive_and_expect_tx(full, sizeof(ticket));
      consumer_wait(ring, drawn_state);
      ticket = *const_cast<std::uint32_t volatile*>(drawn);
      arrive_at_peer_after_loads(&ring.empty[drawn_state.stage]);
    }
    drawn_state.advance();
    return ticket;
  }

  // Tells the others of the next tile that a query sees, or that there is none. Returns its steps,
  // where all are counted.
  CUTE_DEVICE int announce_next() {
    producer_acquire(smem.work_ring, next_state);
    typename Traits::WorkItem& item = smem.work[next_state.stage];
    bool found = false;
    // Without query tiles nobody has zeroed the tickets, and there is nothing to find.
    while (args.call.q_tiles > 0 && !found) {
      const unsigned number = draw();
      if (number >= args.num_tickets) break;
      const int ticket = static_cast<int>(number);
      bool exists;
      if constexpr (Traits::shares_tiles) {
        const auto part = TilePart::of(args.call.shared_tiles, ticket);
        found = find_tile<Traits>(args, part.position, tiles_left, item, exists) &&
                find_part<Traits>(args.call, part, item);
      } else {
        found = find_tile<Traits>(args, ticket, tiles_left, item, exists);
      }
      if (!exists) break;
    }
    int steps = no_next;
    if (found) {
      if constexpr (Traits::writes_dq) find_sums<Traits>(args.call, item);
      if constexpr (!Traits::is_sparse) steps = item.steps();
    } else {
      item.work.tile = no_tile;
    }
    FullBarrier::arrive(&smem.work_ring.full[next_state.stage]);
    next_state.advance();
    return steps;
  }

  CUTE_DEVICE void wait_until_added() {
    consumer_wait(smem.added_ring, added_state);
    EmptyBarrier::arrive(&smem.added_ring.empty[added_state.stage]);
    added_state.advance();
  }

  CUTE_DEVICE void run() {
    BackwardArguments const& call = args.call;
    // The others can do all that is announced while this thread waits for one of them, and the
    // tile in hand stays where it is.
    static_assert(steps_before_next <= Traits::added_stages);
    static_assert(Traits::is_sparse || steps_before_next < Traits::work_stages);
    const int steps_left = call.turns.used() ? steps_before_next_in_turns : steps_before_next;
    [[maybe_unused]] PipelineState<1> wanted;
    int steps_ahead = announce_next();
    CUTE_NO_UNROLL
    for (PipelineState<Traits::work_stages> state;; state.advance()) {
      typename Traits::WorkItem const& item = smem.work[state.stage];
      if (item.work.tile == no_tile) break;
      if constexpr (Traits::is_sparse) {
        FullBarrier::wait(&smem.tile_wanted, wanted.lap);
        wanted.advance();
        announce_next();
        wait_until_added();
        if (call.additions != nullptr)
          count_released(call.additions + schedule_head(call.schedule, call.table, item.work),
                         share_of_part(item.part, item.parts, call.shared_tiles.parts));
      } else {
        Step step = Step::first(item);
        CUTE_NO_UNROLL
        for (int left = item.steps(); left > 0; --left, --steps_ahead, step.advance(item)) {
          while (steps_ahead <= steps_left) steps_ahead += announce_next();
          wait_until_added();
          if (call.additions == nullptr) continue;  // no warp waits for it
          count_released(call.additions + step.sum(item));
        }
      }
    }
  }
};

}  // namespace flash_attn_cuda::sm90
