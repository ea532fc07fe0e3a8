// One attention call as the binding's functions pass it on: checked tensors and numbers. A tensor
// that was not given is undefined.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "flash_attn/params.h"

namespace flash_attn_cuda::binding {

struct CallOptions {
  Window window;
  float softmax_scale = 1.0f;
  float softcap = 0.0f;    // 0: off
  double p_dropout = 0.0;  // 0: off
  bool deterministic = false;
  bool fp32_results = false;
  int sm_margin = 0;  // multiprocessors that plans do not count on
};

// What a forward over a cache has beyond lengths.
struct CacheTensors {
  bool reads_in_place = false;  // k and v are entries of a cache, which is never copied
  at::Tensor block_table;       // int32 (entries, max_pages): k and v are pages of a pool
  at::Tensor kv_batch_idx;      // int32 (batch): entry of k and v, or row of block_table
  at::Tensor cu_seqlens_k_new;  // int32 (batch + 1), of keys appended since seqused_k was written
  int seqlen_k_new = 0;         // the same for every sequence where cu_seqlens_k_new is not given
  int seqlen_k = -1;  // keys of every sequence with appended ones; -1: what device memory says
};

// What hides pairs, or adds to scores, beside window and lengths.
struct MaskTensors {
  // int32 (batch or 1, heads_q or 1, tiles, 2 + other tiles), contiguous (BlockLists,
  // flash_attn/params.h): by tiles of queries for a forward, by tiles of keys for a backward.
  at::Tensor block_rows, block_columns;
  at::Tensor bits;  // int32 (batch or 1, heads_q or 1, rows, 4 * tiles of keys), contiguous
  // (batch or 1, heads_q or 1, seqlen_q or 1, seqlen_k) of the dtype of q or fp32, rows contiguous
  at::Tensor bias;
  at::Tensor sink;  // fp32 (heads_q); of a backward, whose lse has it, where it has a gradient
};

// Dense: q (batch, seqlen_q, heads_q, head_dim), k (batch, seqlen_k, heads_k, head_dim). Packed,
// with cu_seqlens: (total_q, heads_q, head_dim) and (total_k, heads_k, head_dim). Paged, with
// cache.block_table: k (num_pages, page_size, heads_k, head_dim), and cu_seqlens_k tells lengths
// alone. v is like k, and what comes out like q, but for their last dimension, head_dim_v.
struct AttentionCall {
  at::Tensor q, k, v;
  at::Tensor cu_seqlens_q, cu_seqlens_k;       // int32 (batch + 1)
  at::Tensor seqused_q, seqused_k, leftpad_k;  // int32 (batch)
  at::Tensor origin;                           // int32 (batch, 4): SequenceParams
  at::Tensor alibi_slopes;                     // fp32 (heads_q) or (batch, heads_q)
  int max_seqlen_q = 0;                        // of packed sequences, an upper bound; 0: not known
  int max_seqlen_k = 0;
  CacheTensors cache;
  MaskTensors masks;
  CallOptions options;

  bool is_packed() const { return cu_seqlens_q.defined(); }
  // Of out, dq, dk and dv.
  at::ScalarType result_dtype() const {
    return options.fp32_results ? at::kFloat : q.scalar_type();
  }
  bool is_paged() const { return cache.block_table.defined(); }
  std::int64_t batch() const { return is_packed() ? cu_seqlens_q.size(0) - 1 : q.size(0); }
  // Whether kernels read lengths or indices that may be wrong.
  bool has_device_contents() const {
    return cu_seqlens_q.defined() || cu_seqlens_k.defined() || seqused_q.defined() ||
           seqused_k.defined() || leftpad_k.defined() || cache.block_table.defined() ||
           cache.kv_batch_idx.defined() || cache.cu_seqlens_k_new.defined();
  }
};

}  // namespace flash_attn_cuda::binding
