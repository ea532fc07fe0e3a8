// A consumer warpgroup of a forward CTA: S, P and O of 64 query rows of every tile, in registers.
//
// The scores of a block are multiplied together with P V of the block before it, and while P V
// still runs the warpgroup is already in the softmax of the new scores, where it has registers for
// two P (Shah et al., "FlashAttention-3", 2024, section 3.2). The warpgroups take turns, so that
// one multiplies while another exponentiates (section 3.1). Of two CTAs on an SM a warpgroup does
// one after the other, and leaves the tensor cores to the other three meanwhile; there a last block
// of few keys is a step of its own, of narrower products. Blocks that only other queries of the
// tile see it drops, and takes its turns all the same.
#pragma once

#include "shared/block_range.h"
#include "shared/dropout.h"
#include "shared/mask.h"
#include "shared/online_softmax.h"
#include "shared/paged_kv.h"
#include "shared/score_modifiers.h"
#include "sm90/forward_dropout.h"
#include "sm90/forward_epilogue.h"
#include "sm90/named_barriers.h"

namespace flash_attn_cuda::sm90 {

template <class Traits>
CUTE_DEVICE void consume(ForwardArguments const& args, typename Traits::SharedStorage& smem,
                         int warpgroup) {
  using Element = typename Traits::Element;
  constexpr int block_n = Traits::block_n;
  ForwardParams const& params = args.params;
  const int thread = threadIdx.x % 128;
  const PingPong<Traits::consumers, Traits::drops_turns> turns{
      warpgroup, Traits::drops_turns && params.dropout.threshold > 0};
  PipelineState<Traits::work_stages> work_state;
  PipelineState<Traits::q_stages> q_state;
  // Where nothing overlaps, K and V of a step lie in the same place of their rings.
  PipelineState<Traits::stages> k_state, own_v_state;
  auto& v_state = Traits::overlaps_softmax ? own_v_state : k_state;
  PipelineState<Traits::bias_stages> bias_state;
  [[maybe_unused]] PipelineState<1> bits_state;
  [[maybe_unused]] PipelineState<Traits::word_stages> word_state;

  auto sQ = smem_tile<typename Traits::QueryLayout>(smem.q);  // (64, head_dim, q_stages * parts)
  auto sK = smem_tile<typename Traits::KeyLayout>(smem.k);    // (block_n, head_dim, stages)
  auto sV =
      transposed(smem_tile<typename Traits::ValueLayout>(smem.v));  // (head_dim_v, block_n, ..)

  typename Traits::ScoresMma scores_mma;
  typename Traits::OutputMma output_mma;
  auto scores_share = scores_mma.get_thread_slice(thread);
  auto output_share = output_mma.get_thread_slice(thread);
  auto tSrQ = scores_share.partition_fragment_A(sQ);  // (atom, m, k, q_stages * parts)
  auto tSrK = scores_share.partition_fragment_B(sK);  // (atom, n, k, stages)
  auto tOrV = output_share.partition_fragment_B(sV);  // (atom, n, k, stages)
  auto tSrS = partition_fragment_C(scores_mma, Shape<_64, Int<block_n>>{});
  auto tOrO = partition_fragment_C(output_mma, Shape<_64, Int<Traits::head_dim_v>>{});
  auto tOrP = make_tensor_like<Element>(a_operand_view(tSrS));
  auto scores = rows_cols_view(tSrS);
  auto output = rows_cols_view(tOrO);
  // This thread's (rows, columns) of S -> (query, key)
  auto tScS =
      rows_cols_view(scores_share.partition_C(make_identity_tensor(Shape<_64, Int<block_n>>{})));

  using Shifts =
      std::conditional_t<Traits::shifts_rows, RowShifts<Traits::rows_per_thread>, NoShifts>;
  [[maybe_unused]] VisitedKeys visited{};  // whose scores are made, where there are lists
  [[maybe_unused]] bool misses_keys = false;
  [[maybe_unused]] SeenPairs seen{};  // of it

  // Products run while other code does; finish_.. waits for them and gives the buffer back. Of a
  // block in shared memory a product takes as many keys as its instructions, or its P, have.
  auto start_scores = [&](auto& mma, auto& accumulator) {
    consumer_wait(smem.k_ring, k_state);
    auto q = tSrQ(_, _, _, q_state.stage * Traits::consumers + warpgroup);
    start_product(mma, q, tSrK(_, _, _, k_state.stage), accumulator, false);
  };
  auto start_output = [&](auto& probabilities, bool add) {
    consumer_wait(smem.v_ring, v_state);
    start_product(output_mma, probabilities, tOrV(_, _, _, v_state.stage), tOrO, add);
  };
  auto finish_scores = [&](auto& accumulator, auto products_left, bool last_of_tile) {
    wait_products<products_left>(accumulator);
    consumer_release(smem.k_ring, k_state);
    if (Traits::overlaps_softmax) k_state.advance();
    if (last_of_tile) consumer_release(smem.q_ring, q_state);
  };
  auto finish_output = [&]() {
    wait_products<0>(tOrO);
    consumer_release(smem.v_ring, v_state);
    v_state.advance();
  };
  // A block that these queries do not see, and others of the tile do.
  auto drop_block = [&]() {
    consumer_wait(smem.k_ring, k_state);
    __syncwarp();
    consumer_release(smem.k_ring, k_state);
    if (Traits::overlaps_softmax) k_state.advance();
    consumer_wait(smem.v_ring, v_state);
    __syncwarp();
    consumer_release(smem.v_ring, v_state);
    v_state.advance();
  };

  if constexpr (Traits::overlaps_softmax) turns.open();
  for (;; work_state.advance(), q_state.advance()) {
    consumer_wait(smem.work_ring, work_state);
    TileWork const& work = smem.work[work_state.stage].work;
    if (work.tile == no_tile) break;
    const BlockRange of_tile = smem.work[work_state.stage].range;
    Sequence const& sequence = work.sequence;
    const int query_begin = work.tile * Traits::block_m + 64 * warpgroup;
    BlockRange range = of_tile;
    if (Traits::drops_blocks && !params.window.is_full()) {
      range = own_range(band_from_queries(params.window, sequence.seqlen_q, sequence.seqlen_k),
                        query_begin, min(query_begin + 64, sequence.seqlen_q) - 1,
                        sequence.seqlen_k, block_n, of_tile);
    }
    [[maybe_unused]] ScoreModifiers modifiers{};
    [[maybe_unused]] DropoutMask dropout{};
    if constexpr (Traits::has_modifiers) {
      modifiers = ScoreModifiers::of(params.score, sequence.index, work.head,
                                     sequence.seqlen_k - sequence.seqlen_q);
    }
    if constexpr (Traits::has_dropout && !Traits::draws_ahead) {
      dropout = DropoutMask::of(read_rng(params.dropout.rng), params.dropout.threshold,
                                sequence.index, params.shape.num_heads_q, work.head);
    }
    OnlineSoftmax<Traits::rows_per_thread> softmax(args.scale_log2);

    // What the block is of which the scores are multiplied, and what of it is seen. Behind the
    // products, so that whose turn is next does not wait for it.
    auto look_up_block = [&]() {
      if constexpr (Traits::is_paged) misses_keys = smem.misses_keys[k_state.stage];
      if constexpr (Traits::is_sparse) {
        visited = smem.sparse.visited[k_state.stage];
        if (visited.shows_all(warpgroup)) return;
        seen = {};
        if (!wants_bits(params.sparsity.bits, visited.pieces, warpgroup)) return;
        auto& ring = smem.sparse.bits_ring[warpgroup];
        consumer_wait(ring, bits_state);
        seen = read_mask_bits(smem.sparse.bits[warpgroup], visited.pieces, warpgroup, tScS);
        finish_reads();
        consumer_release(ring, bits_state);
        bits_state.advance();
      }
    };

    auto mask_of_sequence = [&]() {
      return ScoreMask<Traits::config.mask>{
          .band = band_from_queries(params.window, sequence.seqlen_q, sequence.seqlen_k),
          .seqlen_k = sequence.seqlen_k};
    };

    // What comes between the scores of `block` and their softmax; returns what rows of them lack.
    auto modify_and_mask = [&](int block) {
      bool is_interior = range.is_interior(block);
      if constexpr (Traits::is_sparse) {
        block = visited.block;
        is_interior = visited.is_in_window;
      }
      const int key_begin = block * block_n;
      Shifts row_shifts{};
      if constexpr (Traits::has_modifiers) {
        if (has_score_modifiers(params.score)) {
          if constexpr (Traits::shifts_rows) {
            modifiers.template apply_but_shifts<64, block_n>(scores, tScS, query_begin, key_begin,
                                                             row_shifts);
          } else {
            modifiers.apply(scores, tScS, query_begin, key_begin);
          }
        }
      }
      if constexpr (Traits::has_bias) {
        consumer_wait(smem.bias_ring, bias_state);
        add_bias<Traits::block_m, block_n>(smem.bias + bias_state.stage * Traits::block_m * block_n,
                                           64 * warpgroup, params.score.softmax_scale, tSrS);
        finish_reads();
        consumer_release(smem.bias_ring, bias_state);
        bias_state.advance();
      }
      if constexpr (Traits::is_sparse) {
        if (!visited.shows_all(warpgroup)) {
          hide_unseen_pairs(scores, visited.pieces, warpgroup, seen, -INFINITY);
        }
      }
      if constexpr (Traits::is_paged) {
        if (misses_keys) {
          hide_missing_keys<block_n>(KeyRows::of(params.paged, sequence), scores, tScS, key_begin,
                                     sequence.seqlen_k, -INFINITY);
        }
      }
      if (!is_interior) {
        mask_of_sequence().apply_by_bits(scores, tScS, query_begin, key_begin, -INFINITY);
      }
      return row_shifts;
    };

    [[maybe_unused]] KeptPairs<Traits> kept;
    auto decide_dropout = [&]([[maybe_unused]] int block) {
      if constexpr (Traits::has_dropout) {
        if (params.dropout.threshold == 0) return;
        if constexpr (Traits::draws_ahead) {
          kept = take_words<Traits>(smem, warpgroup, thread, word_state);
          word_state.advance();
        } else {
          kept = KeptPairs<Traits>::draw(dropout, [&](int tile) {
            const auto place = tScS(0, 4 * tile);
            return int2{query_begin + get<0>(place), block * block_n + get<1>(place)};
          });
        }
      }
    };

    // S -> P for the next product; rescale(row, factor): what O has to be multiplied by before it.
    auto rescale_o = [&](int row, float factor) { softmax.multiply_row(output, row, factor); };
    auto has_no_o = [](int, float) {};
    auto scores_to_probabilities = [&](auto& target, Shifts const& row_shifts, auto rescale) {
      auto pairs = recast<std::uint32_t>(target);
      if constexpr (Traits::has_dropout) {
        if (params.dropout.threshold > 0) {
          auto drop = [&](int tile, float (&p)[2][4]) { drop_pairs(kept, tile, p); };
          softmax.template softmax_to_pairs<Element>(scores, pairs, row_shifts, rescale, drop);
          return;
        }
      }
      auto keep_all = [](int, float (&)[2][4]) {};
      softmax.template softmax_to_pairs<Element>(scores, pairs, row_shifts, rescale, keep_all);
    };

    consumer_wait(smem.q_ring, q_state);
    if constexpr (Traits::drops_blocks) {
      CUTE_NO_UNROLL
      for (int block = of_tile.end - 1; block >= range.end; --block) {
        if (Traits::overlaps_softmax && block < of_tile.end - 1) turns.take_and_pass();
        drop_block();
      }
    }
    if constexpr (Traits::overlaps_softmax) {
      const bool has_turn = range.end < of_tile.end;
      if (has_turn) turns.take();
      start_scores(scores_mma, tSrS);
      if (has_turn) turns.pass();
      look_up_block();
      finish_scores(tSrS, Int<0>{}, range.end - 1 == range.begin);
      const auto row_shifts = modify_and_mask(range.end - 1);
      decide_dropout(range.end - 1);
      scores_to_probabilities(tOrP, row_shifts, has_no_o);
      if constexpr (Traits::alternates_probabilities) {
        // S of a block beside P V of the one before it, then S -> the next P. Inline, because as a
        // function it would have its registers in memory.
        auto step = [&](int block, auto& probabilities,
                        auto& next_probabilities) __attribute__((always_inline)) {
          turns.take();
          start_scores(scores_mma, tSrS);
          start_output(probabilities, block < range.end - 2);
          turns.pass();
          look_up_block();
          finish_scores(tSrS, Int<1>{}, block == range.begin);
          const auto row_shifts = modify_and_mask(block);
          decide_dropout(block);
          bool moved = false;
          float factors[2] = {1.0f, 1.0f};
          scores_to_probabilities(next_probabilities, row_shifts, [&](int row, float factor) {
            moved = true;
            factors[row] = factor;
          });
          finish_output();
          warpgroup_fence_operand(probabilities);  // which the product has read until now
          if (moved) {
            CUTE_UNROLL
            for (int row = 0; row < Traits::rows_per_thread; ++row) rescale_o(row, factors[row]);
          }
        };
        int block = range.end - 2;
        auto tOrOtherP = make_tensor_like(tOrP);
        for (;;) {  // two steps: which of the two P is the next one has to be known when compiled
          if (block < range.begin) {
            start_output(tOrP, range.end - range.begin > 1);
            break;
          }
          step(block--, tOrP, tOrOtherP);
          if (block < range.begin) {
            start_output(tOrOtherP, true);
            break;
          }
          step(block--, tOrOtherP, tOrP);
        }
      } else {
        for (int block = range.end - 2; block >= range.begin; --block) {
          turns.take();
          start_scores(scores_mma, tSrS);
          start_output(tOrP, block < range.end - 2);
          turns.pass();
          look_up_block();
          finish_scores(tSrS, Int<1>{}, block == range.begin);
          const auto row_shifts = modify_and_mask(block);
          decide_dropout(block);
          finish_output();  // P is free
          scores_to_probabilities(tOrP, row_shifts, rescale_o);
        }
        start_output(tOrP, range.end - range.begin > 1);
      }
      finish_output();
    } else {
      // A warp without any multiplies as well, and nobody reads its O: it takes its scores for P.
      const bool has_queries = query_begin + first_row_of_warp(thread) < sequence.seqlen_q;
      int block = range.end - 1;
      bool has_output = false;
      if (sequence.seqlen_k - block * block_n <= Traits::narrow_keys) {
        typename Traits::NarrowScoresMma narrow_mma;
        auto tNrS = partition_fragment_C(narrow_mma, Shape<_64, Int<Traits::narrow_keys>>{});
        auto tNrP = make_tensor_like<Element>(a_operand_view(tNrS));
        start_scores(narrow_mma, tNrS);
        finish_scores(tNrS, Int<0>{}, block == range.begin);
        if (has_queries) {
          auto narrow_scores = rows_cols_view(tNrS);
          const int key_begin = block * block_n;
          if (params.window.is_full()) {
            mask_of_sequence().apply_end(narrow_scores, tScS, key_begin, -INFINITY);
          } else {
            mask_of_sequence().apply(narrow_scores, tScS, query_begin, key_begin, -INFINITY);
          }
          softmax.softmax(narrow_scores, has_no_o);
        }
        convert_into(a_operand_view(tNrS), tNrP);
        start_output(tNrP, false);
        finish_output();
        has_output = true;
        --block;
      }
      for (; block >= range.begin; --block) {
        start_scores(scores_mma, tSrS);
        finish_scores(tSrS, Int<0>{}, block == range.begin);
        if (has_queries) {
          modify_and_mask(block);
          softmax.softmax(scores, [&](int row, float factor) {
            if (has_output) rescale_o(row, factor);
          });
        }
        convert_into(a_operand_view(tSrS), tOrP);
        start_output(tOrP, has_output);
        finish_output();
        has_output = true;
      }
    }
    if constexpr (Traits::drops_blocks) {
      // Read again, because a register for it would be kept all the tile long.
      const int first_of_tile = smem.work[work_state.stage].range.begin;
      CUTE_NO_UNROLL
      for (int block = range.begin - 1; block >= first_of_tile; --block) {
        if constexpr (Traits::overlaps_softmax) turns.take_and_pass();
        drop_block();
      }
    }
    write_output<Traits>(args, sequence, smem.work[work_state.stage].split, work.head, query_begin,
                         output_mma, tOrO, softmax, smem, warpgroup, thread);
    __syncwarp();
    consumer_release(smem.work_ring, work_state);
  }
  if (Traits::stores_tiles && Traits::stores(thread))
    wait_stores();  // shared memory ends with the CTA
}

}  // namespace flash_attn_cuda::sm90
