// The producer warps of a CTA: one finds items, one loads keys and one queries. The loading ones
// read the items as the consumers do.
#pragma once

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

// One of the warps that load blocks of keys, whose pieces they take in turn: each lane has a box of
// rows that lie in one page. One warp alone takes longer over a piece than the products.
template <class Traits>
struct KeyLoader {
  using Element = typename Traits::Element;
  static constexpr int block_n = Traits::block_n;
  static constexpr int columns = Traits::piece_columns;
  static constexpr int loading_warps = Traits::loading_warps;

  LatentArguments const& args;
  typename Traits::SharedStorage& smem;
  int piece;  // the next of this warp's, counted from the first of the next block
  PipelineState<Traits::stages> state = PipelineState<Traits::stages>{}.plus(piece);

  // Keys of a block that are there, of which this lane's box has some: a bit each.
  CUTE_DEVICE uint2 keys_seen(PagedSpan const& span, int keys_left) const {
    const int first = threadIdx.x % 32 * args.key_box_rows;
    const bool exists = span.box.rows > 0 && span.box.place.exists();
    const int count = exists ? max(0, min(args.key_box_rows, keys_left - first)) : 0;
    const std::uint64_t bits = count == 0 ? 0 : ~std::uint64_t{0} >> (64 - count) << first;
    return {__reduce_or_sync(0xffffffffu, static_cast<unsigned>(bits)),
            __reduce_or_sync(0xffffffffu, static_cast<unsigned>(bits >> 32))};
  }

  // Of a pair's pieces each CTA loads every other one for both. Both wait for all, and each makes
  // zeros of what lies nowhere.
  CUTE_DEVICE void load(PagedSpan const& span, int keys_left) {
    const int lane = threadIdx.x % 32;
    const uint2 seen = keys_seen(span, keys_left);
    auto const& [place, rows] = span.box;
    const bool is_loaded = rows > 0 && place.exists();
    const RowSpan own{place.batch, span.head, place.row, rows};
    const int bytes = __popc(__ballot_sync(0xffffffffu, is_loaded)) * args.key_box_rows * columns *
                      int(sizeof(Element));
    CUTE_NO_UNROLL
    for (; piece < Traits::pieces; piece += loading_warps, state = state.plus(loading_warps)) {
      producer_acquire(smem.ring, state);
      std::uint64_t* full = &smem.ring.full[state.stage];
      Element* box =
          smem.pieces + state.stage * Traits::piece_elements + lane * args.key_box_rows * columns;
      if (span.misses_keys) clear_missing_box<block_n, columns>(box, span, args.key_box_rows);
      if (lane == 0) {
        if (piece == 0) reinterpret_cast<uint2&>(smem.seen[state.stage]) = seen;
        FullBarrier::arrive_and_expect_tx(full, bytes);
      }
      __syncwarp();
      CUtensorMap const& map = piece == 0 ? args.k_map : args.v_map;
      const int column = max(piece - 1, 0) * columns;
      if (!is_pair<Traits>(args)) {
        if (is_loaded)
          load_tile<block_n, columns>(map, full, box, own, columns, args.key_box_rows, column);
      } else if (is_loaded && state.stage / loading_warps % 2 == rank_in_pair()) {
        load_box_for_pair(map, full, box, own, args.key_box_rows, column);
      }
    }
    piece -= Traits::pieces;
  }

  CUTE_DEVICE void run() {
    ForwardParams const& params = args.params;
    const Divider page_size = Divider::by(max(params.paged.page_size, 1));
    for_each_item<Traits>(smem, [&](LatentItem const& item) {
      Sequence const& sequence = item.work.sequence;
      const KeyRows keys = KeyRows::of(params.paged, sequence, page_size);
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
        load(span, sequence.seqlen_k - block * block_n);
      }
    });
  }
};

// A warp's loads of Q, each lane boxes of rows that are heads of one query. Rows that do not attend
// may be anything, as rows of Q stay by themselves in the products: no box lies outside the tensor.
template <class Traits>
CUTE_DEVICE void load_queries(LatentArguments const& args, typename Traits::SharedStorage& smem) {
  using Element = typename Traits::Element;
  constexpr int columns = Traits::piece_columns;
  constexpr auto hint = static_cast<std::uint64_t>(TMA::CacheHintSm90::EVICT_NORMAL);
  constexpr int bytes = Traits::block_m * columns * Traits::pieces * int(sizeof(Element));
  const int boxes = Traits::block_m / args.query_box_rows;  // of a piece
  const int last_head = args.params.shape.num_heads_q - args.query_box_rows;
  PipelineState<1> state;
  for_each_item<Traits>(smem, [&](LatentItem const& item) {
    if (item.range.empty()) return;
    Sequence const& sequence = item.work.sequence;
    producer_acquire(smem.q_ring, state);
    std::uint64_t* full = &smem.q_ring.full[0];
    if (threadIdx.x % 32 == 0) FullBarrier::arrive_and_expect_tx(full, bytes);
    CUTE_NO_UNROLL
    for (int i = threadIdx.x % 32; i < boxes * Traits::pieces; i += 32) {
      const int piece = i / boxes;
      const int row = (i - piece * boxes) * args.query_box_rows;
      const PackedRow place = latent_row<Traits>(args, item.work, row);
      const int query = sequence.row_q + max(0, min(place.query, sequence.seqlen_q - 1));
      SM90_TMA_LOAD_4D::copy(piece == 0 ? &args.q_map : &args.qv_map, full, hint,
                             smem.q + (piece * Traits::block_m + row) * columns,
                             max(piece - 1, 0) * columns, min(place.head, last_head), query,
                             sequence.batch_q);
    }
    __syncwarp();
    state.advance();
  });
}

}  // namespace flash_attn_cuda::sm90
