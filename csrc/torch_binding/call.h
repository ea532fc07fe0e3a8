// What follows from an attention call's fields, beside what flash_attn_cuda/call/fields.py says of
// them: of that AttentionCall itself, Incoming, Results and Gradients are made, and functions of a
// call (build_tools/generate/call_structs.py). A tensor that was not given is undefined.
//
// Numbers of a checked call (checked_call.h) are those that kernels use: softmax_scale has a value,
// a window is what window_of says, num_splits is 0 where the plan is to choose, and seqlen_k has a
// value where all sequences have one length after their new keys as well.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <limits>
#include <optional>

#include "flash_attn/params.h"
#include "torch_binding/generated_call.h"

namespace flash_attn_cuda::binding {

using OptionalTensor = std::optional<at::Tensor>;

// Which lists of blocks a call needs.
enum class Pass { forward, backward, both };

inline bool is_paged(const AttentionCall& call) { return call.block_table.defined(); }
inline bool drops(const AttentionCall& call) { return call.dropout_p > 0.0; }

// Whether there is a scale for each token and head, laid out as k.
inline bool is_per_token(const at::Tensor& scale) { return scale.defined() && scale.dim() >= 3; }

inline bool has_packed_new_keys(const AttentionCall& call) {
  return call.cu_seqlens_k_new.defined();
}

// Keys that are appended to every sequence; 0 where they are packed.
inline std::int64_t seqlen_k_new(const AttentionCall& call) {
  return call.k_new.defined() && !has_packed_new_keys(call) ? call.k_new.size(1) : 0;
}

// Of the tensors in 16 bits: q's dtype where it is one of them.
inline at::ScalarType dtype_in_16_bits(const AttentionCall& call) {
  if (!multiplies_fp8(call)) return call.q.scalar_type();
  return call.out_is_half ? at::kHalf : at::kBFloat16;
}

inline at::ScalarType dtype_of_new_keys(const AttentionCall& call) {
  return appends_fp8(call) ? at::kFloat8_e4m3fn : dtype_in_16_bits(call);
}

// The shape of scales of each token of a cache or pages; empty: k is neither, and has none.
inline at::IntArrayRef tokens_in_place(const AttentionCall& call) {
  return reads_in_place(call) ? call.k.sizes().slice(0, call.k.dim() - 1) : at::IntArrayRef();
}

// Of scales of groups of a latent row's columns, as many as v_descale has; empty: there are none.
inline at::DimVector groups_in_place(const AttentionCall& call) {
  at::DimVector sizes;
  if (!reads_in_place(call) || !is_fp8_latent(call)) return sizes;
  if (!call.v_descale.defined() || call.v_descale.dim() != 4) return sizes;
  sizes = call.k.sizes();
  sizes.back() = call.v_descale.size(3);
  return sizes;
}

// The dtype of out, dq, dk and dv.
inline at::ScalarType result_dtype(const AttentionCall& call) {
  return call.fp32_results ? at::kFloat : dtype_in_16_bits(call);
}

// Results in fp32 are as computed, and those over a cache, with qv or tree_mask have no backward.
inline bool has_rounding(const AttentionCall& call) {
  return !call.fp32_results && !reads_in_place(call) && !call.qv.defined() &&
         !call.tree_mask.defined();
}

// A negative bound, or one that no kernel could hold, is none.
inline Window window_of(const AttentionCall& call) {
  const auto bound = [](std::int64_t size) {
    const bool is_none = size < 0 || size > std::numeric_limits<int>::max();
    return is_none ? Window::unbounded : static_cast<int>(size);
  };
  return {.left = bound(call.window_size_left),
          .right = call.causal ? 0 : bound(call.window_size_right),
          .has_tree = call.tree_mask.defined()};
}

// Whether kernels read lengths or indices that may be wrong.
inline bool has_device_contents(const AttentionCall& call) {
  return call.cu_seqlens_q.defined() || call.cu_seqlens_k.defined() || call.seqused_q.defined() ||
         call.seqused_k.defined() || call.leftpad_k.defined() || call.block_table.defined() ||
         call.cache_batch_idx.defined() || call.cu_seqlens_k_new.defined() ||
         call.key_lists.defined();
}

}  // namespace flash_attn_cuda::binding
