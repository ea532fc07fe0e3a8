// What lies between the products of a backward step, for a thread's share of S^T and dP^T: keys
// (j, j + 8) and pairs (i, i + 1) of every eight queries.
//
// P goes on in 16 bits, as dV wants it and as dS takes it: in fp32 beside dP it would need
// registers that there are not. With dropout it is negative where a pair is dropped,
//
//   dS = |P| * (kept dP - D),
//
// until dS is made, and then 0 for dV. Where scores have a curve dS takes a weight P * their
// slope instead, beside P. With keep probability k a kept dP counts 1 / k times: the factor is left
// to the ends of dV, dK and dQ, and D is multiplied by k instead.
#pragma once

#include "shared/fragments.h"
#include "shared/gradient/backward_arguments.h"
#include "shared/mask/mask.h"
#include "shared/online_softmax.h"
#include "shared/scores/score_modifiers.h"
#include "sm90/backward/excluded.h"
#include "sm90/backward/traits.h"

namespace flash_attn_cuda::sm90 {

// The tensor's registers with rows and columns exchanged.
template <class Tensor>
CUTE_HOST_DEVICE constexpr auto exchanged(Tensor&& tensor) {
  return make_tensor(tensor.data(), select<1, 0>(tensor.layout()));
}

// A thread's share of a statistic of a step's queries, a pair for every eight of them.
CUTE_DEVICE float2 const* share_of_statistic(float const* statistic) {
  return reinterpret_cast<float2 const*>(statistic + threadIdx.x % 4 * 2);
}

// A statistic in registers, of queries (i, i + 1) of the group'th eight. It is read before a
// product is waited for: shared memory that feeds products answers late.
template <int kQueries>
struct StatisticInRegisters {
  float2 groups[kQueries / 8];

  CUTE_DEVICE void read(float const* statistic) {
    CUTE_UNROLL
    for (int group = 0; group < kQueries / 8; ++group)
      groups[group] = share_of_statistic(statistic)[4 * group];
  }
  CUTE_DEVICE float2 operator[](int group) const { return groups[group]; }
};

// A statistic that is read when it is used, where there are no registers for it.
struct StatisticInPlace {
  float2 const* share;

  CUTE_DEVICE void read(float const* statistic) { share = share_of_statistic(statistic); }
  CUTE_DEVICE float2 operator[](int group) const { return share[4 * group]; }
};

// Where the weights go: beside P, or, where nothing tells them apart, with it.
template <class Traits, class Operand>
CUTE_DEVICE Operand& weights_beside(Operand& probs, Operand& own_weights) {
  if constexpr (Traits::has_weights) {
    return own_weights;
  } else {
    return probs;
  }
}

// Two numbers of 16 bits an instruction; NaN stays.
template <class Element, class Fragment>
CUTE_DEVICE void zero_negative(Fragment& fragment) {
  using Two = std::conditional_t<std::is_same_v<Element, cutlass::half_t>, __half2, __nv_bfloat162>;
  auto pairs = recast<Two>(fragment);
  const Two zeros{};
  CUTE_UNROLL
  for (int i = 0; i < size(pairs); ++i) pairs(i) = __hmax2_nan(pairs(i), zeros);
}

template <class Traits>
struct ScoreMath {
  static constexpr int queries = Traits::block_m;  // of a tile of scores
  using Statistic =
      std::conditional_t<Traits::reads_ahead, StatisticInRegisters<queries>, StatisticInPlace>;
  using Element = typename Traits::Element;
  using Excluded = ExcludedPairs<Traits>;
  static constexpr bool drops = Traits::has_dropout;

  BackwardArguments const& call;
  RngState rng;

  CUTE_DEVICE explicit ScoreMath(BackwardArguments const& call) : call(call), rng{} {
    if (drops) rng = read_rng(call.params.dropout.rng);
  }

  CUTE_DEVICE Excluded excluded_pairs(StepPairs const& tile) const {
    return Excluded::find(call.params, rng, tile);
  }

