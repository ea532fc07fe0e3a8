// When a CTA adds to dQ of a query tile, in kernels that walk the query tiles of a key tile: at
// once or, if dQ is summed in a fixed order, when its turn has come (shared/schedule/turns.h).
#pragma once

#include "shared/gradient/backward_arguments.h"
#include "sm80/backward/loads.h"
#include "sm80/backward/steps.h"

namespace flash_attn_cuda::sm80 {

template <class Traits>
struct OwnTurns {
  BackwardArguments const& args;
  TileWork const& work;
  OwnGradients<Traits> const& own;
  int thread;

  CUTE_DEVICE bool are_taken() const { return Traits::is_ordered && args.turns.used(); }
  CUTE_DEVICE bool have_marks() const {
    return Traits::is_sparse && are_taken() && args.turns.words > 0;
  }

  // All threads. q_tile: of all heads; query_tile: of the sequence.
  CUTE_DEVICE void wait(std::int64_t q_tile, int query_tile) const {
    if (!are_taken()) return;
    const BlockRange adders =
        adders_of<Traits::block_m, Traits::block_n>(args.params.window, work.sequence, query_tile);
    const auto sync = [] { __syncthreads(); };
    if (have_marks()) {
      args.turns.wait_for_marks(row_of(q_tile), adders, work.tile, thread, Traits::threads, sync);
    } else {
      args.turns.wait(q_tile, adders, work.tile, thread, sync, shares());
    }
  }

  CUTE_DEVICE void pass_on(std::int64_t q_tile) const {
    if (!are_taken()) return;
    __threadfence();
    __syncthreads();
    if (thread != 0) return;
    if (have_marks()) {
      mark(q_tile);
    } else {
      args.turns.count(q_tile);
    }
  }

  CUTE_DEVICE void mark(std::int64_t q_tile) const { args.turns.mark(row_of(q_tile), work.tile); }

 private:
  // CTAs that share the columns of dQ.
  CUTE_DEVICE int shares() const {
    return Traits::shares_columns ? (args.params.shape.head_dim - 1) / Traits::columns_per_cta + 1
                                  : 1;
  }
  // Of the marks: each of those CTAs waits for the others' of its columns.
  CUTE_DEVICE std::int64_t row_of(std::int64_t q_tile) const {
    if (!Traits::shares_columns) return q_tile;
    return q_tile * shares() + own.column_begin / Traits::columns_per_cta;
  }
};

enum class Marked { skipped, all };

// Marks query tiles that the CTA skips, before its first step, or all of them, behind its last one.
// No part of the kernel, whose registers it would take.
template <class Traits, Marked kWhich>
__device__ __noinline__ void mark_tiles(BackwardArguments const& args,
                                        typename Traits::SharedStorage const& smem) {
  const auto own = OwnGradients<Traits>::of(args, smem);
  const OwnTurns<Traits> turns{args, smem.work, own, static_cast<int>(threadIdx.x)};
  if (!own.has_k) return;
  const auto walk = steps_of<Traits>(args, smem.work, smem.range, own.first_head, own.end_head);
  for (int head = own.first_head; head < own.end_head; ++head) {
    for (int tile = smem.range.begin + turns.thread; tile < smem.range.end;
         tile += Traits::threads) {
      if (kWhich == Marked::all || !walk.visits.has(head, tile))
        turns.mark(q_tile_index(args, smem.work.sequence, Step{head, tile}));
    }
  }
}

}  // namespace flash_attn_cuda::sm80
