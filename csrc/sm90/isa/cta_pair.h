// Two CTAs of a cluster that work on one tile, and what one of them does in the other's shared
// memory, where everything lies at the same address as in its own.
#pragma once

#include <cstdint>

#include <cute/arch/cluster_sm90.hpp>
#include <cute/tensor.hpp>

#include "sm90/isa/copy.h"

namespace flash_attn_cuda::sm90 {

// 0 or 1.
CUTE_DEVICE int rank_in_pair() { return static_cast<int>(block_rank_in_cluster()); }

// All threads of both CTAs wait for one another, before the first look at the other's shared
// memory, whose barriers have to be there, and after the last one, as memory ends with its CTA.
CUTE_DEVICE void sync_pair() {
  __syncwarp();
  cluster_arrive();
  cluster_wait();
}

// The address that the other CTA's copy of an object in shared memory has for this one.
CUTE_DEVICE std::uint32_t in_peer(void const* own) {
  return set_block_rank(cute::cast_smem_ptr_to_uint(own), block_rank_in_cluster() ^ 1);
}

// barrier: in_peer() of one.
CUTE_DEVICE void arrive_in_peer(std::uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}
CUTE_DEVICE void arrive_at_peer(std::uint64_t const* barrier) { arrive_in_peer(in_peer(barrier)); }

// arrive_at_peer() after this thread's loads of what the other CTA overwrites then. It takes a
// fence of the whole GPU, so it is not for every step.
CUTE_DEVICE void arrive_at_peer_after_loads(std::uint64_t const* barrier) {
  asm volatile(
      "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(in_peer(barrier))
      : "memory");
}

// Starts a copy of shared memory to `target` in the other CTA, whose barrier counts the bytes.
CUTE_DEVICE void copy_to_peer(void* target, void const* source, int bytes, std::uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, "
      "[%3];" ::"r"(in_peer(target)),
      "r"(cute::cast_smem_ptr_to_uint(source)), "r"(bytes), "r"(in_peer(barrier))
      : "memory");
}

// Starts the store of a number to `target` in the other CTA, whose barrier counts four bytes.
CUTE_DEVICE void send_to_peer(std::uint32_t* target, std::uint32_t number, std::uint64_t* barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(
                   in_peer(target)),
               "r"(number), "r"(in_peer(barrier))
               : "memory");
}

inline constexpr std::uint16_t both_ctas = 3;  // a bit each

// load_tile() of box_rows rows of one box of columns into both CTAs, whose barriers count it.
template <class Element>
CUTE_DEVICE void load_box_for_pair(CUtensorMap const& map, std::uint64_t* barrier, Element* box,
                                   RowSpan const& span, int box_rows, int first_column) {
  constexpr auto hint = static_cast<std::uint64_t>(TMA::CacheHintSm90::EVICT_NORMAL);
  SM90_TMA_LOAD_MULTICAST_5D::copy(&map, barrier, both_ctas, hint, box, first_column,
                                   box_rows - span.rows, span.row + span.rows, span.head,
                                   span.batch);
}

// Starts the load of this CTA's half of a tile's rows into both CTAs, whose barriers count it; the
// tile is that of load_tile. A half without rows is read from the tile's first row.
template <int kRows, int kColumns, class Element>
CUTE_DEVICE void load_half_for_pair(CUtensorMap const& map, std::uint64_t* barrier, Element* tile,
                                    RowSpan const& span) {
  constexpr auto hint = static_cast<std::uint64_t>(TMA::CacheHintSm90::EVICT_NORMAL);
  constexpr int half = kRows / 2;
  constexpr int box = box_columns<kColumns>;
  const int first = rank_in_pair() * half;
  const int begin = first < span.rows ? first : 0;
  const int rows = min(span.rows - begin, half);
  CUTE_UNROLL
  for (int column = 0; column < kColumns; column += box) {
    SM90_TMA_LOAD_MULTICAST_5D::copy(&map, barrier, both_ctas, hint,
                                     tile + column * kRows + first * box, column, half - rows,
                                     span.row + begin + rows, span.head, span.batch);
  }
}

}  // namespace flash_attn_cuda::sm90
