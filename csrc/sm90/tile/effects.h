// Effects on the scores of a forward step: a bias, lists of blocks, pages, dropout. Each has
//
//   prefetch()   what it needs to know of the step's block, after the products, so that the
//                warpgroup whose turn is next does not wait for it
//   apply()      it, to the scores or to what they become
//
// and lives as long as its warpgroup, for the sake of its pipeline.
#pragma once

#include "shared/dropout/dropout.h"
#include "shared/e4m3_units.h"
#include "shared/scores/effect.h"
#include "shared/sequence/paged_kv.h"
#include "sm90/scores/bias.h"
#include "sm90/scores/mask_bits.h"
#include "sm90/tile/dropout.h"
#include "sm90/tile/tile.h"

namespace flash_attn_cuda::sm90 {

// This thread's (rows, columns) of S -> (query, key)
template <class Traits>
CUTE_DEVICE auto score_coords(int thread) {
  return rows_cols_view(accumulator_share(typename Traits::ScoresMma{},
                                          make_identity_tensor(Shape<_64, Int<Traits::block_n>>{}),
                                          thread));
}

template <class Traits>
struct BiasTiles {
  PipelineState<Traits::bias_stages> state{};

  // S -> softmax_scale * S + bias.
  template <class Accumulator>
  CUTE_DEVICE void apply(ForwardTile<Traits> const& tile, typename Traits::SharedStorage& smem,
                         int warpgroup, Accumulator& tSrS) {
    constexpr int size = Traits::block_m * Traits::block_n;
    consumer_wait(smem.bias_ring, state);
    add_bias<Traits::block_m, Traits::block_n>(smem.bias + state.stage * size, 64 * warpgroup,
                                               tile.params.score.softmax_scale, tSrS);
    finish_reads();
    consumer_release(smem.bias_ring, state);
    state.advance();
  }
};

template <class Traits>
struct ListedBlocks {
  PipelineState<1> bits_state{};
  VisitedKeys visited;
  SeenPairs seen;  // of it, where it does not show all

  CUTE_DEVICE void prefetch(ForwardTile<Traits> const& tile, typename Traits::SharedStorage& smem,
                            int stage, int warpgroup, int thread) {
    visited = smem.sparse.visited[stage];
    if (!visited.shows_all(warpgroup))
      seen = take_bits(tile.params.sparsity.bits, smem, warpgroup, thread);
  }

  CUTE_DEVICE int block(int) const { return visited.block; }
  CUTE_DEVICE bool is_interior(BlockRange const&, int) const { return visited.is_in_window; }

  template <class Scores>
  CUTE_DEVICE void apply(int warpgroup, Scores& scores) const {
    if (!visited.shows_all(warpgroup))
      hide_unseen_pairs(scores, visited.pieces, warpgroup, seen, -INFINITY);
  }

 private:
  CUTE_DEVICE SeenPairs take_bits(PairBits const& bits, typename Traits::SharedStorage& smem,
                                  int warpgroup, int thread) {
    if (!wants_bits(bits, visited.pieces, warpgroup)) return {};
    auto& ring = smem.sparse.bits_ring[warpgroup];
    consumer_wait(ring, bits_state);
    const SeenPairs seen = read_mask_bits(smem.sparse.bits[warpgroup], visited.pieces, warpgroup,
                                          score_coords<Traits>(thread));
    finish_reads();
    consumer_release(ring, bits_state);
    bits_state.advance();
    return seen;
  }
};

// Takes the place of lists: a tile visits the blocks of its range.
template <class Traits>
struct EveryBlock {
  CUTE_DEVICE static void prefetch(ForwardTile<Traits> const&, typename Traits::SharedStorage&, int,
                                   int, int) {}
  CUTE_DEVICE static int block(int position) { return position; }
  CUTE_DEVICE static bool is_interior(BlockRange const& range, int position) {
    return range.is_interior(position);
  }
  template <class Scores>
  CUTE_DEVICE static void apply(int, Scores&) {}
};

template <class Traits>
struct PagedKeys {
  bool misses_keys;

  CUTE_DEVICE void prefetch(typename Traits::SharedStorage const& smem, int stage) {
    misses_keys = false;
    for (bool misses : smem.misses_keys[stage]) misses_keys = misses_keys || misses;
  }
  CUTE_DEVICE bool hides() const { return misses_keys; }

  template <class Scores>
  CUTE_DEVICE void apply(ForwardTile<Traits> const& tile, int key_begin, int thread,
                         Scores& scores) const {
    if (!misses_keys) return;
    hide_missing_keys<Traits::block_n>(KeyRows::of(tile.params.paged, tile.sequence), scores,
                                       score_coords<Traits>(thread), key_begin,
                                       tile.sequence.seqlen_k, -INFINITY);
  }
};

// Takes the place of pages: no key of the sequence is missing.
template <class Traits>
struct AllKeys {
  CUTE_DEVICE static void prefetch(typename Traits::SharedStorage const&, int) {}
  CUTE_DEVICE static bool hides() { return false; }
  template <class Scores>
  CUTE_DEVICE static void apply(ForwardTile<Traits> const&, int, int, Scores&) {}
};

// Decisions that other warps draw.
template <class Traits>
struct WordsOfDropout {
  PipelineState<Traits::word_stages> state{};
  ThreadWords<Traits> kept;

