// What one attention call is, as plain structs: filled by the caller with designated initialisers,
// handed to the kernels by value. All strides are in elements and 64-bit; the last dimension of
// every tensor is contiguous.
#pragma once

#include <cstdint>

#include "flash_attn/config.h"

namespace flash_attn_cuda {

// A (batch, seqlen, heads, head_dim) tensor.
struct TensorView {
  void* data = nullptr;
  std::int64_t batch_stride = 0;
  std::int64_t row_stride = 0;
  std::int64_t head_stride = 0;
};

struct AttentionShape {
  int batch_size = 0;
  int seqlen_q = 0;
  int seqlen_k = 0;
  int num_heads_q = 0;
  int num_heads_k =
      0;  // divides num_heads_q; query head h reads key head h / (num_heads_q / num_heads_k)
  int head_dim = 0;
};

// Key j is visible to query i iff i + shift - left <= j <= i + shift + right, shift = seqlen_k -
// seqlen_q.
struct Window {
  static constexpr int unbounded = -1;
  int left = unbounded;
  int right = unbounded;

  constexpr bool is_full() const { return left == unbounded && right == unbounded; }
};

struct ForwardParams {
  Dtype dtype = Dtype::bf16;
  AttentionShape shape;
  Window window;
  float softmax_scale = 1.0f;
  TensorView q, k, v, out;
  float* lse = nullptr;  // (batch, num_heads_q, seqlen_q), natural logarithm
};

struct BackwardParams {
  Dtype dtype = Dtype::bf16;
  AttentionShape shape;
  Window window;
  float softmax_scale = 1.0f;
  TensorView q, k, v, out, dout;
  TensorView dq, dk, dv;
  const float* lse = nullptr;   // (batch, num_heads_q, seqlen_q), as the forward wrote it
  const float* dlse = nullptr;  // gradient of lse, same shape, or null
  float* softmax_d = nullptr;   // (batch, num_heads_q, seqlen_q_rounded): rowsum(dO * O) - dlse,
                                // written by the call
  void* workspace =
      nullptr;  // BackwardPlan::workspace_bytes, 256-byte aligned, contents irrelevant
};

}  // namespace flash_attn_cuda
