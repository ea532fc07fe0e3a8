// The dQ warpgroup of a backward CTA: dQ = dS K of every step. Of the key tiles that a query tile
// sees the first one stores its part in global memory, in fp32, those in the middle add theirs, and
// the last one writes dq, where an order is known; else all add. Straight from registers, 16 bytes
// a thread, that costs wgmma next to nothing; through shared memory it would cost a quarter of the
// kernel (docs/backward_sm90.md).
#pragma once

#include "shared/gradient/dq_accumulator.h"
#include "sm90/backward/arguments.h"
#include "sm90/backward/finish.h"
#include "sm90/backward/traits.h"
#include "sm90/isa/barriers.h"
#include "sm90/isa/cta_pair.h"

namespace flash_attn_cuda::sm90 {

// dS of a step -> dbias.
template <class Traits>
CUTE_DEVICE void write_bias_gradient(BackwardKernelArguments const& args,
                                     typename Traits::SharedStorage const& smem, int ds_stage,
                                     BackwardWorkItem const& item, Step const& step, int thread) {
  constexpr int block_m = Traits::block_m;
  constexpr int block_n = Traits::block_n;
  BiasParams const& bias = args.call.params.score.bias;
  BiasGradient const& dbias = args.call.params.dbias;
  if (dbias.data == nullptr) return;
  auto const* tile = smem.ds + ds_stage * block_m * block_n;
  const int query_begin = step.tile * block_m;
  const int key_begin = item.work.tile * block_n;
  const int sequence = item.work.sequence.index;
  if (dbias.is_summed) {
    add_bias_tile<block_m, block_n>(dbias, bias, tile, sequence, step.head, query_begin, key_begin,
                                    thread);
  } else if (thread == 0) {
    store_bias_tile<block_m, block_n>(
        args.dbias_map, tile, PairBox::of(dbias, key_begin, query_begin, step.head, sequence),
        bias);
  }
}

// dQ of 64 queries, dq_columns of it -> dq.
template <class Traits, class Accumulator>
CUTE_DEVICE void write_query_gradient(BackwardArguments const& call, Sequence const& sequence,
                                      Step const& step, int row, int column, Accumulator& dq,
                                      int thread) {
  CUTE_UNROLL
  for (int i = 0; i < size(dq); ++i) dq(i) *= call.score_factor;
  const auto write_as = [&](auto stored) {
    auto target = query_gradient_rows<Traits, decltype(stored)>(call.params, sequence, step.head,
                                                                step.tile, row);
    target.first += column;
    target.columns -= column;
    write_rows(rows_cols_view(dq), target, thread);
  };
  if (Traits::writes_fp32 && call.params.fp32_results) {
    write_as(float{});
  } else {
    write_as(typename Traits::Element{});
  }
}

// The tile of dq_accum to which a step adds, which is its counter as well.
template <class Traits>
CUTE_DEVICE std::int64_t sum_of(BackwardArguments const& call,
                                typename Traits::WorkItem const& item, Step const& step) {
  if constexpr (Traits::writes_dq) return step.sum(item);
  return std::int64_t{step.head} * call.q_tiles + item.work.sequence.first_q_tile + step.tile;
}

template <class Traits>
CUTE_DEVICE void add_query_gradients(BackwardKernelArguments const& args,
                                     typename Traits::SharedStorage& smem) {
  constexpr int block_m = Traits::block_m;
  constexpr int block_n = Traits::block_n;
  constexpr int head_dim = Traits::head_dim;
  constexpr int dq_columns = Traits::dq_columns;
  BackwardArguments const& call = args.call;
  const int thread = threadIdx.x % 128;
  PipelineState<Traits::work_stages> work_state;
  PipelineState<Traits::key_stages> key_state;
  PipelineState<Traits::ds_stages> ds_state;
  PipelineState<Traits::added_stages> added_state;

  // Of a pair each CTA makes its columns of dQ, of both CTAs' keys.
  const int first_column = Traits::in_pairs ? rank_in_pair() * Traits::cta_columns : 0;
  constexpr int columns = Traits::cta_columns;
  // (columns, keys, key_stages * parts). Those of a CTA of a pair begin at another address, or,
  // with several parts, at another n: ptxas has registers for the one or for the other.
  constexpr bool by_address = Traits::key_parts == 1;
  auto sK = [&] {
    if constexpr (by_address) {
      return transposed<columns>(smem_tile<typename Traits::KeyLayout>(smem.k + 64 * first_column));
    } else {
      return transposed(smem_tile<typename Traits::KeyLayout>(smem.k));
    }
  }();
  const int first_n = by_address ? 0 : first_column / dq_columns;
  // (queries, keys, ds_stages * parts)
  auto sdS = [&] {
    auto tiles = smem_tile<typename Traits::ScoresLayout>(smem.ds);
    if constexpr (Traits::has_bias) {
      return tiles;
    } else {
      return transposed(tiles);
    }
  }();
  typename Traits::DqMma mma;
  auto tQrdS = a_fragment(mma, sdS, thread);  // (atom, m, k, ds_stages * warpgroups)
  auto tQrK = b_fragment(mma, sK, thread);    // (atom, n, k, key_stages * parts)
  AccumulatorOf<decltype(mma), Shape<_64, Int<dq_columns>>> tQrdQ;

  for (;; work_state.advance()) {
    consumer_wait(smem.work_ring, work_state);
    typename Traits::WorkItem const& item = smem.work[work_state.stage];
    if (item.work.tile == no_tile) break;
    Sequence const& sequence = item.work.sequence;
    consumer_wait(smem.key_ring, key_state);
    Step step = Step::first(item);
    for (int left = item.steps(); left > 0; --left, step.advance(item)) {
      const bool skips_half =
          Traits::skips_hidden_half && item.half_starts_later && step.tile == item.first_tile;
      if constexpr (Traits::is_sparse) {
        consumer_wait(smem.ds_ring, ds_state);
        step = smem.ds_steps[ds_state.stage];
      }
      const std::int64_t index = sum_of<Traits>(call, item, step);
      float* sums = call.dq_accum + index * (block_m * head_dim) + first_column * 64;
      const bool is_started = !Traits::writes_dq || item.added_before.holds(step.tile);
      const bool is_unfinished = !Traits::writes_dq || item.added_after.holds(step.tile);
      if constexpr (!Traits::is_sparse) consumer_wait(smem.ds_ring, ds_state);
      if constexpr (Traits::has_bias)
        write_bias_gradient<Traits>(args, smem, ds_state.stage, item, step, thread);
      const auto wait_for_turn = [&] {
        if (!call.turns.used()) return;
        call.turns.wait(index, adders_of<block_m, block_n>(call.params.window, sequence, step.tile),
                        item.work.tile, thread, sync_dq, Traits::ctas_per_tile);
      };
      // Kept from step to step, the addresses of two CTAs' keys take more registers than there are.
      const auto step_k = [&] {
        if constexpr (Traits::in_pairs) {
          return with_new_addresses(tQrK);
        } else {
          return tQrK;
        }
      }();
      CUTE_UNROLL
      for (int m = 0; m < block_m / 64; ++m) {
        CUTE_UNROLL
        for (int n = 0; n < columns / dq_columns; ++n) {
          const bool is_first = m == 0 && n == 0;
          const bool resumes = is_started && !is_unfinished;
          if (resumes) {
            if (is_first) wait_for_turn();
            DqAccumulator<128>::load(sums, tQrdQ, thread);
          }
          CUTE_UNROLL
          for (int part = 0; part < Traits::key_parts; ++part) {
            if (part > 0 && skips_half) continue;
            start_product(mma, tQrdS(_, m, _, Traits::ds_tile(ds_state.stage, part)),
                          step_k(_, first_n + n, _, Traits::part_tile(key_state.stage, part)),
                          tQrdQ, part > 0 || resumes);
          }
          if constexpr (Traits::in_pairs) {
            auto tQrdSOfPeer = a_fragment(
                mma, transposed(smem_tile<typename Traits::ScoresLayout>(smem.from_peer.ds)),
                thread);
            auto tQrKOfPeer = with_new_addresses(b_fragment(
                mma, transposed(smem_tile<typename Traits::PeerKeyLayout>(smem.from_peer.k)),
                thread));
            CUTE_UNROLL
            for (int part = 0; part < Traits::key_parts; ++part) {
              start_product(mma, tQrdSOfPeer(_, m, _, Traits::ds_tile(ds_state.stage, part)),
                            tQrKOfPeer(_, n, _, part), tQrdQ, true);
            }
          }
          wait_products<0>(tQrdQ);
          if (m + 1 == block_m / 64 && n + 1 == columns / dq_columns) {
            if constexpr (Traits::has_bias) {
              if (thread == 0) wait_stores();
              __syncwarp();
            }
            consumer_release(smem.ds_ring, ds_state);
            if constexpr (Traits::in_pairs) {
              if (threadIdx.x % 32 == 0) arrive_at_peer(&smem.ds_ring.empty[ds_state.stage]);
            }
            ds_state.advance();
            // With the tile's last product, not its last addition.
            if (threadIdx.x % 32 == 0 && left == 1)
              EmptyBarrier::arrive(&smem.key_ring.empty[key_state.stage]);
          }
          if (is_first && !resumes) wait_for_turn();
          if (!is_unfinished) {
            write_query_gradient<Traits>(call, sequence, step, 64 * m,
                                         first_column + n * dq_columns, tQrdQ, thread);
          } else if (is_started) {
            DqAccumulator<128>::add(sums, tQrdQ, thread);
          } else {
            DqAccumulator<128>::store(sums, tQrdQ, thread);
          }
          sums += 64 * dq_columns;  // pairs: of the only 64 queries
        }
      }
      // Where nobody counts as well: with a branch for it ptxas serialized the products (d = 64,
      // bf16).
      if constexpr (Traits::writes_dq) {
        producer_acquire(smem.added_ring, added_state);
        __syncwarp();
        producer_commit(smem.added_ring, added_state);
        added_state.advance();
      }
    }
    __syncwarp();
    if constexpr (Traits::is_sparse) {
      producer_acquire(smem.added_ring, added_state);
      __syncwarp();
      producer_commit(smem.added_ring, added_state);
      added_state.advance();
    }
    key_state.advance();
    consumer_release(smem.work_ring, work_state);
  }
}

}  // namespace flash_attn_cuda::sm90
