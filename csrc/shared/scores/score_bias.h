// A tensor added to the scores, and its gradient.
#pragma once

#include <cute/tensor.hpp>

#include "flash_attn/params.h"
#include "shared/scores/effect.h"
#include "shared/scores/exact_sum.h"
#include "shared/scores/score_modifiers.h"

namespace flash_attn_cuda {

// The bias of one sequence and query head, of kernels of `Element`.
template <class Element>
struct ScoreBias {
  BiasParams const& bias;
  std::int64_t offset;
  int last_query;
  bool has_pairs;  // neighbouring elements can be loaded together

  CUTE_DEVICE static ScoreBias of(BiasParams const& bias, int sequence, int seqlen_q, int head) {
    const std::int64_t offset = sequence * bias.batch_stride + head * bias.head_stride;
    const int bytes = bias.is_fp32 ? 4 : 2;
    const bool is_aligned = reinterpret_cast<std::uintptr_t>(bias.data) % (2 * bytes) == 0;
    return {.bias = bias,
            .offset = offset,
            .last_query = min(seqlen_q, bias.rows) - 1,
            .has_pairs = is_aligned && offset % 2 == 0 && bias.row_stride % 2 == 0};
  }

  // scores: this thread's (rows, columns) of a tile, in a unit of 1 / factor, of accumulators whose
  // lanes hold neighbouring columns (j, j + 1); coords as in shared/mask/mask.h.
  template <class Scores, class Coords>
  CUTE_DEVICE void add(Scores& scores, Coords const& coords, int query_begin, int key_begin,
                       float factor) const {
    if (bias.is_fp32) {
      add_as<float>(scores, coords, query_begin, key_begin, factor);
    } else {
      add_as<Element>(scores, coords, query_begin, key_begin, factor);
    }
  }

 private:
  template <class Number, class Scores, class Coords>
  CUTE_DEVICE void add_as(Scores& scores, Coords const& coords, int query_begin, int key_begin,
                          float factor) const {
    using namespace cute;
    constexpr int columns = decltype(size<1>(scores))::value;
    const Number* head = static_cast<const Number*>(bias.data) + offset;
    const int last_key = key_begin + get<1>(coords(0, columns - 1));
    CUTE_UNROLL
    for (int row = 0; row < size<0>(scores); ++row) {
      // What lies beyond the sequence may be no numbers, and hiding it costs the keys alone.
      const int query = min(query_begin + get<0>(coords(row, 0)), last_query);
      const Number* source = head + query * bias.row_stride + key_begin;
      if (has_pairs && last_key < bias.columns) {
        add_pairs<columns>(scores, coords, row, source, factor);
        continue;
      }
      CUTE_UNROLL
      for (int col = 0; col < columns; ++col) {
        const int column = get<1>(coords(row, col));
        if (key_begin + column < bias.columns)
          scores(row, col) += factor * static_cast<float>(source[column]);
      }
    }
  }

