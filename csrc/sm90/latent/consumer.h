// The consumer warpgroup of a CTA that has one: S^T of a block of 64 keys, and O^T, in registers.
#pragma once

#include <cute/arch/copy_sm90.hpp>

#include "shared/mask/tree_mask.h"
#include "shared/online_softmax.h"
#include "shared/scores/softcap.h"
#include "sm90/latent/producer.h"
#include "sm90/tile/results.h"

namespace flash_attn_cuda::sm90 {

// What a thread knows of the softmax of its rows of Q. As in OnlineSoftmax a score may exceed its
// reference by kMaxLag before that follows.
template <int kRows>
struct LatentSoftmax {
  static constexpr float lowest = -1e38f;  // below every score; finite, for differences

  float reference[kRows];  // in powers of two
  float sum[kRows];        // of this thread's keys

  CUTE_DEVICE void clear() {
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      reference[i] = lowest;
      sum[i] = 0.0f;
    }
  }
};

// Of what threads have stored, not TMA, the fence is here: theirs would wait for the loads that
// they have under way.
template <class Traits>
CUTE_DEVICE void wait_for_piece(LatentArguments const& args, typename Traits::SharedStorage& smem,
                                PipelineState<Traits::stages> const& at) {
  consumer_wait(smem.ring, at);
  if (Traits::is_e4m3 || !args.loads_boxes) cutlass::arch::fence_view_async_shared();
}

// What the softmax takes of the numbers that products have made.
template <class Scores>
CUTE_DEVICE void modify_latent_scores(LatentArguments const& args, Scores& scores) {
  if (args.negates_scores) {
    CUTE_UNROLL
    for (int i = 0; i < size(scores); ++i) scores(i) = -scores(i);
  }
  if (args.params.score.softcap > 0.0f) Softcap::scale_and_apply(args.params.score, scores);
}

// Of the item's row at `place`, of which this is the sum of P.
CUTE_DEVICE Denominator latent_denominator(LatentArguments const& args, LatentItem const& item,
                                           PackedRow const& place, float sum, float reference) {
  const bool attends = place.query < item.work.sequence.seqlen_q;
  Denominator total{sum, reference};
  if (!attends) total.sum = 0.0f;
  if (attends && item.is_first) total = total.with_sink(sink_of(args.params.score, place.head));
  return total;
}
// Of row `row` of the tile, which lies at `place`.
template <class Traits>
CUTE_DEVICE void write_latent_lse(LatentArguments const& args, LatentItem const& item, int row,
                                  PackedRow const& place, Denominator const& total) {
  if (item.part != whole_tile) {
    args.lse_parts[std::int64_t(item.part) * Traits::block_m + row] = total.lse_log2();
  } else if (place.query < item.work.sequence.rows_q) {
    *lse_row(args.params, item.work.sequence, place.head, place.query) = total.lse();
  }
}

template <class Traits>
struct LatentConsumer {
  using Element = typename Traits::Element;
  using Storage = typename Traits::SharedStorage;
  using Scores = AccumulatorOf<typename Traits::ScoresMma, Shape<_64, Int<Traits::block_m>>>;
  using Output = AccumulatorOf<typename Traits::OutputMma, Shape<_64, Int<Traits::block_m>>>;
  static constexpr int columns = Traits::columns_per_thread;
  static constexpr int own_values = Traits::own_values;
  static constexpr int pairs = own_values / 2;        // of pieces of O
  static constexpr int eights = Traits::block_m / 8;  // columns come in eights, two to a thread

  LatentArguments const& args;
  Storage& smem;
  int thread;  // of the warpgroup
  int warp;
  int lane;
  PipelineState<Traits::stages> state{};   // of the block's first piece
  PipelineState<Traits::stages> values{};  // of that of the block whose O is under way
  PipelineState<1> q_state{};
  int buffer = 0;  // of P
  LatentSoftmax<columns> softmax{};

  CUTE_DEVICE LatentConsumer(LatentArguments const& args, Storage& smem)
      : args(args),
        smem(smem),
        thread(threadIdx.x % warpgroup_threads),
        warp(same_in_warp(thread / 32)),
        lane(thread % 32) {}

  // The row of Q that the thread's column i is.
  CUTE_DEVICE int row_of(int i) const { return i / 2 * 8 + lane % 4 * 2 + i % 2; }
  // The key, of the block's, that its row h of S^T is; the column of a piece of O^T.
  CUTE_DEVICE int key_of(int h) const { return 16 * warp + lane / 4 + 8 * h; }

