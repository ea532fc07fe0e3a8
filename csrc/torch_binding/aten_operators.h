// torch's own operators of flash attention, run by these kernels while they are taken.
#pragma once

namespace flash_attn_cuda::binding {

// From then on CUDA tensors of F.scaled_dot_product_attention's flash backend and of aten's
// _flash_attention_forward and _backward come here. Calls that no kernel takes, forward and
// backward alike, go on to what ran before.
void take_aten_operators();
// Gives them back; nothing if they are not taken.
void give_back_aten_operators();

}  // namespace flash_attn_cuda::binding