  // S -> P and the weights, both in 16 bits and in the order of the left operand of a product. They
  // are the same registers where nothing tells them apart.
  template <class Accumulator, class Operand, class Weights>
  CUTE_DEVICE void probabilities(StepPairs const& tile, Excluded const& excluded,
                                 Statistic const& lse_log2, Accumulator& tSrS, Operand& probs,
                                 Weights& weights) const {
    if constexpr (Traits::has_weights) {
      const ScoreModifiers modifiers = this->modifiers(tile);
      auto all_scores = rows_cols_view(tSrS);
      const bool reaches = modifiers.is_curved() && modifiers.scale_to_curve(all_scores);
      // A row with dropout gets calls without it only where it serves all features.
      const bool is_dropped = drops && call.params.dropout.threshold > 0;
      if ((!drops || Traits::separate) && reaches && tile.is_interior && !is_dropped &&
          !modifiers.terms.is_used()) {
        curve_and_exponentiate(all_scores, lse_log2, probs, weights);
        return;
      }
      // Some queries at a time, so that not all weights are in fp32 at once.
      constexpr int part_queries = 32;
      CUTE_UNROLL
      for (int begin = 0; begin < queries; begin += part_queries) {
        auto scores = queries_of<part_queries>(tSrS, begin);
        auto fp32_weights = make_tensor_like<float>(scores);
        StepPairs part = tile;
        part.query_begin += begin;
        modified_scores<part_queries>(part, modifiers, reaches, lse_log2, begin / 8, scores,
                                      fp32_weights);
        auto part_scores = rows_cols_view(scores);
        excluded.mark(begin / 16, part_scores);
        CUTE_UNROLL
        for (int i = 0; i < size(scores); ++i) {
          fp32_weights(i) *= scores(i);
          if (drops) scores(i) = scores(i) < 0.0f ? 0.0f : scores(i);
        }
        auto part_weights = queries_of<part_queries>(weights, begin);
        auto part_probs = queries_of<part_queries>(probs, begin);
        convert_into(fp32_weights, part_weights);
        convert_into(scores, part_probs);
      }
    } else {
      auto scores = rows_cols_view(tSrS);  // (keys, queries)
      if (Traits::has_score_modifiers && modifies_scores(call.params.score)) {
        auto by_query = exchanged(scores);
        modifiers(tile).apply(by_query, coords_by_query<queries>(), tile.query_begin,
                              tile.key_begin);
      }
      excluded.hide(tile, scores);
      if (!tile.is_interior) hide(tile, scores, coords_by_key<queries>());
      exponentiate(scores, lse_log2, 0);
      excluded.mark(0, scores);
      convert_into(a_operand_view(tSrS), probs);
    }
  }

  // dP -> dS in 16 bits, in the order of weights.
  template <class Weights, class Accumulator, class Gradients>
  CUTE_DEVICE void gradients(Weights const& weights, Statistic const& softmax_d, Accumulator& tSrdP,
                             Gradients& tGrdS) const {
    if constexpr (Traits::rounds_differences) {
      rounded_gradients(weights, softmax_d, tSrdP, tGrdS);
    } else {
      fp32_gradients(weights, softmax_d, tSrdP);
      convert_into(a_operand_view(tSrdP), tGrdS);
    }
  }

 private:
  template <class Weights, class Accumulator, class Gradients>
  CUTE_DEVICE static void rounded_gradients(Weights const& weights, Statistic const& softmax_d,
                                            Accumulator const& tSrdP, Gradients& tGrdS) {
    const auto dprobs = rows_cols_view(tSrdP);  // (keys, queries)
    const auto rounded = rows_cols_view(make_tensor(weights.data(), tSrdP.layout()));
    auto dscores = rows_cols_view(make_tensor(tGrdS.data(), tSrdP.layout()));
    CUTE_UNROLL
    for (int query = 0; query < size<1>(dprobs); query += 2) {
      const float2 d = softmax_d[query / 2];
      CUTE_UNROLL
      for (int key = 0; key < size<0>(dprobs); ++key) {
        const auto weight = reinterpret_cast<__nv_bfloat162 const&>(rounded(key, query));
        const auto difference =
            __floats2bfloat162_rn(dprobs(key, query) - d.x, dprobs(key, query + 1) - d.y);
        reinterpret_cast<__nv_bfloat162&>(dscores(key, query)) = __hmul2(weight, difference);
      }
    }
  }

  // dP -> dS, in its place.
  template <class Weights, class Accumulator>
  CUTE_DEVICE void fp32_gradients(Weights const& weights, Statistic const& softmax_d,
                                  Accumulator& tSrdP) const {
    auto dscores = rows_cols_view(tSrdP);  // (keys, queries)
    auto rounded = rows_cols_view(make_tensor(weights.data(), tSrdP.layout()));
    using Pair = cutlass::Array<Element, 2>;
    cutlass::NumericArrayConverter<float, Element, 2> convert;
    auto gradient = [](float weight, float dp, float d) {
      if (!drops) return weight * (dp - d);
      return fabsf(weight) * ((__float_as_int(weight) < 0 ? 0.0f : dp) - d);
    };
    CUTE_UNROLL
    for (int query = 0; query < size<1>(dscores); query += 2) {
      float2 d = softmax_d[query / 2];
      if (drops) d = {d.x * call.keep_probability, d.y * call.keep_probability};
      CUTE_UNROLL
      for (int key = 0; key < size<0>(dscores); ++key) {
        const auto weight = convert(reinterpret_cast<Pair const&>(rounded(key, query)));
        dscores(key, query) = gradient(weight[0], dscores(key, query), d.x);
        dscores(key, query + 1) = gradient(weight[1], dscores(key, query + 1), d.y);
      }
    }
  }

  // What a thread holds of the queries [begin, begin + kQueries), of an accumulator of S^T or of a
  // left operand made of one: their registers have the same order.
  template <int kQueries, class Fragment>
  CUTE_DEVICE static auto queries_of(Fragment& fragment, int begin) {
    return make_tensor(fragment.data() + begin / 2,
                       Layout<Shape<Shape<_2, _2, Int<kQueries / 8>>, _1, _1>>{});
  }

  // Signed, for what it makes of coordinates.
  CUTE_DEVICE static int thread_of_warpgroup() {
    return static_cast<int>(threadIdx.x % warpgroup_threads);
  }

