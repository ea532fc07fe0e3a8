// The steps of a backward CTA: the query tiles that its key tile visits, of one query head that
// shares its key head after the other.
#pragma once

#include "shared/gradient/backward_arguments.h"
#include "shared/mask/block_lists.h"
#include "shared/schedule/tile_work.h"

namespace flash_attn_cuda::sm80 {

// What a CTA walks over.
struct StepRange {
  BlockRange const& tiles;  // that the window leaves
  int first_head;
  int end_head;
};

struct Step {
  int head;
  int tile;
};

struct WindowSteps {
  StepRange range;
  bool descends;

  CUTE_DEVICE static WindowSteps of(StepRange const& range, bool descends, BlockLists const&,
                                    TileWork const&) {
    return {range, descends};
  }

  CUTE_DEVICE int steps() const {
    if (range.tiles.empty()) return 0;
    return (range.end_head - range.first_head) * (range.tiles.end - range.tiles.begin);
  }
  CUTE_DEVICE int first_tile() const { return descends ? range.tiles.end - 1 : range.tiles.begin; }
  CUTE_DEVICE Step first() const { return {range.first_head, first_tile()}; }
  CUTE_DEVICE Step next(Step step) const {
    const int last_tile = descends ? range.tiles.begin : range.tiles.end - 1;
    if (step.tile == last_tile) return {step.head + 1, first_tile()};
    return {step.head, descends ? step.tile - 1 : step.tile + 1};
  }
};

struct SparseStep {
  int head;
  int tile;
  Pieces pieces;
  int position;  // in the list of the head
  int end;
};

// The steps in a kernel for block-sparse masks, which a call without lists can run as well.
template <int kBlockM, int kBlockN>
struct ListSteps {
  using Visits = HeadVisits<kBlockM>;
  StepRange range;
  bool descends;  // without lists
  Visits visits;

  CUTE_DEVICE static ListSteps of(StepRange const& range, bool descends, BlockLists const& lists,
                                  TileWork const& work) {
    return {.range = range,
            .descends = descends,
            .visits = {.lists = lists,
                       .sequence = work.sequence.index,
                       .tile = work.tile * kBlockN / list_tile,
                       .range = range.tiles,
                       .end_head = range.end_head}};
  }

  CUTE_DEVICE bool has_lists() const { return visits.lists.data != nullptr; }
  CUTE_DEVICE int steps() const {
    if (has_lists()) return visits.count(range.first_head);
    return of_window().steps();
  }
  CUTE_DEVICE SparseStep first() const {
    if (has_lists()) return sparse_step(visits.first(range.first_head));
    return sparse_step(of_window().first());
  }
  CUTE_DEVICE SparseStep next(SparseStep const& step) const {
    if (has_lists()) {
      return sparse_step(visits.next({.head = step.head,
                                      .position = step.position,
                                      .end = step.end,
                                      .visit = {.block = step.tile, .pieces = step.pieces}}));
    }
    return sparse_step(of_window().next({step.head, step.tile}));
  }

 private:
  CUTE_DEVICE static SparseStep sparse_step(typename Visits::Step const& step) {
    return {step.head, step.visit.block, step.visit.pieces, step.position, step.end};
  }
  CUTE_DEVICE static SparseStep sparse_step(Step const& step) {
    return {.head = step.head, .tile = step.tile, .pieces = {}, .position = 0, .end = 0};
  }
  CUTE_DEVICE WindowSteps of_window() const { return {range, descends}; }
};

// The steps of a kernel's CTA. Where tiles take turns, key tiles that start early must not wait for
// what others do last (shared/schedule/turns.h).
template <class Traits>
CUTE_DEVICE auto steps_of(BackwardArguments const& args, TileWork const& work,
                          BlockRange const& range, int first_head, int end_head) {
  using Steps = std::conditional_t<Traits::is_sparse, ListSteps<Traits::block_m, Traits::block_n>,
                                   WindowSteps>;
  const bool descends = Traits::is_ordered && args.turns.used() && !args.turns.tiles_descend;
  return Steps::of({range, first_head, end_head}, descends, args.params.sparsity.lists, work);
}

}  // namespace flash_attn_cuda::sm80
