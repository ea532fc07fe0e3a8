// Tensors as the tensor memory accelerator (TMA) of Hopper GPUs sees them.
#pragma once

#include <cuda.h>

#include "flash_attn/params.h"

namespace flash_attn_cuda {

// The part of a tensor that one TMA instruction moves: `rows` of one head, `columns` of head_dim
// or, of a bias, keys.
struct TensorBox {
  int rows;     // at most 256
  int columns;  // 64 (128-byte swizzle), 32 (64-byte swizzle) or 8 (none)
};

struct TensorExtent {
  int batch_size;
  int rows;
  int num_heads;
  int head_dim;
};

// Of q, of out, of k, and of v, and so of their gradients.
TensorExtent query_extent(const AttentionShape& shape, const SequenceParams& sequences);
TensorExtent output_extent(const AttentionShape& shape, const SequenceParams& sequences);
TensorExtent key_extent(const AttentionShape& shape, const SequenceParams& sequences);
TensorExtent value_extent(const AttentionShape& shape, const SequenceParams& sequences);
// Of k and v as a paged cache has them.
TensorExtent in_pages(TensorExtent keys, const PagedKvParams& paged);

// Whether TMA can read and write the tensor: 16-byte aligned, strides multiples of 16 bytes below
// 2^40 and, where there is a second element to step to, not 0.
bool tma_can_move(const TensorView& view, const TensorExtent& extent);

// A map whose boxes end where a sequence ends, wherever that is. Its coordinates are (column,
// box.rows - n, row + n, head, batch) for the n rows from `row` on: the second one leaves the map
// after n rows, and what lies beyond is not read but zero. The same row stride serves the second
// and the third coordinate, and the base lies box.rows rows before the tensor.
// Throws Error when the driver refuses. The map of an empty tensor must not be used.
CUtensorMap make_tensor_map(const TensorView& view, Dtype dtype, const TensorExtent& extent,
                            const TensorBox& box);

// A bias or its gradient in 16 bits: (batch or 1, heads or 1, rows, columns).
struct PairTensor {
  const void* data;
  int batch_size;
  int num_heads;
  int rows;
  int columns;
  std::int64_t batch_stride;
  std::int64_t head_stride;
  std::int64_t row_stride;
};

PairTensor pair_tensor(const BiasParams& bias, const AttentionShape& shape);
PairTensor pair_tensor(const BiasGradient& dbias, const BiasParams& bias,
                       const AttentionShape& shape);

bool tma_can_move(const PairTensor& tensor);

// The same of a call's bias, if there is one: an fp32 one or one row for all queries it cannot.
bool tma_can_load_bias(const BiasParams& bias, const AttentionShape& shape);

// A map with coordinates (column, row, head, batch); the last two are 0 where the stride is.
CUtensorMap make_pair_map(const PairTensor& tensor, Dtype dtype, const TensorBox& box);

// A mask's bits: (batch or 1, heads or 1, rows, words), in elements of 16 bits. Whether TMA can
// read them, if there are any, and a map with coordinates like those of a bias.
PairTensor pair_tensor(const PairBits& bits, const AttentionShape& shape);
bool tma_can_load_bits(const PairBits& bits, const AttentionShape& shape);
CUtensorMap make_bits_map(const PairTensor& tensor, const TensorBox& box);

}  // namespace flash_attn_cuda
