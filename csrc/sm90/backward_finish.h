// dQ when all key tiles have added to it: where the plan says so, warps that have nothing else to
// do turn its fp32 sums into dq, while the rest of their CTA is at later tiles, and no kernel has
// to follow.
//
// Every query tile has a counter of additions in global memory. The dQ warpgroup says when a step's
// additions are on their way (added_ring), and one thread counts them. Whoever is free draws the
// next part of a query tile, in the order in which key tiles are drawn, waits for its counter and
// writes it: two warps of the producer's warpgroup all the time, the other two when there are no
// more key tiles. Key tiles that are waited for are drawn by CTAs that run, so the wait ends.
#pragma once

#include "shared/dq_accumulator.h"
#include "sm90/backward_arguments.h"
#include "sm90/backward_traits.h"
#include "sm90/epilogue.h"

namespace flash_attn_cuda::sm90 {

// One more addition to a query tile, behind all those that this thread has heard of.
CUTE_DEVICE void count_addition(int* counter) {
  asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(counter) : "memory");
}

// One thread: counts the additions of every step of the CTA's tiles.
template <class Traits>
CUTE_DEVICE void count_additions(BackwardKernelArguments const& args,
                                 typename Traits::SharedStorage& smem) {
  BackwardArguments const& call = args.call;
  RingPlace<Traits::work_stages> work_place;
  RingPlace<Traits::added_stages> added_place;
  CUTE_NO_UNROLL
  for (;; work_place.advance()) {
    wait_full(smem.work_ring, work_place);
    typename Traits::WorkItem const& item = smem.work[work_place.stage];
    if (item.work.tile == no_tile) break;
    Step step = Step::first(item);
    CUTE_NO_UNROLL
    for (int left = item.steps(); left > 0; --left, step.advance(item)) {
      wait_full(smem.added_ring, added_place);
      EmptyBarrier::arrive(&smem.added_ring.empty[added_place.stage]);
      added_place.advance();
      if (call.additions == nullptr) continue;  // nobody asks
      count_addition(call.additions + step.sum(item));
    }
    EmptyBarrier::arrive(&smem.work_ring.empty[work_place.stage]);
  }
}

// Where the rows of query tile `tile` of a sequence lie in dq, from its row `row` on.
template <class Traits>
CUTE_DEVICE RowTarget<typename Traits::Element> query_gradient_rows(BackwardParams const& params,
                                                                    Sequence const& sequence,
                                                                    int head, int tile, int row) {
  TensorView const& dq = params.dq;
  const int query = tile * Traits::block_m + row;
  return {.first = static_cast<typename Traits::Element*>(dq.data) +
                   sequence.batch_q * dq.batch_stride +
                   (std::int64_t{sequence.row_q} + query) * dq.row_stride + head * dq.head_stride,
          .row_stride = dq.row_stride,
          .rows = sequence.rows_q - query,
          .columns = params.shape.head_dim};
}

// What one warp finishes at a time: some rows of a query tile.
struct FinishedPart {
  int head;
  int tile;  // of the head's, over all sequences
  int part;  // of the tile
};

// Number `index` of them. Key tiles are drawn batch entry by batch entry or, packed, head by head.
CUTE_DEVICE FinishedPart finished_part(BackwardArguments const& call, unsigned index, int parts) {
  const unsigned tile = index / parts;
  const unsigned tiles = call.table.counts != nullptr ? call.q_tiles : call.q_tiles_per_sequence;
  const unsigned entry = tile / tiles;  // batch and head
  const unsigned batch = entry / call.params.shape.num_heads_q;
  return {.head = static_cast<int>(entry - batch * call.params.shape.num_heads_q),
          .tile = static_cast<int>(batch * tiles + tile - entry * tiles),
          .part = static_cast<int>(index - tile * parts)};
}