  // A row; all its loads are under way before the first is waited for.
  template <int kColumns, class Number, class Scores, class Coords>
  CUTE_DEVICE static void add_pairs(Scores& scores, Coords const& coords, int row,
                                    const Number* source, float factor) {
    using namespace cute;
    struct alignas(2 * sizeof(Number)) Pair {
      Number x, y;
    };
    Pair pairs[kColumns / 2];
    CUTE_UNROLL
    for (int i = 0; i < kColumns / 2; ++i) {
      pairs[i] = *reinterpret_cast<const Pair*>(source + get<1>(coords(row, 2 * i)));
    }
    CUTE_UNROLL
    for (int i = 0; i < kColumns / 2; ++i) {
      scores(row, 2 * i) += factor * static_cast<float>(pairs[i].x);
      scores(row, 2 * i + 1) += factor * static_cast<float>(pairs[i].y);
    }
  }
};

// A row of scores; centre: the key that distances count from. head: of the bias.
template <class Number, class Scores, class Coords>
CUTE_DEVICE void add_relative(BiasParams const& bias, const Number* head, Scores& scores,
                              Coords const& coords, int row, int centre, int key_begin,
                              float factor) {
  using namespace cute;
  CUTE_UNROLL
  for (int col = 0; col < size<1>(scores); ++col) {
    const int distance = key_begin + get<1>(coords(row, col)) - centre;
    const int place = min(max(distance, -bias.reach), bias.reach) + bias.reach;
    scores(row, col) += factor * static_cast<float>(head[place]);
  }
}

// Adds the bias to a tile whose rows are of several heads. Its scores are not in units.
// query_of(row), head_of(row): the row's; rows of no query keep their scores.
template <class Element, class Scores, class Coords, class QueryOf, class HeadOf>
CUTE_DEVICE void add_bias_of_rows(BiasParams const& bias, Sequence const& sequence, Scores& scores,
                                  Coords const& coords, int key_begin, QueryOf query_of,
                                  HeadOf head_of) {
  using namespace cute;
  const auto add = [&](const auto* data) {
    CUTE_UNROLL
    for (int row = 0; row < size<0>(scores); ++row) {
      const int query = query_of(row);
      if (bias.is_relative()) {
        if (query < sequence.seqlen_q)
          add_relative(bias, data + head_of(row) * bias.head_stride, scores, coords, row,
                       query + sequence.shift, key_begin, 1.0f);
        continue;
      }
      if (query >= min(sequence.seqlen_q, bias.rows)) continue;
      const auto* source = data + sequence.index * bias.batch_stride +
                           head_of(row) * bias.head_stride + query * bias.row_stride;
      CUTE_UNROLL
      for (int col = 0; col < size<1>(scores); ++col) {
        // Slices of rows of a cache may begin in its left padding, before the first key.
        const auto key = static_cast<unsigned>(key_begin + get<1>(coords(row, col)));
        if (key < static_cast<unsigned>(bias.columns))
          scores(row, col) += static_cast<float>(source[key]);
      }
    }
  };
  if (bias.is_fp32) {
    add(static_cast<const float*>(bias.data));
  } else {
    add(static_cast<const Element*>(bias.data));
  }
}

namespace detail {

// dscores, times factor -> the rows of one head of the gradient, whose elements have one pair each.
template <class Number, class Scores, class Coords>
CUTE_DEVICE void store_bias_gradient(Number* target, std::int64_t row_stride,
                                     BiasParams const& bias, float factor, Scores const& dscores,
                                     Coords const& coords, int query_begin, int key_begin) {
  using namespace cute;
  struct alignas(2 * sizeof(Number)) Pair {
    Number x, y;
  };
  constexpr int columns = decltype(size<1>(dscores))::value;
  const int last_key = key_begin + get<1>(coords(0, columns - 1));
  const bool has_pairs = last_key < bias.columns && row_stride % 2 == 0 &&
                         reinterpret_cast<std::uintptr_t>(target) % sizeof(Pair) == 0;
  CUTE_UNROLL
  for (int row = 0; row < size<0>(dscores); ++row) {
    const int query = query_begin + get<0>(coords(row, 0));
    if (query >= bias.rows) continue;
    Number* row_target = target + query * row_stride + key_begin;
    CUTE_UNROLL
    for (int col = 0; col < columns; col += 2) {
      const int key = get<1>(coords(row, col));
      const Pair pair{static_cast<Number>(factor * dscores(row, col)),
                      static_cast<Number>(factor * dscores(row, col + 1))};
      if (has_pairs) {
        *reinterpret_cast<Pair*>(row_target + key) = pair;
      } else {
        if (key_begin + key < bias.columns) row_target[key] = pair.x;
        if (key_begin + key + 1 < bias.columns) row_target[key + 1] = pair.y;
      }
    }
  }
}

}  // namespace detail

// dscores, times factor the gradient of a tile's scores, added to that of the bias, of kernels of
// `Element`. Pairs that do not exist have 0 there. coords as in ScoreBias::add.
template <class Element, class Scores, class Coords>
CUTE_DEVICE void add_bias_gradient(BiasGradient const& dbias, BiasParams const& bias, int sequence,
                                   int head, float factor, Scores const& dscores,
                                   Coords const& coords, int query_begin, int key_begin) {
  using namespace cute;
  const std::int64_t first = sequence * dbias.batch_stride + head * dbias.head_stride;
  float* target = static_cast<float*>(dbias.data) + first;
  if (!dbias.is_summed) {
    if (dbias.is_fp32) {
      detail::store_bias_gradient(target, dbias.row_stride, bias, factor, dscores, coords,
                                  query_begin, key_begin);
    } else {
      detail::store_bias_gradient(static_cast<Element*>(dbias.data) + first, dbias.row_stride, bias,
                                  factor, dscores, coords, query_begin, key_begin);
    }
    return;
  }
  const auto add = [&](std::int64_t element, float x) {
    if (dbias.word_stride > 0) {
      add_exactly(static_cast<unsigned long long*>(dbias.data) + first + element, dbias.word_stride,
                  x);
    } else {
      atomicAdd(target + element, x);
    }
  };
  if (dbias.row_stride == 0) {
    // The thread's rows, then the eight lanes that hold other rows of the same columns.
    const bool adds = threadIdx.x % 32 < 4;
    CUTE_UNROLL
    for (int col = 0; col < size<1>(dscores); ++col) {
      float sum = 0.0f;
      CUTE_UNROLL
      for (int row = 0; row < size<0>(dscores); ++row) sum += dscores(row, col);
      CUTE_UNROLL
      for (int lanes = 4; lanes < 32; lanes *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, lanes);
      const int key = key_begin + get<1>(coords(0, col));
      if (adds && key < bias.columns) add(key, factor * sum);
    }
    return;
  }
  CUTE_UNROLL
  for (int row = 0; row < size<0>(dscores); ++row) {
    const int query = query_begin + get<0>(coords(row, 0));
    if (query >= bias.rows) continue;
    CUTE_UNROLL
    for (int col = 0; col < size<1>(dscores); ++col) {
      const int key = key_begin + get<1>(coords(row, col));
      if (key < bias.columns) add(query * dbias.row_stride + key, factor * dscores(row, col));
    }
  }
}

// The bias as an effect in kernels whose scores are in units. kOfCaches: it may be relative.
template <class Element, bool kOfCaches = false>
struct BiasEffect {
  template <class Scores, class Coords>
  CUTE_DEVICE static void apply(ScoreParams const& params, ScoreTile const& tile, Scores& scores,
                                Coords const& coords) {
    if (params.bias.data == nullptr) return;
    if (kOfCaches && params.bias.is_relative()) {
      add_relative_to_tile(params, tile, scores, coords);
      return;
    }
    const auto bias =
        ScoreBias<Element>::of(params.bias, tile.sequence.index, tile.sequence.seqlen_q, tile.head);
    bias.add(scores, coords, tile.query_begin, tile.key_begin, 1.0f / score_unit(params));
  }