  CUTE_DEVICE static void start(ForwardTile<Traits> const&, int) {}
  // The words stay as they were where nothing is dropped.
  CUTE_DEVICE void prefetch(ForwardTile<Traits> const& tile, typename Traits::SharedStorage& smem,
                            int, int warpgroup, int thread) {
    if (tile.params.dropout.threshold == 0) return;
    kept = take_words<Traits>(smem, warpgroup, thread, state);
    state.advance();
  }
};

// Decisions that a consumer draws for itself.
template <class Traits>
struct OwnDropout {
  DropoutMask mask;
  DropoutDecisions<Traits::block_n / 16, false> kept;

  CUTE_DEVICE void start(ForwardTile<Traits> const& tile, int head) {
    DropoutParams const& params = tile.params.dropout;
    mask = DropoutMask::of(read_rng(params.rng), params.threshold, tile.sequence.stream, head);
  }
  CUTE_DEVICE void prefetch(ForwardTile<Traits> const& tile, typename Traits::SharedStorage&,
                            int block, int, int thread) {
    if (tile.params.dropout.threshold == 0) return;
    const auto coords = score_coords<Traits>(thread);
    kept = decltype(kept)::draw(mask, [&](int sixteen) {
      const auto place = coords(0, 4 * sixteen);
      return int2{tile.sequence.first_q + tile.query_begin + get<0>(place),
                  tile.sequence.first_k + block * Traits::block_n + get<1>(place)};
    });
  }
};

template <class Traits>
struct NoDropout {
  CUTE_DEVICE static void start(ForwardTile<Traits> const&, int) {}
  CUTE_DEVICE static void prefetch(ForwardTile<Traits> const&, typename Traits::SharedStorage&, int,
                                   int, int) {}
};

// The scales of keys and values of e4m3, which the products leave out: one of the scores, and those
// of tokens.
template <class Traits>
struct E4m3Scales {
  ScoreScales of_scores;
  bool values_have_own;
  ValueUnit unit;

  // For a tile, whose Q counts in query_unit. Returns what the softmax multiplies scores by.
  CUTE_DEVICE float start(ForwardTile<Traits> const& tile, int head, float scale_log2,
                          float query_unit) {
    ScaleParams const& scales = tile.params.scales;
    of_scores =
        ScoreScales::of(scales, tile.sequence.index, tile.params.shape.key_head(head), query_unit);
    values_have_own = scales.v.per_token;
    unit = {};
    return of_scores.leave_to_softmax(scale_log2);
  }

  // O's, whose unit of tokens is 1 for a head.
  CUTE_DEVICE float of_output(ForwardTile<Traits> const& tile, int head) const {
    if (values_have_own) return unit.unit * ValueUnit::most_per_unit;
    return scale_of_head(tile.params.scales.v, tile.sequence.index,
                         tile.params.shape.key_head(head));
  }

  // Before K's stage is released.
  template <class Scores>
  CUTE_DEVICE void apply(typename Traits::SharedStorage const& smem, int stage, int thread,
                         Scores& scores) const {
    if (of_scores.are_one()) return;
    of_scores.apply(scores, score_coords<Traits>(thread), smem.key_scales[stage]);
    finish_reads();
  }

  // Multiplies P of 16 columns with the scales of the block's values, which O's unit holds then.
  // rescale(row, factor): O.
  template <class Rescale>
  CUTE_DEVICE auto weigher(const float* of_values, int thread, Rescale& rescale) {
    unit.raise<Traits::block_n>(of_values, [&](float ratio) {
      CUTE_UNROLL
      for (int row = 0; row < Traits::rows_per_thread; ++row) rescale(row, ratio);
    });
    const float per_unit = 1.0f / (unit.unit * ValueUnit::most_per_unit);
    const int first_key = thread % 4 * 2;  // the lane's of 16
    return [of_values, per_unit, first_key](int sixteen, float (&p)[2][4]) {
      CUTE_UNROLL
      for (int col = 0; col < 4; ++col) {
        const int key = 16 * sixteen + first_key + col / 2 * 8 + col % 2;
        CUTE_UNROLL
        for (auto& of_row : p) of_row[col] *= of_values[key] * per_unit;
      }
    };
  }
};

template <class Traits>
struct ForwardEffects {
  EffectIf<Traits::has_bias, BiasTiles<Traits>> bias;
  EffectIf<Traits::is_e4m3, E4m3Scales<Traits>> e4m3;
  std::conditional_t<Traits::is_sparse, ListedBlocks<Traits>, EveryBlock<Traits>> lists;
  std::conditional_t<Traits::is_paged, PagedKeys<Traits>, AllKeys<Traits>> pages;
  std::conditional_t<
      !Traits::has_dropout, NoDropout<Traits>,
      std::conditional_t<Traits::draws_ahead, WordsOfDropout<Traits>, OwnDropout<Traits>>>
      dropout;
};

}  // namespace flash_attn_cuda::sm90
