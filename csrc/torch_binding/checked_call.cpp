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

// -- q, k and v -----------------------------------------------------------------------------------

void check_dtype_of_q(const char* name, const at::Tensor& tensor, const at::Tensor& q,
                      bool may_be_e4m3) {
  const at::ScalarType dtype = tensor.scalar_type();
  TORCH_CHECK_TYPE(dtype == q.scalar_type() || (may_be_e4m3 && dtype == at::kFloat8_e4m3fn), name,
                   ": must have the dtype of q (", q.scalar_type(), "), got ", dtype);
}

void check_input(const char* name, const at::Tensor& tensor, const at::Tensor& q, std::int64_t dims,
                 const char* layout, bool may_be_e4m3 = false) {
  check_cuda(name, tensor);
  check_device(name, tensor, q);
  check_dtype_of_q(name, tensor, q, may_be_e4m3);
  TORCH_CHECK_VALUE(tensor.dim() == dims, name, ": must have ", dims, " dimensions (", layout,
                    ", heads, head_dim), got shape ", tensor.sizes());
  check_sizes(name, tensor);
}

void check_head_dim(const char* name, const char* dimension, std::int64_t size, bool any) {
  TORCH_CHECK_VALUE(size >= 1 && size <= max_head_dim, name, ": last dimension (", dimension,
                    ") must be from 1 to ", max_head_dim, ", got ", size);
  TORCH_CHECK_VALUE(any || size % 8 == 0, name, ": last dimension (", dimension,
                    ") must be a multiple of 8, got ", size);
}

// -- lengths --------------------------------------------------------------------------------------

std::int64_t checked_batch(const AttentionCall& call) {
  if (!is_packed(call)) return call.q.size(0);
  return checked_num_sequences("cu_seqlens_q", call.cu_seqlens_q, call.q);
}

