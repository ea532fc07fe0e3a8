// The products of a warpgroup that makes dV or dK of 64 keys (separate_keys.h), with a step's
// queries: S^T = K Q^T, dP^T = V dO^T, dV += P^T dO, dK += dS^T Q.
//
// They run while other code does. A function that waits for their end gives their buffers back.
// Warpgroups that make both (keys.h) name their fragments themselves: with this struct ptxas
// serialized the products of pairs (C7512).
#pragma once

#include "sm90/backward/traits.h"
#include "sm90/isa/cta_pair.h"

namespace flash_attn_cuda::sm90 {

template <class Traits>
struct KeyProducts {
  typename Traits::SharedStorage& smem;
  int thread;
  typename Traits::ScoresMma scores_mma{};
  typename Traits::HeldScoresMma held_mma{};
  typename Traits::KeyGradientMma dk_mma{};
  typename Traits::ValueGradientMma dv_mma{};
  PipelineState<Traits::key_stages> key_state{};
  PipelineState<Traits::stages> q_state{};
  PipelineState<Traits::dout_stages> dout_state{};

  CUTE_DEVICE auto make_scores() const {
    return partition_fragment_C(scores_mma, Shape<_64, Int<Traits::block_m>>{});
  }
  CUTE_DEVICE auto make_dk() const {
    return partition_fragment_C(dk_mma, Shape<_64, Int<Traits::head_dim>>{});
  }
  CUTE_DEVICE auto make_dv() const {
    return partition_fragment_C(dv_mma, Shape<_64, Int<Traits::head_dim_v>>{});
  }

  CUTE_DEVICE void wait_for_queries() const { consumer_wait(smem.q_ring, q_state); }
  CUTE_DEVICE void wait_for_dout() const { consumer_wait(smem.dout_ring, dout_state); }

  // The tile's K, where registers hold it.
  CUTE_DEVICE auto make_keys() const {
    return make_held(held_mma, smem_tile<typename Traits::KeyLayout>(smem.k)(_, _, 0));
  }
  template <class Keys>
  CUTE_DEVICE void read_keys(Keys& tSrK) const {
    const int place = Traits::part_tile(key_state.stage, 0);
    read_held(held_mma, smem_tile<typename Traits::KeyLayout>(smem.k)(_, _, place), tSrK, thread);
  }

  // wait_for_queries() comes first.
  template <class Keys, class Accumulator>
  CUTE_DEVICE void start_scores(Keys& tSrK, Accumulator& tSrS) {
    auto share = held_mma.get_thread_slice(thread);
    auto tSrQ = share.partition_fragment_B(smem_tile<typename Traits::QueryLayout>(smem.q));
    start_product(held_mma, tSrK, tSrQ(_, _, _, q_state.stage), tSrS, false);
  }
  template <class Accumulator>
  CUTE_DEVICE void start_scores(Accumulator& tSrS) {
    auto share = scores_mma.get_thread_slice(thread);
    auto tSrK = share.partition_fragment_A(smem_tile<typename Traits::KeyLayout>(smem.k));
    auto tSrQ = share.partition_fragment_B(smem_tile<typename Traits::QueryLayout>(smem.q));
    start_product(scores_mma, tSrK(_, _, _, Traits::part_tile(key_state.stage, 0)),
                  tSrQ(_, _, _, q_state.stage), tSrS, false);
  }

  template <class Accumulator>
  CUTE_DEVICE void start_dprobabilities(Accumulator& tSrdP) {
    auto share = scores_mma.get_thread_slice(thread);
    auto tSrV = share.partition_fragment_A(smem_tile<typename Traits::ValueLayout>(smem.v));
    auto tSrdO = share.partition_fragment_B(smem_tile<typename Traits::OutputLayout>(smem.dout));
    wait_for_dout();
    start_product(scores_mma, tSrV(_, _, _, Traits::part_tile(key_state.stage, 0)),
                  tSrdO(_, _, _, dout_state.stage), tSrdP, false);
  }

  // wait_for_dout() comes first, as for dP. add: to what is in tGrdV.
  template <class Operand, class Accumulator>
  CUTE_DEVICE void start_dv(Operand& tGrP, Accumulator& tGrdV, bool add) {
    auto sdO = smem_tile<typename Traits::OutputLayout>(smem.dout);
    auto tGrdO = dv_mma.get_thread_slice(thread).partition_fragment_B(transposed(sdO));
    start_product(dv_mma, tGrP, tGrdO(_, _, _, dout_state.stage), tGrdV, add);
  }

  // wait_for_queries() comes first.
  template <class Operand, class Accumulator>
  CUTE_DEVICE void start_dk(Operand& tGrdS, Accumulator& tGrdK, bool add) {
    auto sQ = smem_tile<typename Traits::QueryLayout>(smem.q);
    auto tGrQ = dk_mma.get_thread_slice(thread).partition_fragment_B(transposed(sQ));
    start_product(dk_mma, tGrdS, tGrQ(_, _, _, q_state.stage), tGrdK, add);
  }

  // A buffer of Q or dO, which both CTAs of a pair write.
  template <int kStages>
  CUTE_DEVICE static void release(Ring<kStages>& ring, PipelineState<kStages> const& state) {
    consumer_release(ring, state);
    if (Traits::in_pairs && threadIdx.x % 32 == 0) arrive_at_peer(&ring.empty[state.stage]);
  }
  CUTE_DEVICE void release_queries(PipelineState<Traits::stages> const& state) {
    release(smem.q_ring, state);
  }
  CUTE_DEVICE void release_dout(PipelineState<Traits::dout_stages> const& state) {
    release(smem.dout_ring, state);
  }
};

}  // namespace flash_attn_cuda::sm90
