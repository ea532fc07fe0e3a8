#include "torch_binding/checked_call.h"

#include <ATen/ops/full.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "flash_attn/params.h"
#include "host/normalize_window.h"
#include "torch_binding/append.h"
#include "torch_binding/check.h"
#include "torch_binding/generated_rules.h"
#include "torch_binding/layout.h"
#include "torch_binding/over_pairs.h"
#include "torch_binding/to_params.h"

namespace flash_attn_cuda::binding {
namespace {

constexpr std::int64_t most_margin = 1 << 16;  // of multiprocessors: more than any device has

// -- lengths --------------------------------------------------------------------------------------

std::int64_t checked_batch(const AttentionCall& call, const ArgumentNames& names) {
  const at::Tensor& bounds = call.cu_seqlens_q;
  if (bounds.defined()) check_array("cu_seqlens_q", bounds, bounds.sizes(), at::kInt, call.q);
  check_bounds(call, names);
  if (bounds.defined()) check_sizes("cu_seqlens_q", bounds);
  return batch_of(call);
}

// A sequence that names no entry of a cache has none.
void check_entries(const AttentionCall& call, std::int64_t batch) {
  const bool has_pages = is_paged(call);
  const at::Tensor& entries = has_pages ? call.block_table : call.k;
  TORCH_CHECK_VALUE(batch == 0 || !call.cache_batch_idx.defined() || entries.size(0) > 0,
                    has_pages ? "block_table" : "k_cache",
                    ": must have an entry for cache_batch_idx to name, got shape ",
                    entries.sizes());
}

void check_rows_of_table(const at::Tensor& table) {
  TORCH_CHECK_VALUE(table.stride(1) == 1 || table.size(1) <= 1,
                    "block_table: rows must be contiguous, got strides ", table.strides());
}

// A cache, or the pages of a sequence, have no more rows than kernels count.
void check_capacity(const AttentionCall& call) {
  const std::int64_t rows = call.k.size(1);
  if (!is_paged(call)) {
    TORCH_CHECK_VALUE(rows <= max_keys, "k_cache: must have at most ", max_keys, " rows, got ",
                      rows);
    return;
  }
  const std::int64_t pages = call.block_table.size(1);
  TORCH_CHECK_VALUE(rows == 0 || pages <= max_keys / rows,
                    "block_table: pages * page_size must be at most ", max_keys, ", got ", pages,
                    " * ", rows);
}

void check_lists_of_keys(const AttentionCall& call) {
  const at::Tensor& lists = call.key_lists;
  check_sizes("key_lists", lists);
  TORCH_CHECK_VALUE(lists.size(-1) <= max_keys / call.key_list_block,
                    "key_lists: must have at most ", max_keys, " keys a list, got ", lists.size(-1),
                    " blocks of ", call.key_list_block);
  if (!lists_blocks(call)) return;
  // A backward numbers entries, and keys of all heads.
  const std::int64_t keys = call.k.numel() / std::max<std::int64_t>(1, head_dim_of(call));
  TORCH_CHECK_VALUE(lists.numel() <= max_keys && keys <= max_keys, "key_lists: must have at most ",
                    max_keys, " entries, and k as many keys of all heads, got ", lists.numel(),
                    " and ", keys);
}

// Kernels number the pairs of probabilities that a call returns.
void check_s_dmask(const AttentionCall& call) {
  const std::int64_t longest = std::max(call.max_seqlen_q, call.max_seqlen_k);
  TORCH_CHECK_NOT_IMPLEMENTED(!wants_s_dmask(call) || longest <= max_size,
                              "return_softmax: must be False where max_seqlen_q or max_seqlen_k is "
                              "above ",
                              max_size, " (", longest, "), got True");
}

// -- as kernels read it ---------------------------------------------------------------------------

// Lists that have entries, of no key if of none.
at::Tensor lists_of_keys(const at::Tensor& lists) {
  if (lists.size(-1) > 0) return with_contiguous_rows(lists);
  at::DimVector sizes(lists.sizes());
  sizes.back() = 1;
  return at::full({1}, -1, lists.options()).expand(sizes);
}

AttentionCall as_kernels_read(AttentionCall given, std::int64_t batch) {
  AttentionCall call = with_contiguous_masks(std::move(given));
  if (call.alibi_slopes.defined()) call.alibi_slopes = with_contiguous_rows(call.alibi_slopes);
  if (call.key_lists.defined()) call.key_lists = lists_of_keys(call.key_lists);
  if (call.tree_mask.defined()) call.tree_mask = with_contiguous_rows(call.tree_mask);
  if (call.relative_bias.defined()) call.relative_bias = with_contiguous_rows(call.relative_bias);
  call.softmax_scale = softmax_scale_of(call);
  call.softcap = std::max(0.0f, static_cast<float>(call.softcap));
  const Window window = window_of(call);
  call.window_size_left = window.left;
  call.window_size_right = window.right;
  // A packed batch fills the device without splits; a cache, or pages, may be long.
  if (call.num_splits == 0 && !reads_in_place(call)) call.num_splits = 1;
  call.sm_margin = std::min(call.sm_margin, most_margin);
  // cu_seqlens_k of pages tells lengths, which seqused_k replaces, as in FlashAttention-2.
  if (call.over_cache || (is_paged(call) && call.seqused_k.defined())) call.cu_seqlens_k.reset();
  if (!has_packed_new_keys(call)) return call;
  if (call.seqlen_k.has_value()) {  // sequences of one length become sequences of different ones
    call.seqused_k = at::full({batch}, *call.seqlen_k, call.q.options().dtype(at::kInt));
    call.seqlen_k.reset();
  }
  return call;
}

// The call of tensors that fit one another.
AttentionCall checked_description(AttentionCall call, Pass pass, const ArgumentNames* given_names) {
  const ArgumentNames& names = given_names == nullptr ? names_of(call) : *given_names;
  call = with_lists_of(pass, std::move(call));
  check_numbers(call, names);
  check_rules_of_call(call, names);
  if (reads_in_place(call)) {
    check_read_in_place(names.k, call.k);
    check_read_in_place(names.v, call.v);
  }
  const std::int64_t batch = checked_batch(call, names);
  check_batch(call, names);
  check_arrays(call, names);
  check_sizes_of_arrays(call, names);
  if (call.key_lists.defined()) check_lists_of_keys(call);
  if (call.tree_mask.defined()) check_sizes("tree_mask", call.tree_mask);
  if (call.relative_bias.defined()) check_sizes("relative_bias", call.relative_bias);
  check_entries(call, batch);
  if (is_paged(call)) check_rows_of_table(call.block_table);
  if (reads_in_place(call)) check_capacity(call);
  check_pairs(call, names);
  check_sizes_of_pairs(call, names);
  check_s_dmask(call);
  if (has_fp8_values(call)) check_e4m3(call, names);
  if (call.over_cache) check_append(call, batch);
  return as_kernels_read(std::move(call), batch);
}

}  // namespace

void check_inputs(const AttentionCall& call) {
  const ArgumentNames& names = names_of(call);
  const at::Tensor& q = call.q;
  check_cuda("q", q);
  const bool is_e4m3 = q.scalar_type() == at::kFloat8_e4m3fn && !is_of_one_length(call);
  TORCH_CHECK_TYPE(is_e4m3 || q.scalar_type() == at::kHalf || q.scalar_type() == at::kBFloat16,
                   "q: dtype must be float16 or bfloat16, got ", in_python(q.scalar_type()));
  for (const auto& [name, tensor] : {std::pair(names.k, &call.k), std::pair(names.v, &call.v)}) {
    check_cuda(name, *tensor);
    check_device(name, *tensor, q);
  }
  check_tensors(call, names);
  check_cuda_tensors(call, names);
  check_sizes("q", q);
  check_sizes(names.k, call.k);
  check_sizes(names.v, call.v);
  check_capability("q", q);
}

float softmax_scale_of(const AttentionCall& call) {
  const auto head_dim = static_cast<double>(head_dim_of(call));
  return static_cast<float>(call.softmax_scale.value_or(1.0 / std::sqrt(head_dim)));
}

AttentionCall checked_call(AttentionCall call, Pass pass, const ArgumentNames* names) {
  check_inputs(call);
  call = checked_description(std::move(call), pass, names);
  return with_kernel_layouts(std::move(call));
}

AttentionCall described_call(AttentionCall call, Pass pass) {
  check_tensors(call, names_of(call));
  return checked_description(std::move(call), pass, nullptr);
}

AttentionCall with_kernel_layouts(AttentionCall call) {
  const auto adopt = [](at::Tensor& tensor) {
    if (tensor.defined() && !is_addressable(tensor)) tensor = with_kernel_layout(tensor);
  };
  adopt(call.q);
  adopt(call.qv);
  adopt(call.k_new);
  adopt(call.v_new);
  if (reads_in_place(call)) return call;
  adopt(call.k);
  adopt(call.v);
  return call;
}

}  // namespace flash_attn_cuda::binding