void check_packed_keys(const AttentionCall& call) {
  require(call.cu_seqlens_k.defined() || (is_paged(call) && call.seqused_k.defined()),
          "cu_seqlens_k: must be given, got None");
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

// int32 (batch, max_pages), or of any number of rows where entries are chosen.
void check_block_table(const AttentionCall& call, std::int64_t batch) {
  const at::Tensor& table = call.block_table;
  check_place("block_table", table, {at::kInt}, call.q);
  TORCH_CHECK_VALUE(table.dim() == 2, "block_table: must have 2 dimensions (batch, max_pages), ",
                    "got shape ", table.sizes());
  TORCH_CHECK_VALUE(call.cache_batch_idx.defined() || table.size(0) == batch,
                    "block_table: must have a row for each of ", batch, " sequences, got shape ",
                    table.sizes());
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

void check_rows_with_origin(const AttentionCall& call) {
  const std::int64_t rows = std::max(call.q.size(0), call.k.size(0));
  TORCH_CHECK_VALUE(rows <= max_seqlen_with_origin, "origin: must be None for more than ",
                    max_seqlen_with_origin, " rows, got ", rows);
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

AttentionCall as_kernels_read(AttentionCall given, std::int64_t batch) {
  AttentionCall call = with_contiguous_masks(std::move(given));
  if (call.alibi_slopes.defined()) call.alibi_slopes = with_contiguous_rows(call.alibi_slopes);
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
  // New keys are as many as their sequence's queries where nothing else tells, and sequences of one
  // length become sequences of different ones.
  if (!call.cu_seqlens_k_new.defined()) call.cu_seqlens_k_new = call.cu_seqlens_q;
  if (call.seqlen_k.has_value()) {
    call.seqused_k = at::full({batch}, *call.seqlen_k, call.q.options().dtype(at::kInt));
    call.seqlen_k.reset();
  }
  return call;
}

}  // namespace

void check_inputs(const AttentionCall& call) {
  const at::Tensor& q = call.q;
  const at::Tensor& k = call.k;
  const at::Tensor& v = call.v;
  const bool is_dense = !is_packed(call) && !reads_in_place(call);
  const bool has_packed_keys = is_packed(call) && !reads_in_place(call);
  const int q_dims = is_packed(call) ? 3 : 4;
  const int kv_dims = has_packed_keys ? 3 : 4;
  const char* const kv_layout =
      is_paged(call) ? "num_pages, page_size" : (has_packed_keys ? "total" : "batch, seqlen");
  const auto [k_name, v_name] = std::pair(names_of(call).k, names_of(call).v);
  check_input("q", q, q, q_dims, is_packed(call) ? "total" : "batch, seqlen");
  TORCH_CHECK_TYPE(q.scalar_type() == at::kHalf || q.scalar_type() == at::kBFloat16,
                   "q: dtype must be float16 or bfloat16, got ", q.scalar_type());
  check_input(k_name, k, q, kv_dims, kv_layout, /*may_be_e4m3=*/true);
  check_input(v_name, v, q, kv_dims, kv_layout, /*may_be_e4m3=*/true);

  const std::int64_t heads_q = q.size(q_dims - 2);
  const std::int64_t heads_k = k.size(kv_dims - 2);
  const std::int64_t head_dim = q.size(q_dims - 1);
  check_head_dim("q", "head_dim", head_dim, call.over_cache);
  TORCH_CHECK_VALUE(heads_q >= 1, "q: must have at least one head, got shape ", q.sizes());
  TORCH_CHECK_VALUE(heads_k >= 1, k_name, ": must have at least one head, got shape ", k.sizes());
  TORCH_CHECK_VALUE(heads_q % heads_k == 0, k_name, ": number of heads must divide that of q (",
                    heads_q, "), got ", heads_k);
  TORCH_CHECK_VALUE(!is_dense || k.size(0) == q.size(0), k_name, ": batch must be that of q (",
                    q.size(0), "), got ", k.size(0));
  TORCH_CHECK_VALUE(!is_paged(call) || k.size(1) >= 1, k_name,
                    ": a page must hold at least one key, got shape ", k.sizes());
  TORCH_CHECK_VALUE(k.size(kv_dims - 1) == head_dim, k_name,
                    ": last dimension (head_dim) must be that of q (", head_dim, "), got ",
                    k.size(kv_dims - 1));
  TORCH_CHECK_VALUE(v.sizes().slice(0, kv_dims - 1) == k.sizes().slice(0, kv_dims - 1), v_name,
                    ": must have the shape of ", k_name, " but for the last dimension, ", k.sizes(),
                    ", got ", v.sizes());
  check_head_dim(v_name, "head_dim_v", v.size(kv_dims - 1), call.over_cache);
  check_capability("q", q);
}

void check_16_bits(const AttentionCall& call) {
  const auto is_e4m3 = [](const at::Tensor& x) { return x.scalar_type() == at::kFloat8_e4m3fn; };
  if (!is_e4m3(call.k) && !is_e4m3(call.v)) return;  // what else is wrong has checks of its own
  check_dtype_of_q(names_of(call).k, call.k, call.q, /*may_be_e4m3=*/false);
  check_dtype_of_q(names_of(call).v, call.v, call.q, /*may_be_e4m3=*/false);
}

float softmax_scale_of(const AttentionCall& call) {
  const auto head_dim = static_cast<double>(call.q.size(call.q.dim() - 1));
  return static_cast<float>(call.softmax_scale.value_or(1.0 / std::sqrt(head_dim)));
}

AttentionCall checked_call(AttentionCall call, Pass pass, const ArgumentNames* names) {
  check_inputs(call);
  return with_kernel_layouts(described_call(std::move(call), pass, names));
}

AttentionCall described_call(AttentionCall call, Pass pass, const ArgumentNames* given_names) {
  const ArgumentNames& names = given_names == nullptr ? names_of(call) : *given_names;
  call = with_lists_of(pass, std::move(call));
  check_numbers(call, names);
  check_rules_of_call(call, names);
  if (reads_in_place(call)) {
    check_read_in_place(names.k, call.k);
    check_read_in_place(names.v, call.v);
  }
  const std::int64_t batch = checked_batch(call);
  if (call.over_cache)
    check_cache_entries(call, batch);
  else if (is_packed(call))
    check_packed_keys(call);
  if (is_paged(call)) check_block_table(call, batch);
  if (reads_in_place(call)) check_capacity(call);
  if (call.origin.defined()) check_rows_with_origin(call);
  check_arrays(call, names);
  check_pairs(call, names);
  check_bits_of_lists(call);
  check_s_dmask(call);
  is_fp8(call) ? check_e4m3(call, names) : check_16_bits(call);
  if (call.over_cache) check_append(call, batch);
  return as_kernels_read(std::move(call), batch);
}

AttentionCall with_kernel_layouts(AttentionCall call) {
  const auto adopt = [](at::Tensor& tensor) {
    if (tensor.defined() && !is_addressable(tensor)) tensor = with_kernel_layout(tensor);
  };
  adopt(call.q);
  adopt(call.k_new);
  adopt(call.v_new);
  if (reads_in_place(call)) return call;
  adopt(call.k);
  adopt(call.v);
  return call;
}

void check_gradients_exist(const AttentionCall& call, bool wants_dbias) {
  check_rules_of_backward(call, names_of(call));
  TORCH_CHECK_NOT_IMPLEMENTED(!wants_dbias || call.softcap <= 0.0,
                              "wants_dbias: must be False with softcap (", call.softcap,
                              "), got True");
}

}  // namespace flash_attn_cuda::binding
