// What autograd keeps of a call for its backward, which is everything that the call's backward is
// told where it goes through an operator instead: explain_settings shows both. Structured bindings
// name every field, so that one that is added does not compile until it is decided about here.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <vector>

#include "torch_binding/call.h"

namespace flash_attn_cuda::binding {

// All are exact in a double, which autograd keeps lists of.
inline std::vector<double> saved_numbers(const AttentionCall& call) {
  const auto& [window, softmax_scale, softcap, p_dropout, deterministic, fp32_results, sm_margin] =
      call.options;
  const auto& [left, right] = window;
  return {static_cast<double>(left),
          static_cast<double>(right),
          softmax_scale,
          softcap,
          p_dropout,
          deterministic ? 1.0 : 0.0,
          fp32_results ? 1.0 : 0.0,
          static_cast<double>(sm_margin),
          static_cast<double>(call.max_seqlen_q),
          static_cast<double>(call.max_seqlen_k)};
}

inline void restore_numbers(const std::vector<double>& numbers, AttentionCall& call) {
  std::size_t next = 0;
  const auto integer = [&] { return static_cast<int>(numbers.at(next++)); };
  const auto real = [&] { return numbers.at(next++); };
  CallOptions& options = call.options;
  options.window.left = integer();
  options.window.right = integer();
  options.softmax_scale = static_cast<float>(real());
  options.softcap = static_cast<float>(real());
  options.p_dropout = real();
  options.deterministic = real() != 0.0;
  options.fp32_results = real() != 0.0;
  options.sm_margin = integer();
  call.max_seqlen_q = integer();
  call.max_seqlen_k = integer();
}

// The tensors beside q, k and v, in one order for save and restore. A cache has no backward, lists
// of blocks by queries are the forward's, and numbers are above.
template <class Call, class Visitor>
void visit_saved_tensors(Call& call, Visitor&& visitor) {
  auto& [q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, leftpad_k, origin, alibi_slopes,
         max_seqlen_q, max_seqlen_k, cache, masks, options] = call;
  auto& [block_rows, block_columns, bits, bias, sink] = masks;
  visitor(cu_seqlens_q);
  visitor(cu_seqlens_k);
  visitor(seqused_q);
  visitor(seqused_k);
  visitor(leftpad_k);
  visitor(origin);
  visitor(alibi_slopes);
  visitor(block_columns);
  visitor(bits);
  visitor(bias);
  visitor(sink);
}

}  // namespace flash_attn_cuda::binding
