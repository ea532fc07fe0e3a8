// From the arguments that forward and backward functions share to a checked AttentionCall.
#pragma once

#include <cstdint>
#include <optional>

#include "torch_binding/call.h"
#include "torch_binding/check.h"

namespace flash_attn_cuda::binding {

// As a caller gave them; cu_seqlens_q makes the tensors packed. max_seqlen_q may choose a kernel,
// and masks and bias of packed sequences must hold the max_seqlens; what is computed goes by the
// lengths in device memory alone.
struct CallArguments {
  const at::Tensor& q;
  const at::Tensor& k;
  const at::Tensor& v;
  OptionalTensor cu_seqlens_q;
  OptionalTensor cu_seqlens_k;
  OptionalTensor seqused_q;
  OptionalTensor seqused_k;
  OptionalTensor leftpad_k;
  OptionalTensor block_table;
  std::optional<std::int64_t> max_seqlen_q;
  std::optional<std::int64_t> max_seqlen_k;
  OptionalTensor alibi_slopes;
  OptionalTensor block_rows;     // of a forward
  OptionalTensor block_columns;  // of a backward
  OptionalTensor mask_bits;
  OptionalTensor bias;
  OptionalTensor sink;
  double p_dropout = 0.0;
  std::optional<double> softmax_scale;  // none: head_dim ** -0.5
  bool is_causal = false;
  std::int64_t window_left = -1;
  std::int64_t window_right = -1;
  double softcap = 0.0;
  bool deterministic = false;
  const char* p_dropout_name = "p_dropout";
};

AttentionCall checked_call(const CallArguments& given);

// A checked max_seqlen as AttentionCall has it.
int useful_bound(std::int64_t max_seqlen, std::int64_t total);

// q, k and v where kernels can address them; pages stay where they are.
void use_kernel_layout(AttentionCall& call);

}  // namespace flash_attn_cuda::binding
