// Attention over some keys and attention over others become one.
#pragma once

#include <cstdint>

#include "flash_attn/api.h"

namespace flash_attn_cuda {

// Attention over some keys takes in attention over others, both in fp32:
//   out = (exp(lse) out + exp(part_lse) part) / (exp(lse) + exp(part_lse)), and lse likewise;
// a row whose lse is -inf has seen no key.
struct MergeParams {
  std::int64_t rows = 0;
  int num_heads = 0;
  int head_dim = 0;    // a multiple of 8
  TensorView out;      // fp32, without a batch; strides that keep rows of a head at 16 bytes
  TensorView part;     // likewise
  RowView<float> lse;  // (heads, rows)
  RowView<const float> part_lse;
  TensorView result;  // of result_dtype, at 8 bytes; null data: out is written, otherwise this
  Dtype result_dtype = Dtype::bf16;
  TensorView rounding;  // of the result, as ForwardParams::out_rounding; null data: not wanted
};

// Merges in place, by one kernel.
void run_merge(const MergeParams& params, Stream stream);

}  // namespace flash_attn_cuda
