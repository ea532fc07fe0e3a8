// From a call as it was described to one that kernels can read.
#pragma once

#include "torch_binding/call.h"

namespace flash_attn_cuda::binding {

// The call with numbers as kernels use them, tensors that they read as plain arrays contiguous, and
// q, k, v and new keys where they can address them; pages and caches stay where they are. Lengths
// in device memory decide what is computed; max_seqlen_q may choose a kernel, and masks and biases
// of packed sequences must hold the max_seqlens. names: null for names_of(call).
AttentionCall checked_call(AttentionCall call, Pass pass, const ArgumentNames* names = nullptr);

// checked_call() for tensors that no kernel may be able to read, such as those without memory: q,
// k, v and new keys stay as they are.
AttentionCall described_call(AttentionCall call, Pass pass);

// Raises unless q, k and v have the call's layout, one CUDA device, one 16-bit dtype, but for k and
// v of e4m3, and heads that fit.
void check_inputs(const AttentionCall& call);

// Raises unless kernels can read such k and v of e4m3.
void check_e4m3(const AttentionCall& call, const ArgumentNames& names);

// The scale, given or not, in the fp32 that kernels use.
float softmax_scale_of(const AttentionCall& call);

// The call with q, k, v and new keys where kernels can address them.
AttentionCall with_kernel_layouts(AttentionCall call);

}  // namespace flash_attn_cuda::binding
