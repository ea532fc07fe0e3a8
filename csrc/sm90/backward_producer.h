// The producer of a backward CTA: one thread that draws the CTA's tiles and loads K, V, Q, dO, a
// bias and the row statistics, in the order in which the others want them.
#pragma once

#include "sm90/backward_arguments.h"
#include "sm90/backward_traits.h"

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

// What of an item's steps is part `part`; false where it is nothing.
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

// False for a tile of which the window hides all, or beyond the end of a packed call's list; then
// `exists` tells the two apart. What lists hide is not looked at.
template <class Traits>
CUTE_DEVICE bool find_tile(BackwardKernelArguments const& args, int id, BackwardWorkItem& item,
                           bool& exists) {
  BackwardArguments const& call = args.call;
  BackwardParams const& params = call.params;
  TileWork work;
  if (Traits::is_sparse && call.table.counts == nullptr) id = longest_first(call.schedule, id);
  exists = find_work(call.schedule, call.table, params, id, work);
  if (!exists) return false;
  Sequence& sequence = work.sequence;
  sequence.first_q_tile += sequence.index * call.q_tiles_per_sequence;
  if constexpr (Traits::is_sparse) {
    // Of the first of the query heads that share the key head.
    const int head =
        work.head / call.dkdv_splits * (params.shape.num_heads_q / params.shape.num_heads_k);
    work.tile = ranked_tile<Traits::block_n>(params, call.table, sequence.index, head, work.tile);
  }
  const int key_begin = work.tile * Traits::block_n;
  const int key_last = min(key_begin + Traits::block_n, sequence.seqlen_k) - 1;
  const int heads = heads_per_tile(call);
  item.work = work;
  item.head_k = work.head / call.dkdv_splits;
  item.split = work.head - item.head_k * call.dkdv_splits;
  item.first_head = work.head * heads;
  item.end_head = item.first_head + heads;
  item.range = tiles_that_see<Traits::block_m>(params.window, sequence, key_begin, key_last);
  // In turns, key tiles that start early must not wait for what others do last (turns.h). A CTA
  // that takes one tile after the other goes back and forth, if all see the same queries.
  const bool descends = Traits::writes_dq && call.sweep_tiles > 1
                            ? work.tile % 2 == 1 && params.window.is_full()
                            : call.turns.used() && !call.tiles_descend;
  item.first_tile = descends ? item.range.end - 1 : item.range.begin;
  item.last_tile = descends ? item.range.begin : item.range.end - 1;
  item.direction = descends ? -1 : 1;
  item.half_starts_later = false;
  if constexpr (Traits::skips_hidden_half) {
    const BlockRange of_half = tiles_that_see<Traits::block_m>(
        params.window, sequence, key_begin + 64, max(key_begin + 64, key_last));
    item.half_starts_later = !descends && !of_half.empty() && of_half.begin > item.range.begin;
  }
  return !item.range.empty();
}

