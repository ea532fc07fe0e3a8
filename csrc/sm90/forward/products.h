// The two products of a forward step, S = Q K^T and O += P V, of a warpgroup's 64 query rows.
//
// They run while other code does. start_.. waits for what they read, finish_.. for their end, and
// gives the buffer back. Of a block in shared memory a product takes as many keys as its
// instructions, or its P, have.
#pragma once

#include "shared/e4m3_units.h"
#include "sm90/forward/traits.h"

namespace flash_attn_cuda::sm90 {

template <class Traits>
struct ForwardProducts {
  using Storage = typename Traits::SharedStorage;

  Storage& smem;
  int warpgroup;
  int thread;  // of the warpgroup
  typename Traits::ScoresMma scores_mma{};
  typename Traits::OutputMma output_mma{};
  PipelineState<Traits::q_stages> q_state{};
  PipelineState<Traits::stages> k_state{};
  PipelineState<Traits::stages> own_v_state{};

  // Where nothing overlaps, K and V of a step lie in the same place of their rings.
  CUTE_DEVICE PipelineState<Traits::stages>& v_state() {
    return Traits::overlaps_softmax ? own_v_state : k_state;
  }

  CUTE_DEVICE auto make_scores() const {
    return AccumulatorOf<typename Traits::ScoresMma, Shape<_64, Int<Traits::block_n>>>{};
  }
  CUTE_DEVICE auto make_output() const {
    return AccumulatorOf<typename Traits::OutputMma, Shape<_64, Int<Traits::head_dim_v>>>{};
  }

  // P of scores.
  template <class Accumulator>
  CUTE_DEVICE static auto make_probabilities(Accumulator const& tSrS) {
    using Element = typename Traits::Element;
    if constexpr (Traits::multiplies_e4m3) {
      using Tile = decltype(make_tensor(std::declval<Element*>(),
                                        Layout<Shape<_64, Int<Traits::block_n>>>{}));
      return decltype(a_fragment(typename Traits::OutputMma{}, std::declval<Tile>(), 0)){};
    } else {
      return FragmentLike<Element, decltype(a_operand_view(tSrS))>{};
    }
  }

  template <class Mma, class Accumulator>
  CUTE_DEVICE void start_scores(Mma& mma, Accumulator& tSrS) {
    auto sQ = smem_tile<typename Traits::QueryLayout>(smem.q);  // (64, head_dim, stages * parts)
    auto sK = smem_tile<typename Traits::KeyLayout>(smem.k);    // (block_n, head_dim, stages)
    auto tSrQ = a_fragment(scores_mma, sQ, thread);
    auto tSrK = b_fragment(scores_mma, sK, thread);
    consumer_wait(smem.k_ring, k_state);
    start_product(mma, tSrQ(_, _, _, q_state.stage * Traits::consumers + warpgroup),
                  tSrK(_, _, _, k_state.stage), tSrS, false);
  }
  template <class Accumulator>
  CUTE_DEVICE void start_scores(Accumulator& tSrS) {
    start_scores(scores_mma, tSrS);
  }

  // Q as fp16 where it is of bf16 and keys of e4m3; what it counts in then (e4m3_units.h). Once all
  // of Q is here.
  CUTE_DEVICE float convert_queries() {
    if constexpr (!Traits::converts_e4m3 ||
                  std::is_same_v<typename Traits::Stored, typename Traits::Element>)
      return 1.0f;
    constexpr int box = 64;
    constexpr int warp_rows = 16;
    constexpr int boxes = Traits::head_dim / box;
    constexpr int vectors = warp_rows * box * 2 / 16 / 32;  // of a lane, in each box
    auto* tile = smem.q + (q_state.stage * Traits::consumers + warpgroup) * 64 * Traits::head_dim;
    auto* own = reinterpret_cast<uint4*>(tile + thread / 32 * warp_rows * box) + thread % 32;
    const auto place = [&](int i) -> uint4& {
      return own[i / vectors * (64 * box * 2 / 16) + i % vectors * 32];
    };
    uint4 numbers[boxes * vectors];
    CUTE_UNROLL
    for (int i = 0; i < boxes * vectors; ++i) numbers[i] = place(i);
    const float unit =
        queries_to_half<boxes * vectors * 4>(reinterpret_cast<std::uint32_t*>(numbers));
    CUTE_UNROLL
    for (int i = 0; i < boxes * vectors; ++i) place(i) = numbers[i];
    cutlass::arch::fence_view_async_shared();
    sync_output(warpgroup);
    return unit;
  }

  // add: to what is in tOrO.
  template <class Operand, class Accumulator>
  CUTE_DEVICE void start_output(Operand& tOrP, Accumulator& tOrO, bool add) {
    // (block_n, head_dim_v, stages), or what has been transposed.
    auto sV = smem_tile<typename Traits::ValueLayout>(smem.v);
    auto tOrV = [&] {
      if constexpr (Traits::multiplies_e4m3) {
        return b_fragment(output_mma, sV, thread);
      } else {
        return b_fragment(output_mma, transposed(sV), thread);
      }
    }();
    consumer_wait(smem.v_ring, v_state());
    start_product(output_mma, tOrP, tOrV(_, _, _, v_state().stage), tOrO, add);
  }

  // kLeft: products that have been started later. read(): what lies beside K.
  template <int kLeft, class Accumulator, class Read>
  CUTE_DEVICE void finish_scores(Accumulator& tSrS, bool last_of_tile, Read read) {
    wait_products<kLeft>(tSrS);
    read();
    release_keys();
    if (last_of_tile) consumer_release(smem.q_ring, q_state);
  }

  template <int kLeft, class Accumulator>
  CUTE_DEVICE void finish_scores(Accumulator& tSrS, bool last_of_tile) {
    finish_scores<kLeft>(tSrS, last_of_tile, [] {});
  }

  template <class Accumulator>
  CUTE_DEVICE void finish_output(Accumulator& tOrO) {
    wait_products<0>(tOrO);
    release_values();
  }

  // A block that these queries do not see, and others of the tile do.
  CUTE_DEVICE void drop_block() {
    consumer_wait(smem.k_ring, k_state);
    __syncwarp();
    release_keys();
    consumer_wait(smem.v_ring, v_state());
    __syncwarp();
    release_values();
  }

 private:
  CUTE_DEVICE void release_keys() {
    consumer_release(smem.k_ring, k_state);
    if (Traits::overlaps_softmax) k_state.advance();
  }
  CUTE_DEVICE void release_values() {
    consumer_release(smem.v_ring, v_state());
    v_state().advance();
  }
};

}  // namespace flash_attn_cuda::sm90
