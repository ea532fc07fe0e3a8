// A consumer warpgroup of a CTA that has two, each with 64 rows of Q and half of the columns of O.
// They take the blocks of an item in turn: whoever has a block makes its S and P, tells the other
// P, and both multiply it with their columns of V. So each product is made once, one makes P while
// the other multiplies, and blocks come to O one after the other.
//
// Who makes P has heard of the block before it, and so has the latest references of all rows.
#pragma once

#include "sm90/latent/consumer.h"

namespace flash_attn_cuda::sm90 {

template <class Traits, int kWarpgroup>
struct LatentPairConsumer {
  using Element = typename Traits::Element;
  using Storage = typename Traits::SharedStorage;
  using State = PipelineState<Traits::stages>;
  static constexpr int rows = 2;  // of a thread
  static constexpr int own_values = Traits::own_values;
  static constexpr int own_columns = own_values * Traits::piece_columns;
  static constexpr int first_value = 1 + kWarpgroup * own_values;  // piece
  using Scores = AccumulatorOf<typename Traits::ScoresMma, Shape<_64, Int<Traits::block_n>>>;
  using Output = AccumulatorOf<typename Traits::OutputMma, Shape<_64, Int<own_columns>>>;
  using Probabilities =
      FragmentLike<Element, decltype(a_operand_view(std::declval<Scores const&>()))>;
  using ValueLayout = TileLayout<Element, Traits::block_n, own_columns, 1>;

  LatentArguments const& args;
  Storage& smem;
  int thread;  // of the warpgroup
  int lane;
  PartnerInTurn partner;
  std::uint32_t empty_in_peer;  // barriers of the ring
  State state{};                // of the first piece of the next block
  PipelineState<1> q_state{};
  LatentSoftmax<rows> softmax{};

  CUTE_DEVICE LatentPairConsumer(LatentArguments const& args, Storage& smem)
      : args(args),
        smem(smem),
        thread(threadIdx.x % warpgroup_threads),
        lane(thread % 32),
        partner{smem.told.block, thread},
        empty_in_peer(args.in_pairs ? in_peer(smem.ring.empty) : 0) {}

  CUTE_DEVICE int row_of(int i) const { return first_row_of(thread) + 8 * i; }
  // Of column i of a thread's accumulator.
  CUTE_DEVICE int column_of(int i) const { return i / 2 * 8 + lane % 4 * 2 + i % 2; }

  // Keys of a block that are there: a bit each, of which a thread's first is the lowest.
  CUTE_DEVICE std::uint64_t keys_seen(State const& at) const {
    auto const& words = smem.seen[at.stage];
    return (std::uint64_t{words[1]} << 32 | words[0]) >> (lane % 4 * 2);
  }

  // What the window hides, or is not there, becomes -inf.
  CUTE_DEVICE void hide(LatentItem const& item, int block, std::uint64_t seen, Scores& tSrS) const {
    Window const& window = args.params.window;
    const bool has_window = !has_key_lists(args.params);
    auto scores = rows_cols_view(tSrS);
    CUTE_UNROLL
    for (int row = 0; row < rows; ++row) {
      const int centre =
          latent_row<Traits>(args, item.work, row_of(row)).query + item.work.sequence.shift;
      CUTE_UNROLL
      for (int i = 0; i < size<1>(scores); ++i) {
        const int key = block * Traits::block_n + column_of(i);
        const bool is_hidden =
            has_window && ((window.left != Window::unbounded && key < centre - window.left) ||
                           (window.right != Window::unbounded && key > centre + window.right));
        if (is_hidden || (seen >> (i / 2 * 8 + i % 2) & 1) == 0) scores(row, i) = -INFINITY;
      }
    }
    if (window.has_tree) {
      const auto query_of = [&](int row) {
        return latent_row<Traits>(args, item.work, row_of(row)).query;
      };
      SequenceTree::of(args.params.tree, item.work.sequence)
          .hide(scores, query_of, block * Traits::block_n, -INFINITY);
    }
  }

