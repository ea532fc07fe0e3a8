// What lies between the products of a forward step, for a thread's share of S: modifiers, a bias,
// what lists, pages and the window hide, what dropout keeps, and the softmax that makes P.
#pragma once

#include "shared/dropout/dropout.h"
#include "shared/online_softmax.h"
#include "shared/scores/score_modifiers.h"
#include "shared/sequence/paged_kv.h"
#include "sm90/forward/dropout.h"
#include "sm90/forward/tile.h"

namespace flash_attn_cuda::sm90 {

// What the producer says of a block, which the consumers know of no other way.
struct BlockNews {
  VisitedKeys visited;  // where there are lists
  SeenPairs seen;       // of it, where they do not show all
  bool misses_keys;     // where keys come in pages
};

// What the softmax has to do of a block besides.
template <class Shifts>
struct LeftToSoftmax {
  Shifts row_shifts{};
  bool bending = false;
};

// Of one tile. The pipelines go on from tile to tile.
template <class Traits>
struct ForwardScores {
  using Element = typename Traits::Element;
  using Storage = typename Traits::SharedStorage;
  using Tile = ForwardTile<Traits>;
  using Shifts =
      std::conditional_t<Traits::shifts_rows, RowShifts<Traits::rows_per_thread>, NoShifts>;
  static constexpr int block_n = Traits::block_n;

  struct Pipelines {
    PipelineState<Traits::bias_stages> bias{};
    PipelineState<1> bits{};
    PipelineState<Traits::word_stages> words{};
  };

  Tile const& tile;
  Storage& smem;
  int warpgroup;
  int thread;  // of the warpgroup
  Pipelines& pipelines;
  ScoreModifiers modifiers{};
  DropoutMask dropout{};

  CUTE_DEVICE ForwardScores(Tile const& tile, int head, Storage& smem, int warpgroup, int thread,
                            Pipelines& pipelines)
      : tile(tile), smem(smem), warpgroup(warpgroup), thread(thread), pipelines(pipelines) {
    ForwardParams const& params = tile.params;
    Sequence const& sequence = tile.sequence;
    if constexpr (Traits::has_score_modifiers) {
      modifiers = ScoreModifiers::of(params.score, sequence.index, head, sequence.shift);
    }
    if constexpr (Traits::has_dropout && !Traits::draws_ahead) {
      dropout = DropoutMask::of(read_rng(params.dropout.rng), params.dropout.threshold,
                                sequence.stream, head);
    }
  }

  // Of the block in `stage`, whose scores are multiplied. Called behind the products, so that whose
  // turn is next does not wait for it.
  CUTE_DEVICE void look_up_block(int stage, BlockNews& news) const {
    if constexpr (Traits::is_paged) news.misses_keys = smem.misses_keys[stage];
    if constexpr (Traits::is_sparse) {
      news.visited = smem.sparse.visited[stage];
      if (!news.visited.shows_all(warpgroup)) news.seen = take_bits(news.visited.pieces);
    }
  }

  // Raw scores -> those of the softmax; returns what they lack. may_leave: that may be to bend
  // them.
  template <class Accumulator>
  CUTE_DEVICE LeftToSoftmax<Shifts> modify_and_mask(int block, BlockNews const& news,
                                                    [[maybe_unused]] bool may_leave,
                                                    Accumulator& tSrS) const {
    ForwardParams const& params = tile.params;
    auto scores = rows_cols_view(tSrS);
    bool is_interior = tile.range.is_interior(block);
    if constexpr (Traits::is_sparse) {
      block = news.visited.block;
      is_interior = news.visited.is_in_window;
    }
    const int key_begin = block * block_n;
    LeftToSoftmax<Shifts> left;
    if constexpr (Traits::has_score_modifiers) {
      if (modifies_scores(params.score)) {
        if constexpr (Traits::leaves_bending) {
          bool hides = !is_interior;
          if constexpr (Traits::is_paged) hides |= news.misses_keys;
          may_leave = may_leave && !hides && !drops() && modifiers.bends_alone(params.score);
        } else {
          may_leave = false;
        }
        left.bending = modifiers.template apply_for_softmax<64, block_n, Traits::config.features>(
            scores, coords(), tile.query_begin, key_begin, may_leave, left.row_shifts);
        if (left.bending) return left;
      }
    }
    if constexpr (Traits::has_bias) add_bias_tile(tSrS);
    if constexpr (Traits::is_sparse) {
      if (!news.visited.shows_all(warpgroup))
        hide_unseen_pairs(scores, news.visited.pieces, warpgroup, news.seen, -INFINITY);
    }
    if constexpr (Traits::is_paged) {
      if (news.misses_keys) {
        hide_missing_keys<block_n>(KeyRows::of(params.paged, tile.sequence), scores, coords(),
                                   key_begin, tile.sequence.seqlen_k, -INFINITY);
      }
    }
    if (!is_interior)
      tile.mask().apply_by_bits(scores, coords(), tile.query_begin, key_begin, -INFINITY);
    return left;
  }

