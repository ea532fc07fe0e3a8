// Lists of blocks, bits of pairs and biases: tensors that are made for pairs of queries and keys.
#include <algorithm>
#include <ostream>

#include "torch_binding/check.h"
#include "torch_binding/checked_call.h"
#include "torch_binding/layout.h"
#include "torch_binding/to_params.h"

namespace flash_attn_cuda::binding {
namespace {

constexpr std::int64_t mask_tile = 128;  // queries, or keys, of a tile of BlockLists
constexpr std::int64_t words_per_tile = mask_tile / 32;

// What such tensors must fit.
struct PairExtent {
  std::int64_t batch = 0;
  std::int64_t heads_q = 0;
  std::int64_t seqlen_q = 0;
  std::int64_t seqlen_k = 0;
  bool at_least = false;  // of packed sequences: such a tensor may be made for more
};

PairExtent extent_of(const AttentionCall& call) {
  const bool packed = is_packed(call);
  return {.batch = batch_of(call),
          .heads_q = call.q.size(call.q.dim() - 2),
          .seqlen_q = packed ? call.max_seqlen_q : call.q.size(1),
          .seqlen_k = packed ? call.max_seqlen_k : call.k.size(1),
          .at_least = packed};
}

// The sizes that a dimension may have.
struct SizeRule {
  std::int64_t size = 0;
  bool or_more = false;
  bool or_one = false;

  bool allows(std::int64_t given) const {
    return given == size || (or_more && given > size) || (or_one && given == 1);
  }
};

std::ostream& operator<<(std::ostream& stream, const SizeRule& rule) {
  stream << rule.size;
  if (rule.or_more) stream << " or more";
  if (rule.or_one && rule.size != 1) stream << " or 1";
  return stream;
}

// (batch or 1, heads_q or 1, rows, columns).
void check_shape(const char* name, const at::Tensor& tensor, const PairExtent& extent,
                 const SizeRule& rows, const SizeRule& columns) {
  const SizeRule batch{.size = extent.batch, .or_one = true};
  const SizeRule heads{.size = extent.heads_q, .or_one = true};
  TORCH_CHECK_VALUE(tensor.dim() == 4 && batch.allows(tensor.size(0)) &&
                        heads.allows(tensor.size(1)) && rows.allows(tensor.size(2)) &&
                        columns.allows(tensor.size(3)),
                    name, ": must have shape (", batch, ", ", heads, ", ", rows, ", ", columns,
                    "), got ", tensor.sizes());
  check_sizes(name, tensor);
}

std::int64_t mask_tiles(std::int64_t seqlen) {
  return seqlen / mask_tile + (seqlen % mask_tile != 0);
}

// int32 (batch or 1, heads_q or 1, tiles of queries, 2 + tiles of keys), or, by_keys, with the two
// exchanged.
void check_lists(const char* name, const at::Tensor& lists, bool by_keys, const PairExtent& extent,
                 const at::Tensor& q) {
  check_place(name, lists, at::kInt, q);
  const std::int64_t tiles = mask_tiles(by_keys ? extent.seqlen_k : extent.seqlen_q);
  const std::int64_t others = mask_tiles(by_keys ? extent.seqlen_q : extent.seqlen_k);
  check_shape(name, lists, extent, {.size = tiles, .or_more = extent.at_least},
              {.size = 2 + others, .or_more = extent.at_least});
}

// int32 (batch or 1, heads_q or 1, seqlen_q or more, 4 * tiles of keys) for these lists.
void check_bits(const at::Tensor& bits, const at::Tensor& lists, bool by_keys,
                const PairExtent& extent, const at::Tensor& q) {
  check_place("mask_bits", bits, at::kInt, q);
  const std::int64_t tiles = lists.size(2);
  const std::int64_t others = lists.size(3) - 2;
  const std::int64_t query_tiles = by_keys ? others : tiles;
  const std::int64_t key_tiles = by_keys ? tiles : others;
  // Lists of packed sequences may be made for longer ones, and then so are the bits.
  const std::int64_t least_rows =
      std::max(extent.seqlen_q, query_tiles > 0 ? (query_tiles - 1) * mask_tile + 1 : 0);
  check_shape("mask_bits", bits, extent, {.size = least_rows, .or_more = true},
              {.size = words_per_tile * key_tiles});
}

// (batch or 1, heads_q or 1, seqlen_q or 1, seqlen_k) of the dtype of q or fp32.
void check_bias(const at::Tensor& bias, const PairExtent& extent, const at::Tensor& q) {
  check_device("bias", bias, q);
  TORCH_CHECK_TYPE(bias.scalar_type() == q.scalar_type() || bias.scalar_type() == at::kFloat,
                   "bias: dtype must be that of q (", q.scalar_type(), ") or ", at::kFloat,
                   ", got ", bias.scalar_type());
  check_shape("bias", bias, extent,
              {.size = extent.seqlen_q, .or_more = extent.at_least, .or_one = true},
              {.size = extent.seqlen_k, .or_more = extent.at_least});
}

}  // namespace

AttentionCall with_checked_masks(AttentionCall call, Pass pass) {
  if (pass == Pass::forward) call.block_columns.reset();
  if (pass == Pass::backward) call.block_rows.reset();
  const bool has_lists = call.block_rows.defined() || call.block_columns.defined();
  TORCH_CHECK_VALUE(has_lists || !call.mask_bits.defined(),
                    "mask_bits: must be None without lists of blocks, got shape ",
                    call.mask_bits.sizes());
  if (!has_lists && !call.bias.defined()) return call;
  const PairExtent extent = extent_of(call);
  const auto adopt_lists = [&](const char* name, at::Tensor& lists, bool by_keys) {
    if (!lists.defined()) return;
    check_lists(name, lists, by_keys, extent, call.q);
    if (call.mask_bits.defined()) check_bits(call.mask_bits, lists, by_keys, extent, call.q);
    lists = contiguous(lists);
  };
  adopt_lists("block_rows", call.block_rows, /*by_keys=*/false);
  adopt_lists("block_columns", call.block_columns, /*by_keys=*/true);
  if (call.mask_bits.defined()) call.mask_bits = contiguous(call.mask_bits);
  if (call.bias.defined()) {
    check_bias(call.bias, extent, call.q);
    call.bias = with_contiguous_rows(call.bias);
  }
  return call;
}

}  // namespace flash_attn_cuda::binding
