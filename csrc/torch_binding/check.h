// Checks of what a caller passed. Each throws naming the argument, the rule and the value, and
// costs a few comparisons when nothing is wrong: TypeError for a dtype, ValueError for a shape, a
// device or a number, NotImplementedError for what is refused. None looks into device memory.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "torch_binding/call.h"

namespace flash_attn_cuda::binding {

// How q, k and v lie, and what errors call k and v.
struct InputLayout {
  enum class Kv { dense, packed, paged, cache };
  bool packed_q = false;  // (total_q, heads_q, head_dim) instead of (batch, seqlen_q, ...)
  // dense (batch, seqlen_k, heads_k, head_dim), cache the same of any batch, packed (total_k,
  // heads_k, head_dim), paged (num_pages, page_size, heads_k, head_dim); v with head_dim_v.
  Kv kv = Kv::dense;
  const char* k_name = "k";
  const char* v_name = "v";
  bool any_head_dim = false;  // else multiples of 8
};

// What tensors that are made for pairs of queries and keys must fit.
struct PairExtent {
  std::int64_t batch = 0;
  std::int64_t heads_q = 0;
  std::int64_t seqlen_q = 0;
  std::int64_t seqlen_k = 0;
  bool at_least = false;  // of packed sequences: such a tensor may be made for more
};

// q, k and v have this layout, one CUDA device, one 16-bit dtype, and heads that fit.
void check_inputs(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                  const InputLayout& layout = {});

// The GPU of a CUDA tensor runs kernels of this library.
void check_capability(const char* name, const at::Tensor& tensor);

// `tensor` has this shape and dtype and lies on the device of q.
void check_like(const char* name, const at::Tensor& tensor, at::IntArrayRef shape,
                at::ScalarType dtype, const at::Tensor& q);

// As check_like, and contiguous: what kernels read as a plain array.
void check_array(const char* name, const at::Tensor& tensor, at::IntArrayRef shape,
                 at::ScalarType dtype, const at::Tensor& q);

// Kernels read such a tensor where it lies: it is never copied.
void check_read_in_place(const char* name, const at::Tensor& tensor);

// The number of sequences of an int32 (batch + 1) tensor. B = 0 has one entry.
std::int64_t checked_num_sequences(const char* name, const at::Tensor& cu_seqlens,
                                   const at::Tensor& q);

// int32 (rows, max_pages), rows contiguous; rows -1: any number of them.
void check_block_table(const at::Tensor& table, std::int64_t rows, const at::Tensor& q);

// fp32 (heads_q) or (batch, heads_q), or not given. Rows are contiguous in the tensor returned.
at::Tensor checked_alibi_slopes(const at::Tensor& slopes, std::int64_t batch, const at::Tensor& q);

// int32 (batch or 1, heads_q or 1, tiles of queries, 2 + tiles of keys), or, by_keys, with the two
// exchanged; or not given. Contiguous in the tensor returned.
at::Tensor checked_block_lists(const char* name, const at::Tensor& tensor, bool by_keys,
                               const PairExtent& extent, const at::Tensor& q);

// int32 (batch or 1, heads_q or 1, seqlen_q or more, 4 * tiles of keys) for these lists, or not
// given. Contiguous in the tensor returned.
at::Tensor checked_mask_bits(const at::Tensor& tensor, const at::Tensor& lists, bool by_keys,
                             const PairExtent& extent, const at::Tensor& q);

// (batch or 1, heads_q or 1, seqlen_q or 1, seqlen_k) of the dtype of q or fp32, or not given. Rows
// are contiguous in the tensor returned.
at::Tensor checked_bias(const at::Tensor& bias, const PairExtent& extent, const at::Tensor& q);

// int64 (2), needed where p_dropout > 0.
void check_rng_state(const at::Tensor& rng_state, double p_dropout, const at::Tensor& q);

// Whether it is an upper bound of lengths, device memory tells alone.
void check_max_seqlen(const char* name, std::int64_t max_seqlen);

// The fp32 that kernels use.
float checked_softmax_scale(double softmax_scale);
float checked_softcap(double softcap);
void check_p_dropout(const char* name, double p_dropout);

void check_num_splits(std::int64_t num_splits);

// FlashAttention-2 raises for it as well.
void refuse_generator(bool has_generator);

}  // namespace flash_attn_cuda::binding