  template <class Scores, class Coords>
  CUTE_DEVICE static void add_relative_to_tile(ScoreParams const& params, ScoreTile const& tile,
                                               Scores& scores, Coords const& coords) {
    using namespace cute;
    BiasParams const& bias = params.bias;
    const auto add = [&](const auto* data) {
      CUTE_UNROLL
      for (int row = 0; row < size<0>(scores); ++row) {
        const int centre = tile.query_begin + get<0>(coords(row, 0)) + tile.sequence.shift;
        add_relative(bias, data + tile.head * bias.head_stride, scores, coords, row, centre,
                     tile.key_begin, 1.0f / score_unit(params));
      }
    };
    if (bias.is_fp32) {
      add(static_cast<const float*>(bias.data));
    } else {
      add(static_cast<const Element*>(bias.data));
    }
  }

  template <class Scores, class Coords>
  CUTE_DEVICE static void add_gradient(BiasGradient const& dbias, BiasParams const& bias,
                                       ScoreTile const& tile, float factor, Scores const& dscores,
                                       Coords const& coords) {
    if (dbias.data == nullptr) return;
    add_bias_gradient<Element>(dbias, bias, tile.sequence.index, tile.head, factor, dscores, coords,
                               tile.query_begin, tile.key_begin);
  }
};

}  // namespace flash_attn_cuda
