// From a call as it was described to a checked AttentionCall.
#pragma once

#include <cstdint>

#include "torch_binding/arguments.h"
#include "torch_binding/call.h"

namespace flash_attn_cuda::binding {

// Which lists of blocks a call needs.
enum class Pass { forward, backward, both };

// Lengths in device memory decide what is computed; max_seqlen_q may choose a kernel, and masks and
// biases of packed sequences must hold the max_seqlens.
AttentionCall checked_call(const CallArguments& given, Pass pass);

// The same of tensors that no kernel may be able to read, such as those on the CPU.
AttentionCall described_call(const CallArguments& given, Pass pass);

// q, k and v where kernels can address them; pages and caches stay where they are.
void use_kernel_layout(AttentionCall& call);

// Raises where kernels have no backward for a call.
void check_gradients_exist(const AttentionCall& call, bool wants_dbias);

}  // namespace flash_attn_cuda::binding
