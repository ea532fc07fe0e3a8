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

template <class Traits>
CUTE_DEVICE void load_keys(LatentArguments const& args, typename Traits::SharedStorage& smem) {
  constexpr int block_n = Traits::block_n;
  constexpr int columns = Traits::piece_columns;
  ForwardParams const& params = args.params;
  PipelineState<Traits::stages> state;
  for_each_item<Traits>(smem, [&](LatentItem const& item) {
    Sequence const& sequence = item.work.sequence;
    const KeyRows keys = KeyRows::of(params.paged, sequence);
    CUTE_NO_UNROLL
    for (int block = item.range.begin; block < item.range.end; ++block) {
      const PagedSpan span =
          find_span<block_n>(keys, item.work.head, args.key_box_rows, block * block_n,
                             sequence.seqlen_k, params.errors);
      CUTE_NO_UNROLL
      for (int piece = 0; piece < Traits::pieces; ++piece, state.advance()) {
        producer_acquire(smem.ring, state);
        if (threadIdx.x % 32 == 0) smem.misses_keys[state.stage] = span.misses_keys;
        load_pages<block_n, columns>(piece == 0 ? args.k_map : args.v_map,
                                     &smem.ring.full[state.stage],
                                     smem.pieces + state.stage * Traits::piece_elements, span,
                                     args.key_box_rows, columns, max(piece - 1, 0) * columns);
      }
    }
  });
}

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