  // (keys, queries) -> (key, query), and (queries, keys) -> (query, key)
  template <int kQueries>
  CUTE_DEVICE static auto coords_by_key() {
    const auto share = SharedMma<Element, kQueries, 16>{}.get_thread_slice(thread_of_warpgroup());
    return rows_cols_view(share.partition_C(make_identity_tensor(Shape<_64, Int<kQueries>>{})));
  }
  template <int kQueries>
  CUTE_DEVICE static auto coords_by_query() {
    const auto share = SharedMma<Element, kQueries, 16>{}.get_thread_slice(thread_of_warpgroup());
    return exchanged(rows_cols_view(share.partition_C(
        make_tensor(make_inttuple_iter(make_coord(0, 0)),
                    make_layout(Shape<_64, Int<kQueries>>{}, make_stride(E<1>{}, E<0>{}))))));
  }

  CUTE_DEVICE ScoreModifiers modifiers(StepPairs const& tile) const {
    return ScoreModifiers::of(call.params.score, tile.sequence.index, tile.head,
                              tile.sequence.shift);
  }

  // What scale_to_curve() made -> P and the weights, where nothing else changes scores: in one
  // loop, so that exponentials hide the rest.
  template <class Numbers, class Operand, class Weights>
  CUTE_DEVICE void curve_and_exponentiate(Numbers const& numbers, Statistic const& lse_log2,
                                          Operand& probs, Weights& weights) const {
    cutlass::NumericArrayConverter<Element, float, 2> convert;
    auto prob_pairs = recast<cutlass::Array<Element, 2>>(probs);
    auto weight_pairs = recast<cutlass::Array<Element, 2>>(weights);
    CUTE_UNROLL
    for (int query = 0; query < size<1>(numbers); query += 2) {
      const float2 lse = lse_log2[query / 2];
      CUTE_UNROLL
      for (int key = 0; key < size<0>(numbers); ++key) {
        float p[2], weight[2];
        CUTE_UNROLL
        for (int i = 0; i < 2; ++i) {
          const float score = ScoreModifiers::Curve::apply_to_scaled(numbers(key, query + i));
          p[i] = fast_exp2(score * call.scale_log2 - (i == 0 ? lse.x : lse.y));
          weight[i] = p[i] * ScoreModifiers::Curve::derivative(score);
        }
        prob_pairs(query + key) = convert({p[0], p[1]});
        weight_pairs(query + key) = convert({weight[0], weight[1]});
      }
    }
  }

  // tSrS: S, or, where scores have a curve, what scale_to_curve() made of it -> P, and what dS has
  // beside it as a factor.
  template <int kQueries, class Accumulator, class Weights>
  CUTE_DEVICE void modified_scores(StepPairs const& tile, ScoreModifiers const& modifiers,
                                   bool reaches, Statistic const& lse_log2, int first_group,
                                   Accumulator& tSrS, Weights& slopes) const {
    auto scores = rows_cols_view(tSrS);
    auto by_query = exchanged(scores);
    const auto query_coords = coords_by_query<kQueries>();
    CUTE_UNROLL
    for (int i = 0; i < size(slopes); ++i) slopes(i) = 1.0f;
    if (modifiers.is_curved()) {
      modifiers.apply_and_differentiate(by_query, reaches, query_coords, tile.query_begin,
                                        tile.key_begin, [&](auto derivative) {
                                          CUTE_UNROLL
                                          for (int i = 0; i < size(tSrS); ++i)
                                            slopes(i) *= derivative(tSrS(i));
                                        });
    } else if (modifies_scores(call.params.score)) {
      modifiers.apply(by_query, query_coords, tile.query_begin, tile.key_begin);
    }
    if (!tile.is_interior) hide(tile, scores, coords_by_key<kQueries>());
    exponentiate(scores, lse_log2, first_group);
  }

  template <class Scores, class Coords>
  CUTE_DEVICE void hide(StepPairs const& tile, Scores& scores, Coords const& coords) const {
    const ScoreMask<Traits::config.mask> mask{
        .band = band_from_keys(call.params.window, tile.sequence.shift),
        .seqlen_k = tile.sequence.seqlen_q};
    mask.apply_by_bits(scores, coords, tile.key_begin, tile.query_begin, -INFINITY,
                       tile.sequence.seqlen_k);
  }

  // A score is scale_log2 * S in powers of two. first_group: of the scores' queries.
  template <class Scores>
  CUTE_DEVICE void exponentiate(Scores& scores, Statistic const& lse_log2, int first_group) const {
    CUTE_UNROLL
    for (int query = 0; query < size<1>(scores); query += 2) {
      const float2 lse = lse_log2[first_group + query / 2];
      CUTE_UNROLL
      for (int key = 0; key < size<0>(scores); ++key) {
        scores(key, query) = fast_exp2(scores(key, query) * call.scale_log2 - lse.x);
        scores(key, query + 1) = fast_exp2(scores(key, query + 1) * call.scale_log2 - lse.y);
      }
    }
  }
};

}  // namespace flash_attn_cuda::sm90
