// dQ when all key tiles have added to it: where the plan says so, warps that have nothing else to
// do convert its fp32 sums to dq, while the rest of their CTA is at later tiles. What they have not
// come to when the CTA's work ends is left to a kernel that follows (convert_dq.h).
//
// Every query tile has a counter of additions in global memory. The dQ warpgroup says when a step's
// additions are on their way (added_ring), and one thread counts them. With lists, where the
// additions to come are not known without reading them all, every head has a counter of its key
// tiles, those without steps included.
// A warp that is free takes tickets for strips of dQ, in the order in which key tiles are taken,
// waits for the counter and writes them. CTAs that run have taken the key tiles that are waited
// for, so the wait ends.
#pragma once

#include "shared/gradient/dq_accumulator.h"
#include "sm90/backward/arguments.h"
#include "sm90/backward/traits.h"
#include "sm90/epilogue.h"

namespace flash_attn_cuda::sm90 {

// Where the rows of query tile `tile` of a sequence lie in dq, of Stored, from its row `row` on.
template <class Traits, class Stored>
CUTE_DEVICE RowTarget<Stored> query_gradient_rows(BackwardParams const& params,
                                                  Sequence const& sequence, int head, int tile,
                                                  int row) {
  TensorView const& dq = params.dq;
  const int query = tile * Traits::block_m + row;
  return {.first = static_cast<Stored*>(dq.data) + sequence.batch_q * dq.batch_stride +
                   (std::int64_t{sequence.row_q} + query) * dq.row_stride + head * dq.head_stride,
          .row_stride = dq.row_stride,
          .rows = sequence.rows_q - query,
          .columns = params.shape.head_dim,
          .accumulates = params.accumulate};
}

// Rows of a query tile, which one warp of the dQ warpgroup has summed and one warp converts to dq.
struct Strip {
  static constexpr int rows = strip_rows;

  int head;
  int tile;  // of the head's, over all sequences
  int row;   // of the tile, the first

  // Number `index` of them. Key tiles are taken batch entry by batch entry or, packed, in sections
  // of few heads.
  template <class Traits, class Arguments>
  CUTE_DEVICE static Strip of(Arguments const& call, unsigned index) {
    constexpr unsigned per_tile = Traits::block_m / rows;
    const unsigned tile = index / per_tile;
    const unsigned tiles = call.table.counts != nullptr ? call.q_tiles : call.q_tiles_per_sequence;
    const unsigned entry = tile / tiles;  // batch and head
    const unsigned batch = entry / call.params.shape.num_heads_q;
    return {.head = static_cast<int>(entry - batch * call.params.shape.num_heads_q),
            .tile = static_cast<int>(batch * tiles + tile - entry * tiles),
            .row = static_cast<int>(index % per_tile) * rows};
  }

