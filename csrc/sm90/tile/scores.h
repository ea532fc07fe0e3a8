// What lies between the products of a forward step, for a thread's share of S: modifiers, a bias,
// what lists, pages and the window hide, what dropout keeps, and the softmax that makes P.
#pragma once

#include "shared/mask/tree_mask.h"
#include "shared/online_softmax.h"
#include "shared/scores/score_modifiers.h"
#include "sm90/tile/effects.h"
#include "sm90/tile/tile.h"

namespace flash_attn_cuda::sm90 {

// What the softmax still has to do to the scores of a block.
template <class Bias>
struct LeftToSoftmax {
  Bias row_bias{};
  bool curve = false;
};

// The scores of one tile.
template <class Traits>
struct ForwardScores {
  using Element = typename Traits::Element;
  using Tile = ForwardTile<Traits>;
  using Left = LeftToSoftmax<
      std::conditional_t<Traits::has_row_bias, RowBias<Traits::rows_per_thread>, NoRowBias>>;
  static constexpr int block_n = Traits::block_n;

  Tile const& tile;
  RowsOfTile<Traits> rows;
  typename Traits::SharedStorage& smem;
  int warpgroup;
  int thread;  // of the warpgroup
  ForwardEffects<Traits>& effects;
  ScoreModifiers modifiers{};

  CUTE_DEVICE ForwardScores(Tile const& tile, TileWork const& work,
                            typename Traits::SharedStorage& smem, int warpgroup, int thread,
                            ForwardEffects<Traits>& effects)
      : tile(tile),
        rows{tile.params, work},
        smem(smem),
        warpgroup(warpgroup),
        thread(thread),
        effects(effects) {
    if (Traits::has_score_modifiers) {
      modifiers = ScoreModifiers::of(tile.params.score, tile.sequence.index, work.head,
                                     tile.sequence.shift);
    }
    effects.dropout.start(tile, work.head);
  }

  // Looks up the block in `stage`, whose scores are multiplied, in lists and pages.
  CUTE_DEVICE void look_up_block(int stage) const {
    effects.pages.prefetch(smem, stage);
    effects.lists.prefetch(tile, smem, stage, warpgroup, thread);
  }

  // Raw scores -> those of the softmax; returns what they lack. may_leave: that may be the second
  // half of their curve.
  template <class Accumulator>
  CUTE_DEVICE Left modify_and_mask(int position, bool may_leave, Accumulator& tSrS) const {
    ForwardParams const& params = tile.params;
    auto scores = rows_cols_view(tSrS);
    const bool is_interior = effects.lists.is_interior(tile.range, position);
    const int key_begin = effects.lists.block(position) * block_n;
    Left left;
    if constexpr (Traits::has_score_modifiers) {
      if (modifies_scores(params.score)) {
        may_leave = Traits::leaves_curve && may_leave && is_interior && !effects.pages.hides() &&
                    !drops() && !rows.are_wanted() && modifiers.is_curve_alone(params.score);
        left.curve = modifiers.template apply_for_softmax<64, block_n, Traits::config.features>(
            scores, score_coords<Traits>(thread), tile.query_begin, key_begin, may_leave,
            left.row_bias);
        if (left.curve) return left;
      }
    }
    effects.bias.apply(tile, smem, warpgroup, tSrS);
    effects.lists.apply(warpgroup, scores);
    effects.pages.apply(tile, key_begin, thread, scores);
    if (!is_interior) {
      const auto coords = score_coords<Traits>(thread);
      tile.mask().apply_by_bits(scores, coords, tile.query_begin, key_begin, -INFINITY);
      if (Traits::can_split && params.window.has_tree) {
        SequenceTree::of(params.tree, tile.sequence)
            .hide(
                scores, [&](int row) { return tile.query_begin + get<0>(coords(row, 0)); },
                key_begin, -INFINITY);
      }
    }
    return left;
  }

  // What keys of e4m3 in `stage` leave to be multiplied.
  template <class Accumulator>
  CUTE_DEVICE void scale(int stage, Accumulator& tSrS) const {
    auto scores = rows_cols_view(tSrS);
    effects.e4m3.apply(smem, stage, thread, scores);
  }

  // Prefetches dropout's decisions about the pairs of a block.
  CUTE_DEVICE void decide_dropout(int block) const {
    effects.dropout.prefetch(tile, smem, block, warpgroup, thread);
  }

  // S -> P for the next product; rescale(row, factor): what O has to be multiplied by before it.
  // value_stage: where the block's values lie, if their tokens have scales.
  template <class Accumulator, class Operand, class Rescale>
  CUTE_DEVICE void probabilities(Accumulator& tSrS, Left const& left,
                                 typename Traits::Softmax& softmax, Operand& tOrP, Rescale rescale,
                                 [[maybe_unused]] int value_stage = 0) const {
    auto scores = rows_cols_view(tSrS);
    auto pairs = recast<std::uint32_t>(tOrP);
    if constexpr (Traits::has_dropout) {
      if (tile.params.dropout.threshold > 0) {
        auto drop = [&](int sixteen, float (&p)[2][4]) {
          drop_pairs(effects.dropout.kept, sixteen, p);
        };
        softmax.template softmax_to_pairs<Element>(scores, pairs, left.row_bias, rows, rescale,
                                                   drop);
        return;
      }
    }
    bool is_too_large = false;
    if constexpr (Traits::leaves_curve) {
      if (left.curve) {
        const ScoreModifiers::Curve::Exponents exponents(softmax.scale_log2);
        if (softmax.template softmax_of_curve_to_pairs<Element>(scores, exponents, pairs)) return;
        is_too_large = true;
        ScoreModifiers::Curve::apply_to_scaled(scores, true);
      }
    }
    if constexpr (Traits::converts_e4m3) {
      if (effects.e4m3.values_have_own) {
        auto weigh = effects.e4m3.weigher(smem.value_scales[value_stage], thread, rescale);
        softmax.template softmax_to_pairs<Element>(scores, pairs, left.row_bias, rows, rescale,
                                                   weigh);
        return;
      }
    }
    auto keep_all = [](int, float (&)[2][4]) {};
    softmax.template softmax_to_pairs<Element>(scores, pairs, left.row_bias, rows, rescale,
                                               keep_all, is_too_large);
  }

 private:
  CUTE_DEVICE bool drops() const {
    return Traits::has_dropout && tile.params.dropout.threshold > 0;
  }
};

}  // namespace flash_attn_cuda::sm90