  CUTE_DEVICE void release_values(int pair) const {
    consumer_release(smem.ring, values.plus(1 + 2 * pair));
    consumer_release(smem.ring, values.plus(2 + 2 * pair));
  }

  // Starts S^T of the block at `state`, piece after piece as they come, if there is one, and
  // finishes O^T of the block before it, if there is one: its products are under way, and in the
  // order in which they end their pieces are free.
  CUTE_DEVICE void multiply(bool has_values, bool has_scores, Scores& tSrS,
                            Output (&tOrO)[own_values]) const {
    typename Traits::ScoresMma mma;
    auto sK = smem_tile<typename Traits::PieceLayout>(smem.pieces);
    auto sQ = smem_tile<typename Traits::QueryLayout>(smem.q);
    auto tSrK = a_fragment(mma, sK, thread);
    auto tSrQ = b_fragment(mma, sQ, thread);
    CUTE_UNROLL
    for (int piece = 0; piece < Traits::pieces; ++piece) {
      if (piece < pairs && has_values) {
        if (has_scores)
          warpgroup_wait<pairs - 1>();
        else
          warpgroup_wait<0>();
        release_values(piece);
      }
      if (!has_scores) continue;
      const auto at = state.plus(piece);
      wait_for_piece<Traits>(args, smem, at);
      start_product(mma, tSrK(_, _, _, at.stage), tSrQ(_, _, _, piece), tSrS, piece > 0);
    }
    wait_products<0>(tSrS);
    CUTE_UNROLL
    for (int t = 0; t < own_values; ++t) warpgroup_fence_operand(tOrO[t]);
  }

  // The block's keys that are there, of which this warp has 16: a bit each.
  CUTE_DEVICE unsigned keys_seen() const {
    return smem.seen[state.stage][warp / 2] >> (warp % 2 * 16) & 0xffff;
  }

  // What is not there, or the window hides, becomes -inf. A list has no key that its window hides.
  CUTE_DEVICE void hide(LatentItem const& item, int block, unsigned seen, Scores& tSrS) const {
    Window const& window = args.params.window;
    const bool has_window = !has_key_lists(args.params);
    const auto tree = SequenceTree::of(args.params.tree, item.work.sequence);
    auto scores = rows_cols_view(tSrS);
    CUTE_UNROLL
    for (int h = 0; h < 2; ++h) {
      const int key = block * Traits::block_n + key_of(h);
      const bool exists = (seen >> (lane / 4 + 8 * h) & 1) != 0;
      CUTE_UNROLL
      for (int i = 0; i < columns; ++i) {
        const int query = latent_row<Traits>(args, item.work, row_of(i)).query;
        const int centre = query + item.work.sequence.shift;
        const bool is_hidden =
            has_window && ((window.left != Window::unbounded && key < centre - window.left) ||
                           (window.right != Window::unbounded && key > centre + window.right) ||
                           (window.has_tree && !tree.shows(query, key)));
        if (!exists || is_hidden) scores(h, i) = -INFINITY;
      }
    }
  }

  // S^T -> P^T in shared memory. True if some score exceeds its reference too far: P is of no use.
  CUTE_DEVICE bool exponentiate(Scores const& tSrS, float (&sums)[columns]) const {
    auto scores = rows_cols_view(tSrS);
    auto sP = smem_tile<typename Traits::ProbabilityLayout>(smem.told.p);
    cutlass::NumericArrayConverter<Element, float, 2> convert;
    bool is_too_large = false;
    CUTE_UNROLL
    for (int first = 0; first < columns; first += 4) {
      std::uint32_t pairs[2][2];  // of eight columns, of keys
      CUTE_UNROLL
      for (int j = 0; j < 2; ++j) {
        const int i = first + 2 * j;
        sums[i] = sums[i + 1] = 0.0f;
        CUTE_UNROLL
        for (int h = 0; h < 2; ++h) {
          float p[2];
          CUTE_UNROLL
          for (int c = 0; c < 2; ++c) {
            const float exponent =
                fmaf(scores(h, i + c), args.scale_log2, -softmax.reference[i + c]);
            is_too_large |= exponent > kMaxLag;
            p[c] = fast_exp2(exponent);
            sums[i + c] += p[c];
          }
          const auto pair = convert({p[0], p[1]});
          pairs[j][h] = reinterpret_cast<std::uint32_t const&>(pair);
        }
      }
      // Each lane has the address of eight rows for one key, of the four bricks that this writes.
      auto& target = sP(4 * first + 8 * (lane / 16), 16 * warp + lane % 16, buffer);
      SM90_U32x4_STSM_N::copy(pairs[0][0], pairs[0][1], pairs[1][0], pairs[1][1],
                              *reinterpret_cast<uint128_t*>(&target));
    }
    cutlass::arch::fence_view_async_shared();
    return is_too_large;
  }

