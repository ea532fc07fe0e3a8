// A key warpgroup of a backward CTA: dK and dV of 64 keys of every tile, in registers. Where the
// two do not fit one warpgroup's registers, separate_keys.h takes this file's place.
//
// It multiplies S^T = K Q^T and dP^T = V dO^T, so that P^T and dS^T come out as the left operands
// of dV = P^T dO and dK = dS^T Q and stay in registers; dS^T goes to shared memory for the
// warpgroup that makes dQ of it (dq.h). dP is started when P is done, so that the two
// accumulators of scores hardly meet; dV runs while dS is made of dP, the next S after dK.
#pragma once

#include "sm90/backward/results.h"
#include "sm90/backward/scores.h"
#include "sm90/isa/cta_pair.h"

namespace flash_attn_cuda::sm90 {

// What a warp has stored of dS^T, 16 keys, to both CTAs' dQ warpgroups: each one's barrier counts
// its own CTA's warps and the bytes that the other one sends. A buffer is empty when both have read
// it.
template <class Traits>
CUTE_DEVICE void producer_commit_in_pair(typename Traits::SharedStorage& smem,
                                         PipelineState<Traits::ds_stages> const& state, int part) {
  if (threadIdx.x % 32 != 0) return;
  constexpr int size = 16 * Traits::block_m;
  constexpr int bytes = size * int(sizeof(typename Traits::Element));
  const int first =
      (Traits::ds_tile(state.stage, part) * 4 + threadIdx.x % warpgroup_threads / 32) * size;
  std::uint64_t* full = &smem.ds_ring.full[state.stage];
  FullBarrier::arrive_and_expect_tx(full, bytes);
  copy_to_peer(smem.from_peer.ds + first, smem.ds + first, bytes, full);
}

// dS^T of 64 keys -> the buffer that the dQ warpgroup reads next. announce(stage) writes what it
// shall find with them. commit_dscores follows.
template <class Traits, class Fragment, class Announce>
CUTE_DEVICE void store_dscores(typename Traits::SharedStorage& smem,
                               PipelineState<Traits::ds_stages> const& state, int part,
                               Fragment const& tGrdS, Announce announce) {
  constexpr int block_m = Traits::block_m;
  producer_acquire(smem.ds_ring, state);
  announce(state.stage);
  auto* scores = smem.ds + Traits::ds_tile(state.stage, part) * 64 * block_m;
  if constexpr (Traits::has_bias) {
    operand_to_transposed_box<block_m>(tGrdS, scores);
  } else {
    operand_to_shared<block_m>(tGrdS, scores);
  }
  if constexpr (Traits::in_pairs) cutlass::arch::fence_view_async_shared();
}

// Tells the dQ warpgroups that it is there. The fence comes first where a copy to the other CTA is
// what takes long, else as late as it may.
template <class Traits>
CUTE_DEVICE void commit_dscores(typename Traits::SharedStorage& smem,
                                PipelineState<Traits::ds_stages>& state, int part) {
  if constexpr (!Traits::in_pairs) cutlass::arch::fence_view_async_shared();
  __syncwarp();
  if constexpr (Traits::in_pairs) {
    producer_commit_in_pair<Traits>(smem, state, part);
  } else {
    producer_commit(smem.ds_ring, state);
  }
  state.advance();
}

// The first of a tile's keys whose dK and dV are this CTA's.
template <class Traits>
CUTE_DEVICE int first_own_key(BackwardWorkItem const& item) {
  const int first = item.work.tile * Traits::block_n;
  return Traits::in_pairs ? first + rank_in_pair() * Traits::cta_keys : first;
}

// Gives back a buffer of Q or dO, which both CTAs of a pair write.
template <class Traits, int kStages>
CUTE_DEVICE void release_queries(Ring<kStages>& ring, PipelineState<kStages> const& state) {
  consumer_release(ring, state);
  if constexpr (Traits::in_pairs) {
    if (threadIdx.x % 32 == 0) arrive_at_peer(&ring.empty[state.stage]);
  }
}

// Passes a step's buffers on, unread and, of dS, unwritten.
template <class Traits>
CUTE_DEVICE void skip_step(typename Traits::SharedStorage& smem,
                           PipelineState<Traits::stages>& q_state,
                           PipelineState<Traits::dout_stages>& dout_state,
                           PipelineState<Traits::ds_stages>& ds_state) {
  consumer_wait(smem.q_ring, q_state);
  __syncwarp();
  consumer_release(smem.q_ring, q_state);
  q_state.advance();
  consumer_wait(smem.dout_ring, dout_state);
  __syncwarp();
  consumer_release(smem.dout_ring, dout_state);
  dout_state.advance();
  producer_acquire(smem.ds_ring, ds_state);
  __syncwarp();
  producer_commit(smem.ds_ring, ds_state);
  ds_state.advance();
}

// The pairs of a step and the 64 keys from key_begin on, whose queries are in q_stage. range: of
// the tile's queries.
template <class Traits>
CUTE_DEVICE StepPairs pairs_of_step(typename Traits::SharedStorage const& smem, int q_stage,
                                    Sequence const& sequence, BlockRange const& range,
                                    Step const& step, int key_begin, bool has_all_keys) {
  if constexpr (Traits::announces) {
    VisitedQueries const& visited = smem.visited[q_stage];
    return {.sequence = sequence,
            .head = visited.step.head,
            .query_begin = visited.step.tile * Traits::block_m,
            .key_begin = key_begin,
            .is_interior = has_all_keys && visited.is_in_window,
            .pieces = visited.pieces};
  } else {
    return {.sequence = sequence,
            .head = step.head,
            .query_begin = step.tile * Traits::block_m,
            .key_begin = key_begin,
            .is_interior = has_all_keys && range.is_interior(step.tile)};
  }
}

template <class Traits>
CUTE_DEVICE void mma_dkdv(BackwardKernelArguments const& args, typename Traits::SharedStorage& smem,
                          int warpgroup) {
  using Element = typename Traits::Element;
  constexpr int block_m = Traits::block_m;
  BackwardArguments const& call = args.call;
  const int thread = threadIdx.x % warpgroup_threads;
  using Math = ScoreMath<Traits>;
  const Math math(call);
  PipelineState<Traits::work_stages> work_state;
  PipelineState<Traits::key_stages> key_state;
  PipelineState<Traits::stages> q_state;
  PipelineState<Traits::dout_stages> dout_state;
  PipelineState<Traits::ds_stages> ds_state;

  auto sK = smem_tile<typename Traits::KeyLayout>(smem.k);    // (64, head_dim, key_stages * parts)
  auto sV = smem_tile<typename Traits::ValueLayout>(smem.v);  // (64, head_dim_v, ..)
  auto sQ = smem_tile<typename Traits::QueryLayout>(smem.q);  // (block_m, head_dim, stages)
  auto sdO =
      smem_tile<typename Traits::OutputLayout>(smem.dout);  // (block_m, head_dim_v, dout_stages)

  typename Traits::ScoresMma scores_mma;
  typename Traits::KeyGradientMma dk_mma;
  typename Traits::ValueGradientMma dv_mma;
  auto scores_share = scores_mma.get_thread_slice(thread);
  auto tSrK = scores_share.partition_fragment_A(sK);
  auto tSrV = scores_share.partition_fragment_A(sV);
  auto tSrQ = scores_share.partition_fragment_B(sQ);
  auto tSrdO = scores_share.partition_fragment_B(sdO);
  auto tGrQ = dk_mma.get_thread_slice(thread).partition_fragment_B(transposed(sQ));
  auto tGrdO = dv_mma.get_thread_slice(thread).partition_fragment_B(transposed(sdO));
  auto tSrS = partition_fragment_C(scores_mma, Shape<_64, Int<block_m>>{});
  auto tSrdP = partition_fragment_C(scores_mma, Shape<_64, Int<block_m>>{});
  auto tGrdK = partition_fragment_C(dk_mma, Shape<_64, Int<Traits::head_dim>>{});
  auto tGrdV = partition_fragment_C(dv_mma, Shape<_64, Int<Traits::head_dim_v>>{});
  auto tGrP = make_tensor_like<Element>(a_operand_view(tSrS));
  auto tGrdS = make_tensor_like<Element>(a_operand_view(tSrdP));
  auto own_weights = make_tensor_like<Element>(tGrP);
  auto& weights = weights_beside<Traits>(tGrP, own_weights);

  // Products run until they are waited for; then their buffer is given back.
  typename Math::Statistic lse_log2;
  typename Math::Statistic softmax_d;
  auto start_scores = [&]() {
    consumer_wait(smem.q_ring, q_state);
    if constexpr (Traits::reads_ahead) lse_log2.read(smem.lse_log2[q_state.stage]);
    start_product(scores_mma, tSrK(_, _, _, Traits::part_tile(key_state.stage, warpgroup)),
                  tSrQ(_, _, _, q_state.stage), tSrS, false);
  };

  for (;; work_state.advance()) {
    consumer_wait(smem.work_ring, work_state);
    typename Traits::WorkItem const& item = smem.work[work_state.stage];
    if (item.work.tile == no_tile) break;
    const int key_begin = first_own_key<Traits>(item) + 64 * warpgroup;
    const bool has_all_keys = key_begin + 64 <= item.work.sequence.seqlen_k;
    using Item = typename Traits::WorkItem;
    const std::conditional_t<Traits::reads_ahead, StepOrder, Item const&> order(item);
    const std::conditional_t<Traits::reads_ahead, BlockRange, BlockRange const&> range = item.range;
    const auto skips_half = [&] {
      return Traits::skips_hidden_half && warpgroup == 1 && item.half_starts_later;
    };
    // The pairs of a step whose scores are made.
    auto made_tile = [&](Step const& step) {
      return pairs_of_step<Traits>(smem, q_state.stage, item.work.sequence, range, step, key_begin,
                                   has_all_keys);
    };

    consumer_wait(smem.key_ring, key_state);
    Step step = Step::first(item);
    int steps = item.steps();
    if (skips_half()) {
      skip_step<Traits>(smem, q_state, dout_state, ds_state);
      step.advance(order);
      steps -= item.end_head - item.first_head;
    }
    start_scores();
    if constexpr (Traits::stores_in_ds) {
      if (thread == 0) wait_stores();
      sync_output(warpgroup);
    }
    for (int index = 0;; ++index, step.advance(order)) {
      // Pairs are found before the wait, or after it.
      const StepPairs early_tile = made_tile(step);
      const auto excluded = math.excluded_pairs(early_tile);
      wait_products<0>(tSrS);
      if constexpr (Traits::has_bias) {
        const int box = Traits::part_tile(q_state.stage, warpgroup);
        add_transposed_bias<block_m>(smem.bias + box * 64 * block_m,
                                     call.params.score.softmax_scale, tSrS);
      }
      if constexpr (Traits::reads_ahead) {
        math.probabilities(early_tile, excluded, lse_log2, tSrS, tGrP, weights);
      } else {
        lse_log2.read(smem.lse_log2[q_state.stage]);
        math.probabilities(made_tile(step), excluded, lse_log2, tSrS, tGrP, weights);
      }

      if (index == 0) consumer_wait(smem.value_ring, key_state);  // it follows K
      consumer_wait(smem.dout_ring, dout_state);
      start_product(scores_mma, tSrV(_, _, _, Traits::part_tile(key_state.stage, warpgroup)),
                    tSrdO(_, _, _, dout_state.stage), tSrdP, false);
      auto start_dv = [&]() {
        start_product(dv_mma, tGrP, tGrdO(_, _, _, dout_state.stage), tGrdV, index > 0);
      };
      if constexpr (!Traits::marks_dropped) start_dv();
      softmax_d.read(smem.softmax_d[dout_state.stage]);
      wait_products<Traits::keeps_probabilities ? 1 : 0>(tSrdP);
      math.gradients(weights, softmax_d, tSrdP, tGrdS);
      store_dscores<Traits>(smem, ds_state, warpgroup, tGrdS, [&](int stage) {
        if constexpr (Traits::is_sparse) {
          if (warpgroup == 0 && thread == 0)
            smem.ds_steps[stage] = smem.visited[q_state.stage].step;
        }
      });

      if constexpr (!Traits::starts_dk_first) commit_dscores<Traits>(smem, ds_state, warpgroup);
      if constexpr (Traits::marks_dropped) {
        zero_negative<Element>(tGrP);
        start_dv();
      }
      start_product(dk_mma, tGrdS, tGrQ(_, _, _, q_state.stage), tGrdK, index > 0);
      if constexpr (Traits::starts_dk_first) commit_dscores<Traits>(smem, ds_state, warpgroup);
      wait_products<1>(tGrdV);
      release_queries<Traits>(smem.dout_ring, dout_state);
      dout_state.advance();
      const PipelineState<Traits::stages> last_state = q_state;
      q_state.advance();
      if (index + 1 == steps) {
        wait_products<0>(tGrdK);
        release_queries<Traits>(smem.q_ring, last_state);
        break;
      }
      if (skips_half() && step.tile == order.last_tile) {
        // The next head's first step. Its queries are behind these, whose buffer comes after it.
        wait_products<0>(tGrdK);
        release_queries<Traits>(smem.q_ring, last_state);
        skip_step<Traits>(smem, q_state, dout_state, ds_state);
        step.advance(order);
        start_scores();
        continue;
      }
      start_scores();
      wait_products<1>(tGrdK);
      release_queries<Traits>(smem.q_ring, last_state);
    }
    consumer_release(smem.key_ring, key_state);
    key_state.advance();

    bool has_results = true;
    if constexpr (Traits::shares_tiles) {
      if (item.parts > 1) {
        has_results = join_parts<Traits>(call, item, tGrdK, tGrdV, smem.parts_done[warpgroup],
                                         warpgroup, thread);
      }
    }
    if (has_results) {
      leave_key_gradients<Traits>(args, smem, ds_state, item, key_begin, tGrdK, tGrdV, warpgroup,
                                  thread);
    }
    __syncwarp();
    consumer_release(smem.work_ring, work_state);
  }
  if ((Traits::stores_tiles || Traits::stores_in_ds) && thread == 0)
    wait_stores();  // shared memory ends with the CTA
}

}  // namespace flash_attn_cuda::sm90
