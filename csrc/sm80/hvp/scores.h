// What lies between the products S, T, dP, dP' and the products of the gradients, for a thread's
// (rows, columns) of one score tile. coords: the (query, key) each element stands for, counted from
// the tile's first pair.
#pragma once

#include "shared/dropout/dropout.h"
#include "shared/mask/mask.h"
#include "shared/scores/score_modifiers.h"
#include "sm80/backward/scores.h"
#include "sm80/hvp/traits.h"
#include "sm80/jvp/scores.h"

namespace flash_attn_cuda::sm80 {

// A step of a CTA, for what lies between its products.
template <class Traits, class Step>
struct HvpScores {
  BackwardArguments const& args;
  Sequence const& sequence;
  BlockRange const& range;  // of query tiles that see the keys
  Step const& step;
  int key_begin;
  bool makes_dbias;  // of CTAs that share a tile one does
  typename Traits::RowStatistics const& rows;

  // S -> P (T - mu), as dV wants it; dP -> dS; dP', with T -> the tangent of dS. With keep
  // probability k, P is kept / k where it is kept: as in a backward, the factor 1 / k is left to
  // the ends of the gradients, and D and beta are multiplied by k instead.
  template <class Scores, class Coords>
  CUTE_DEVICE void differentiate(Scores& scores, Scores& tangents, Scores& dscores,
                                 Scores& tangent_dscores, Coords const& coords) const {
    BackwardParams const& params = args.params;
    const ScoreTile tile{sequence, step.head, step.tile * Traits::block_m, key_begin};
    const auto modifiers =
        ScoreModifiers::of(params.score, sequence.index, step.head, sequence.shift);
    CUTE_UNROLL
    for (int i = 0; i < size(tangents); ++i) tangents(i) *= params.score.softmax_scale;
    float slopes[decltype(size(scores))::value];
    float bends[decltype(size(scores))::value];  // what T changes them by
    const bool is_curved = modifiers.is_curved();
    if (is_curved) {
      const float per_unit = 1.0f / score_unit(params.score);
      const bool reaches = modifiers.scale_to_curve(scores);
      modifiers.apply_and_differentiate(
          scores, reaches, coords, tile.query_begin, key_begin, [&](auto derivative) {
            CUTE_UNROLL
            for (int i = 0; i < size(scores); ++i) {
              slopes[i] = derivative(scores(i));
              tangents(i) *= slopes[i];
              bends[i] = ScoreModifiers::bend(scores(i)) * per_unit * tangents(i);
            }
          });
    } else if (modifies_scores(params.score)) {
      modifiers.apply(scores, coords, tile.query_begin, key_begin);
    }
    Traits::Bias::apply(params.score, tile, scores, coords);
    add_bias_tangent<typename Traits::Element>(params.tangents.bias, tile, tangents, coords);
    probabilities(scores, coords, args.scale_log2, rows[Traits::lse_log2]);
    hide(tile, scores, coords);
    drop(tile, scores, coords);
    multiply(scores, tangents, dscores, tangent_dscores, coords);
    if (makes_dbias) {
      Traits::Bias::add_gradient(params.dbias, params.score.bias, tile,
                                 1.0f / args.keep_probability, tangent_dscores, coords);
    }
    if (!is_curved) return;
    CUTE_UNROLL
    for (int i = 0; i < size(scores); ++i) {
      tangent_dscores(i) = tangent_dscores(i) * slopes[i] + dscores(i) * bends[i];
      dscores(i) *= slopes[i];
    }
  }

 private:
  template <class Scores, class Coords>
  CUTE_DEVICE void hide(ScoreTile const& tile, Scores& scores, Coords const& coords) const {
    Traits::Lists::apply(args.params.sparsity, step, tile, scores, coords, 0.0f);
    if (key_begin + Traits::block_n <= sequence.seqlen_k && range.is_interior(step.tile)) return;
    const ScoreMask<Traits::config.mask> mask{
        .band = band_from_queries(args.params.window, sequence.shift),
        .seqlen_k = sequence.seqlen_k};
    mask.apply(scores, coords, tile.query_begin, key_begin, 0.0f);
  }

  // A P that is dropped becomes negative.
  template <class Scores, class Coords>
  CUTE_DEVICE void drop(ScoreTile const& tile, Scores& scores, Coords const& coords) const {
    DropoutParams const& params = args.params.dropout;
    if (params.threshold == 0) return;
    const auto dropout =
        DropoutMask::of(read_rng(params.rng), params.threshold, sequence.stream, step.head);
    for_each_decision(dropout, scores, coords, sequence.first_q + tile.query_begin,
                      sequence.first_k + key_begin,
                      [](float& p, bool is_kept) { p = is_kept ? p : -p; });
  }

  template <class Scores, class Coords>
  CUTE_DEVICE void multiply(Scores& scores, Scores const& tangents, Scores& dscores,
                            Scores& tangent_dscores, Coords const& coords) const {
    CUTE_UNROLL
    for (int row = 0; row < size<0>(scores); ++row) {
      const int query = get<0>(coords(row, 0));
      const float row_d = rows[Traits::softmax_d][query] * args.keep_probability;
      const float row_beta = rows[Traits::tangent_dot][query] * args.keep_probability;
      const float row_mu = rows[Traits::tangent_lse][query];
      CUTE_UNROLL
      for (int col = 0; col < size<1>(scores); ++col) {
        const float p = fabsf(scores(row, col));
        const bool is_dropped = scores(row, col) < 0.0f;
        const float from_output = is_dropped ? 0.0f : dscores(row, col);
        const float from_tangent = is_dropped ? 0.0f : tangent_dscores(row, col);
        // Where P is 0 the tangent of a bias may be anything.
        const float moved = p == 0.0f ? 0.0f : tangents(row, col) - row_mu;
        const float slack = from_output - row_d;
        scores(row, col) = is_dropped ? 0.0f : p * moved;
        dscores(row, col) = p * slack;
        tangent_dscores(row, col) = p * (from_tangent + moved * slack - row_beta);
      }
    }
  }
};

}  // namespace flash_attn_cuda::sm80
