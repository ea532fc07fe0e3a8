// Gradients of a CTA: registers -> global memory.
#pragma once

#include "shared/gradient/backward_arguments.h"
#include "shared/gradient/dq_accumulator.h"
#include "sm80/backward/find_tile.h"
#include "sm80/epilogue.h"

namespace flash_attn_cuda::sm80 {

// dQ of a step, the columns from column_begin on, added to that of other key tiles. q_tile: of all
// heads.
template <class Traits, class Accumulator>
CUTE_DEVICE void add_query_gradient(BackwardArguments const& args, std::int64_t q_tile,
                                    int column_begin, Accumulator const& tdQrdQ, int thread) {
  constexpr int block_m = Traits::block_m;
  float* sums = args.dq_accum + q_tile * (block_m * Traits::head_dim) + column_begin * block_m;
  DqAccumulator<Traits::threads>::add(sums, tdQrdQ, thread);
}

// Registers -> shared memory -> the tile's rows of dk or dv.
template <class Traits, class Accumulator>
CUTE_DEVICE void write_key_gradient(TensorView const& view, Sequence const& sequence, int head_k,
                                    int key_begin, int columns, Accumulator const& accumulator,
                                    typename Traits::Element* buffer, int thread) {
  auto sGrad = smem_tile<typename Traits::OwnKeyLayout>(buffer);
  fragment_to_shared<typename Traits::Element>(accumulator, typename Traits::DkdvMma{}, sGrad,
                                               thread);
  __syncthreads();
  Traits::KeyWriter::store(view, sequence.batch_k, head_k, sequence.row_k + key_begin,
                           sequence.rows_k - key_begin, columns, sGrad, thread);
}

// Registers -> the tile's rows of dk or dv in fp32, or, where the query heads are split, of this
// split's partial sum.
template <class Traits, class Accumulator>
CUTE_DEVICE void write_fp32_gradient(TensorView const& view, float* partial,
                                     BackwardArguments const& args, Sequence const& sequence,
                                     int split, int head_k, int key_begin, int column_begin,
                                     int columns, Accumulator const& accumulator, int thread) {
  constexpr int head_dim = Traits::head_dim;
  AttentionShape const& shape = args.params.shape;
  Fp32Rows target{
      .first = row_pointer<float>(view, sequence.batch_k, head_k, sequence.row_k + key_begin),
      .row_stride = view.row_stride,
      .rows = sequence.rows_k - key_begin,
      .columns = columns,
      .accumulates = args.params.accumulate};
  if (args.dkdv_splits > 1) {
    const std::int64_t row = split * args.partial_rows +
                             std::int64_t(sequence.batch_k) * shape.seqlen_k + sequence.row_k +
                             key_begin;
    target.first = partial + (row * shape.num_heads_k + head_k) * head_dim + column_begin;
    target.row_stride = shape.num_heads_k * head_dim;
    target.columns = Traits::columns_per_cta;
    target.accumulates = false;
  }
  fragment_to_fp32_rows<Traits::block_n, Traits::columns_per_cta>(
      accumulator, typename Traits::DkdvMma{}, target, thread);
}

// A CTA's dK and dV as they were multiplied -> scaled, in global memory.
template <class Traits, class Accumulator>
CUTE_DEVICE void leave_key_gradients(BackwardArguments const& args, Sequence const& sequence,
                                     typename Traits::SharedStorage& smem,
                                     OwnGradients<Traits> const& own, Accumulator& tdKrdK,
                                     Accumulator& tdVrdV, int thread) {
  using Element = typename Traits::Element;
  const int column_begin = own.column_begin;
  BackwardParams const& params = args.params;
  const float kept = Traits::has_dropout ? 1.0f / args.keep_probability : 1.0f;
  CUTE_UNROLL
  for (int i = 0; i < size(tdKrdK); ++i) tdKrdK(i) *= args.score_factor;
  if (Traits::has_dropout) {
    CUTE_UNROLL
    for (int i = 0; i < size(tdVrdV); ++i) tdVrdV(i) *= kept;
  }
  const int columns_k = params.shape.head_dim - column_begin;
  const int columns_v = params.shape.head_dim_v - column_begin;
  if (args.dkdv_splits > 1 || (Traits::writes_fp32 && params.fp32_results)) {
    write_fp32_gradient<Traits>(from_column<float, Traits::shares_columns>(params.dk, column_begin),
                                args.dk_partial, args, sequence, own.split, own.head_k,
                                own.key_begin, column_begin, columns_k, tdKrdK, thread);
    write_fp32_gradient<Traits>(from_column<float, Traits::shares_columns>(params.dv, column_begin),
                                args.dv_partial, args, sequence, own.split, own.head_k,
                                own.key_begin, column_begin, columns_v, tdVrdV, thread);
    return;
  }
  __syncthreads();  // K and V are read, their buffers take dK and dV
  write_key_gradient<Traits>(from_column<Element, Traits::shares_columns>(params.dk, column_begin),
                             sequence, own.head_k, own.key_begin, columns_k, tdKrdK, smem.k,
                             thread);
  write_key_gradient<Traits>(from_column<Element, Traits::shares_columns>(params.dv, column_begin),
                             sequence, own.head_k, own.key_begin, columns_v, tdVrdV, smem.v,
                             thread);
}

}  // namespace flash_attn_cuda::sm80
