// A backward's lists of blocks the other way round (ListedQueries, flash_attn/params.h).
#pragma once

#include "torch_binding/call.h"

namespace flash_attn_cuda::binding {

// int32, on the call's device. Nothing waits for that.
struct ListedTensors {
  at::Tensor places;
  at::Tensor rows;
  at::Tensor begins;
  at::Tensor ranks;  // not defined without deterministic
};

// Of a checked call with lists of blocks. What lengths say may be wrong: then places are other
// blocks or none, and always in range.
ListedTensors listed_tensors(const AttentionCall& call);

// Without pointers, as planning reads it; block 0: the call has no lists of blocks.
ListedQueries listed_queries(const AttentionCall& call);
ListedQueries listed_queries(const AttentionCall& call, const ListedTensors& tensors);

}  // namespace flash_attn_cuda::binding