  template <class Traits, class Arguments>
  CUTE_DEVICE static unsigned count(Arguments const& call) {
    return static_cast<unsigned>(call.params.shape.num_heads_q * call.q_tiles) *
           (Traits::block_m / rows);
  }
};

// Where the lane's sums of a strip begin, its atoms DqAccumulator<warpgroup_threads>::offset apart.
template <class Traits, class Arguments>
CUTE_DEVICE float const* strip_sums(Arguments const& call, float const* dq_accum,
                                    Strip const& strip, int lane) {
  const int thread = strip.row % 64 * 2 + lane;  // of the warpgroup that summed 64 rows
  const std::int64_t query_tile = std::int64_t{strip.head} * call.q_tiles + strip.tile;
  return dq_accum + (query_tile * Traits::block_m + strip.row / 64 * 64) * Traits::head_dim +
         DqAccumulator<warpgroup_threads>::offset(0, 0, thread);
}

// One warp: a strip of the sums -> dq in fp32, kAtOnce times 16 columns at a time.
template <class Traits, int kAtOnce, class Arguments>
CUTE_DEVICE void write_fp32_strip(Arguments const& call, float const* dq_accum, float factor,
                                  Strip const& strip, QueryTile const& work) {
  constexpr int atoms = 2 * kAtOnce;
  const int lane = threadIdx.x % 32;
  const float* sums = strip_sums<Traits>(call, dq_accum, strip, lane);
  const auto target = query_gradient_rows<Traits, float>(call.params, work.sequence, strip.head,
                                                         work.tile, strip.row + lane / 4);
  float* row = target.first + 2 * (lane % 4);
  CUTE_NO_UNROLL
  for (int begin = 0; begin < target.columns; begin += 8 * atoms) {
    float4 values[atoms];
    CUTE_UNROLL
    for (int atom = 0; atom < atoms; ++atom) {
      values[atom] = __ldcg(reinterpret_cast<float4 const*>(
          sums + 64 * begin + DqAccumulator<warpgroup_threads>::offset(atom, 0, 0)));
    }
    CUTE_UNROLL
    for (int atom = 0; atom < atoms; ++atom) {
      const float4 sum = values[atom];
      const int column = begin + 8 * atom;
      if (column >= target.columns) continue;
      if (target.rows > 0)
        write_pair(row + column, {sum.x * factor, sum.y * factor}, target.accumulates);
      if (target.rows > 8) {
        write_pair(row + 8 * target.row_stride + column, {sum.z * factor, sum.w * factor},
                   target.accumulates);
      }
    }
  }
}

// One warp: a strip of the sums -> dq, kAtOnce times 32 columns at a time.
template <class Traits, int kAtOnce, class Arguments>
CUTE_DEVICE void write_strip(Arguments const& call, float const* dq_accum, float factor,
                             Strip const& strip, QueryTile const& work) {
  using Element = typename Traits::Element;
  constexpr int column_group = 32;  // that four atoms of the sums cover
  if (Traits::writes_fp32 && call.params.fp32_results) {
    write_fp32_strip<Traits, kAtOnce>(call, dq_accum, factor, strip, work);
    return;
  }
  const int lane = threadIdx.x % 32;
  const float* sums = strip_sums<Traits>(call, dq_accum, strip, lane);
  const auto target = query_gradient_rows<Traits, Element>(call.params, work.sequence, strip.head,
                                                           work.tile, strip.row + lane / 4);
  Element* row = target.first + 8 * (lane % 4);
  CUTE_NO_UNROLL
  for (int begin = 0; begin < Traits::head_dim; begin += kAtOnce * column_group) {
    float4 values[kAtOnce][4];
    CUTE_UNROLL
    for (int group = 0; group < kAtOnce; ++group) {
      CUTE_UNROLL
      for (int atom = 0; atom < 4; ++atom) {
        values[group][atom] = __ldcg(reinterpret_cast<float4 const*>(
            sums + 64 * begin + DqAccumulator<warpgroup_threads>::offset(4 * group + atom, 0, 0)));
      }
    }
    CUTE_UNROLL
    for (int group = 0; group < kAtOnce; ++group) {
      const int column = begin + group * column_group;
      const bool exists = column + 8 * (lane % 4) < target.columns;
      CUTE_UNROLL
      for (int i = 0; i < 2; ++i) {
        std::uint32_t pairs[4];
        CUTE_UNROLL
        for (int atom = 0; atom < 4; ++atom) {
          cutlass::NumericArrayConverter<Element, float, 2> convert;
          const float4 sum = values[group][atom];
          const auto pair =
              convert({(i == 0 ? sum.x : sum.z) * factor, (i == 0 ? sum.y : sum.w) * factor});
          pairs[atom] = reinterpret_cast<std::uint32_t const&>(pair);
        }
        transpose_quad(pairs, lane);
        if (exists && 8 * i < target.rows) {
          *reinterpret_cast<uint4*>(row + 8 * i * target.row_stride + column) = {
              pairs[0], pairs[1], pairs[2], pairs[3]};
        }
      }
    }
  }
}

// The key tiles that have added to a query tile; none, where no sum is left to become dq.
template <class Traits, class Arguments>
CUTE_DEVICE BlockRange adders_of_sum(Arguments const& call, QueryTile const& work) {
  if (Traits::has_one_key_tile(work.sequence)) return {};
  if (Traits::sweeps && is_swept(work.sequence, call.swept_rows)) return {};
  return adders_of<Traits::block_m, Traits::block_n>(call.params.window, work.sequence, work.tile);
}

// Whether the CTA's producer has anything more to load, as one lane of a warp finds it.
template <class SharedStorage>
CUTE_DEVICE bool has_loads(SharedStorage const& smem) {
  return *const_cast<int const volatile*>(&smem.has_loads) != 0;
}

// All lanes: until a counter has come to `additions`, which are seen from then on; false if the
// CTA's work ends before.
template <class Traits>
CUTE_DEVICE bool wait_for_additions(int const* counter, int additions,
                                    typename Traits::SharedStorage const& smem) {
  bool is_done = false;
  if (threadIdx.x % 32 == 0) {
    while (has_loads(smem)) {
      int done;
      asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(done) : "l"(counter) : "memory");
      is_done = done >= additions;
      if (is_done) break;
      __nanosleep(200);
    }
  }
  __syncwarp();  // what lane 0 has acquired is for all
  return __shfl_sync(0xffffffffu, is_done, 0);
}