  // A number of each column over the keys of all warps. own: over this thread's.
  template <class Op>
  CUTE_DEVICE void reduce_over_keys(float (&own)[columns], Op op) const {
    CUTE_UNROLL
    for (int i = 0; i < columns; ++i) {
      CUTE_UNROLL
      for (int step = 4; step < 32; step *= 2)
        own[i] = op(own[i], __shfl_xor_sync(0xffffffffu, own[i], step));
      if (lane < 4) smem.told.row_parts[warp][row_of(i)] = own[i];
    }
    sync_output(0);
    CUTE_UNROLL
    for (int i = 0; i < columns; ++i) {
      auto const& parts = smem.told.row_parts;
      const int row = row_of(i);
      own[i] = op(op(parts[0][row], parts[1][row]), op(parts[2][row], parts[3][row]));
    }
    sync_output(0);
  }

  // References follow the scores that exceed them too far, each for itself, and O and the sums
  // follow the references.
  CUTE_DEVICE void raise_references(Scores const& tSrS, Output (&tOrO)[own_values]) {
    auto scores = rows_cols_view(tSrS);
    float largest[columns];
    CUTE_UNROLL
    for (int i = 0; i < columns; ++i)
      largest[i] = fmaxf(scores(0, i), scores(1, i)) * args.scale_log2;
    reduce_over_keys(largest, [](float a, float b) { return fmaxf(a, b); });
    CUTE_UNROLL
    for (int i = 0; i < columns; ++i) {
      const bool rises = largest[i] - softmax.reference[i] > kMaxLag;
      const float raised = rises ? largest[i] : softmax.reference[i];
      const float factor = fast_exp2(softmax.reference[i] - raised);
      softmax.reference[i] = raised;
      softmax.sum[i] *= factor;
      CUTE_UNROLL
      for (int t = 0; t < own_values; ++t) {
        auto output = rows_cols_view(tOrO[t]);
        output(0, i) *= factor;
        output(1, i) *= factor;
      }
    }
  }

  // S^T -> P^T of the block, and O is ready to take it in. starts: there are no references yet.
  CUTE_DEVICE void make_probabilities(bool starts, Scores const& tSrS, Output (&tOrO)[own_values]) {
    float sums[columns];
    // The vote comes with the barrier that all need who read P.
    if (starts || sync_any(0, exponentiate(tSrS, sums))) {
      raise_references(tSrS, tOrO);
      exponentiate(tSrS, sums);
      sync_output(0);
    }
    CUTE_UNROLL
    for (int i = 0; i < columns; ++i) softmax.sum[i] += sums[i];
  }

  // Starts O^T += V^T P^T of the block at `state`, two pieces at a time, so that neighbouring
  // instructions do not wait for each other.
  CUTE_DEVICE void start_values(Output (&tOrO)[own_values]) const {
    typename Traits::OutputMma mma;
    auto sV = transposed(smem_tile<typename Traits::PieceLayout>(smem.pieces));
    auto sP = smem_tile<typename Traits::ProbabilityLayout>(smem.told.p);
    auto tOrV = a_fragment(mma, sV, thread);
    auto tOrP = b_fragment(mma, sP, thread);
    mma.accumulate_ = GMMA::ScaleOut::One;
    CUTE_UNROLL
    for (int t = 0; t < own_values; ++t) warpgroup_fence_operand(tOrO[t]);
    CUTE_UNROLL
    for (int t = 0; t < own_values; t += 2) {
      const int even = state.plus(1 + t).stage;
      const int odd = state.plus(2 + t).stage;
      warpgroup_arrive();
      CUTE_UNROLL
      for (int k = 0; k < size<2>(tOrV); ++k) {
        cute::gemm(mma, tOrV(_, _, k, even), tOrP(_, _, k, buffer), tOrO[t]);
        cute::gemm(mma, tOrV(_, _, k, odd), tOrP(_, _, k, buffer), tOrO[t + 1]);
      }
      warpgroup_commit_batch();
    }
  }

