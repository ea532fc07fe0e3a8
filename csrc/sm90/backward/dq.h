// The dQ warpgroup of a backward CTA: dQ = dS K of every step. Of the key tiles that a query tile
// sees the first one stores its dQ in global memory, in fp32, those in the middle add theirs, and
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

// The first of a CTA's columns of dQ: of a pair each makes its own, of both CTAs' keys.
template <class Traits>
CUTE_DEVICE int first_column_of_cta() {
  return Traits::in_pairs ? rank_in_pair() * Traits::cta_columns : 0;
}

// The operands of dQ = dS K of a CTA's own keys. Its columns begin at another address, or, with
// more than 64 keys, at another n: ptxas has registers for the one or for the other.
template <class Traits>
struct DqOperands {
  static constexpr bool by_address = Traits::key_parts == 1;

  // (columns, keys, key_stages * parts)
  CUTE_DEVICE static auto keys(typename Traits::SharedStorage& smem, int first_column) {
    if constexpr (by_address) {
      return transposed<Traits::cta_columns>(
          smem_tile<typename Traits::KeyLayout>(smem.k + 64 * first_column));
    } else {
      return transposed(smem_tile<typename Traits::KeyLayout>(smem.k));
    }
  }
  CUTE_DEVICE static int first_n(int first_column) {
    return by_address ? 0 : first_column / Traits::dq_columns;
  }

  // (queries, keys, ds_stages * parts)
  CUTE_DEVICE static auto dscores(typename Traits::SharedStorage& smem) {
    auto tiles = smem_tile<typename Traits::ScoresLayout>(smem.ds);
    if constexpr (Traits::has_bias) {
      return tiles;
    } else {
      return transposed(tiles);
    }
  }
};

// In a pair: the products with the other CTA's keys, added to those with its own.
template <class Traits, class Mma, class Accumulator>
CUTE_DEVICE void start_dq_of_peer(typename Traits::SharedStorage& smem, Mma& mma, int ds_stage,
                                  int m, int n, Accumulator& tQrdQ, int thread) {
  auto tQrdS = a_fragment(
      mma, transposed(smem_tile<typename Traits::ScoresLayout>(smem.from_peer.ds)), thread);
  auto tQrK = with_new_addresses(b_fragment(
      mma, transposed(smem_tile<typename Traits::PeerKeyLayout>(smem.from_peer.k)), thread));
  CUTE_UNROLL
  for (int part = 0; part < Traits::key_parts; ++part) {
    start_product(mma, tQrdS(_, m, _, Traits::ds_tile(ds_stage, part)), tQrK(_, n, _, part), tQrdQ,
                  true);
  }
}

// Gives a step's dS back, and advances.
template <class Traits>
CUTE_DEVICE void release_dscores(typename Traits::SharedStorage& smem,
                                 PipelineState<Traits::ds_stages>& state, int thread) {
  if (Traits::has_bias) {
    if (thread == 0) wait_stores();  // of the bias's gradient
    __syncwarp();
  }
  consumer_release(smem.ds_ring, state);
  if (Traits::in_pairs && threadIdx.x % 32 == 0) arrive_at_peer(&smem.ds_ring.empty[state.stage]);
  state.advance();
}

// Tells the dispatcher that dQ of a step has been added, or that of all of a tile's.
template <class Traits>
CUTE_DEVICE void announce_addition(typename Traits::SharedStorage& smem,
                                   PipelineState<Traits::added_stages>& state) {
  producer_acquire(smem.added_ring, state);
  __syncwarp();
  producer_commit(smem.added_ring, state);
  state.advance();
}

// Where dQ of a step goes, and which key tiles add to it besides.
struct DqTarget {
  float* sums;         // (64 queries, dq_columns) after another, of dq_accum
  bool is_started;     // others have added
  bool is_unfinished;  // others will

  CUTE_DEVICE bool resumes() const { return is_started && !is_unfinished; }
};

