// What a call over a cache does before it attends: new keys and values are written into the cache,
// and keys and queries are rotated.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

#include "flash_attn/params.h"
#include "torch_binding/call.h"
#include "torch_binding/to_params.h"

namespace flash_attn_cuda::binding {

// Keys and values to be written behind what the cache holds; k undefined: none.
struct NewKeys {
  at::Tensor k, v;          // (batch, length, heads_k, head_dim), packed (total, ...)
  at::Tensor cu_seqlens;    // of packed ones
  std::int64_t length = 0;  // of every sequence where they are not packed
};

// cos undefined: no rotation.
struct Rotary {
  at::Tensor cos, sin;  // (seqlen_rotary, rotary_dim / 2)
  bool interleaved = true;
};

// A checked one. Its tensors must live until the kernel that reads them is launched.
struct CacheUpdate {
  NewKeys keys;
  Rotary rotary;
  std::int64_t capacity = 0;   // rows of the cache for a sequence
  std::int64_t seqlen_k = -1;  // keys of every sequence before the update; -1: lengths say it
  KeyLengths lengths;          // behind it
};

CacheUpdate checked_update(const AttentionCall& call);

// For run_append, if there is anything to do.
struct Append {
  std::optional<AppendParams> params;
  at::Tensor rotated_q;  // to be attended with instead of q; undefined: q is not rotated
};

// Marks the caches as written.
Append begin_append(const AttentionCall& call, const CacheUpdate& update);

}  // namespace flash_attn_cuda::binding
