// The producer of a backward CTA: one thread that loads K, V, Q, dO, a bias and the row statistics
// of the tiles that the dispatcher announces, in the order in which the others want them.
#pragma once

#include "sm90/backward/dispatcher.h"
#include "sm90/tile/spans.h"

namespace flash_attn_cuda::sm90 {

template <class Traits>
struct BackwardProducer {
  static constexpr int block_m = Traits::block_m;
  static constexpr int head_dim = Traits::head_dim;
  static constexpr int head_dim_v = Traits::head_dim_v;

  BackwardKernelArguments const& args;
  typename Traits::SharedStorage& smem;
  PipelineState<Traits::key_stages> key_state{};
  PipelineState<Traits::stages> q_state{};
  PipelineState<Traits::dout_stages> dout_state{};
  PipelineState<Traits::work_stages> work_state{};

  CUTE_DEVICE void load_keys(BackwardWorkItem const& item) {
    Sequence const& sequence = item.work.sequence;
    producer_acquire(smem.key_ring, key_state);
    std::uint64_t* full_k = &smem.key_ring.full[key_state.stage];
    std::uint64_t* full_v = &smem.value_ring.full[key_state.stage];
    FullBarrier::arrive_and_expect_tx(full_k, Traits::key_bytes);
    FullBarrier::arrive_and_expect_tx(full_v, Traits::value_bytes);
    // 64 keys that do not exist are read from the tile's first row, and their scores are hidden.
    const auto part_keys = [&](int part) {
      const int key = item.work.tile * Traits::block_n + part * 64;
      const int row = key < sequence.seqlen_k ? key : item.work.tile * Traits::block_n;
      return keys_from(sequence, item.head_k, row);
    };
    const int rank = Traits::in_pairs ? rank_in_pair() : 0;
    const int first_part = rank * Traits::key_parts;
    constexpr int box = Traits::key_box_columns;
    // Beyond it columns of K repeat: they meet zeros of Q, and such columns of dQ are not written.
    const int last_box =
        Traits::in_pairs ? (args.call.params.shape.head_dim - 1) / box * box : head_dim;
    CUTE_UNROLL
    for (int part = 0; part < Traits::key_parts; ++part) {
      load_tile<64, head_dim, box>(
          args.k_map, full_k, smem.k + Traits::part_tile(key_state.stage, part) * 64 * head_dim,
          part_keys(first_part + part), last_box);
    }
    if constexpr (Traits::in_pairs) {
      constexpr int columns = Traits::cta_columns;
      CUTE_UNROLL
      for (int part = 0; part < Traits::key_parts; ++part) {
        load_tile<64, columns>(args.k_map, full_k, smem.from_peer.k + part * 64 * columns,
                               part_keys((rank ^ 1) * Traits::key_parts + part), last_box, 64,
                               rank * columns);
      }
    }
    CUTE_UNROLL
    for (int part = 0; part < Traits::key_parts; ++part) {
      load_tile<64, head_dim_v>(args.v_map, full_v,
                                smem.v + Traits::part_tile(key_state.stage, part) * 64 * head_dim_v,
                                part_keys(first_part + part));
    }
    key_state.advance();
  }

  // A tile of q or dout, and its rows of one statistic. announce(stage) writes what the key
  // warpgroups shall find with it, besides loaded bytes.
  template <int kColumns, int kMoreBytes = 0, int kStages, class Element, class Announce>
  CUTE_DEVICE void load_queries(CUtensorMap const& map, Ring<kStages>& ring,
                                PipelineState<kStages>& state, Element* tiles,
                                RowSpan const& queries, float const* source, float (*rows)[block_m],
                                Announce announce) {
    producer_acquire(ring, state);
    announce(state.stage);
    std::uint64_t* full = &ring.full[state.stage];
    constexpr int bytes = block_m * kColumns * int(sizeof(Element));
    FullBarrier::arrive_and_expect_tx(full, bytes + Traits::row_bytes + kMoreBytes);
    Element* tile = tiles + state.stage * block_m * kColumns;
    if constexpr (Traits::in_pairs) {
      load_half_for_pair<block_m, kColumns>(map, full, tile, queries);
    } else {
      load_tile<block_m, kColumns>(map, full, tile, queries);
    }
    SM90_BULK_COPY_G2S::copy(source, full, rows[state.stage], Traits::row_bytes);
    state.advance();
  }

  template <class Announce>
  CUTE_DEVICE void load_step(BackwardWorkItem const& item, Step const& step, Announce announce) {
    BackwardArguments const& call = args.call;
    Sequence const& sequence = item.work.sequence;
    const int query = step.tile * block_m;
    const RowSpan queries = queries_from(sequence, step.head, query);
    const std::int64_t row =
        (std::int64_t{step.head} * call.q_tiles + sequence.first_q_tile + step.tile) * block_m;
    const int stage = q_state.stage;
    load_queries<head_dim, Traits::bias_bytes>(args.q_map, smem.q_ring, q_state, smem.q, queries,
                                               call.lse_log2 + row, smem.lse_log2, announce);
    if constexpr (Traits::has_bias) {
      constexpr int block_n = Traits::block_n;
      BiasParams const& bias = call.params.score.bias;
      load_bias<block_m, block_n>(
          args.bias_map, &smem.q_ring.full[stage], smem.bias + stage * block_m * block_n,
          PairBox::of(bias, item.work.tile * block_n, query, step.head, sequence.index), bias);
    }
    load_queries<head_dim_v>(args.dout_map, smem.dout_ring, dout_state, smem.dout, queries,
                             call.softmax_d + row, smem.softmax_d, [](int) {});
  }

  // The keys of a tile are loaded after its first step: their buffer is in use until the tile
  // before it ends, those of queries are not.
  CUTE_DEVICE void run() {
    for (;; work_state.advance()) {
      consumer_wait(smem.work_ring, work_state);
      typename Traits::WorkItem const& item = smem.work[work_state.stage];
      if (item.work.tile == no_tile) break;
      const int steps = item.steps();
      if constexpr (Traits::is_sparse) {
        const auto visits = visits_of<Traits>(args.call.params, item);
        auto visit = visits.first(item.first_head, item.first_step);
        CUTE_NO_UNROLL
        for (int index = 0; index < steps; ++index, visit = visits.next(visit)) {
          if (index == max(0, steps - loads_before_next)) EmptyBarrier::arrive(&smem.tile_wanted);
          const VisitedQueries visited{.step = {visit.head, visit.visit.block},
                                       .pieces = visit.visit.pieces,
                                       .is_in_window = item.range.is_interior(visit.visit.block)};
          load_step(item, visited.step, [&](int place) { smem.visited[place] = visited; });
          if (index == 0) load_keys(item);
        }
      } else {
        Step step = Step::first(item);
        CUTE_NO_UNROLL
        for (int index = 0; index < steps; ++index, step.advance(item)) {
          load_step(item, step, [&](int place) {
            if constexpr (Traits::announces) {
              smem.visited[place] = {
                  .step = step, .pieces = {}, .is_in_window = item.range.is_interior(step.tile)};
            }
          });
          if (index == 0) load_keys(item);
        }
      }
      EmptyBarrier::arrive(&smem.work_ring.empty[work_state.stage]);
    }
    *const_cast<int volatile*>(&smem.has_loads) = 0;
  }
};

}  // namespace flash_attn_cuda::sm90
