#include <c10/util/StringUtil.h>

#include <algorithm>
#include <ostream>

#include "torch_binding/check.h"
#include "torch_binding/layout.h"
#include "torch_binding/over_pairs.h"

namespace flash_attn_cuda::binding {
std::ostream& operator<<(std::ostream& stream, const SizeRule& rule) {
  stream << rule.size;
  if (rule.or_more) stream << " or more";
  if (rule.or_one && rule.size != 1) stream << " or 1";
  return stream;
}

std::int64_t tiles_of(std::int64_t seqlen) {
  constexpr std::int64_t tile = 128;
  return seqlen / tile + (seqlen % tile != 0);
}

PairExtent extent_of(const AttentionCall& call) {
  const bool packed = is_packed(call);
  const std::int64_t seqlen_q = packed ? call.max_seqlen_q : call.q.size(1);
  const bool is_known = call.seqlen_k.has_value() && !has_packed_new_keys(call);
  const std::int64_t seqlen_k = is_known          ? *call.seqlen_k + seqlen_k_new(call)
                                : call.over_cache ? capacity_of(call)
                                : packed          ? call.max_seqlen_k
                                                  : call.k.size(1);
  return {.batch = batch_of(call),
          .heads_q = call.q.size(call.q.dim() - 2),
          .seqlen_q = seqlen_q,
          .seqlen_k = seqlen_k,
          .tiles_q = tiles_of(seqlen_q),
          .tiles_k = tiles_of(seqlen_k),
          .or_more = packed};
}

void check_over_pairs(const char* name, const at::Tensor& tensor,
                      std::initializer_list<SizeRule> sizes,
                      std::initializer_list<at::ScalarType> dtypes, const at::Tensor& q) {
  check_place(name, tensor, dtypes, q);
  const bool fits = std::ranges::equal(tensor.sizes(), sizes,
                                       [](auto given, auto& rule) { return rule.allows(given); });
  TORCH_CHECK_VALUE(fits, name, ": must have shape (", c10::Join(", ", sizes), "), got ",
                    in_python(tensor.sizes()));
  check_sizes(name, tensor);
}

AttentionCall with_lists_of(Pass pass, AttentionCall call) {
  if (pass == Pass::forward) call.block_columns.reset();
  if (pass == Pass::backward) call.block_rows.reset();
  return call;
}

AttentionCall with_contiguous_masks(AttentionCall call) {
  for (at::Tensor* const x : {&call.block_rows, &call.block_columns, &call.mask_bits})
    if (x->defined()) *x = contiguous(*x);
  if (call.bias.defined()) call.bias = with_contiguous_rows(call.bias);
  return call;
}

}  // namespace flash_attn_cuda::binding