  // Of the pairs of a block. Left as it was where nothing is dropped.
  CUTE_DEVICE void decide_dropout([[maybe_unused]] int block,
                                  [[maybe_unused]] KeptPairs<Traits>& kept) const {
    if constexpr (Traits::has_dropout) {
      if (tile.params.dropout.threshold == 0) return;
      if constexpr (Traits::draws_ahead) {
        kept = take_words<Traits>(smem, warpgroup, thread, pipelines.words);
        pipelines.words.advance();
      } else {
        kept = KeptPairs<Traits>::draw(dropout, [&](int sixteen) {
          const auto place = coords()(0, 4 * sixteen);
          return int2{tile.sequence.first_q + tile.query_begin + get<0>(place),
                      tile.sequence.first_k + block * block_n + get<1>(place)};
        });
      }
    }
  }

  // S -> P for the next product; rescale(row, factor): what O has to be multiplied by before it.
  template <class Accumulator, class Operand, class Rescale>
  CUTE_DEVICE void probabilities(Accumulator& tSrS, LeftToSoftmax<Shifts> const& left,
                                 [[maybe_unused]] KeptPairs<Traits> const& kept,
                                 OnlineSoftmax<Traits::rows_per_thread>& softmax, Operand& tOrP,
                                 Rescale rescale) const {
    auto scores = rows_cols_view(tSrS);
    auto pairs = recast<std::uint32_t>(tOrP);
    if constexpr (Traits::has_dropout) {
      if (tile.params.dropout.threshold > 0) {
        auto drop = [&](int sixteen, float (&p)[2][4]) { drop_pairs(kept, sixteen, p); };
        softmax.template softmax_to_pairs<Element>(scores, pairs, left.row_shifts, rescale, drop);
        return;
      }
    }
    bool is_too_large = false;
    if constexpr (Traits::leaves_bending) {
      if (left.bending) {
        const ScoreModifiers::Curve curve(softmax.scale_log2);
        if (softmax.template softmax_of_curve_to_pairs<Element>(scores, curve, pairs)) return;
        is_too_large = true;
        ScoreModifiers::bend_reached(scores);
      }
    }
    auto keep_all = [](int, float (&)[2][4]) {};
    softmax.template softmax_to_pairs<Element>(scores, pairs, left.row_shifts, rescale, keep_all,
                                               is_too_large);
  }

 private:
  CUTE_DEVICE bool drops() const {
    return Traits::has_dropout && tile.params.dropout.threshold > 0;
  }

  // This thread's (rows, columns) of S -> (query, key)
  CUTE_DEVICE auto coords() const {
    return rows_cols_view(accumulator_share(
        typename Traits::ScoresMma{}, make_identity_tensor(Shape<_64, Int<block_n>>{}), thread));
  }

  CUTE_DEVICE SeenPairs take_bits(Pieces pieces) const {
    if (!wants_bits(tile.params.sparsity.bits, pieces, warpgroup)) return {};
    auto& ring = smem.sparse.bits_ring[warpgroup];
    consumer_wait(ring, pipelines.bits);
    const SeenPairs seen = read_mask_bits(smem.sparse.bits[warpgroup], pieces, warpgroup, coords());
    finish_reads();
    consumer_release(ring, pipelines.bits);
    pipelines.bits.advance();
    return seen;
  }

  template <class Accumulator>
  CUTE_DEVICE void add_bias_tile(Accumulator& tSrS) const {
    constexpr int size = Traits::block_m * block_n;
    consumer_wait(smem.bias_ring, pipelines.bias);
    add_bias<Traits::block_m, block_n>(smem.bias + pipelines.bias.stage * size, 64 * warpgroup,
                                       tile.params.score.softmax_scale, tSrS);
    finish_reads();
    consumer_release(smem.bias_ring, pipelines.bias);
    pipelines.bias.advance();
  }
};

}  // namespace flash_attn_cuda::sm90
