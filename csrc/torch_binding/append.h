// What a call over a cache does before it attends: new keys and values are written into the cache,
// and keys and queries are rotated.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <optional>

#include "flash_attn/params.h"
#include "torch_binding/call.h"

namespace flash_attn_cuda::binding {

// Raises unless new keys, lengths and rotation fit the call's cache.
void check_append(const AttentionCall& call, std::int64_t batch);

// For run_append, if there is anything to do.
struct Append {
  std::optional<AppendParams> params;
  at::Tensor rotated_q;  // to be attended with instead of q; undefined: q is not rotated
  std::array<at::Tensor, 4> written;  // caches and scales; undefined: none
};

// `call` is checked.
Append begin_append(const AttentionCall& call);

}  // namespace flash_attn_cuda::binding
