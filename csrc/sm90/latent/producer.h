// The producer warps of a CTA. One finds items, one loads keys and two load queries; each of the
// others reads the items as the consumers do.
#pragma once

#include <cute/arch/copy_sm80.hpp>

#include "sm90/forward/page_load.h"
#include "sm90/latent/share.h"

namespace flash_attn_cuda::sm90 {

// visit(item) for each of the CTA's, by a whole warp.
template <class Traits, class Visit>
CUTE_DEVICE void for_each_item(typename Traits::SharedStorage& smem, Visit visit) {
  PipelineState<Traits::item_stages> state;
  CUTE_NO_UNROLL
  for (;; state.advance()) {
    consumer_wait(smem.item_ring, state);
    LatentItem const& item = smem.items[state.stage];
    if (item.work.tile == no_tile) return;
    visit(item);
    __syncwarp();
    consumer_release(smem.item_ring, state);
  }
}

template <class Traits>
CUTE_DEVICE void find_items(LatentArguments const& args, typename Traits::SharedStorage& smem) {
  PipelineState<Traits::item_stages> state;
  const auto give = [&](LatentItem const& item) {
    producer_acquire(smem.item_ring, state);
    if (threadIdx.x % 32 == 0) smem.items[state.stage] = item;
    producer_commit(smem.item_ring, state);
    state.advance();
  };
  share_tiles<Traits>(args, give);
  give({.work = {.tile = no_tile}});
}

// A warp's loads of blocks of keys: each lane has a box of rows that lie in one page.
template <class Traits>
struct KeyLoader {
  static constexpr int block_n = Traits::block_n;
  static constexpr int columns = Traits::piece_columns;

  LatentArguments const& args;
  typename Traits::SharedStorage& smem;
  PipelineState<Traits::stages> state{};

  // What lies nowhere is not read but becomes zeros, as in load_pages.
  CUTE_DEVICE void clear_box(typename Traits::Element* box) const {
    auto* zeros = reinterpret_cast<uint4*>(box);
    CUTE_NO_UNROLL
    for (int i = 0; i < args.key_box_rows * columns * 2 / int(sizeof(uint4)); ++i)
      zeros[i] = {0, 0, 0, 0};
    cutlass::arch::fence_view_async_shared();
  }

  CUTE_DEVICE void load(PagedSpan const& span) {
    const int lane = threadIdx.x % 32;
    auto const& [place, rows] = span.box;
    const bool is_loaded = rows > 0 && place.exists();
    const int boxes = __popc(__ballot_sync(0xffffffffu, is_loaded));
    const int bytes = boxes * args.key_box_rows * columns * int(sizeof(typename Traits::Element));
    CUTE_NO_UNROLL
    for (int piece = 0; piece < Traits::pieces; ++piece, state.advance()) {
      producer_acquire(smem.ring, state);
      std::uint64_t* full = &smem.ring.full[state.stage];
      auto* box = smem.pieces + state.stage * Traits::piece_elements +
                  lane * args.key_box_rows * columns;
      if (span.misses_keys) {
        if (rows > 0 && !is_loaded) clear_box(box);
        __syncwarp();
      }
      if (lane == 0) {
        smem.misses_keys[state.stage] = span.misses_keys;
        FullBarrier::arrive_and_expect_tx(full, bytes);
      }
      if (is_loaded) {
        load_tile<block_n, columns>(piece == 0 ? args.k_map : args.v_map, full, box,
                                    {place.batch, span.head, place.row, rows}, columns,
                                    args.key_box_rows, max(piece - 1, 0) * columns);
      }
    }
  }

  CUTE_DEVICE void run() {
    ForwardParams const& params = args.params;
    for_each_item<Traits>(smem, [&](LatentItem const& item) {
      Sequence const& sequence = item.work.sequence;
      const KeyRows keys = KeyRows::of(params.paged, sequence);
      const int end = item.range.end;
      // Places are looked up a block ahead of the loads.
      const auto look_up = [&](int block) {
        return look_up_span<block_n>(keys, item.work.head, args.key_box_rows, block * block_n,
                                     sequence.seqlen_k);
      };
      PagedSpan next{};
      if (item.range.begin < end) next = look_up(item.range.begin);
      CUTE_NO_UNROLL
      for (int block = item.range.begin; block < end; ++block) {
        const PagedSpan span = checked_span(keys, next, params.errors);
        if (block + 1 < end) next = look_up(block + 1);
        load(span);
      }
    });
  }
};

// Rows that do not attend, and columns that do not exist, are zeros.
template <class Traits>
CUTE_DEVICE void load_queries(LatentArguments const& args, typename Traits::SharedStorage& smem,
                              int warp) {
  using Element = typename Traits::Element;
  constexpr int chunk = vector_bytes / int(sizeof(Element));
  constexpr int chunks_of_piece = Traits::piece_columns / chunk;
  constexpr int chunks_of_row = Traits::pieces * chunks_of_piece;
  ForwardParams const& params = args.params;
  PipelineState<1> state;
  auto sQ = smem_tile<typename Traits::QueryLayout>(smem.q);  // (block_m, 64, pieces)
  for_each_item<Traits>(smem, [&](LatentItem const& item) {
    Sequence const& sequence = item.work.sequence;
    producer_acquire(smem.q_ring, state);
    CUTE_NO_UNROLL
    for (int i = threadIdx.x % 32 + 32 * warp; i < Traits::block_m * chunks_of_row;
         i += 32 * Traits::query_warps) {
      const int row = i / chunks_of_row;
      const int piece = i % chunks_of_row / chunks_of_piece;
      const int column = i % chunks_of_piece * chunk;
      const LatentRow place = latent_row<Traits>(args.group, item.work, row);
      const bool is_rotary = piece == 0;
      TensorView const& view = is_rotary ? params.q : params.qv;
      const int first = is_rotary ? column : (piece - 1) * Traits::piece_columns + column;
      const bool exists =
          place.query < sequence.seqlen_q &&
          first < (is_rotary ? params.shape.head_dim : params.shape.head_dim_v);
      const Element* source = static_cast<const Element*>(view.data);
      if (exists)
        source += sequence.batch_q * view.batch_stride + place.head * view.head_stride +
                  (std::int64_t(sequence.row_q) + place.query) * view.row_stride + first;
      SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<uint128_t>::copy(
          *reinterpret_cast<const uint128_t*>(source),
          *reinterpret_cast<uint128_t*>(&sQ(row, column, piece)), exists);
    }
    cp_async_fence();
    cp_async_wait<0>();
    cutlass::arch::fence_view_async_shared();
    __syncwarp();
    producer_commit(smem.q_ring, state);
    state.advance();
  });
}

}  // namespace flash_attn_cuda::sm90
