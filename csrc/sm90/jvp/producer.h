// The producer of a CTA: one thread that loads Q, K, V and their tangents by TMA, in the order in
// which the consumers want them.
#pragma once

#include "sm90/jvp/arguments.h"
#include "sm90/jvp/traits.h"
#include "sm90/tile/spans.h"

namespace flash_attn_cuda::sm90 {

template <class Traits>
struct JvpProducer {
  static constexpr int block_m = Traits::block_m;
  static constexpr int block_n = Traits::block_n;
  static constexpr int head_dim = Traits::head_dim;

  JvpArguments const& args;
  typename Traits::SharedStorage& smem;
  PipelineState<Traits::stages> k_state{}, v_state{};

  CUTE_DEVICE void load_queries() const {
    TileWork const& work = smem.work;
    std::uint64_t* full = &smem.q_ring.full[0];
    FullBarrier::arrive_and_expect_tx(full, 2 * Traits::query_bytes);
    CUTE_UNROLL
    for (int part = 0; part < Traits::consumers; ++part) {
      const RowSpan span = queries_of_part(work.sequence, work.head, work.tile * block_m, part);
      load_tile<64, head_dim>(args.q_map, full, smem.q + part * 64 * head_dim, span);
      load_tile<64, head_dim>(args.tangent_q_map, full, smem.tangent_q + part * 64 * head_dim,
                              span);
    }
  }

  // A block of keys, or of values, and its tangent.
  template <class Element>
  CUTE_DEVICE void load_keys(Ring<Traits::stages>& ring, PipelineState<Traits::stages>& state,
                             CUtensorMap const& map, Element* tiles, CUtensorMap const& tangent_map,
                             Element* tangent_tiles, int block) const {
    TileWork const& work = smem.work;
    const RowSpan span =
        keys_from(work.sequence, args.params.shape.key_head(work.head), block * block_n);
    producer_acquire(ring, state);
    std::uint64_t* full = &ring.full[state.stage];
    FullBarrier::arrive_and_expect_tx(full, 2 * Traits::key_bytes);
    const int first = state.stage * block_n * head_dim;
    load_tile<block_n, head_dim>(map, full, tiles + first, span);
    load_tile<block_n, head_dim>(tangent_map, full, tangent_tiles + first, span);
    state.advance();
  }

  CUTE_DEVICE void run() {
    const BlockRange range = smem.range;
    if (range.empty()) return;
    load_queries();
    CUTE_NO_UNROLL
    for (int block = range.end - 1; block >= range.begin; --block) {
      load_keys(smem.k_ring, k_state, args.k_map, smem.k, args.tangent_k_map, smem.tangent_k,
                block);
      load_keys(smem.v_ring, v_state, args.v_map, smem.v, args.tangent_v_map, smem.tangent_v,
                block);
    }
  }
};

}  // namespace flash_attn_cuda::sm90
