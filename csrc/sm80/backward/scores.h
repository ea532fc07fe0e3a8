// What lies between the products S, dP and the products dV, dQ, dK: P from S and dS from dP, for a
// thread's (rows, columns) of one score tile. coords: the (query, key) each element stands for,
// counted from the tile's first pair.
#pragma once

#include <cuda_fp16.h>

#include "shared/dropout/dropout.h"
#include "shared/mask/mask.h"
#include "shared/online_softmax.h"
#include "shared/scores/score_modifiers.h"
#include "sm80/backward/traits.h"

namespace flash_attn_cuda::sm80 {

using namespace cute;

// S -> P. A score is scale_log2 * S in powers of two.
template <class Scores, class Coords>
CUTE_DEVICE void probabilities(Scores& scores, Coords const& coords, float scale_log2,
                               float const* lse_log2) {
  CUTE_UNROLL
  for (int row = 0; row < size<0>(scores); ++row) {
    const float row_lse = lse_log2[get<0>(coords(row, 0))];
    CUTE_UNROLL
    for (int col = 0; col < size<1>(scores); ++col) {
      scores(row, col) = fast_exp2(scores(row, col) * scale_log2 - row_lse);
    }
  }
}

// dP -> dS = P * (dP - D).
template <class Scores, class Coords>
CUTE_DEVICE void score_gradients(Scores const& probs, Scores& dscores, Coords const& coords,
                                 float const* softmax_d) {
  CUTE_UNROLL
  for (int row = 0; row < size<0>(dscores); ++row) {
    const float row_d = softmax_d[get<0>(coords(row, 0))];
    CUTE_UNROLL
    for (int col = 0; col < size<1>(dscores); ++col) {
      dscores(row, col) = probs(row, col) * (dscores(row, col) - row_d);
    }
  }
}

// Slopes of a thread's scores, while its registers are needed for others: in shared memory, in
// fp16, which is finer than what dS is rounded to.
template <int kThreads>
struct KeptSlopes {
  __half2* words;  // of all threads

  template <class Scores, class Derivative>
  CUTE_DEVICE void keep(Scores const& scores, Derivative derivative) const {
    CUTE_UNROLL
    for (int i = 0; i < size(scores); i += 2)
      word(i) = __floats2half2_rn(derivative(scores(i)), derivative(scores(i + 1)));
  }
  // By all threads, as they may write there next.
  template <class Scores>
  CUTE_DEVICE void multiply(Scores& dscores) const {
    CUTE_UNROLL
    for (int i = 0; i < size(dscores); i += 2) {
      const float2 slopes = __half22float2(word(i));
      dscores(i) *= slopes.x;
      dscores(i + 1) *= slopes.y;
    }
    __syncthreads();
  }

 private:
  CUTE_DEVICE __half2& word(int i) const { return words[i / 2 * kThreads + threadIdx.x]; }
};

// P and dS with modifiers and dropout. With keep probability k, P is kept / k where it is kept, and
// dS = P * (dP * kept / k - D): the factor 1 / k is left to the ends of dV, dK and dQ, and D is
// multiplied by k instead.
template <bool kDrops>
struct ModifiedScores {
  ScoreModifiers modifiers;
  bool is_modified;     // by modifiers or a bias: scores are scaled here
  DropoutMask dropout;  // if kDrops
  float scale_log2;
  float keep_probability;
  int query_begin;
  int key_begin;
  int first_query;  // query_begin and key_begin as dropout counts them
  int first_key;

  // S -> P as dV wants it, handed over by calling store_probabilities; dP -> dS. add_bias() adds
  // to scores that are scaled, hide() zeroes what the mask excludes. keeps_slopes: where modifiers
  // have a curve, dS lacks its slopes.
  template <class Scores, class Coords, class Slopes, class AddBias, class Hide, class Store>
  CUTE_DEVICE void differentiate(Scores& scores, Scores& dscores, Coords const& coords,
                                 float const* lse_log2, float const* softmax_d, bool keeps_slopes,
                                 Slopes const& slopes, AddBias add_bias, Hide hide,
                                 Store store_probabilities) const {
    if (modifiers.is_curved()) {
      if (kDrops) drop(dscores, coords);
      const bool reaches = modifiers.scale_to_curve(scores);
      modifiers.apply_and_differentiate(
          scores, reaches, coords, query_begin, key_begin, [&](auto derivative) {
            if (!keeps_slopes) {
              multiply_slopes(scores, dscores, coords, softmax_d, derivative);
              return;
            }
            slopes.keep(scores, derivative);
            multiply_slopes(scores, dscores, coords, softmax_d, [](float) { return 1.0f; });
          });
      add_bias();
      probabilities(scores, coords, scale_log2, lse_log2);
      hide();
      CUTE_UNROLL
      for (int i = 0; i < size(scores); ++i) dscores(i) *= scores(i);
      if (kDrops) drop(scores, coords);
      store_probabilities();
      return;
    }

    if (is_modified) modifiers.apply(scores, coords, query_begin, key_begin);
    add_bias();
    probabilities(scores, coords, scale_log2, lse_log2);
    hide();
    if constexpr (kDrops) {
      drop_both(scores, dscores, coords, softmax_d);
      store_probabilities();
    } else {
      store_probabilities();
      score_gradients(scores, dscores, coords, softmax_d);
    }
  }

