// What a call over a cache does before it attends: new keys and values are written into the cache,
// and keys and queries are rotated.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

#include "flash_attn/params.h"
#include "torch_binding/arguments.h"
#include "torch_binding/call.h"

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

// Keys that the cache holds before the call: on the device, or one number for every sequence.
struct CacheLengths {
  at::Tensor on_device;
  std::int64_t on_host = -1;
};

// A checked one. Its tensors must live until the kernel that reads them is launched.
struct CacheUpdate {
  NewKeys keys;
  Rotary rotary;
  CacheLengths lengths;
  std::int64_t capacity = 0;
};

// Sets the lengths that the call's cache has with the new keys.
CacheUpdate checked_update(const CallArguments& given, AttentionCall& call);

// For run_append, if there is anything to do. The call's q becomes the rotated one.
std::optional<AppendParams> append_params(AttentionCall& call, const CacheUpdate& update);

}  // namespace flash_attn_cuda::binding