// One warp: a strip of dq, when all key tiles have added to it; false if the CTA's work ends
// before.
template <class Traits>
CUTE_DEVICE bool finish_strip(BackwardArguments const& call,
                              typename Traits::SharedStorage const& smem, unsigned index) {
  const Strip strip = Strip::of<Traits>(call, index);
  QueryTile work;
  if (!find_query_tile(call.table, call.params, call.q_tiles_per_sequence, strip.tile, work))
    return true;
  if constexpr (Traits::is_sparse) {
    const TileWork of_keys{
        .sequence = work.sequence, .tile = 0, .head = strip.head / heads_per_tile(call)};
    if (!wait_for_additions<Traits>(
            call.additions + schedule_head(call.schedule, call.table, of_keys),
            existing_tiles(call.schedule, call.table).num_tiles * call.shared_tiles.parts, smem))
      return false;
  } else {
    const BlockRange adders = adders_of_sum<Traits>(call, work);
    if (adders.empty()) return true;
    const std::int64_t query_tile = std::int64_t{strip.head} * call.q_tiles + strip.tile;
    const int additions = (adders.end - adders.begin) * Traits::ctas_per_tile;
    if (!wait_for_additions<Traits>(call.additions + query_tile, additions, smem)) return false;
  }
  write_strip<Traits, 1>(call, call.dq_accum, call.score_factor, strip, work);
  return true;
}

// One of finishing_warps: dq, strip by strip, until all have been taken or the CTA's loads end.
template <class Traits>
CUTE_DEVICE void finish_query_gradients(BackwardKernelArguments const& args,
                                        typename Traits::SharedStorage const& smem, int warp) {
  BackwardArguments const& call = args.call;
  if (call.dq_path != DqPath::finished) return;
  const unsigned end = Strip::count<Traits>(call);
  int given_back = -1;
  while (given_back < 0) {
    unsigned first = end;
    if (threadIdx.x % 32 == 0 && has_loads(smem))
      first = atomicAdd(call.tickets + 1, strips_at_once);
    first = __shfl_sync(0xffffffffu, first, 0);
    if (first >= end) break;
    CUTE_NO_UNROLL
    for (unsigned index = first; index < first + strips_at_once && given_back < 0; ++index) {
      if (!finish_strip<Traits>(call, smem, index)) given_back = static_cast<int>(index);
    }
  }
  if (threadIdx.x % 32 == 0) call.given_back[blockIdx.x * finishing_warps + warp] = given_back;
}

}  // namespace flash_attn_cuda::sm90
