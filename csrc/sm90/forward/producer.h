// The producer of a forward CTA: one thread that finds the CTA's tiles and loads their Q, K and V
// and a bias, in the order in which the consumers want them. In some kernels another one finds
// them, of pages two warps load K and V, and with lists a thread loads a mask's bits.
#pragma once

#include "sm90/forward/page_load.h"
#include "sm90/forward/traits.h"
#include "sm90/tile/finder.h"
#include "sm90/tile/spans.h"
#include "sm90/tile/tile.h"

namespace flash_attn_cuda::sm90 {

// One thread, for lists with bits: one block after the other, those of each warpgroup that wants
// some.
template <class Traits>
CUTE_DEVICE void load_bits(ForwardArguments const& args, typename Traits::SharedStorage& smem) {
  PairBits const& bits = args.params.sparsity.bits;
  PipelineState<Traits::work_stages> work_state;
  PipelineState<1> places[Traits::consumers];
  for (;; work_state.advance()) {
    consumer_wait(smem.work_ring, work_state);
    auto const& item = smem.work[work_state.stage];
    TileWork const& work = item.work;
    if (work.tile == no_tile) break;
    CUTE_NO_UNROLL
    for (int position = item.range.end - 1; position >= item.range.begin; --position) {
      const Visit visit = item.visits.list.at(position);
      CUTE_UNROLL
      for (int part = 0; part < Traits::consumers; ++part) {
        if (!wants_bits(bits, visit.pieces, part)) continue;
        auto& ring = smem.sparse.bits_ring[part];
        producer_acquire(ring, places[part]);
        FullBarrier::arrive_and_expect_tx(&ring.full[0], sizeof(MaskBits));
        load_mask_bits(args.bits_map, &ring.full[0], smem.sparse.bits[part], bits,
                       work.sequence.index, work.head, work.tile * Traits::block_m + 64 * part,
                       visit.block * Traits::block_n);
        places[part].advance();
      }
    }
    EmptyBarrier::arrive(&smem.work_ring.empty[work_state.stage]);
  }
}

template <class Traits>
struct Producer {
  static constexpr int block_m = Traits::block_m;
  static constexpr int block_n = Traits::block_n;
  static constexpr int head_dim = Traits::head_dim;
  static constexpr int head_dim_v = Traits::head_dim_v;
  using KeySpan = std::conditional_t<Traits::is_paged, PagedSpan, RowSpan>;

  ForwardArguments const& args;
  typename Traits::SharedStorage& smem;
  TileAnnouncer<Traits> tiles{args, smem};  // of no use where another thread finds them
  PipelineState<Traits::q_stages> q_state{};
  PipelineState<Traits::stages> k_state{};
  PipelineState<Traits::multiplies_e4m3 ? Traits::value_row_stages : Traits::stages> v_state{};
  PipelineState<Traits::bias_stages> bias_state{};
  PipelineState<Traits::work_stages> work_state{};

  // One thread, of the warps that load pages.
  CUTE_DEVICE static bool leads() { return !Traits::is_paged || threadIdx.x % 32 == 0; }

  CUTE_DEVICE void want_next_tile() {
    if constexpr (Traits::has_finder) {
      EmptyBarrier::arrive(&smem.tile_wanted);
    } else {
      tiles.announce_next();
    }
  }

  CUTE_DEVICE void load_queries(TileWork const& work) {
    producer_acquire(smem.q_ring, q_state);
    const int stage = q_state.stage;
    q_state.advance();
    if (!leads()) return;
    std::uint64_t* full = &smem.q_ring.full[stage];
    FullBarrier::arrive_and_expect_tx(full, Traits::query_bytes);
    CUTE_UNROLL
    for (int part = 0; part < Traits::consumers; ++part) {
      load_tile<64, head_dim>(args.q_map, full,
                              smem.q + (stage * Traits::consumers + part) * 64 * head_dim,
                              queries_of_part(work.sequence, work.head, work.tile * block_m, part));
    }
  }

  // Where keys and values of a block lie.
  CUTE_DEVICE KeySpan keys_of(TileWork const& work, int block) const {
    AttentionShape const& shape = args.params.shape;
    Sequence const& sequence = work.sequence;
    const int key = block * block_n;
    const int head = shape.key_head(work.head);
    if constexpr (Traits::is_paged) {
      return find_span<block_n>(KeyRows::of(args.params.paged, sequence), head, args.key_box_rows,
                                key, sequence.seqlen_k, args.params.errors);
    } else {
      return keys_from(sequence, head, key);
    }
  }

  // announce(stage) writes what the consumers shall find with the tile.
  template <int kColumns, int kStages, class Element, class Announce>
  CUTE_DEVICE void load_keys(CUtensorMap const& map, Ring<kStages>& ring,
                             PipelineState<kStages>& state, Element* tiles, KeySpan const& keys,
                             int last_box, Announce announce) {
    producer_acquire(ring, state);
    announce(state.stage);
    std::uint64_t* full = &ring.full[state.stage];
    Element* tile = tiles + state.stage * block_n * kColumns;
    if constexpr (Traits::is_paged) {
      load_pages<block_n, kColumns>(map, full, tile, keys, args.key_box_rows, last_box);
    } else {
      FullBarrier::arrive_and_expect_tx(full, block_n * kColumns * int(sizeof(Element)));
      load_tile<block_n, kColumns>(map, full, tile, keys, last_box);
    }
    state.advance();
  }

