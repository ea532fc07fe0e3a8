// The backward of a checked call.
#pragma once

#include "flash_attn/api.h"
#include "torch_binding/call.h"

namespace flash_attn_cuda::binding {

// Checks what is given and writes the gradients, which do not hang on the inputs. `call` is what
// checked_call made of the forward's arguments, without inputs that only a gradient needs and
// nobody wants that of. softmax_d (batch, heads_q, seqlen_q rounded up to 128), packed (heads_q,
// total_q), is zero after seqlen_q. What is undefined was not wanted; dbias is fp32 where pairs
// share an element, else of the bias's dtype; dsink is fp32.
Gradients run_backward_call(const AttentionCall& call, const Incoming& given);

// The same of <dout, tout> + <dlse, tlse>, for tangents where kernels can address them.
Gradients run_hvp_call(const AttentionCall& call, const Incoming& given, const Tangents& tangents);

// Raises unless results and their gradients have the shapes and dtypes of the call's.
void check_results(const Incoming& given, const AttentionCall& call);

// What it would run, of tensors without memory too. Allocates nothing.
// with_tangents: of the second derivative in a direction.
BackwardPlan plan_backward_call(const AttentionCall& call, const DeviceInfo& device,
                                bool with_tangents);

}  // namespace flash_attn_cuda::binding
