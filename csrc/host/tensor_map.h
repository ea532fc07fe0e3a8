// Tensors as the tensor memory accelerator (TMA) of Hopper GPUs sees them.
#pragma once

#include "flash_attn/api.h"

struct CUtensorMap_st;
using CUtensorMap = CUtensorMap_st;

namespace flash_attn_cuda {

// What one TMA instruction moves of a tensor: `rows` of one head, `columns` of head_dim or, of a
// bias, keys.
struct TensorBox {
  int rows;                      // at most 256
  int columns;                   // 64 (128-byte swizzle), 32 (64-byte swizzle) or 8 (none)
  bool is_narrow_in_l2 = false;  // L2 fetches 128 bytes around what a box wants, not 256
};

// The extents of a call's tensors; k and v as a paged cache has them.
TensorExtents tensor_extents(const AttentionShape& shape, const SequenceParams& sequences,
                             const PagedKvParams& paged = {});

// Whether TMA can read and write the tensor: 16-byte aligned, strides multiples of 16 bytes below
// 2^40 and, where there is a second element to step to, not 0.
bool tma_can_move(const TensorView& view, Dtype dtype, const TensorExtent& extent);

// Whether keys lie in boxes of TMA: those that lie in one page and begin where the swizzle of
// shared memory does.
bool has_boxes(const PagedKvParams& paged, const SequenceParams& sequences);

// Whether a latent kernel copies keys row by row: those of lists, and where there are no boxes.
inline bool loads_rows(const ForwardParams& params) {
  return has_key_lists(params) || !has_boxes(params.paged, params.sequences);
}

// Whether 32 bits count the vectors of 16 bytes up to any row: kernels that copy rows have no more.
bool has_near_rows(const TensorView& view, Dtype dtype, const TensorExtent& extent);

// A map whose boxes end where a sequence ends, wherever that is. Its coordinates are (column,
// box.rows - n, row + n, head, batch) for the n rows from `row` on: the second one leaves the map
// after n rows, and what lies beyond is not read but zero. The same row stride serves the second
// and the third coordinate, and the base lies box.rows rows before the tensor.
// Throws Error when the driver refuses. The map of an empty tensor must not be used.
CUtensorMap make_tensor_map(const TensorView& view, Dtype dtype, const TensorExtent& extent,
                            const TensorBox& box);

// A map whose boxes are heads of one row: coordinates (column, head, row, batch).
CUtensorMap make_heads_map(const TensorView& view, Dtype dtype, const TensorExtent& extent,
                           const TensorBox& box);

// A bias or its gradient, (batch or 1, heads or 1, rows, columns), or a mask's bits, as columns of
// bf16.
struct PairTensor {
  const void* data;
  Dtype dtype;
  int batch_size;
  int num_heads;
  int rows;
  int columns;
  std::int64_t batch_stride;
  std::int64_t head_stride;
  std::int64_t row_stride;
};

PairTensor pair_tensor(const BiasParams& bias, Dtype dtype, const AttentionShape& shape);
PairTensor pair_tensor(const BiasGradient& dbias, const BiasParams& bias, Dtype dtype,
                       const AttentionShape& shape);
PairTensor pair_tensor(const PairBits& bits, const AttentionShape& shape);

bool tma_can_move(const PairTensor& tensor);

// Whether TMA can load a call's bias or bits, if there are any. It cannot load a bias in fp32 or
// with one row for all queries.
bool tma_can_load_bias(const BiasParams& bias, Dtype dtype, const AttentionShape& shape);
bool tma_can_load_bits(const PairBits& bits, const AttentionShape& shape);

// A map with coordinates (column, row, head, batch); the last two are 0 where the stride is.
CUtensorMap make_pair_map(const PairTensor& tensor, const TensorBox& box);

}  // namespace flash_attn_cuda
