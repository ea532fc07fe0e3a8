// Sums in a fixed order: who adds waits until what comes before it has been added, as in
// shared/schedule/turns.h. Blocks add to a row of dQ in their order, and of a block one tile after
// the other; CTAs add to dK and dV in theirs.
//
// A CTA walks ascending entries. It waits for lower entries alone, and for other tiles of its own:
// those of CTAs that have drawn a ticket before it, or draw the next ones, tiles_per_block
// together. Entries and tiles that nobody multiplies are counted as well, so that no contents keep
// anyone waiting.
#pragma once

#include "sm80/listed_backward/rows.h"

namespace flash_attn_cuda::sm80 {

template <class Traits>
struct OwnListedTurns {
  ListedArguments const& args;
  typename Traits::SharedStorage& smem;
  int thread;

  CUTE_DEVICE bool are_taken() const { return args.turns.are_taken(); }

  // The CTA's place among those that have started. All threads.
  CUTE_DEVICE int ticket() const {
    if (!are_taken()) return blockIdx.x;
    if (thread == 0) smem.ticket = atomicAdd(args.turns.tickets, 1);
    __syncthreads();
    return smem.ticket;
  }

  // Around what a step's entries, `count` from `first` on, add to dQ. All threads.
  CUTE_DEVICE void wait_for_queries(int first, int count) const {
    if (!are_taken()) return;
    if (thread < count && first + thread < smem.run.end) wait_for_query(first + thread);
    __syncthreads();
  }
  CUTE_DEVICE void pass_on_queries(int first, int count) const {
    if (!are_taken()) return;
    __threadfence();
    __syncthreads();
    if (thread < count && first + thread < smem.run.end) pass_on_query(first + thread);
  }

  // Around what a run adds to dK and dV. All threads.
  CUTE_DEVICE void wait_for_tile() const {
    if (!are_taken()) return;
    if (thread == 0) {
      const int of_block = args.of.params.listed.begins[smem.run.place];
      wait(tile_counter(), smem.run.begin / args.entries_per_cta - of_block / args.entries_per_cta);
    }
    __syncthreads();
  }
  CUTE_DEVICE void pass_on_tile() const {
    if (!are_taken()) return;
    __threadfence();
    __syncthreads();
    if (thread == 0) count(tile_counter());
  }

  // A run that adds nothing.
  CUTE_DEVICE void skip_run() const {
    if (!are_taken()) return;
    for (int entry = smem.run.begin + thread; entry < smem.run.end; entry += Traits::threads) {
      wait_for_query(entry);
      pass_on_query(entry);
    }
    wait_for_tile();
    pass_on_tile();
  }

 private:
  CUTE_DEVICE int* tile_counter() const {
    return args.turns.of_tiles + std::int64_t(smem.run.place) * args.tiles_per_block +
           smem.run.part;
  }
  // Of the row of q that an entry is of, which listed_tensors() keeps in range; null if it is not.
  CUTE_DEVICE int* query_counter(int entry) const {
    const int row = args.of.params.listed.rows[entry];
    if (row < 0 || row >= args.turns.query_rows) return nullptr;
    return args.turns.of_queries + std::int64_t(row) * args.of.params.shape.num_heads_k +
           smem.run.block.head;
  }
  CUTE_DEVICE void wait_for_query(int entry) const {
    const int* counter = query_counter(entry);
    const int rank = args.of.params.listed.ranks[entry];
    if (counter != nullptr) wait(counter, rank * args.tiles_per_block + smem.run.part);
  }
  CUTE_DEVICE void pass_on_query(int entry) const {
    int* counter = query_counter(entry);
    if (counter != nullptr) count(counter);
  }

  CUTE_DEVICE static void wait(const int* counter, int additions) {
    int done;
    do {
      asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(done) : "l"(counter) : "memory");
    } while (done < additions);
  }
  CUTE_DEVICE static void count(int* counter) {
    asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(counter) : "memory");
  }
};

}  // namespace flash_attn_cuda::sm80