 private:
  template <class Scores, class Coords>
  CUTE_DEVICE void drop(Scores& scores, Coords const& coords) const {
    for_each_decision(dropout, scores, coords, first_query, first_key,
                      [](float& x, bool is_kept) { x = is_kept ? x : 0.0f; });
  }

  // P -> what is kept of it; dP -> dS. Between the two passes a negative P is a dropped one, so
  // that the decisions are made once.
  template <class Scores, class Coords>
  CUTE_DEVICE void drop_both(Scores& scores, Scores& dscores, Coords const& coords,
                             float const* softmax_d) const {
    for_each_decision(dropout, scores, coords, first_query, first_key,
                      [](float& p, bool is_kept) { p = is_kept ? p : -p; });
    CUTE_UNROLL
    for (int row = 0; row < size<0>(dscores); ++row) {
      const float row_d = softmax_d[get<0>(coords(row, 0))] * keep_probability;
      CUTE_UNROLL
      for (int col = 0; col < size<1>(dscores); ++col) {
        const float p = scores(row, col);
        const bool is_dropped = p < 0.0f;
        const float from_output = is_dropped ? 0.0f : dscores(row, col);
        dscores(row, col) = fabsf(p) * (from_output - row_d);
        scores(row, col) = is_dropped ? 0.0f : p;
      }
    }
  }

  // dP -> (dP - D) times the slopes at modified scores.
  template <class Scores, class Coords, class Derivative>
  CUTE_DEVICE void multiply_slopes(Scores const& modified, Scores& dscores, Coords const& coords,
                                   float const* softmax_d, Derivative derivative) const {
    CUTE_UNROLL
    for (int row = 0; row < size<0>(dscores); ++row) {
      const float row_d = softmax_d[get<0>(coords(row, 0))] * keep_probability;
      CUTE_UNROLL
      for (int col = 0; col < size<1>(dscores); ++col) {
        const float slope = derivative(modified(row, col));
        dscores(row, col) = (dscores(row, col) - row_d) * slope;
      }
    }
  }
};

// A step of a backward CTA, for what lies between its products.
template <class Traits, class Step>
struct StepScores {
  static constexpr int block_m = Traits::block_m;
  static constexpr int block_n = Traits::block_n;
  static constexpr bool drops = Traits::has_dropout;

  BackwardArguments const& args;
  Sequence const& sequence;
  BlockRange const& range;  // of query tiles that see the keys
  Step const& step;
  int key_begin;
  bool makes_dbias;  // of CTAs that share a tile one does
  float const* lse_log2;
  float const* softmax_d;
  __half2* free_words;  // of shared memory, one for two pairs of the tile, until dS is stored

  CUTE_DEVICE ScoreTile tile() const {
    return {sequence, step.head, step.tile * block_m, key_begin};
  }

  // S -> P as dV wants it, handed over by calling store_probabilities, of rows with more than a
  // softmax; of others P is there. dP -> dS. Only after dP, so that the exponentials share the
  // product's basic block and fill its gaps.
  template <class Scores, class Coords, class Store>
  CUTE_DEVICE void differentiate(RngState const& rng, Scores& scores, Scores& dscores,
                                 Coords const& coords, Store store_probabilities) const {
    if constexpr (Traits::is_plain) {
      hide_outside(scores, coords);
      store_probabilities();
      score_gradients(scores, dscores, coords, softmax_d);
    } else {
      BackwardParams const& params = args.params;
      const ScoreTile tile = this->tile();
      const ModifiedScores<drops> modified{
          .modifiers = ScoreModifiers::of(params.score, sequence.index, step.head, sequence.shift),
          .is_modified = modifies_scores(params.score),
          .dropout = DropoutMask::of(rng, params.dropout.threshold, sequence.stream, step.head),
          .scale_log2 = args.scale_log2,
          .keep_probability = args.keep_probability,
          .query_begin = tile.query_begin,
          .key_begin = key_begin,
          .first_query = sequence.first_q + tile.query_begin,
          .first_key = sequence.first_k + key_begin};
      const auto add_bias = [&] { Traits::Bias::apply(params.score, tile, scores, coords); };
      const auto hide = [&] {
        hide_outside(scores, coords);
        Traits::Lists::apply(params.sparsity, step, tile, scores, coords, 0.0f);
      };
      // A bias is added behind the curve, whose slopes its gradient lacks.
      const bool is_wanted = Traits::has_bias && makes_dbias && params.dbias.data != nullptr;
      const bool keeps_slopes = is_wanted && modified.modifiers.is_curved();
      const KeptSlopes<Traits::threads> slopes{free_words};
      modified.differentiate(scores, dscores, coords, lse_log2, softmax_d, keeps_slopes, slopes,
                             add_bias, hide, store_probabilities);
      if (!is_wanted) return;
      Traits::Bias::add_gradient(params.dbias, params.score.bias, tile,
                                 1.0f / args.keep_probability, dscores, coords);
      if (keeps_slopes) slopes.multiply(dscores);
    }
  }

 private:
  template <class Scores, class Coords>
  CUTE_DEVICE void hide_outside(Scores& scores, Coords const& coords) const {
    if (key_begin + block_n <= sequence.seqlen_k && range.is_interior(step.tile)) return;
    const ScoreMask<Traits::config.mask> mask{
        .band = band_from_queries(args.params.window, sequence.shift),
        .seqlen_k = sequence.seqlen_k};
    mask.apply(scores, coords, step.tile * block_m, key_begin, 0.0f);
  }
};

}  // namespace flash_attn_cuda::sm80
