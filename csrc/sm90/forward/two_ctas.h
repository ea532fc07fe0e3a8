// A consumer warpgroup of one of two forward CTAs on an SM: it takes consumer.h's place.
//
// It does one after the other, a step's scores, their softmax and P V, and leaves the tensor cores
// to the other three warpgroups meanwhile. A last block of few keys is a step of its own, of
// narrower products: sequences are short here, and their ends count. No kernel of this kind
// modifies scores.
#pragma once

#include "shared/online_softmax.h"
#include "sm90/forward/epilogue.h"
#include "sm90/forward/products.h"
#include "sm90/tile/tile.h"

namespace flash_attn_cuda::sm90 {

template <class Traits>
CUTE_DEVICE void consume_beside_a_cta(ForwardArguments const& args,
                                      typename Traits::SharedStorage& smem, int warpgroup) {
  using Element = typename Traits::Element;
  constexpr int block_n = Traits::block_n;
  ForwardParams const& params = args.params;
  const int thread = threadIdx.x % warpgroup_threads;
  PipelineState<Traits::work_stages> work_state;
  ForwardProducts<Traits> products{smem, warpgroup, thread};
  auto tSrS = products.make_scores();
  auto tOrO = products.make_output();
  FragmentLike<Element, decltype(a_operand_view(tSrS))> tOrP;
  auto scores = rows_cols_view(tSrS);
  auto output = rows_cols_view(tOrO);
  // This thread's (rows, columns) of S -> (query, key)
  auto tScS = rows_cols_view(accumulator_share(
      products.scores_mma, make_identity_tensor(Shape<_64, Int<block_n>>{}), thread));
  auto drop_blocks = [&](int begin, int end) {
    CUTE_NO_UNROLL
    for (int block = end - 1; block >= begin; --block) products.drop_block();
  };

  for (;; work_state.advance(), products.q_state.advance()) {
    consumer_wait(smem.work_ring, work_state);
    TileWork const& work = smem.work[work_state.stage].work;
    if (work.tile == no_tile) break;
    const BlockRange of_tile = smem.work[work_state.stage].range;
    Sequence const& sequence = work.sequence;
    const int query_begin = work.tile * Traits::block_m + 64 * warpgroup;
    BlockRange range = of_tile;
    if (Traits::drops_blocks && !params.window.is_full()) {
      range = own_range(band_from_queries(params.window, sequence.shift), query_begin,
                        min(query_begin + 64, sequence.seqlen_q) - 1, sequence.seqlen_k,
                        Traits::block_n, of_tile);
    }
    const ForwardTile<Traits> tile{params, sequence, query_begin, range};
    const RowsOfTile<Traits> rows{params, work};
    typename Traits::Softmax softmax(args.scale_log2, rows);
    consumer_wait(smem.q_ring, products.q_state);
    drop_blocks(range.end, of_tile.end);

    // A warp without any multiplies as well, and nobody reads its O: it takes its scores for P.
    const bool has_queries = query_begin + first_row_of_warp(thread) < sequence.seqlen_q;
    int block = range.end - 1;
    bool has_output = false;
    if (sequence.seqlen_k - block * block_n <= Traits::narrow_keys) {
      typename Traits::NarrowScoresMma narrow_mma;
      AccumulatorOf<decltype(narrow_mma), Shape<_64, Int<Traits::narrow_keys>>> tNrS;
      FragmentLike<Element, decltype(a_operand_view(tNrS))> tNrP;
      products.start_scores(narrow_mma, tNrS);
      products.template finish_scores<0>(tNrS, block == range.begin);
      if (has_queries) {
        auto narrow_scores = rows_cols_view(tNrS);
        const int key_begin = block * block_n;
        if (params.window.is_full()) {
          tile.mask().apply_end(narrow_scores, tScS, key_begin, -INFINITY);
        } else {
          tile.mask().apply(narrow_scores, tScS, query_begin, key_begin, -INFINITY);
        }
        softmax.softmax(narrow_scores, [](int, float) {}, rows);  // there is no O yet
      }
      convert_into(a_operand_view(tNrS), tNrP);
      products.start_output(tNrP, tOrO, false);
      products.finish_output(tOrO);
      has_output = true;
      --block;
    }
    for (; block >= range.begin; --block) {
      products.start_scores(tSrS);
      products.template finish_scores<0>(tSrS, block == range.begin);
      if (has_queries) {
        if (!range.is_interior(block)) {
          tile.mask().apply_by_bits(scores, tScS, query_begin, block * block_n, -INFINITY);
        }
        const auto rescale_o = [&](int row, float factor) {
          if (has_output) softmax.multiply_row(output, row, factor);
        };
        softmax.softmax(scores, rescale_o, rows);
      }
      convert_into(a_operand_view(tSrS), tOrP);
      products.start_output(tOrP, tOrO, has_output);
      products.finish_output(tOrO);
      has_output = true;
    }

    // Read again, because a register for it would be kept all the tile long.
    drop_blocks(smem.work[work_state.stage].range.begin, range.begin);
    write_output<Traits>(args, sequence, smem.work[work_state.stage].split, work.head, query_begin,
                         products.output_mma, tOrO, softmax, smem, warpgroup, thread);
    __syncwarp();
    consumer_release(smem.work_ring, work_state);
  }
  if (Traits::stores_tiles && Traits::stores(thread))
    wait_stores();  // shared memory ends with the CTA
}

}  // namespace flash_attn_cuda::sm90
