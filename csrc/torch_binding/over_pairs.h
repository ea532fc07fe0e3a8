// Lists of blocks, bits of pairs and biases: tensors over pairs of queries and keys. Their shapes
// are rules of both sides (generated_rules.h).
#pragma once

#include <initializer_list>
#include <iosfwd>

#include "torch_binding/call.h"

namespace flash_attn_cuda::binding {

// Tiles of queries, or of keys, that lists of blocks have.
std::int64_t tiles_of(std::int64_t seqlen);

// What such tensors must fit: of packed sequences the bounds of their lengths, or more.
struct PairExtent {
  std::int64_t batch;
  std::int64_t heads_q;
  std::int64_t seqlen_q;
  std::int64_t seqlen_k;
  std::int64_t tiles_q;
  std::int64_t tiles_k;
  bool or_more;
};

PairExtent extent_of(const AttentionCall& call);

// The sizes that a dimension may have.
struct SizeRule {
  std::int64_t size;
  bool or_one;
  bool or_more;

  bool allows(std::int64_t given) const {
    return given == size || (or_more && given > size) || (or_one && given == 1);
  }
};

std::ostream& operator<<(std::ostream& stream, const SizeRule& rule);

// The tensor lies on the device of q and has one of the dtypes and such a shape.
void check_over_pairs(const char* name, const at::Tensor& tensor,
                      std::initializer_list<SizeRule> sizes,
                      std::initializer_list<at::ScalarType> dtypes, const at::Tensor& q);

// The call with lists that the pass reads alone.
AttentionCall with_lists_of(Pass pass, AttentionCall call);

// The call with lists and bits contiguous, and the bias in rows.
AttentionCall with_contiguous_masks(AttentionCall call);

}  // namespace flash_attn_cuda::binding