  // K of a position in the order of visits, or in the tile's list; where its values lie.
  CUTE_DEVICE KeySpan load_k(int tile, VisitOrder const& order, int position) {
    int block = order.block_at(position);
    [[maybe_unused]] VisitedKeys visited{};
    if constexpr (Traits::is_sparse) {
      auto const& visits = smem.work[tile].visits;
      const Visit visit = visits.list.at(position);
      block = visit.block;
      const bool is_in_window = visits.window.is_interior(block);
      unsigned hides_from = 0;
      CUTE_UNROLL
      for (int part = 0; part < Traits::consumers; ++part) {
        const bool shows_all = visit.pieces.template show_all<64, block_n>(64 * part, 0);
        if (!is_in_window || !shows_all) hides_from |= 1u << part;
      }
      visited = {block, visit.pieces, hides_from, is_in_window};
    }
    const KeySpan keys = keys_of(smem.work[tile].work, block);
    load_keys<head_dim>(args.k_map, smem.k_ring, k_state, smem.k, keys, head_dim, [&](int stage) {
      if constexpr (Traits::is_sparse) smem.sparse.visited[stage] = visited;
      if constexpr (Traits::is_paged) {
        if (leads()) smem.misses_keys[stage][0] = keys.misses_keys;
      }
    });
    if constexpr (Traits::has_bias) load_bias_tile(smem.work[tile].work, block);
    return keys;
  }

  CUTE_DEVICE void load_bias_tile(TileWork const& work, int block) {
    BiasParams const& bias = args.params.score.bias;
    producer_acquire(smem.bias_ring, bias_state);
    std::uint64_t* full = &smem.bias_ring.full[bias_state.stage];
    FullBarrier::arrive_and_expect_tx(full, Traits::bias_bytes);
    load_bias<block_m, block_n>(
        args.bias_map, full, smem.bias + bias_state.stage * block_m * block_n,
        PairBox::of(bias, block * block_n, work.tile * block_m, work.head, work.sequence.index),
        bias);
    bias_state.advance();
  }

  // Columns of O that are made of what a box without values holds are not stored.
  CUTE_DEVICE void load_v(KeySpan const& values) {
    const auto load = [&](auto& ring, auto* tiles) {
      load_keys<head_dim_v>(args.v_map, ring, v_state, tiles, values, args.last_v_box, [](int) {});
    };
    if constexpr (Traits::multiplies_e4m3) {
      load(smem.value_rows_ring, reinterpret_cast<typename Traits::Element*>(smem.bytes));
    } else {
      load(smem.v_ring, smem.v);
    }
  }

  // What each of the two loading warps does over a cache, in pages or not. To start a tile's boxes
  // takes a warp as long as its products take, so that K and V have one each.
  CUTE_DEVICE void run_over_cache(bool loads_values) {
    if (!Traits::has_finder && !loads_values && leads()) tiles.announce_next();
    for (;; work_state.advance()) {
      consumer_wait(smem.work_ring, work_state);
      const int tile = work_state.stage;
      TileWork const& work = smem.work[tile].work;
      if (work.tile == no_tile) break;
      const BlockRange range = smem.work[tile].range;
      const VisitOrder order = visit_order<Traits>(args.params, work, range);
      if (!loads_values) load_queries(work);
      CUTE_NO_UNROLL
      for (int position = range.end - 1; position >= range.begin; --position) {
        if (loads_values) {
          load_v(keys_of(work, order.block_at(position)));
        } else {
          load_k(tile, order, position);
        }
      }
      if (!leads()) continue;
      if (!loads_values) want_next_tile();
      EmptyBarrier::arrive(&smem.work_ring.empty[tile]);
    }
  }

  CUTE_DEVICE void run() {
    if constexpr (!Traits::has_finder) tiles.announce_next();
    for (;; work_state.advance()) {
      consumer_wait(smem.work_ring, work_state);
      const int tile = work_state.stage;
      if (smem.work[tile].work.tile == no_tile) break;
      const BlockRange range = smem.work[tile].range;
      const VisitOrder order = visit_order<Traits>(args.params, smem.work[tile].work, range);
      load_queries(smem.work[tile].work);
      KeySpan keys = load_k(tile, order, range.end - 1);
      CUTE_NO_UNROLL
      for (int position = range.end - 2; position >= range.begin; --position) {
        const KeySpan values = keys;
        keys = load_k(tile, order, position);
        load_v(values);
      }
      // It asks before there is room for the last values: to find a tile takes as long as a step.
      want_next_tile();
      load_v(keys);
      if constexpr (Traits::has_finder) EmptyBarrier::arrive(&smem.work_ring.empty[tile]);
    }
  }
};

}  // namespace flash_attn_cuda::sm90
