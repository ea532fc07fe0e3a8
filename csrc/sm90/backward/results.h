// dK and dV on their way from a key warpgroup's registers to global memory.
#pragma once

#include "shared/gradient/dq_accumulator.h"
#include "sm90/backward/arguments.h"
#include "sm90/backward/traits.h"
#include "sm90/epilogue.h"
#include "sm90/isa/barriers.h"
#include "sm90/isa/cta_pair.h"

namespace flash_attn_cuda::sm90 {

// Which row of the split's partial sums is row `key` of a tile's sequence.
template <class Traits>
CUTE_DEVICE std::int64_t partial_row(BackwardArguments const& call, BackwardWorkItem const& item,
                                     int key) {
  AttentionShape const& shape = call.params.shape;
  Sequence const& sequence = item.work.sequence;
  const std::int64_t row = item.split * call.partial_rows +
                           std::int64_t(sequence.batch_k) * shape.seqlen_k + sequence.row_k + key;
  return row * shape.num_heads_k + item.head_k;
}

// Where row `key` of a tile's sequence lies in dk or dv, of elements of any size.
CUTE_DEVICE std::int64_t gradient_offset(TensorView const& view, BackwardWorkItem const& item,
                                         int key) {
  Sequence const& sequence = item.work.sequence;
  return sequence.batch_k * view.batch_stride +
         (std::int64_t(sequence.row_k) + key) * view.row_stride + item.head_k * view.head_stride;
}

// Whether dK and dV of a tile leave the kernel in fp32.
template <class Traits>
CUTE_DEVICE bool leaves_fp32(BackwardArguments const& call) {
  return call.dkdv_splits > 1 || (Traits::writes_fp32 && call.params.fp32_results);
}

// The accumulator of the 64 keys from key_begin on, by all threads of its warpgroup, in fp32 ->
// the columns of dk or dv, or, where the query heads are split, this split's partial sum.
template <class Traits, class Accumulator>
CUTE_DEVICE void write_fp32_gradient(TensorView const& view, int columns, float* partial,
                                     BackwardArguments const& call, BackwardWorkItem const& item,
                                     int key_begin, Accumulator const& accumulator, int thread) {
  auto gradient = rows_cols_view(accumulator);
  constexpr int all_columns = 4 * decltype(size<1>(gradient))::value;  // a quad shares a row
  RowTarget<float> target{
      .first = static_cast<float*>(view.data) + gradient_offset(view, item, key_begin),
      .row_stride = view.row_stride,
      .rows = item.work.sequence.rows_k - key_begin,
      .columns = columns,
      .accumulates = call.params.accumulate};
  if (call.dkdv_splits > 1) {
    target.first = partial + partial_row<Traits>(call, item, key_begin) * all_columns;
    target.row_stride = call.params.shape.num_heads_k * all_columns;
    target.columns = all_columns;
    target.accumulates = false;
  }
  write_rows(gradient, target, thread);
}

// The accumulator in 16 bits -> dk or dv, through `tiles`, shared memory of all key warpgroups.
template <class Traits, int kColumns, class Mma, class Accumulator>
CUTE_DEVICE void store_gradient(CUtensorMap const& map, BackwardWorkItem const& item, int key_begin,
                                Mma const& mma, Accumulator const& accumulator,
                                typename Traits::Element* tiles, int warpgroup, int thread) {
  Sequence const& sequence = item.work.sequence;
  auto* tile = tiles + warpgroup * 64 * kColumns;
  accumulator_to_shared<kColumns>(mma, accumulator, tile, thread);
  tma_store_fence();
  sync_output(warpgroup);
  const int rows = sequence.rows_k - key_begin;
  if (thread == 0 && rows > 0) {
    store_tile<64, kColumns>(map, tile,
                             {sequence.batch_k, item.head_k, sequence.row_k + key_begin, rows});
  }
}

// The accumulator in 16 bits -> dk or dv straight from registers, or write_fp32_gradient().
template <class Traits, class Accumulator>
CUTE_DEVICE void write_gradient(TensorView const& view, int columns, float* partial,
                                BackwardArguments const& call, BackwardWorkItem const& item,
                                int key_begin, Accumulator const& accumulator, int thread) {
  using Element = typename Traits::Element;
  if (leaves_fp32<Traits>(call)) {
    write_fp32_gradient<Traits>(view, columns, partial, call, item, key_begin, accumulator, thread);
    return;
  }
  const RowTarget<Element> target{
      .first = static_cast<Element*>(view.data) + gradient_offset(view, item, key_begin),
      .row_stride = view.row_stride,
      .rows = item.work.sequence.rows_k - key_begin,
      .columns = columns};
  write_rows(rows_cols_view(accumulator), target, thread);
}

// Waits until all that the producer at `state` has written to a ring's buffers is read.
template <int kStages>
CUTE_DEVICE void wait_until_empty(Ring<kStages>& ring, PipelineState<kStages> state) {
  CUTE_UNROLL
  for (int stage = 0; stage < kStages; ++stage, state.advance()) producer_acquire(ring, state);
}

// dK and dV of a tile as they were multiplied -> scaled, in global memory; by all threads of their
// warpgroup, which stores through its buffers of dS where those have no others.
template <class Traits, class KeyAccumulator, class ValueAccumulator>
CUTE_DEVICE void leave_key_gradients(BackwardKernelArguments const& args,
                                     typename Traits::SharedStorage& smem,
                                     PipelineState<Traits::ds_stages> const& ds_state,
                                     BackwardWorkItem const& item, int key_begin,
                                     KeyAccumulator& dk, ValueAccumulator& dv, int warpgroup,
                                     int thread) {
  BackwardArguments const& call = args.call;
  BackwardParams const& params = call.params;
  const int head_dim = params.shape.head_dim;
  const int head_dim_v = params.shape.head_dim_v;
  typename Traits::KeyGradientMma dk_mma;
  typename Traits::ValueGradientMma dv_mma;
  CUTE_UNROLL
  for (int i = 0; i < size(dk); ++i) dk(i) *= call.score_factor;
  if (Traits::has_dropout) {
    const float kept = 1.0f / call.keep_probability;
    CUTE_UNROLL
    for (int i = 0; i < size(dv); ++i) dv(i) *= kept;
  }
  // Its own branch for fp32: with that of the others ptxas serializes the products (C7512).
  if constexpr (!Traits::stores_in_ds && !Traits::stores_tiles) {
    write_gradient<Traits>(params.dv, head_dim_v, call.dv_partial, call, item, key_begin, dv,
                           thread);
    write_gradient<Traits>(params.dk, head_dim, call.dk_partial, call, item, key_begin, dk, thread);
  } else if (leaves_fp32<Traits>(call)) {
    write_fp32_gradient<Traits>(params.dv, head_dim_v, call.dv_partial, call, item, key_begin, dv,
                                thread);
    write_fp32_gradient<Traits>(params.dk, head_dim, call.dk_partial, call, item, key_begin, dk,
                                thread);
  } else if constexpr (Traits::stores_in_ds) {
    wait_until_empty(smem.ds_ring, ds_state);
    store_gradient<Traits, Traits::head_dim_v>(args.dv_map, item, key_begin, dv_mma, dv, smem.ds,
                                               warpgroup, thread);
    if (thread == 0) wait_stores();
    sync_output(warpgroup);
    store_gradient<Traits, Traits::head_dim>(args.dk_map, item, key_begin, dk_mma, dk, smem.ds,
                                             warpgroup, thread);
  } else {
    if (thread == 0) wait_stores();
    sync_output(warpgroup);
    store_gradient<Traits, Traits::head_dim_v>(args.dv_map, item, key_begin, dv_mma, dv, smem.dv,
                                               warpgroup, thread);
    store_gradient<Traits, Traits::head_dim>(args.dk_map, item, key_begin, dk_mma, dk, smem.dk,
                                             warpgroup, thread);
  }
}

// dK and dV of a part of a key tile's steps, by all threads of their warpgroup: the part that ends
// last has those of all parts afterwards, added in the parts' order so that bits do not depend on
// which that is, and the others are told that they have nothing to write.
template <class Traits, class KeyAccumulator, class ValueAccumulator>
CUTE_DEVICE bool join_parts(BackwardArguments const& call, BackwardWorkItem const& item,
                            KeyAccumulator& dk, ValueAccumulator& dv, int& parts_done,
                            int warpgroup, int thread) {
  constexpr int dk_size = 64 * Traits::head_dim;
  constexpr int dv_size = 64 * Traits::head_dim_v;
  const int rank = Traits::in_pairs ? rank_in_pair() : 0;
  const auto place = [&](int part) {
    const std::int64_t of_ctas =
        (std::int64_t{item.first_place} + part) * Traits::ctas_per_tile + rank;
    return of_ctas * Traits::key_warpgroups + warpgroup;
  };
  float* sums = call.part_sums + place(item.part) * (dk_size + dv_size);
  DqAccumulator<warpgroup_threads>::store(sums, dk, thread);
  DqAccumulator<warpgroup_threads>::store(sums + dk_size, dv, thread);
  __threadfence();
  sync_output(warpgroup);
  if (thread == 0) parts_done = atomicAdd(call.part_counters + place(0), 1);
  sync_output(warpgroup);
  if (*const_cast<int volatile*>(&parts_done) + 1 < item.parts) return false;
  __threadfence();
  sums = call.part_sums + place(0) * (dk_size + dv_size);
  DqAccumulator<warpgroup_threads>::load(sums, dk, thread);
  DqAccumulator<warpgroup_threads>::load(sums + dk_size, dv, thread);
  CUTE_NO_UNROLL
  for (int part = 1; part < item.parts; ++part) {
    sums = call.part_sums + place(part) * (dk_size + dv_size);
    DqAccumulator<warpgroup_threads>::load_and_add(sums, dk, thread);
    DqAccumulator<warpgroup_threads>::load_and_add(sums + dk_size, dv, thread);
  }
  return true;
}

// One warp: dk = dv = 0 for a tile that no query sees, or nothing where they accumulate.
template <class Traits>
CUTE_DEVICE void clear_key_gradients(BackwardArguments const& call, BackwardWorkItem const& item,
                                     int lane) {
  BackwardParams const& params = call.params;
  auto clear_row = [&](void* row, int bytes) {
    for (int i = lane * int(sizeof(uint4)); i < bytes; i += 32 * int(sizeof(uint4)))
      *reinterpret_cast<uint4*>(static_cast<char*>(row) + i) = {0, 0, 0, 0};
  };
  const int key_begin = item.work.tile * Traits::block_n;
  const int key_end = min(key_begin + Traits::block_n, item.work.sequence.rows_k);
  for (int key = key_begin; key < key_end; ++key) {
    if (call.dkdv_splits > 1) {
      constexpr int head_dim = Traits::head_dim;
      constexpr int head_dim_v = Traits::head_dim_v;
      const std::int64_t row = partial_row<Traits>(call, item, key);
      clear_row(call.dk_partial + row * head_dim, head_dim * int(sizeof(float)));
      clear_row(call.dv_partial + row * head_dim_v, head_dim_v * int(sizeof(float)));
    } else if (!params.accumulate) {
      const bool is_fp32 = Traits::writes_fp32 && params.fp32_results;
      const int element_bytes =
          static_cast<int>(is_fp32 ? sizeof(float) : sizeof(typename Traits::Element));
      const auto clear = [&](TensorView const& view, int columns) {
        clear_row(static_cast<char*>(view.data) + gradient_offset(view, item, key) * element_bytes,
                  columns * element_bytes);
      };
      clear(params.dk, params.shape.head_dim);
      clear(params.dv, params.shape.head_dim_v);
    }
  }
}

}  // namespace flash_attn_cuda::sm90
