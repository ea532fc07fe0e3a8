// The key warpgroups of a backward CTA for wide heads, where the registers of one hold dV of 64
// keys and those of another dK (keys.h has both in one). The first makes P of S, keeps it
// for dV and hands it to the second, which makes dS of it and dP. It may hold K in registers.
#pragma once

#include "sm90/backward/keys.h"
#include "sm90/backward/products.h"

namespace flash_attn_cuda::sm90 {

// Between the same thread of the two warpgroups: what one holds of P, 16 bytes at a time.
template <class Traits, class Fragment>
CUTE_DEVICE void send_weights(typename Traits::SharedStorage& smem,
                              PipelineState<Traits::ds_stages> const& state,
                              Fragment const& weights) {
  producer_acquire(smem.weights_ring, state);
  auto vectors = recast<uint4>(weights);
  CUTE_UNROLL
  for (int i = 0; i < size(vectors); ++i)
    smem.weights[state.stage][i][threadIdx.x % warpgroup_threads] = vectors(i);
  __syncwarp();
  producer_commit(smem.weights_ring, state);
}

template <class Traits, class Fragment>
CUTE_DEVICE void receive_weights(typename Traits::SharedStorage& smem,
                                 PipelineState<Traits::ds_stages> const& state, Fragment& weights) {
  consumer_wait(smem.weights_ring, state);
  auto vectors = recast<uint4>(weights);
  CUTE_UNROLL
  for (int i = 0; i < size(vectors); ++i)
    vectors(i) = smem.weights[state.stage][i][threadIdx.x % warpgroup_threads];
  __syncwarp();
  consumer_release(smem.weights_ring, state);
}

// S, P and dV.
template <class Traits>
CUTE_DEVICE void mma_dv(BackwardKernelArguments const& args, typename Traits::SharedStorage& smem) {
  using Element = typename Traits::Element;
  BackwardArguments const& call = args.call;
  const int thread = threadIdx.x % warpgroup_threads;
  using Math = ScoreMath<Traits>;
  const Math math(call);
  PipelineState<Traits::work_stages> work_state;
  KeyProducts<Traits> products{smem, thread};
  auto tSrS = products.make_scores();
  auto tGrdV = products.make_dv();
  auto tGrP = make_tensor_like<Element>(a_operand_view(tSrS));
  auto own_weights = make_tensor_like<Element>(tGrP);
  auto& weights = weights_beside<Traits>(tGrP, own_weights);
  auto tSrK = products.make_keys();
  auto start_scores = [&]() {
    products.wait_for_queries();
    if constexpr (Traits::holds_keys) {
      products.start_scores(tSrK, tSrS);
    } else {
      products.start_scores(tSrS);
    }
  };

  for (;; work_state.advance()) {
    consumer_wait(smem.work_ring, work_state);
    BackwardWorkItem const& item = smem.work[work_state.stage];
    if (item.work.tile == no_tile) break;
    const int key_begin = first_own_key<Traits>(item);
    const bool has_all_keys = key_begin + 64 <= item.work.sequence.seqlen_k;

    consumer_wait(smem.key_ring, products.key_state);
    if constexpr (Traits::holds_keys) products.read_keys(tSrK);
    start_scores();
    Step step = Step::first(item);
    const int steps = item.steps();
    for (int index = 0;; ++index, step.advance(item)) {
      const auto tile = pairs_of_step<Traits>(smem, products.q_state.stage, item.work.sequence,
                                              item.range, step, key_begin, has_all_keys);
      const auto excluded = math.excluded_pairs(tile);
      wait_products<0>(tSrS);
      typename Math::Statistic lse_log2;
      lse_log2.read(smem.lse_log2[products.q_state.stage]);
      math.probabilities(tile, excluded, lse_log2, tSrS, tGrP, weights);
      __syncwarp();
      products.release_queries(products.q_state);
      send_weights<Traits>(smem, products.q_state, weights);
      products.q_state.advance();

      products.wait_for_dout();
      products.start_dv(tGrP, tGrdV, index > 0);
      const PipelineState<Traits::dout_stages> last_state = products.dout_state;
      products.dout_state.advance();
      if (index + 1 == steps) {
        wait_products<0>(tGrdV);
        products.release_dout(last_state);
        break;
      }
      start_scores();
      wait_products<1>(tGrdV);
      products.release_dout(last_state);
    }
    consumer_release(smem.key_ring, products.key_state);
    products.key_state.advance();

    if (Traits::has_dropout) {
      const float kept = 1.0f / call.keep_probability;
      CUTE_UNROLL
      for (int i = 0; i < size(tGrdV); ++i) tGrdV(i) *= kept;
    }
    write_gradient<Traits>(call.params.dv, call.params.shape.head_dim_v, call.dv_partial, call,
                           item, key_begin, tGrdV, thread);
    __syncwarp();
    consumer_release(smem.work_ring, work_state);
  }
}

// dP, dS and dK.
template <class Traits>
CUTE_DEVICE void mma_dk(BackwardKernelArguments const& args, typename Traits::SharedStorage& smem) {
  using Element = typename Traits::Element;
  BackwardArguments const& call = args.call;
  const int thread = threadIdx.x % warpgroup_threads;
  using Math = ScoreMath<Traits>;
  const Math math(call);
  PipelineState<Traits::work_stages> work_state;
  KeyProducts<Traits> products{smem, thread};
  auto tSrdP = products.make_scores();
  auto tGrdK = products.make_dk();
  auto weights = make_tensor_like<Element>(a_operand_view(tSrdP));
  auto tGrdS = make_tensor_like<Element>(a_operand_view(tSrdP));

  for (;; work_state.advance()) {
    consumer_wait(smem.work_ring, work_state);
    BackwardWorkItem const& item = smem.work[work_state.stage];
    if (item.work.tile == no_tile) break;
    const int key_begin = first_own_key<Traits>(item);

    consumer_wait(smem.value_ring, products.key_state);
    products.start_dprobabilities(tSrdP);
    const int steps = item.steps();
    for (int index = 0;; ++index) {
      receive_weights<Traits>(smem, products.q_state, weights);
      wait_products<0>(tSrdP);
      typename Math::Statistic softmax_d;
      softmax_d.read(smem.softmax_d[products.dout_state.stage]);
      math.gradients(weights, softmax_d, tSrdP, tGrdS);
      auto ds_state = products.q_state;  // as many buffers, a step each
      store_dscores<Traits>(smem, ds_state, 0, tGrdS, [](int) {});
      commit_dscores<Traits>(smem, ds_state, 0);
      // dO is released after the fence in there: an arrival may overtake a load of D whose number
      // is not used yet, and where dO has one buffer the next D is there soon.
      __syncwarp();
      products.release_dout(products.dout_state);
      products.dout_state.advance();

      products.wait_for_queries();
      products.start_dk(tGrdS, tGrdK, index > 0);
      const PipelineState<Traits::stages> last_state = products.q_state;
      products.q_state.advance();
      if (index + 1 == steps) {
        wait_products<0>(tGrdK);
        products.release_queries(last_state);
        break;
      }
      products.start_dprobabilities(tSrdP);
      wait_products<1>(tGrdK);
      products.release_queries(last_state);
    }
    consumer_release(smem.key_ring, products.key_state);
    products.key_state.advance();

    CUTE_UNROLL
    for (int i = 0; i < size(tGrdK); ++i) tGrdK(i) *= call.score_factor;
    write_gradient<Traits>(call.params.dk, call.params.shape.head_dim, call.dk_partial, call, item,
                           key_begin, tGrdK, thread);
    __syncwarp();
    consumer_release(smem.work_ring, work_state);
  }
}

}  // namespace flash_attn_cuda::sm90