template <class Traits>
CUTE_DEVICE void mma_dq(BackwardKernelArguments const& args, typename Traits::SharedStorage& smem) {
  constexpr int block_m = Traits::block_m;
  constexpr int block_n = Traits::block_n;
  constexpr int dq_columns = Traits::dq_columns;
  constexpr int products = block_m / 64 * (Traits::cta_columns / dq_columns);
  using Operands = DqOperands<Traits>;
  BackwardArguments const& call = args.call;
  const int thread = threadIdx.x % warpgroup_threads;
  PipelineState<Traits::work_stages> work_state;
  PipelineState<Traits::key_stages> key_state;
  PipelineState<Traits::ds_stages> ds_state;
  PipelineState<Traits::added_stages> added_state;

  const int first_column = first_column_of_cta<Traits>();
  const int first_n = Operands::first_n(first_column);
  typename Traits::DqMma mma;
  // (atom, m, k, ds_stages * warpgroups), (atom, n, k, key_stages * parts)
  auto tQrdS = a_fragment(mma, Operands::dscores(smem), thread);
  auto tQrK = b_fragment(mma, Operands::keys(smem, first_column), thread);
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
      if (Traits::is_sparse) {
        consumer_wait(smem.ds_ring, ds_state);
        step = smem.ds_steps[ds_state.stage];
      }
      const std::int64_t index = sum_of<Traits>(call, item, step);
      DqTarget target{
          .sums = call.dq_accum + index * (block_m * Traits::head_dim) + first_column * 64,
          .is_started = !Traits::writes_dq || item.added_before.holds(step.tile),
          .is_unfinished = !Traits::writes_dq || item.added_after.holds(step.tile)};
      if (!Traits::is_sparse) consumer_wait(smem.ds_ring, ds_state);
      if (Traits::has_bias)
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
      for (int product = 0; product < products; ++product) {
        const int m = product / (Traits::cta_columns / dq_columns);
        const int n = product % (Traits::cta_columns / dq_columns);
        const bool resumes = target.resumes();
        if (resumes) {
          if (product == 0) wait_for_turn();
          DqAccumulator<warpgroup_threads>::load(target.sums, tQrdQ, thread);
        }
        CUTE_UNROLL
        for (int part = 0; part < Traits::key_parts; ++part) {
          if (part > 0 && skips_half) continue;
          start_product(mma, tQrdS(_, m, _, Traits::ds_tile(ds_state.stage, part)),
                        step_k(_, first_n + n, _, Traits::part_tile(key_state.stage, part)), tQrdQ,
                        part > 0 || resumes);
        }
        if constexpr (Traits::in_pairs)
          start_dq_of_peer<Traits>(smem, mma, ds_state.stage, m, n, tQrdQ, thread);
        wait_products<0>(tQrdQ);
        if (product + 1 == products) {
          release_dscores<Traits>(smem, ds_state, thread);
          // K is given back with the tile's last product, not its last addition.
          if (threadIdx.x % 32 == 0 && left == 1)
            EmptyBarrier::arrive(&smem.key_ring.empty[key_state.stage]);
        }
        if (product == 0 && !resumes) wait_for_turn();
        if (!target.is_unfinished) {
          write_query_gradient<Traits>(call, sequence, step, 64 * m, first_column + n * dq_columns,
                                       tQrdQ, thread);
        } else if (target.is_started) {
          DqAccumulator<warpgroup_threads>::add(target.sums, tQrdQ, thread);
        } else {
          DqAccumulator<warpgroup_threads>::store(target.sums, tQrdQ, thread);
        }
        target.sums += 64 * dq_columns;  // pairs: of the only 64 queries
      }
      // It does so where nothing counts as well: with a branch for it ptxas serialized the products
      // (d = 64, bf16).
      if (Traits::writes_dq) announce_addition<Traits>(smem, added_state);
    }
    __syncwarp();
    if (Traits::is_sparse) announce_addition<Traits>(smem, added_state);
    key_state.advance();
    consumer_release(smem.work_ring, work_state);
  }
}

}  // namespace flash_attn_cuda::sm90