  // A piece, which both CTAs of a pair write if they load boxes.
  CUTE_DEVICE void release(State const& at) const {
    consumer_release(smem.ring, at);
    if (args.in_pairs && args.loads_boxes && lane == 0)
      arrive_in_peer(empty_in_peer + at.stage * int(sizeof(smem.ring.empty[0])));
  }

  // S of a block of this warpgroup's, piece after piece as they come. is_last: of its in the item.
  CUTE_DEVICE void make_scores(LatentItem const& item, int block, bool is_last, State const& at,
                               Scores& tSrS) const {
    typename Traits::ScoresMma mma;
    auto sQ = smem_tile<typename Traits::QueryLayout>(smem.q);
    auto sK = smem_tile<typename Traits::PieceLayout>(smem.pieces);
    auto tSrQ = a_fragment(mma, sQ, thread);
    auto tSrK = b_fragment(mma, sK, thread);
    CUTE_UNROLL
    for (int piece = 0; piece < Traits::pieces; ++piece) {
      wait_for_piece<Traits>(args, smem, at.plus(piece));
      start_product(mma, tSrQ(_, _, _, piece), tSrK(_, _, _, at.stage + piece), tSrS, piece > 0);
    }
    wait_products<0>(tSrS);
    if (is_last) consumer_release(smem.q_ring, q_state);
    const std::uint64_t seen = keys_seen(at);
    const bool sees_all = __all_sync(0xffffffffu, (~seen & 0x0303'0303'0303'0303u) == 0);
    release(at);
    modify_latent_scores(args, tSrS);
    if (!item.range.is_interior(block) || !sees_all) hide(item, block, seen, tSrS);
  }

  // S -> P.
  CUTE_DEVICE void exponentiate(Scores const& tSrS, Probabilities& tOrP,
                                float (&sums)[rows]) const {
    auto scores = rows_cols_view(tSrS);
    auto pairs = recast<std::uint32_t>(tOrP);
    cutlass::NumericArrayConverter<Element, float, 2> convert;
    CUTE_UNROLL
    for (int row = 0; row < rows; ++row) sums[row] = 0.0f;
    CUTE_UNROLL
    for (int i = 0; i < size<1>(scores); i += 2) {
      CUTE_UNROLL
      for (int row = 0; row < rows; ++row) {
        float p[2];
        CUTE_UNROLL
        for (int c = 0; c < 2; ++c) {
          p[c] = fast_exp2(fmaf(scores(row, i + c), args.scale_log2, -softmax.reference[row]));
          sums[row] += p[c];
        }
        const auto pair = convert({p[0], p[1]});
        pairs(i + row) = reinterpret_cast<std::uint32_t const&>(pair);
      }
    }
  }

  // What was made with the references follows new ones.
  CUTE_DEVICE void set_references(float const (&references)[rows], Output& tOrO) {
    auto output = rows_cols_view(tOrO);
    CUTE_UNROLL
    for (int row = 0; row < rows; ++row) {
      const float factor = fast_exp2(softmax.reference[row] - references[row]);
      softmax.reference[row] = references[row];
      softmax.sum[row] *= factor;
      CUTE_UNROLL
      for (int i = 0; i < size<1>(output); ++i) output(row, i) *= factor;
    }
  }

  // S -> P of the block; starts: there are no references yet. References follow the scores that
  // exceed them too far, as a lane's sum shows, each for itself.
  CUTE_DEVICE void make_probabilities(bool starts, Scores const& tSrS, Probabilities& tOrP,
                                      Output& tOrO) {
    float sums[rows] = {INFINITY, INFINITY};
    if (!starts) exponentiate(tSrS, tOrP, sums);
    unsigned are_too_large[rows];  // lanes
    CUTE_UNROLL
    for (int row = 0; row < rows; ++row)
      are_too_large[row] = __ballot_sync(0xffffffffu, !(sums[row] <= kLargestSum));
    if ((are_too_large[0] | are_too_large[1]) != 0) {
      auto scores = rows_cols_view(tSrS);
      float references[rows];
      CUTE_UNROLL
      for (int row = 0; row < rows; ++row) {
        float largest = scores(row, 0);
        CUTE_UNROLL
        for (int i = 1; i < size<1>(scores); ++i) largest = fmaxf(largest, scores(row, i));
        largest = quad_reduce(largest, [](float a, float b) { return fmaxf(a, b); });
        const bool rises = (are_too_large[row] >> (lane & ~3) & 0xf) != 0;
        const float old = softmax.reference[row];
        references[row] = rises ? fmaxf(old, largest * args.scale_log2) : old;
      }
      wait_products<0>(tOrO);
      set_references(references, tOrO);
      exponentiate(tSrS, tOrP, sums);
    }
    CUTE_UNROLL
    for (int row = 0; row < rows; ++row) softmax.sum[row] += sums[row];
  }

  // P of a block of the other's.
  CUTE_DEVICE void hear(State const& at, Probabilities& tOrP, Output& tOrO) {
    CUTE_UNROLL
    for (int t = 0; t < own_values; ++t)
      wait_for_piece<Traits>(args, smem, at.plus(first_value + t));
    float references[rows];
    partner.hear(tOrP, references);
    const bool differs =
        references[0] != softmax.reference[0] || references[1] != softmax.reference[1];
    if (__any_sync(0xffffffffu, differs)) set_references(references, tOrO);
  }

  // O += P V.
  CUTE_DEVICE void start_values(State const& at, Probabilities& tOrP, Output& tOrO) const {
    typename Traits::OutputMma mma;
    auto sV = transposed(
        smem_tile<ValueLayout>(smem.pieces + (at.stage + first_value) * Traits::piece_elements));
    start_product(mma, tOrP, b_fragment(mma, sV, thread)(_, _, _, _0{}), tOrO, true);
  }
  CUTE_DEVICE void finish_values(State const& at, Output& tOrO) const {
    wait_products<0>(tOrO);
    release_values(at);
  }
  CUTE_DEVICE void release_values(State const& at) const {
    CUTE_UNROLL
    for (int t = 0; t < own_values; ++t) release(at.plus(first_value + t));
  }

  // The first warpgroup has the first block, and every other one after it.
  CUTE_DEVICE void take_blocks(LatentItem const& item, Output& tOrO) {
    const int end = item.range.end;
    Scores tSrS;
    Probabilities tOrP, tOrOtherP;
    int block = item.range.begin;
    if constexpr (kWarpgroup == 0) {
      CUTE_NO_UNROLL
      for (; block < end; block += 2) {
        make_scores(item, block, block + 2 >= end, state, tSrS);
        make_probabilities(block == item.range.begin, tSrS, tOrP, tOrO);
        partner.tell(tOrP, softmax.reference);
        start_values(state, tOrP, tOrO);
        finish_values(state, tOrO);
        state = state.plus(Traits::pieces);
        if (block + 1 == end) break;
        hear(state, tOrP, tOrO);
        start_values(state, tOrP, tOrO);
        finish_values(state, tOrO);
        state = state.plus(Traits::pieces);
      }
    } else {
      if (block + 1 == end) consumer_release(smem.q_ring, q_state);
      CUTE_NO_UNROLL
      for (; block + 1 < end; block += 2) {
        const State own = state.plus(Traits::pieces);
        make_scores(item, block + 1, block + 3 >= end, own, tSrS);
        hear(state, tOrOtherP, tOrO);
        start_values(state, tOrOtherP, tOrO);
        make_probabilities(false, tSrS, tOrP, tOrO);
        partner.tell(tOrP, softmax.reference);
        start_values(own, tOrP, tOrO);
        warpgroup_wait<1>();
        release_values(state);
        finish_values(own, tOrO);
        state = own.plus(Traits::pieces);
      }
      if (block < end) {
        hear(state, tOrP, tOrO);
        start_values(state, tOrP, tOrO);
        finish_values(state, tOrO);
        state = state.plus(Traits::pieces);
      }
    }
  }

  // The item's part of O and LSE, normalised, or the tile's.
  CUTE_DEVICE void write(LatentItem const& item, Output& tOrO) {
    auto output = rows_cols_view(tOrO);
    CUTE_UNROLL
    for (int row = 0; row < rows; ++row) {
      softmax.sum[row] = quad_reduce(softmax.sum[row], [](float a, float b) { return a + b; });
      if (lane % 4 == 0) smem.told.sums[kWarpgroup][row_of(row)] = softmax.sum[row];
    }
    sync_with_partner<kWarpgroup, 0>();
    CUTE_UNROLL
    for (int row = 0; row < rows; ++row)
      softmax.sum[row] += smem.told.sums[1 - kWarpgroup][row_of(row)];
    sync_with_partner<kWarpgroup, 1>();
    CUTE_UNROLL
    for (int row = 0; row < rows; ++row) {
      const PackedRow place = latent_row<Traits>(args, item.work, row_of(row));
      const Denominator total =
          latent_denominator(args, item, place, softmax.sum[row], softmax.reference[row]);
      const float inverse = total.inverse();
      // Of a row that does not attend there may be anything.
      CUTE_UNROLL
      for (int i = 0; i < size<1>(output); ++i)
        output(row, i) = inverse == 0.0f ? 0.0f : output(row, i) * inverse;
      if (kWarpgroup == 0 && lane % 4 == 0)
        write_latent_lse<Traits>(args, item, row_of(row), place, total);
    }
    if (item.part != whole_tile) {
      write_part(item.part, tOrO);
    } else {
      write_output(item.work, tOrO);
    }
  }

  // In the order of the accumulators: 16 bytes a thread.
  CUTE_DEVICE void write_part(int part, Output const& tOrO) const {
    constexpr int eights = Traits::head_dim_v / 8;
    auto* target =
        reinterpret_cast<float4*>(args.out_parts) +
        (std::int64_t(part) * eights + kWarpgroup * own_columns / 8) * warpgroup_threads + thread;
    auto output = rows_cols_view(tOrO);
    CUTE_UNROLL
    for (int i = 0; i < own_columns / 4; i += 2)
      target[i / 2 * warpgroup_threads] = {output(0, i), output(0, i + 1), output(1, i),
                                           output(1, i + 1)};
  }

  CUTE_DEVICE void write_output(TileWork const& work, Output const& tOrO) const {
    TensorView const& out = args.params.out;
    auto output = rows_cols_view(tOrO);
    CUTE_UNROLL
    for (int row = 0; row < rows; ++row) {
      const PackedRow place = latent_row<Traits>(args, work, row_of(row));
      if (place.query >= work.sequence.rows_q) continue;
      auto* target = static_cast<Element*>(out.data) +
                     output_offset(out, work.sequence, place.head, place.query);
      CUTE_UNROLL
      for (int i = 0; i < size<1>(output); ++i) {
        const int column = kWarpgroup * own_columns + column_of(i);
        if (column < args.params.shape.head_dim_v) target[column] = Element(output(row, i));
      }
    }
  }

  CUTE_DEVICE void run() {
    Output tOrO;
    // Inline, because as a function it would have its registers in memory.
    const auto take = [&](LatentItem const& item) __attribute__((always_inline)) {
      softmax.clear();
      clear(tOrO);
      if (!item.range.empty()) {
        consumer_wait(smem.q_ring, q_state);
        take_blocks(item, tOrO);
        q_state.advance();
      }
      write(item, tOrO);
    };
    for_each_item<Traits>(smem, take);
  }
};

}  // namespace flash_attn_cuda::sm90