// Where an item's dQ goes, and who else adds to it.
template <class Traits>
CUTE_DEVICE void find_sums(BackwardArguments const& call, BackwardWorkItem& item) {
  Sequence const& sequence = item.work.sequence;
  const bool sweeps = call.sweep_tiles > 1;
  const int heads = item.end_head - item.first_head;
  item.sums_per_head = sweeps ? call.q_tiles_per_sequence : call.q_tiles;
  item.first_sum = sweeps ? static_cast<int>(blockIdx.x) * heads * call.q_tiles_per_sequence
                          : item.first_head * call.q_tiles + sequence.first_q_tile;
  if (call.dq_path == DqPath::ordered) {
    // Those that see a query tile are neighbours, so the next ones on both sides tell.
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

template <class Traits>
struct BackwardProducer {
  static constexpr int block_m = Traits::block_m;
  static constexpr int head_dim = Traits::head_dim;
  static constexpr int head_dim_v = Traits::head_dim_v;

  BackwardKernelArguments const& args;
  typename Traits::SharedStorage& smem;
  RingPlace<Traits::key_stages> key_place{};
  RingPlace<Traits::stages> q_place{}, dout_place{};
  RingPlace<Traits::work_stages> work_place{};
  unsigned sweep_id = 0;  // the next tile of the sweep, if any are left
  int sweep_left = 0;

  // The next tile's number. Every CTA draws once in vain, which must not turn tickets negative.
  CUTE_DEVICE unsigned draw() {
    if constexpr (!Traits::writes_dq) {
      return static_cast<unsigned>(atomicAdd(args.call.tickets, 1));
    } else {
      if (sweep_left == 0) {
        sweep_left = args.call.sweep_tiles;
        sweep_id = static_cast<unsigned>(atomicAdd(args.call.tickets, sweep_left));
      }
      --sweep_left;
      return sweep_id++;
    }
  }

  // Tells the others of the next tile that a query sees: its stage, or -1 when there is none, of
  // which they are told as well.
  CUTE_DEVICE int next_tile() {
    const int stage = work_place.stage;
    wait_empty(smem.work_ring, work_place);
    typename Traits::WorkItem& item = smem.work[stage];
    bool found = false;
    // Without query tiles nobody has zeroed the tickets, and there is nothing to find.
    while (args.call.q_tiles > 0 && !found) {
      const unsigned drawn = draw();
      if (drawn >= args.num_tickets) break;
      const int ticket = static_cast<int>(drawn);
      bool exists;
      if constexpr (Traits::shares_tiles) {
        const auto part = TilePart::of(args.call.shared_tiles, ticket);
        found = find_tile<Traits>(args, part.turn, item, exists) &&
                find_part<Traits>(args.call, part, item);
      } else {
        found = find_tile<Traits>(args, ticket, item, exists);
      }
    }
    if (found) {
      if constexpr (Traits::writes_dq) find_sums<Traits>(args.call, item);
    } else {
      item.work.tile = no_tile;
    }
    FullBarrier::arrive(&smem.work_ring.full[stage]);
    work_place.advance();
    return found ? stage : -1;
  }

  CUTE_DEVICE void load_keys(BackwardWorkItem const& item) {
    Sequence const& sequence = item.work.sequence;
    wait_empty(smem.key_ring, key_place);
    std::uint64_t* full_k = &smem.key_ring.full[key_place.stage];
    std::uint64_t* full_v = &smem.value_ring.full[key_place.stage];
    FullBarrier::arrive_and_expect_tx(full_k, Traits::key_bytes);
    FullBarrier::arrive_and_expect_tx(full_v, Traits::value_bytes);
    // A part without keys is read from the tile's first row, and its scores are hidden.
    const auto part_keys = [&](int part) {
      const int key = (item.work.tile * Traits::key_parts + part) * 64;
      const int row = key < sequence.seqlen_k ? key : item.work.tile * Traits::block_n;
      return RowSpan{sequence.batch_k, item.head_k, sequence.row_k + row, sequence.seqlen_k - row};
    };
    CUTE_UNROLL
    for (int part = 0; part < Traits::key_parts; ++part) {
      load_tile<64, head_dim>(args.k_map, full_k,
                              smem.k + Traits::part_tile(key_place.stage, part) * 64 * head_dim,
                              part_keys(part));
    }
    CUTE_UNROLL
    for (int part = 0; part < Traits::key_parts; ++part) {
      load_tile<64, head_dim_v>(args.v_map, full_v,
                                smem.v + Traits::part_tile(key_place.stage, part) * 64 * head_dim_v,
                                part_keys(part));
    }
    key_place.advance();
  }

  // A tile of q or dout, and its rows of one statistic.
  // announce(stage): what the key warpgroups shall find with it, besides bytes of loads.
  template <int kColumns, int kMoreBytes = 0, class Element, class Announce>
  CUTE_DEVICE void load_queries(CUtensorMap const& map, Ring<Traits::stages>& ring,
                                RingPlace<Traits::stages>& place, Element* tiles,
                                RowSpan const& queries, float const* source, float (*rows)[block_m],
                                Announce announce) {
    wait_empty(ring, place);
    announce(place.stage);
    std::uint64_t* full = &ring.full[place.stage];
    constexpr int bytes = block_m * kColumns * int(sizeof(Element));
    FullBarrier::arrive_and_expect_tx(full, bytes + Traits::row_bytes + kMoreBytes);
    load_tile<block_m, kColumns>(map, full, tiles + place.stage * block_m * kColumns, queries);
    SM90_BULK_COPY_G2S::copy(source, full, rows[place.stage], Traits::row_bytes);
    place.advance();
  }

  template <class Announce>
  CUTE_DEVICE void load_step(BackwardWorkItem const& item, Step const& step, Announce announce) {
    BackwardArguments const& call = args.call;
    Sequence const& sequence = item.work.sequence;
    const int query = step.tile * block_m;
    const RowSpan queries{sequence.batch_q, step.head, sequence.row_q + query,
                          sequence.seqlen_q - query};
    const std::int64_t row =
        (std::int64_t{step.head} * call.q_tiles + sequence.first_q_tile + step.tile) * block_m;
    const int stage = q_place.stage;
    load_queries<head_dim, Traits::bias_bytes>(args.q_map, smem.q_ring, q_place, smem.q, queries,
                                               call.lse_log2 + row, smem.lse_log2, announce);
    if constexpr (Traits::has_bias) {
      constexpr int block_n = Traits::block_n;
      BiasParams const& bias = call.params.score.bias;
      load_bias<block_m, block_n>(
          args.bias_map, &smem.q_ring.full[stage], smem.bias + stage * block_m * block_n,
          PairBox::of(bias, item.work.tile * block_n, query, step.head, sequence.index), bias);
    }
    load_queries<head_dim_v>(args.dout_map, smem.dout_ring, dout_place, smem.dout, queries,
                             call.softmax_d + row, smem.softmax_d, [](int) {});
  }

  // The keys of a tile are loaded behind its first step: their buffer is in use until the tile
  // before it ends, those of queries are not.
  CUTE_DEVICE void run() {
    for (int stage = next_tile(); stage >= 0; stage = next_tile()) {
      typename Traits::WorkItem const& item = smem.work[stage];
      const int steps = item.steps();
      if constexpr (Traits::is_sparse) {
        const auto visits = visits_of<Traits>(args.call.params, item);
        auto visit = visits.first(item.first_head, item.first_step);
        CUTE_NO_UNROLL
        for (int index = 0; index < steps; ++index, visit = visits.next(visit)) {
          const VisitedQueries visited{.step = {visit.head, visit.visit.block},
                                       .pieces = visit.visit.pieces,
                                       .is_in_window = item.range.is_interior(visit.visit.block)};
          load_step(item, visited.step, [&](int place) { smem.visited[place] = visited; });
          if (index == 0) load_keys(item);
        }
      } else {
        Step step = Step::first(item);
        CUTE_NO_UNROLL
        for (int index = 0; index < steps; ++index, step.advance(item)) {
          load_step(item, step, [&](int place) {
            if constexpr (Traits::announces) {
              smem.visited[place] = {
                  .step = step, .pieces = {}, .is_in_window = item.range.is_interior(step.tile)};
            }
          });
          if (index == 0) load_keys(item);
        }
      }
    }
    *const_cast<int volatile*>(&smem.has_loads) = 0;
  }
};

}  // namespace flash_attn_cuda::sm90
