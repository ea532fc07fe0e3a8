#include "torch_binding/checked_call.h"

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <utility>

#include "flash_attn/params.h"
#include "host/normalize_window.h"
#include "torch_binding/check.h"
#include "torch_binding/to_params.h"

namespace flash_attn_cuda::binding {
namespace {

constexpr std::int64_t most_margin = 1 << 16;  // of multiprocessors: more than any device has

const char* k_name_of(const AttentionCall& call) { return call.over_cache ? "k_cache" : "k"; }
const char* v_name_of(const AttentionCall& call) { return call.over_cache ? "v_cache" : "v"; }

std::int64_t checked_batch(const AttentionCall& call) {
  if (!is_packed(call)) return call.q.size(0);
  const std::int64_t batch = checked_num_sequences("cu_seqlens_q", call.cu_seqlens_q, call.q);
  check_max_seqlen("max_seqlen_q", call.max_seqlen_q);
  return batch;
}

void check_packed_keys(const AttentionCall& call, std::int64_t batch) {
  check_max_seqlen("max_seqlen_k", call.max_seqlen_k);
  if (!call.cu_seqlens_k.defined()) {
    TORCH_CHECK_VALUE(is_paged(call) && call.seqused_k.defined(),
                      "cu_seqlens_k: must be given, got None");
    return;
  }
  const std::int64_t batch_k = checked_num_sequences("cu_seqlens_k", call.cu_seqlens_k, call.q);
  TORCH_CHECK_VALUE(batch_k == batch, "cu_seqlens_k: must have as many entries as cu_seqlens_q (",
                    batch + 1, "), got ", batch_k + 1);
}

void check_cache_entries(const AttentionCall& call, std::int64_t batch) {
  const bool has_pages = is_paged(call);
  const bool are_chosen = call.cache_batch_idx.defined();
  TORCH_CHECK_VALUE(has_pages || are_chosen || call.k.size(0) == batch,
                    "k_cache: batch must be that of q (", batch, ") without cache_batch_idx, got ",
                    call.k.size(0));
  const at::Tensor& entries = has_pages ? call.block_table : call.k;
  TORCH_CHECK_VALUE(
      batch == 0 || !are_chosen || entries.size(0) > 0, has_pages ? "block_table" : "k_cache",
      ": must have an entry for cache_batch_idx to name, got shape ", entries.sizes());
}

void check_origin(const AttentionCall& call) {
  if (!call.origin.defined()) return;
  TORCH_CHECK_VALUE(call.cu_seqlens_q.defined(),
                    "origin: must be None without cu_seqlens_q, got a tensor");
  const auto check = [](const char* what, bool is_there) {
    TORCH_CHECK_NOT_IMPLEMENTED(!is_there, "origin: must be None with ", what, ", got a tensor");
  };
  check("a block_table", is_paged(call));
  check("a cache", call.over_cache);
  check("a mask or a bias", has_masks(call));
  check("return_softmax", call.return_softmax && call.dropout_p > 0.0);
  const std::int64_t rows = std::max(call.q.size(0), call.k.size(0));
  TORCH_CHECK_VALUE(rows <= max_seqlen_with_origin, "origin: must be None for more than ",
                    max_seqlen_with_origin, " rows, got ", rows);
}

void check_refused(const AttentionCall& call, const char* dropout_p_name) {
  const bool in_place = reads_in_place(call);
  TORCH_CHECK_NOT_IMPLEMENTED(call.dropout_p == 0.0 || !in_place, dropout_p_name,
                              ": must be 0 with a block_table, got ", call.dropout_p);
  TORCH_CHECK_NOT_IMPLEMENTED(!in_place || !has_masks(call),
                              "attn_mask: must be None with a block_table");
  TORCH_CHECK_NOT_IMPLEMENTED(!(call.fp32_results && in_place),
                              "fp32_results: must be False with a block_table, got True");
  TORCH_CHECK_NOT_IMPLEMENTED(!(call.fp32_results && has_masks(call)),
                              "fp32_results: must be False with a mask or a bias, got True");
  TORCH_CHECK_VALUE(call.over_cache || !(call.k_new.defined() || call.rotary_cos.defined() ||
                                         call.cache_batch_idx.defined()),
                    "over_cache: must be set where keys are appended or entries chosen");
}

// With lists of the passes, bits and bias that fit them.
AttentionCall with_masks(AttentionCall call, Pass pass, std::int64_t batch) {
  const at::Tensor& q = call.q;
  const bool packed = is_packed(call);
  const PairExtent extent{.batch = batch,
                          .heads_q = q.size(q.dim() - 2),
                          .seqlen_q = packed ? call.max_seqlen_q : q.size(1),
                          .seqlen_k = packed ? call.max_seqlen_k : call.k.size(1),
                          .at_least = packed};
  const auto lists = [&](const char* name, const at::Tensor& tensor, bool by_keys) {
    const bool is_read = pass == Pass::both || (pass == Pass::backward) == by_keys;
    return is_read ? checked_block_lists(name, tensor, by_keys, extent, q) : at::Tensor();
  };
  call.block_rows = lists("block_rows", call.block_rows, /*by_keys=*/false);
  call.block_columns = lists("block_columns", call.block_columns, /*by_keys=*/true);
  const bool by_keys = call.block_columns.defined();
  if (by_keys && call.block_rows.defined())
    checked_mask_bits(call.mask_bits, call.block_rows, /*by_keys=*/false, extent, q);
  call.mask_bits = checked_mask_bits(call.mask_bits, by_keys ? call.block_columns : call.block_rows,
                                     by_keys, extent, q);
  call.bias = checked_bias(call.bias, extent, q);
  return call;
}

AttentionCall as_kernels_read(AttentionCall given, Pass pass, std::int64_t batch) {
  AttentionCall call = with_masks(std::move(given), pass, batch);
  call.alibi_slopes = checked_alibi_slopes(call.alibi_slopes, batch, call.q);
  const std::int64_t head_dim = call.q.size(call.q.dim() - 1);
  call.softmax_scale = checked_softmax_scale(
      call.softmax_scale.value_or(1.0 / std::sqrt(static_cast<double>(head_dim))));
  call.softcap = checked_softcap(call.softcap);
  const Window window = window_of(call);
  call.window_size_left = window.left;
  call.window_size_right = window.right;
  // A packed batch fills the device without splits; a cache, or pages, may be long.
  if (call.num_splits == 0 && !reads_in_place(call)) call.num_splits = 1;
  call.sm_margin = std::clamp<std::int64_t>(call.sm_margin, 0, most_margin);
  // Of pages cu_seqlens_k tells lengths, which seqused_k replaces, as in FlashAttention-2.
  if (call.over_cache || (is_paged(call) && call.seqused_k.defined())) call.cu_seqlens_k.reset();
  return call;
}

}  // namespace

AttentionCall checked_call(AttentionCall call, Pass pass, const char* dropout_p_name) {
  using Kv = InputLayout::Kv;
  const Kv entries = call.over_cache ? Kv::cache : (is_packed(call) ? Kv::packed : Kv::dense);
  check_inputs(call.q, call.k, call.v,
               {.packed_q = is_packed(call),
                .kv = is_paged(call) ? Kv::paged : entries,
                .k_name = k_name_of(call),
                .v_name = v_name_of(call),
                .any_head_dim = call.over_cache});
  return with_kernel_layouts(described_call(std::move(call), pass, dropout_p_name));
}

AttentionCall described_call(AttentionCall call, Pass pass, const char* dropout_p_name) {
  TORCH_CHECK_VALUE(is_packed(call) || !call.cu_seqlens_k.defined(),
                    "cu_seqlens_q: must be given where cu_seqlens_k is, got None");
  check_refused(call, dropout_p_name);
  if (reads_in_place(call)) {
    check_read_in_place(k_name_of(call), call.k);
    check_read_in_place(v_name_of(call), call.v);
  }
  const std::int64_t batch = checked_batch(call);
  if (call.over_cache)
    check_cache_entries(call, batch);
  else if (is_packed(call))
    check_packed_keys(call, batch);
  check_block_table(call.block_table, call.cache_batch_idx.defined() ? -1 : batch, call.q);
  check_origin(call);
  const auto check = [&call](const char* name, const at::Tensor& tensor,
                             std::initializer_list<std::int64_t> shape, at::ScalarType dtype) {
    if (tensor.defined()) check_array(name, tensor, shape, dtype, call.q);
  };
  check_arrays(call, batch, call.q.size(call.q.dim() - 2), check);
  check_p_dropout(dropout_p_name, call.dropout_p);
  check_num_splits(call.num_splits);
  return as_kernels_read(std::move(call), pass, batch);
}

AttentionCall with_kernel_layouts(AttentionCall call) {
  const auto adopt = [](at::Tensor& tensor) {
    if (!is_addressable(tensor)) tensor = with_kernel_layout(tensor);
  };
  adopt(call.q);
  if (reads_in_place(call)) return call;
  adopt(call.k);
  adopt(call.v);
  return call;
}

void check_gradients_exist(const AttentionCall& call, bool wants_dbias) {
  TORCH_CHECK_NOT_IMPLEMENTED(!reads_in_place(call),
                              "block_table: must be None in a call whose gradients are wanted");
  TORCH_CHECK_NOT_IMPLEMENTED(!call.deterministic || !call.block_columns.defined(),
                              "deterministic: must be False with block_columns, got True");
  TORCH_CHECK_NOT_IMPLEMENTED(!call.deterministic || !call.bias.defined(),
                              "deterministic: must be False with a bias, got True");
  TORCH_CHECK_VALUE(!wants_dbias || call.bias.defined(),
                    "wants_dbias: must be False without a bias, got True");
  TORCH_CHECK_NOT_IMPLEMENTED(!wants_dbias || call.softcap == 0.0,
                              "wants_dbias: must be False with softcap (", call.softcap,
                              "), got True");
}

}  // namespace flash_attn_cuda::binding