// All lanes: until a counter has come to `additions`, which are seen from then on.
CUTE_DEVICE void wait_for_additions(int const* counter, int additions) {
  if (threadIdx.x % 32 == 0) {
    for (;;) {
      int done;
      asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(done) : "l"(counter) : "memory");
      if (done >= additions) break;
      __nanosleep(200);
    }
  }
  __syncwarp();
}

// One warp: 16 rows of the sums of a warp of the dQ warpgroup -> dq.
template <class Traits>
CUTE_DEVICE void finish_rows(const float* sums, float factor,
                             RowTarget<typename Traits::Element> const& target) {
  using Element = typename Traits::Element;
  constexpr int column_group = 32;  // that four atoms of the sums cover
  const int lane = threadIdx.x % 32;
  Element* row = target.first + 8 * (lane % 4);
  CUTE_NO_UNROLL
  for (int column = 0; column < Traits::head_dim; column += column_group) {
    float4 values[4];
    CUTE_UNROLL
    for (int atom = 0; atom < 4; ++atom) {
      values[atom] = __ldcg(reinterpret_cast<float4 const*>(
          sums + 64 * column + DqAccumulator<128>::offset(atom, 0, 0)));
    }
    const bool exists = column + 8 * (lane % 4) < target.columns;
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) {
      std::uint32_t pairs[4];
      CUTE_UNROLL
      for (int atom = 0; atom < 4; ++atom) {
        cutlass::NumericArrayConverter<Element, float, 2> convert;
        const float4 sum = values[atom];
        const auto pair =
            convert({(i == 0 ? sum.x : sum.z) * factor, (i == 0 ? sum.y : sum.w) * factor});
        pairs[atom] = reinterpret_cast<std::uint32_t const&>(pair);
      }
      transpose_quad(pairs, lane);
      if (exists && 8 * i < target.rows) {
        *reinterpret_cast<uint4*>(row + 8 * i * target.row_stride + column) = {pairs[0], pairs[1],
                                                                               pairs[2], pairs[3]};
      }
    }
  }
}

// Warps that have nothing else to do: dq, part by part, until all have been drawn.
template <class Traits>
CUTE_DEVICE void finish_query_gradients(BackwardKernelArguments const& args) {
  constexpr int part_rows = 32;
  constexpr int parts = Traits::block_m / part_rows;
  BackwardArguments const& call = args.call;
  if (call.dq_path != DqPath::finished) return;
  const int lane = threadIdx.x % 32;
  const unsigned end = static_cast<unsigned>(call.params.shape.num_heads_q * call.q_tiles) * parts;
  CUTE_NO_UNROLL
  for (;;) {
    unsigned index = 0;
    if (lane == 0) index = atomicAdd(call.tickets + 1, 1);
    index = __shfl_sync(0xffffffffu, index, 0);
    if (index >= end) break;
    const FinishedPart place = finished_part(call, index, parts);
    QueryTile work;
    if (!find_query_tile(call.table, call.params, call.q_tiles_per_sequence, place.tile, work))
      continue;
    const BlockRange adders =
        adders_of<Traits::block_m, Traits::block_n>(call.params.window, work.sequence, work.tile);
    if (adders.empty() || Traits::has_one_key_tile(work.sequence)) continue;
    const std::int64_t query_tile = std::int64_t{place.head} * call.q_tiles + place.tile;
    wait_for_additions(call.additions + query_tile, adders.end - adders.begin);
    const float* sums = call.dq_accum + query_tile * (Traits::block_m * Traits::head_dim);
    CUTE_NO_UNROLL
    for (int row = place.part * part_rows; row < (place.part + 1) * part_rows; row += 16) {
      const int thread = row % 64 * 2 + lane;  // of the warpgroup that summed 64 rows
      finish_rows<Traits>(
          sums + row / 64 * (64 * Traits::head_dim) + DqAccumulator<128>::offset(0, 0, thread),
          call.score_factor,
          query_gradient_rows<Traits>(call.params, work.sequence, place.head, work.tile,
                                      row + lane / 4));
    }
  }
}

}  // namespace flash_attn_cuda::sm90
