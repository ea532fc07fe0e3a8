#include "torch_binding/checked_call.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "torch_binding/to_params.h"

namespace flash_attn_cuda::binding {
namespace {

CallOptions checked_options(const CallArguments& given) {
  const std::int64_t head_dim = given.q.size(given.q.dim() - 1);
  const double scale = given.softmax_scale.value_or(1.0 / std::sqrt(static_cast<double>(head_dim)));
  return {.window = checked_window(given.is_causal, given.window_left, given.window_right),
          .softmax_scale = checked_softmax_scale(scale),
          .softcap = checked_softcap(given.softcap),
          .p_dropout = checked_p_dropout(given.p_dropout_name, given.p_dropout),
          .deterministic = given.deterministic};
}

// Returns how many there are.
std::int64_t set_packed_sequences(const CallArguments& given, bool is_paged, AttentionCall& call) {
  const std::int64_t batch = checked_num_sequences("cu_seqlens_q", *given.cu_seqlens_q, given.q);
  call.cu_seqlens_q = *given.cu_seqlens_q;
  check_max_seqlen("max_seqlen_q", given.max_seqlen_q);
  check_max_seqlen("max_seqlen_k", given.max_seqlen_k);
  if (given.max_seqlen_q.has_value())
    call.max_seqlen_q = useful_bound(*given.max_seqlen_q, given.q.size(0));
  if (given.max_seqlen_k.has_value())
    call.max_seqlen_k = useful_bound(*given.max_seqlen_k, std::numeric_limits<int>::max());
  if (!given.cu_seqlens_k.has_value()) return batch;

  const std::int64_t batch_k = checked_num_sequences("cu_seqlens_k", *given.cu_seqlens_k, given.q);
  TORCH_CHECK_VALUE(batch_k == batch, "cu_seqlens_k: must have as many entries as cu_seqlens_q (",
                    batch + 1, "), got ", batch_k + 1);
  // Of pages it tells lengths, which seqused_k replaces, as in FlashAttention-2.
  if (!is_paged || !given.seqused_k.has_value()) call.cu_seqlens_k = *given.cu_seqlens_k;
  return batch;
}

MaskTensors checked_masks(const CallArguments& given, std::int64_t batch) {
  const at::Tensor& q = given.q;
  const bool is_packed = given.cu_seqlens_q.has_value();
  const PairExtent extent{.batch = batch,
                          .heads_q = q.size(q.dim() - 2),
                          .seqlen_q = is_packed ? given.max_seqlen_q.value_or(0) : q.size(1),
                          .seqlen_k = is_packed ? given.max_seqlen_k.value_or(0) : given.k.size(1),
                          .at_least = is_packed};
  const bool by_keys = given.block_columns.has_value();
  MaskTensors masks;
  masks.block_lists = by_keys ? checked_block_lists("block_columns", given.block_columns,
                                                    /*by_keys=*/true, extent, q)
                              : checked_block_lists("block_rows", given.block_rows,
                                                    /*by_keys=*/false, extent, q);
  masks.bits = checked_mask_bits(given.mask_bits, masks.block_lists, by_keys, extent, q);
  masks.bias = checked_bias(given.bias, extent, q);
  masks.sink = checked_sink(given.sink, q);
  return masks;
}

}  // namespace

int useful_bound(std::int64_t max_seqlen, std::int64_t total) {
  return static_cast<int>(std::min(max_seqlen, total));
}

AttentionCall checked_call(const CallArguments& given) {
  const bool is_packed = given.cu_seqlens_q.has_value();
  const bool is_paged = given.block_table.has_value();
  using Kv = InputLayout::Kv;
  check_inputs(
      given.q, given.k, given.v,
      {.packed_q = is_packed, .kv = is_paged ? Kv::paged : (is_packed ? Kv::packed : Kv::dense)});
  TORCH_CHECK_VALUE(is_packed || !given.cu_seqlens_k.has_value(),
                    "cu_seqlens_q: must be given where cu_seqlens_k is, got None");
  TORCH_CHECK_VALUE(
      !is_packed || given.cu_seqlens_k.has_value() || (is_paged && given.seqused_k.has_value()),
      "cu_seqlens_k: must be given, got None");

  AttentionCall call{.q = given.q, .k = given.k, .v = given.v};
  if (is_paged) {
    check_read_in_place("k", given.k);
    check_read_in_place("v", given.v);
  }
  const std::int64_t batch =
      is_packed ? set_packed_sequences(given, is_paged, call) : given.q.size(0);
  call.cache.block_table = checked_block_table(given.block_table, batch, given.q);
  call.seqused_q = checked_per_sequence("seqused_q", given.seqused_q, batch, given.q);
  call.seqused_k = checked_per_sequence("seqused_k", given.seqused_k, batch, given.q);
  call.leftpad_k = checked_per_sequence("leftpad_k", given.leftpad_k, batch, given.q);
  call.alibi_slopes = checked_alibi_slopes(given.alibi_slopes, batch, given.q);
  call.masks = checked_masks(given, batch);
  call.options = checked_options(given);
  return call;
}

void use_kernel_layout(AttentionCall& call) {
  const auto adopt = [](at::Tensor& tensor) {
    if (!is_addressable(tensor)) tensor = with_kernel_layout(tensor);
  };
  adopt(call.q);
  if (call.is_paged()) return;
  adopt(call.k);
  adopt(call.v);
}

}  // namespace flash_attn_cuda::binding
