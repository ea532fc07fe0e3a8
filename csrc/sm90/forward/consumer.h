// A consumer warpgroup of a forward CTA: S, P and O of 64 query rows of every tile, in registers.
// Where two CTAs share an SM, two_ctas.h takes this file's place.
//
// The scores of a block are multiplied together with P V of the block before it, and while P V
// still runs the warpgroup is already in the softmax of the new scores, where it has registers for
// two P (Shah et al., "FlashAttention-3", 2024, section 3.2). The warpgroups take turns, so that
// one multiplies while another exponentiates (section 3.1). Blocks that only other queries of the
// tile see it drops, and takes its turns all the same.
#pragma once

#include "shared/online_softmax.h"
#include "sm90/forward/epilogue.h"
#include "sm90/forward/output_parts.h"
#include "sm90/forward/products.h"
#include "sm90/tile/scores.h"

namespace flash_attn_cuda::sm90 {

template <class Traits>
CUTE_DEVICE void consume(ForwardArguments const& args, typename Traits::SharedStorage& smem,
                         int warpgroup) {
  ForwardParams const& params = args.params;
  const int thread = threadIdx.x % warpgroup_threads;
  const PingPong<Traits::consumers, Traits::drops_turns> turns{
      warpgroup,
      Traits::goes_without_turns || (Traits::drops_turns && params.dropout.threshold > 0)};
  PipelineState<Traits::work_stages> work_state;
  ForwardEffects<Traits> effects;
  ForwardProducts<Traits> products{smem, warpgroup, thread};
  auto tSrS = products.make_scores();
  auto tOrO = products.make_output();
  auto tOrP = products.make_probabilities(tSrS);
  using Output = decltype(tOrO);
  std::conditional_t<Traits::multiplies_e4m3, OutputParts<Traits, Output>,
                     WholeOutput<Traits, Output>>
      parts;

  turns.open();
  for (;; work_state.advance(), products.q_state.advance()) {
    consumer_wait(smem.work_ring, work_state);
    TileWork const& work = smem.work[work_state.stage].work;
    if (work.tile == no_tile) break;
    const BlockRange of_tile = smem.work[work_state.stage].range;
    Sequence const& sequence = work.sequence;
    const int query_begin = work.tile * Traits::block_m + 64 * warpgroup;
    BlockRange range = of_tile;
    if (Traits::drops_blocks && !params.window.is_full()) {
      range = own_range(band_from_queries(params.window, sequence.shift), query_begin,
                        min(query_begin + 64, sequence.seqlen_q) - 1, sequence.seqlen_k,
                        Traits::block_n, of_tile);
    }
    if (Traits::drops_without_queries && query_begin >= sequence.seqlen_q)
      range.begin = range.end - 1;
    const VisitOrder order = visit_order<Traits>(params, work, range);
    const ForwardTile<Traits> tile{params, sequence, query_begin, range};
    const ForwardScores<Traits> scores(tile, work, smem, warpgroup, thread, effects);
    consumer_wait(smem.q_ring, products.q_state);
    typename Traits::Softmax softmax(args.scale_log2, scores.rows);
    if constexpr (Traits::is_e4m3)
      softmax.scale_log2 =
          effects.e4m3.start(tile, work.head, args.scale_log2, products.convert_queries());
    auto rescale_o = [&](int row, float factor) { parts.multiply_row(tOrO, row, factor); };
    parts.start(tOrO);
    if constexpr (Traits::drops_blocks) {
      CUTE_NO_UNROLL
      for (int block = of_tile.end - 1; block >= range.end; --block) {
        if (block < of_tile.end - 1) turns.take_and_pass();
        products.drop_block();
      }
    }

    const auto scale_scores = [&] { scores.scale(products.k_state.stage, tSrS); };
    // Of the block whose probabilities are made. is_next: the block before still has its values.
    const auto stage_of_values = [&](bool is_next) {
      auto state = products.v_state();
      if (is_next) state.advance();
      if constexpr (Traits::converts_e4m3) {
        if (effects.e4m3.values_have_own) consumer_wait(smem.v_ring, state);
      }
      return state.stage;
    };

    // The first block's scores have no P V beside them.
    const bool has_turn = range.end < of_tile.end;
    if (has_turn) turns.take();
    products.start_scores(tSrS);
    if (has_turn) turns.pass();
    {
      const int position = range.end - 1;
      const int block = order.block_at(position);
      scores.look_up_block(products.k_state.stage);
      products.template finish_scores<0>(tSrS, position == range.begin, scale_scores);
      const auto left = scores.modify_and_mask(block, false, tSrS);
      scores.decide_dropout(block);
      scores.probabilities(tSrS, left, softmax, tOrP, [](int, float) {}, stage_of_values(false));
    }
    if constexpr (!Traits::alternates_probabilities) {
      for (int position = range.end - 2; position >= range.begin; --position) {
        const int block = order.block_at(position);
        turns.take();
        products.start_scores(tSrS);
        products.start_output(tOrP, parts.target(tOrO), parts.begin_step(position < range.end - 2));
        turns.pass();
        scores.look_up_block(products.k_state.stage);
        products.template finish_scores<1>(tSrS, position == range.begin, scale_scores);
        const auto left = scores.modify_and_mask(block, !softmax.needs_maximum, tSrS);
        scores.decide_dropout(block);
        products.finish_output(parts.target(tOrO));  // P is free
        parts.end_step(tOrO);
        scores.probabilities(tSrS, left, softmax, tOrP, rescale_o, stage_of_values(false));
      }
      products.start_output(tOrP, parts.target(tOrO),
                            parts.begin_step(range.end - range.begin > 1));
    } else {
      // A step whose next P is made while this one is still read. Inline, because as a function it
      // would have its registers in memory.
      auto step = [&](int position, auto& tOrP, auto& tOrNextP) __attribute__((always_inline)) {
        const int block = order.block_at(position);
        turns.take();
        products.start_scores(tSrS);
        products.start_output(tOrP, parts.target(tOrO), parts.begin_step(position < range.end - 2));
        turns.pass();
        scores.look_up_block(products.k_state.stage);
        products.template finish_scores<1>(tSrS, position == range.begin, scale_scores);
        const auto left = scores.modify_and_mask(block, !softmax.needs_maximum, tSrS);
        scores.decide_dropout(block);
        bool moved = false;
        float factors[2] = {1.0f, 1.0f};
        scores.probabilities(
            tSrS, left, softmax, tOrNextP,
            [&](int row, float factor) {
              moved = true;
              factors[row] = Traits::is_e4m3 ? factors[row] * factor : factor;
            },
            stage_of_values(true));
        products.finish_output(parts.target(tOrO));
        warpgroup_fence_operand(tOrP);  // which the product has read until now
        parts.end_step(tOrO);
        if (moved) {
          CUTE_UNROLL
          for (int row = 0; row < Traits::rows_per_thread; ++row) rescale_o(row, factors[row]);
        }
      };
      int position = range.end - 2;
      auto tOrOtherP = products.make_probabilities(tSrS);
      for (;;) {  // two steps: which of the two P is the next one has to be known when compiled
        if (position < range.begin) {
          products.start_output(tOrP, parts.target(tOrO),
                                parts.begin_step(range.end - range.begin > 1));
          break;
        }
        step(position--, tOrP, tOrOtherP);
        if (position < range.begin) {
          products.start_output(tOrOtherP, parts.target(tOrO), parts.begin_step(true));
          break;
        }
        step(position--, tOrOtherP, tOrP);
      }
    }
    products.finish_output(parts.target(tOrO));
    parts.finish(tOrO);

    if constexpr (Traits::drops_blocks || Traits::drops_without_queries) {
      // Read again, because a register for it would be kept all the tile long.
      const int first_of_tile = smem.work[work_state.stage].range.begin;
      CUTE_NO_UNROLL
      for (int block = range.begin - 1; block >= first_of_tile; --block) {
        turns.take_and_pass();
        products.drop_block();
      }
    }
    float value_scale = 1.0f;
    if constexpr (Traits::is_e4m3) value_scale = effects.e4m3.of_output(tile, work.head);
    write_output<Traits>(args, sequence, smem.work[work_state.stage].split, work.head, query_begin,
                         products.output_mma, tOrO, softmax, smem, warpgroup, thread, value_scale);
    __syncwarp();
    consumer_release(smem.work_ring, work_state);
  }
  if (Traits::stores_tiles && Traits::stores(thread))
    wait_stores();  // shared memory ends with the CTA
}

}  // namespace flash_attn_cuda::sm90
