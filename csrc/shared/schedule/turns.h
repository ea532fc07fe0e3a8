// dQ in a fixed order: the key tiles that add to a query tile do so one after the other, in the
// order in which their CTAs took them, so that the sum has the same bits every run.
//
// A CTA waits only for tiles that were taken earlier, hence always for one whose CTA runs. Key
// tiles start together and add to the same query tiles, each a little behind the one before it.
// Under a causal mask the last query tile is the only one that all key tiles see, so they walk
// towards the diagonal, where each of them ends; with a left bound alone it is the other way
// round.
//
// With lists not all of those key tiles add. A CTA marks what it skips when it starts, and what it
// visits when it has added. Who adds waits for the marks of the key tiles that started earlier,
// whose CTAs run and wait for earlier ones alone: there is no circle. When a CTA ends it has marked
// all, so lists with bad contents keep nobody waiting.
#pragma once

#include <cstdint>

#include "flash_attn/api.h"
#include "shared/host_device.h"
#include "shared/mask/block_range.h"
#include "shared/sequence/sequence.h"

namespace flash_attn_cuda {

struct DqTurns {
  int* counters = nullptr;     // (heads, query tiles): additions so far; null: nobody waits
  bool tiles_descend = false;  // CTAs start with a sequence's last key tile
  int words = 0;               // > 0: instead of a counter so many words, with a bit for each key
                               // tile of the sequence: its mark

  FAC_HOST_DEVICE constexpr bool used() const { return counters != nullptr; }

  // The number of a tile's turn among `adders`.
  FAC_HOST_DEVICE constexpr int turn_of(const BlockRange& adders, int tile) const {
    return tiles_descend ? adders.end - 1 - tile : tile - adders.begin;
  }
  // The adders whose CTAs start before that of a tile.
  FAC_HOST_DEVICE constexpr Reach before(const BlockRange& adders, int tile) const {
    return tiles_descend ? Reach{.begin = tile + 1, .end = adders.end}
                         : Reach{.begin = adders.begin, .end = tile};
  }
  // Those of a word's bits that are marks of tiles.
  FAC_HOST_DEVICE static constexpr unsigned bits_of(const Reach& tiles, int word) {
    const int first = detail::clamp(tiles.begin - word * 32, 0, 32);
    const int count = detail::clamp(tiles.end - word * 32, 0, 32) - first;
    if (count <= 0) return 0;
    return ~0u >> (32 - count) << first;
  }

#if defined(__CUDACC__)
  // All threads that add call both; sync() is their barrier. Where several CTAs share the columns
  // of a key tile's dQ, each counts.
  template <class Sync>
  __device__ void wait(std::int64_t counter, const BlockRange& adders, int tile, int thread,
                       Sync sync, int shares = 1) const {
    if (thread == 0) {
      const int additions = shares * turn_of(adders, tile);
      int done;
      do {
        asm volatile("ld.acquire.gpu.global.s32 %0, [%1];"
                     : "=r"(done)
                     : "l"(counters + counter)
                     : "memory");
      } while (done < additions);  // the other CTA of this tile may have counted already
    }
    sync();
  }

  template <class Sync>
  __device__ void pass_on(std::int64_t counter, int thread, Sync sync) const {
    __threadfence();
    sync();
    if (thread == 0) count(counter);
  }

  // One thread, behind a fence and a barrier of all.
  __device__ void count(std::int64_t counter) const {
    asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(counters + counter) : "memory");
  }

  // The same with marks, which lie at `row` of so many words.
  template <class Sync>
  __device__ void wait_for_marks(std::int64_t row, const BlockRange& adders, int tile, int thread,
                                 int threads, Sync sync) const {
    const Reach tiles = before(adders, tile);
    for (int word = tiles.begin / 32 + thread; 32 * word < tiles.end; word += threads) {
      const unsigned wanted = bits_of(tiles, word);
      unsigned marks;
      do {
        asm volatile("ld.acquire.gpu.global.b32 %0, [%1];"
                     : "=r"(marks)
                     : "l"(counters + row * words + word)
                     : "memory");
      } while ((marks & wanted) != wanted);
    }
    sync();
  }

  // One thread.
  __device__ void mark(std::int64_t row, int tile) const {
    asm volatile(
        "red.release.gpu.global.or.b32 [%0], %1;" ::"l"(counters + row * words + tile / 32),
        "r"(1u << tile % 32)
        : "memory");
  }
#endif
};

// The key tiles that add to dQ of a query tile.
template <int kBlockM, int kBlockN>
FAC_HOST_DEVICE constexpr BlockRange adders_of(const Window& window, const Sequence& sequence,
                                               int query_tile) {
  const int query = query_tile * kBlockM;
  const int last = query + kBlockM < sequence.seqlen_q ? query + kBlockM : sequence.seqlen_q;
  return block_range(band_from_queries(window, sequence.shift), query, last - 1, sequence.seqlen_k,
                     kBlockN);
}

// The query tiles that see any of the keys [first, last].
template <int kBlockM>
FAC_HOST_DEVICE constexpr BlockRange tiles_that_see(const Window& window, const Sequence& sequence,
                                                    int first, int last) {
  return block_range(band_from_keys(window, sequence.shift), first, last, sequence.seqlen_q,
                     kBlockM);
}

// The query tiles that a key tile adds to; none, where the sequence has no such tile.
template <int kBlockM, int kBlockN>
FAC_HOST_DEVICE constexpr Reach visited_tiles(const Window& window, const Sequence& sequence,
                                              int key_tile) {
  if (key_tile < 0) return {.begin = 0, .end = 0};
  const int key = key_tile * kBlockN;
  const int end = key + kBlockN < sequence.seqlen_k ? key + kBlockN : sequence.seqlen_k;
  const BlockRange range = tiles_that_see<kBlockM>(window, sequence, key, end - 1);
  return {.begin = range.begin, .end = range.end};
}

}  // namespace flash_attn_cuda
