// One forward call on checked tensors.
#pragma once

#include <ATen/core/Tensor.h>

#include "flash_attn/params.h"
#include "torch_binding/call.h"
#include "torch_binding/errors.h"

namespace flash_attn_cuda::binding {

struct ForwardExtras {
  SplitParams split;
  const AppendParams* append = nullptr;  // to the cache, before; when nothing more can be refused
  // S_dmask (batch, heads_q, rows, columns) of a call with dropout.
  bool wants_probabilities = false;
  std::int64_t rows = 0;
  std::int64_t columns = 0;
  ContentNames names;
};

struct ForwardResults {
  at::Tensor softmax_lse;
  at::Tensor rng_state;      // undefined without dropout
  at::Tensor probabilities;  // undefined where not wanted
};

// The call's tensors as use_kernel_layout leaves them, or as a cache is. Writes `out`.
ForwardResults run_forward_call(const AttentionCall& call, TensorView out,
                                const ForwardExtras& extras = {});

}  // namespace flash_attn_cuda::binding
