// torch's own operators of flash attention, run by these kernels while they are taken.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <optional>

#include "torch_binding/call.h"

namespace flash_attn_cuda::binding {

// From then on CUDA tensors of F.scaled_dot_product_attention's flash backend and of aten's
// _flash_attention_forward and _backward come here. Calls that no kernel takes, forward and
// backward alike, go on to what ran before.
void take_aten_operators();
// Gives them back; nothing if they are not taken.
void give_back_aten_operators();

// The call that aten's operator runs for its arguments, the last ones on a stack; none: it goes on
// to what ran before. Does not ask whether there are kernels for it.
std::optional<AttentionCall> call_of_aten(const c10::OperatorHandle& op,
                                          const torch::jit::Stack& stack);

}  // namespace flash_attn_cuda::binding
