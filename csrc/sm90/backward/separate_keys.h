// The key warpgroups of a backward CTA for wide heads, where the registers of one hold dV of 64
// keys and those of another dK (keys.h has both in one). The first makes P of S, keeps it
// for dV and hands it to the second, which makes dS of it and dP.
#pragma once

#include "sm90/backward/keys.h"

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
    smem.weights[state.stage][i][threadIdx.x % 128] = vectors(i);
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
    vectors(i) = smem.weights[state.stage][i][threadIdx.x % 128];
  __syncwarp();
  consumer_release(smem.weights_ring, state);
}

// S, P and dV.
template <class Traits>
CUTE_DEVICE void sum_value_gradients(BackwardKernelArguments const& args,
                                     typename Traits::SharedStorage& smem) {
  using Element = typename Traits::Element;
  constexpr int block_m = Traits::block_m;
  BackwardArguments const& call = args.call;
  const int thread = threadIdx.x % 128;
  using Math = ScoreMath<Traits>;
  const Math math(call);
  PipelineState<Traits::work_stages> work_state;
  PipelineState<Traits::key_stages> key_state;
  PipelineState<Traits::stages> q_state;
  PipelineState<Traits::dout_stages> dout_state;

  auto sK = smem_tile<typename Traits::KeyLayout>(smem.k);    // (64, head_dim, key_stages)
  auto sQ = smem_tile<typename Traits::QueryLayout>(smem.q);  // (block_m, head_dim, stages)
  auto sdO =
      smem_tile<typename Traits::OutputLayout>(smem.dout);  // (block_m, head_dim_v, dout_stages)
  typename Traits::ScoresMma scores_mma;
  typename Traits::ValueGradientMma gradient_mma;
  auto scores_share = scores_mma.get_thread_slice(thread);
  auto tSrK = scores_share.partition_fragment_A(sK);
  auto tSrQ = scores_share.partition_fragment_B(sQ);
  auto tGrdO = gradient_mma.get_thread_slice(thread).partition_fragment_B(transposed(sdO));
  auto tSrS = partition_fragment_C(scores_mma, Shape<_64, Int<block_m>>{});
  auto tGrdV = partition_fragment_C(gradient_mma, Shape<_64, Int<Traits::head_dim_v>>{});
  auto tGrP = make_tensor_like<Element>(a_operand_view(tSrS));
  auto own_weights = make_tensor_like<Element>(tGrP);
  auto& weights = weights_beside<Traits>(tGrP, own_weights);

  auto start_scores = [&]() {
    consumer_wait(smem.q_ring, q_state);
    start_product(scores_mma, tSrK(_, _, _, key_state.stage), tSrQ(_, _, _, q_state.stage), tSrS,
                  false);
  };

  for (;; work_state.advance()) {
    consumer_wait(smem.work_ring, work_state);
    BackwardWorkItem const& item = smem.work[work_state.stage];
    if (item.work.tile == no_tile) break;
    const int key_begin = first_own_key<Traits>(item);
    const bool has_all_keys = key_begin + 64 <= item.work.sequence.seqlen_k;

    consumer_wait(smem.key_ring, key_state);
    start_scores();
    Step step = Step::first(item);
    const int steps = item.steps();
    for (int index = 0;; ++index, step.advance(item)) {
      const ScoreTile score_tile{.sequence = item.work.sequence,
                                 .head = step.head,
                                 .query_begin = step.tile * block_m,
                                 .key_begin = key_begin,
                                 .is_interior = has_all_keys && item.range.is_interior(step.tile)};
      const auto excluded = math.excluded_pairs(score_tile);
      wait_products<0>(tSrS);
      typename Math::Statistic lse_log2;
      lse_log2.read(smem.lse_log2[q_state.stage]);
      math.probabilities(score_tile, excluded, lse_log2, tSrS, tGrP, weights);
      __syncwarp();
      release_queries<Traits>(smem.q_ring, q_state);
      send_weights<Traits>(smem, q_state, weights);
      q_state.advance();

      consumer_wait(smem.dout_ring, dout_state);
      start_product(gradient_mma, tGrP, tGrdO(_, _, _, dout_state.stage), tGrdV, index > 0);
      const PipelineState<Traits::dout_stages> last_state = dout_state;
      dout_state.advance();
      if (index + 1 == steps) {
        wait_products<0>(tGrdV);
        release_queries<Traits>(smem.dout_ring, last_state);
        break;
      }
      start_scores();
      wait_products<1>(tGrdV);
      release_queries<Traits>(smem.dout_ring, last_state);
    }
    consumer_release(smem.key_ring, key_state);
    key_state.advance();

    if constexpr (Traits::has(feature::dropout)) {
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
CUTE_DEVICE void sum_only_key_gradients(BackwardKernelArguments const& args,
                                        typename Traits::SharedStorage& smem) {
  using Element = typename Traits::Element;
  constexpr int block_m = Traits::block_m;
  BackwardArguments const& call = args.call;
  const int thread = threadIdx.x % 128;
  using Math = ScoreMath<Traits>;
  const Math math(call);
  PipelineState<Traits::work_stages> work_state;
  PipelineState<Traits::key_stages> key_state;
  PipelineState<Traits::stages> q_state;
  PipelineState<Traits::dout_stages> dout_state;

  auto sV = smem_tile<typename Traits::ValueLayout>(smem.v);  // (64, head_dim_v, key_stages)
  auto sQ = smem_tile<typename Traits::QueryLayout>(smem.q);  // (block_m, head_dim, stages)
  auto sdO =
      smem_tile<typename Traits::OutputLayout>(smem.dout);  // (block_m, head_dim_v, dout_stages)
  typename Traits::ScoresMma scores_mma;
  typename Traits::KeyGradientMma gradient_mma;
  auto scores_share = scores_mma.get_thread_slice(thread);
  auto tSrV = scores_share.partition_fragment_A(sV);
  auto tSrdO = scores_share.partition_fragment_B(sdO);
  auto tGrQ = gradient_mma.get_thread_slice(thread).partition_fragment_B(transposed(sQ));
  auto tSrdP = partition_fragment_C(scores_mma, Shape<_64, Int<block_m>>{});
  auto tGrdK = partition_fragment_C(gradient_mma, Shape<_64, Int<Traits::head_dim>>{});
  auto weights = make_tensor_like<Element>(a_operand_view(tSrdP));
  auto tGrdS = make_tensor_like<Element>(a_operand_view(tSrdP));

  auto start_dprobabilities = [&]() {
    consumer_wait(smem.dout_ring, dout_state);
    start_product(scores_mma, tSrV(_, _, _, key_state.stage), tSrdO(_, _, _, dout_state.stage),
                  tSrdP, false);
  };

  for (;; work_state.advance()) {
    consumer_wait(smem.work_ring, work_state);
    BackwardWorkItem const& item = smem.work[work_state.stage];
    if (item.work.tile == no_tile) break;
    const int key_begin = first_own_key<Traits>(item);

    consumer_wait(smem.value_ring, key_state);
    start_dprobabilities();
    const int steps = item.steps();
    for (int index = 0;; ++index) {
      receive_weights<Traits>(smem, q_state, weights);
      wait_products<0>(tSrdP);
      typename Math::Statistic softmax_d;
      softmax_d.read(smem.softmax_d[dout_state.stage]);
      math.gradients(weights, softmax_d, tSrdP, tGrdS);
      auto ds_state = q_state;  // as many buffers, a step each
      store_dscores<Traits>(smem, ds_state, 0, tGrdS, [](int) {});
      commit_dscores<Traits>(smem, ds_state, 0);
      // Behind the fence in there: an arrival may overtake a load of D whose number is not used
      // yet, and where dO has one buffer the next D is there soon.
      __syncwarp();
      release_queries<Traits>(smem.dout_ring, dout_state);
      dout_state.advance();

      consumer_wait(smem.q_ring, q_state);
      start_product(gradient_mma, tGrdS, tGrQ(_, _, _, q_state.stage), tGrdK, index > 0);
      const PipelineState<Traits::stages> last_state = q_state;
      q_state.advance();
      if (index + 1 == steps) {
        wait_products<0>(tGrdK);
        release_queries<Traits>(smem.q_ring, last_state);
        break;
      }
      start_dprobabilities();
      wait_products<1>(tGrdK);
      release_queries<Traits>(smem.q_ring, last_state);
    }
    consumer_release(smem.key_ring, key_state);
    key_state.advance();

    CUTE_UNROLL
    for (int i = 0; i < size(tGrdK); ++i) tGrdK(i) *= call.score_factor;
    write_gradient<Traits>(call.params.dk, call.params.shape.head_dim, call.dk_partial, call, item,
                           key_begin, tGrdK, thread);
    __syncwarp();
    consumer_release(smem.work_ring, work_state);
  }
}

}  // namespace flash_attn_cuda::sm90
