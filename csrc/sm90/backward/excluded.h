// Pairs of a backward step that dropout drops or lists hide, of a thread's share of S^T. To draw
// decisions or to load words takes a while and no scores, so it is done ahead of them.
#pragma once

#include "shared/dropout/dropout.h"
#include "shared/mask/pair_mask.h"
#include "sm90/backward/traits.h"

namespace flash_attn_cuda::sm90 {

// The pairs that a warpgroup works on in a step.
struct StepPairs {
  Sequence const& sequence;
  int head;
  int query_begin;
  int key_begin;
  bool is_interior;  // the window and the ends of the sequences hide no pair
  Pieces pieces{};   // what a list says

  // The first of a thread's two keys.
  CUTE_DEVICE int first_key() const {
    return key_begin +
           static_cast<int>(threadIdx.x % warpgroup_threads / 32 * 16 + threadIdx.x % 32 / 4);
  }
};

// No pairs are excluded.
template <class Traits>
struct NoPairs {
  CUTE_DEVICE static NoPairs find(BackwardParams const&, RngState const&, StepPairs const&) {
    return {};
  }
  template <class Scores>
  CUTE_DEVICE static void hide(StepPairs const&, Scores&) {}
  template <class Probs>
  CUTE_DEVICE static void mark(int, Probs&) {}
};

template <class Traits>
struct UnlistedPairs {
  static constexpr int queries = Traits::block_m;

  PairWords<queries / 32> words;

  CUTE_DEVICE static bool shows_all(StepPairs const& tile) {
    return tile.pieces.template show_all<queries, 64>(tile.query_begin, tile.key_begin);
  }

  CUTE_DEVICE static UnlistedPairs find(BackwardParams const& params, RngState const&,
                                        StepPairs const& tile) {
    if (shows_all(tile)) return {};
    const HeadBits bits = HeadBits::of(params.sparsity.bits, tile.sequence.index, tile.head);
    return {load_transposed_words<queries>(tile.pieces, bits, tile.query_begin, tile.first_key())};
  }

  // scores: (keys, queries).
  template <class Scores>
  CUTE_DEVICE void hide(StepPairs const& tile, Scores& scores) const {
    if (!shows_all(tile)) hide_transposed_pairs(scores, words, tile.first_key(), -INFINITY);
  }
  template <class Probs>
  CUTE_DEVICE static void mark(int, Probs&) {}
};

template <class Traits>
struct DroppedPairs {
  using Decisions = DropoutDecisions<Traits::block_m / 16, true>;

  Decisions decisions;

  CUTE_DEVICE static DroppedPairs find(BackwardParams const& params, RngState const& rng,
                                       StepPairs const& tile) {
    const int first_key = tile.sequence.first_k + tile.first_key();
    const int first_query = tile.sequence.first_q + tile.query_begin + threadIdx.x % 4 * 2;
    if (params.dropout.threshold == 0) return {Decisions::all_kept()};
    const auto mask =
        DropoutMask::of(rng, params.dropout.threshold, tile.sequence.stream, tile.head);
    return {Decisions::draw(mask, [&](int n) { return int2{first_query + 16 * n, first_key}; })};
  }

  template <class Scores>
  CUTE_DEVICE static void hide(StepPairs const&, Scores&) {}

  // P of queries from the first_sixteen'th 16 on, (keys, queries) -> negative where it is dropped.
  template <class Probs>
  CUTE_DEVICE void mark(int first_sixteen, Probs& probs) const {
    CUTE_UNROLL
    for (int query = 0; query < size<1>(probs); ++query) {
      CUTE_UNROLL
      for (int key = 0; key < size<0>(probs); ++key) {
        float& p = probs(key, query);
        if (!decisions.keeps(first_sixteen + query / 4, key, query % 4)) p = -p;
      }
    }
  }
};

template <class Traits>
using ExcludedPairs = std::conditional_t<
    Traits::has_dropout, DroppedPairs<Traits>,
    std::conditional_t<Traits::is_sparse, UnlistedPairs<Traits>, NoPairs<Traits>>>;

}  // namespace flash_attn_cuda::sm90