  CUTE_DEVICE void take_blocks(LatentItem const& item, Output (&tOrO)[own_values]) {
    const int end = item.range.end;
    Scores tSrS;
    CUTE_NO_UNROLL
    for (int block = item.range.begin;; ++block) {
      multiply(block > item.range.begin, block < end, tSrS, tOrO);
      if (block >= end) return;
      if (block + 1 == end) consumer_release(smem.q_ring, q_state);
      const unsigned seen = keys_seen();
      __syncwarp();
      consumer_release(smem.ring, state);
      modify_latent_scores(args, tSrS);
      if (!item.range.is_interior(block) || seen != 0xffff) hide(item, block, seen, tSrS);
      make_probabilities(block == item.range.begin, tSrS, tOrO);
      start_values(tOrO);
      buffer ^= 1;
      values = state;
      state = state.plus(Traits::pieces);
    }
  }

  // The item's part of O and LSE, normalised, or the tile's.
  CUTE_DEVICE void write(LatentItem const& item, Output (&tOrO)[own_values]) {
    reduce_over_keys(softmax.sum, [](float a, float b) { return a + b; });
    TileWork const& work = item.work;
    const bool writes_lse = warp == 0 && lane < 4;
    CUTE_UNROLL
    for (int i = 0; i < columns; ++i) {
      const PackedRow row = latent_row<Traits>(args, work, row_of(i));
      const Denominator total =
          latent_denominator(args, item, row, softmax.sum[i], softmax.reference[i]);
      const float inverse = total.inverse();
      CUTE_UNROLL
      for (int t = 0; t < own_values; ++t) {
        auto output = rows_cols_view(tOrO[t]);
        // Of a row that does not attend there may be anything.
        output(0, i) = inverse == 0.0f ? 0.0f : output(0, i) * inverse;
        output(1, i) = inverse == 0.0f ? 0.0f : output(1, i) * inverse;
      }
      if (writes_lse) write_latent_lse<Traits>(args, item, row_of(i), row, total);
    }
    if (item.part != whole_tile) {
      write_part(item.part, tOrO);
    } else {
      write_output(work, tOrO);
    }
  }

  // In the order of the accumulators: 16 bytes a thread.
  CUTE_DEVICE void write_part(int part, Output const (&tOrO)[own_values]) const {
    auto* target = reinterpret_cast<float4*>(args.out_parts) +
                   std::int64_t(part) * (Traits::head_dim_v * Traits::block_m / 4);
    CUTE_UNROLL
    for (int t = 0; t < own_values; ++t) {
      auto output = rows_cols_view(tOrO[t]);
      CUTE_UNROLL
      for (int j = 0; j < eights; ++j)
        target[(t * eights + j) * warpgroup_threads + thread] = {
            output(0, 2 * j), output(0, 2 * j + 1), output(1, 2 * j), output(1, 2 * j + 1)};
    }
  }

  CUTE_DEVICE void write_output(TileWork const& work, Output const (&tOrO)[own_values]) const {
    TensorView const& out = args.params.out;
    CUTE_UNROLL
    for (int i = 0; i < columns; ++i) {
      const PackedRow row = latent_row<Traits>(args, work, row_of(i));
      if (row.query >= work.sequence.rows_q) continue;
      auto* target =
          static_cast<Element*>(out.data) + output_offset(out, work.sequence, row.head, row.query);
      CUTE_UNROLL
      for (int t = 0; t < own_values; ++t) {
        auto output = rows_cols_view(tOrO[t]);
        const int first = t * Traits::piece_columns;
        CUTE_UNROLL
        for (int h = 0; h < 2; ++h) {
          const int column = first + key_of(h);
          if (column < args.params.shape.head_dim_v) target[column] = Element(output(h, i));
        }
      }
    }
  }

  CUTE_DEVICE void run() {
    Output tOrO[own_values];
    for_each_item<Traits>(smem, [&](LatentItem const& item) {
      softmax.clear();
      CUTE_UNROLL
      for (int t = 0; t < own_values; ++t) clear(tOrO[t]);
      if (!item.range.empty()) consumer_wait(smem.q_ring, q_state);
      take_blocks(item, tOrO);
      if (!item.range.empty()) q_state.advance();
      write(item, tOrO);
    });
  }
};

}  // namespace flash_attn_cuda::sm90
