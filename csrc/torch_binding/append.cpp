#include "torch_binding/append.h"

#include <ATen/ops/full.h>
#include <c10/cuda/CUDAGuard.h>

#include <algorithm>

#include "torch_binding/check.h"
#include "torch_binding/errors.h"
#include "torch_binding/to_params.h"

namespace flash_attn_cuda::binding {
namespace {

NewKeys checked_new_keys(const AttentionCall& call) {
  const at::Tensor& k = call.k_new;
  const at::Tensor& v = call.v_new;
  const at::Tensor& cu_seqlens_k_new = call.cu_seqlens_k_new;
  const std::int64_t batch = batch_of(call);
  TORCH_CHECK_VALUE(k.defined() || !v.defined(), "k: must be given where v is, got None");
  TORCH_CHECK_VALUE(v.defined() || !k.defined(), "v: must be given where k is, got None");
  TORCH_CHECK_VALUE(k.defined() || !cu_seqlens_k_new.defined(),
                    "k: must be given where cu_seqlens_k_new is, got None");
  if (!k.defined()) return {};
  const at::Tensor& q = call.q;
  const std::int64_t heads = call.k.size(2);
  const std::int64_t head_dim = call.k.size(3);
  const bool are_packed = k.dim() == 3;
  TORCH_CHECK_VALUE(are_packed || k.dim() == 4, "k: must have 4 dimensions (batch, seqlen, heads, ",
                    "head_dim), or 3 (total, heads, head_dim), got shape ", k.sizes());
  TORCH_CHECK_VALUE(are_packed || !cu_seqlens_k_new.defined(),
                    "k: must have 3 dimensions (total, heads, head_dim) with cu_seqlens_k_new, ",
                    "got shape ", k.sizes());
  NewKeys keys;
  if (are_packed) {
    check_like("k", k, {k.size(0), heads, head_dim}, q.scalar_type(), q);
    if (cu_seqlens_k_new.defined()) {
      const std::int64_t sequences = checked_num_sequences("cu_seqlens_k_new", cu_seqlens_k_new, q);
      TORCH_CHECK_VALUE(sequences == batch, "cu_seqlens_k_new: must have ", batch + 1,
                        " entries, got ", sequences + 1);
      keys.cu_seqlens = cu_seqlens_k_new;
    } else {
      TORCH_CHECK_VALUE(is_packed(call), "cu_seqlens_k_new: must be given where k is packed, ",
                        "got None");
      TORCH_CHECK_VALUE(k.size(0) == q.size(0), "k: must have as many rows as q (", q.size(0),
                        ") without cu_seqlens_k_new, got ", k.size(0));
      keys.cu_seqlens = call.cu_seqlens_q;
    }
  } else {
    check_like("k", k, {batch, k.size(1), heads, head_dim}, q.scalar_type(), q);
    keys.length = k.size(1);
  }
  check_like("v", v, with_columns(k.sizes(), call.v.size(3)), q.scalar_type(), q);
  keys.k = with_kernel_layout(k);
  keys.v = with_kernel_layout(v);
  return keys;
}

// Keys of every sequence that the cache holds, where a number says it; else -1.
std::int64_t checked_seqlen_k(const AttentionCall& call, const NewKeys& keys,
                              std::int64_t capacity) {
  TORCH_CHECK_VALUE(!call.seqused_k.defined() || !call.seqlen_k.has_value(),
                    "cache_seqlens: must be a tensor or a number, got both");
  const bool is_given = call.seqused_k.defined() || call.seqlen_k.has_value();
  TORCH_CHECK_VALUE(is_given || !keys.k.defined(),
                    "cache_seqlens: must be given where k is, got None");
  TORCH_CHECK_VALUE(keys.length <= capacity, "k: must have at most as many rows as the cache (",
                    capacity, "), got ", keys.length);
  const std::int64_t seqlen_k = call.seqlen_k.value_or(-1);
  TORCH_CHECK_VALUE(
      !call.seqlen_k.has_value() || (seqlen_k >= 0 && seqlen_k <= capacity - keys.length),
      "cache_seqlens: must be from 0 to the rows of the cache (", capacity, ") less the new keys (",
      keys.length, "), got ", seqlen_k);
  return seqlen_k;
}

KeyLengths lengths_behind(const AttentionCall& call, const NewKeys& keys, std::int64_t seqlen_k) {
  KeyLengths lengths{.seqused_k = call.seqused_k, .cu_seqlens_k_new = keys.cu_seqlens};
  if (seqlen_k >= 0 && keys.cu_seqlens.defined()) {  // of different lengths afterwards
    lengths.seqused_k = at::full({batch_of(call)}, seqlen_k, call.q.options().dtype(at::kInt));
  } else if (seqlen_k >= 0) {
    lengths.seqlen_k = static_cast<int>(seqlen_k + keys.length);
    return lengths;
  }
  lengths.seqlen_k_new = static_cast<int>(keys.length);
  return lengths;
}

Rotary checked_rotary(const AttentionCall& call) {
  const at::Tensor& cos = call.rotary_cos;
  const at::Tensor& sin = call.rotary_sin;
  const at::Tensor& q = call.q;
  TORCH_CHECK_VALUE(cos.defined() || !sin.defined(),
                    "rotary_cos: must be given where rotary_sin is, got None");
  TORCH_CHECK_VALUE(sin.defined() || !cos.defined(),
                    "rotary_sin: must be given where rotary_cos is, got None");
  if (!cos.defined()) return {};
  const std::int64_t most = q.size(q.dim() - 1) / 2;
  TORCH_CHECK_VALUE(cos.dim() == 2 && cos.size(1) >= 1 && cos.size(1) <= most,
                    "rotary_cos: must have shape (seqlen_rotary, rotary_dim / 2) with a ",
                    "rotary_dim from 2 to head_dim (", q.size(q.dim() - 1), "), got ", cos.sizes());
  constexpr std::int64_t most_rows = 2'147'483'647;
  TORCH_CHECK_VALUE(cos.size(0) <= most_rows, "rotary_cos: must have at most ", most_rows,
                    " rows, got ", cos.size(0));
  check_array("rotary_cos", cos, cos.sizes(), q.scalar_type(), q);
  check_array("rotary_sin", sin, cos.sizes(), q.scalar_type(), q);
  return {.cos = cos, .sin = sin, .interleaved = call.rotary_interleaved};
}

// Of lengths on the device the kernel finds out.
void check_rotary_rows(const Rotary& rotary, const AttentionCall& call, const NewKeys& keys,
                       std::int64_t length) {
  if (!rotary.cos.defined() || length < 0 || is_packed(call)) return;
  const std::int64_t queries =
      window_of(call).is_full() ? std::min<std::int64_t>(call.q.size(1), 1) : call.q.size(1);
  const std::int64_t rotated = std::max(queries, keys.length);
  TORCH_CHECK_VALUE(rotated == 0 || rotary.cos.size(0) >= length + rotated,
                    "rotary_cos: must have a row for every position, ", length + rotated,
                    " in all, got ", rotary.cos.size(0));
}

void check_may_be_written(const char* name, const at::Tensor& cache) {
  TORCH_CHECK_VALUE(!is_expanded(cache), name,
                    ": must not name memory twice where keys are appended, got strides ",
                    cache.strides());
}

}  // namespace

CacheUpdate checked_update(const AttentionCall& call) {
  CacheUpdate update;
  update.capacity = cache_capacity(call.k, call.block_table);
  update.keys = checked_new_keys(call);
  TORCH_CHECK_VALUE(update.keys.k.defined() || !call.rotary_cos.defined(),
                    "rotary_cos: must be None without k: a rotation is one of new keys");
  update.rotary = checked_rotary(call);
  update.seqlen_k = checked_seqlen_k(call, update.keys, update.capacity);
  update.lengths = lengths_behind(call, update.keys, update.seqlen_k);
  if (update.lengths.seqlen_k >= 0)
    check_rotary_rows(update.rotary, call, update.keys, update.seqlen_k);
  return update;
}

Append begin_append(const AttentionCall& call, const CacheUpdate& update) {
  const NewKeys& keys = update.keys;
  const Rotary& rotary = update.rotary;
  const at::Tensor& q = call.q;
  const bool writes = keys.k.defined() && keys.k.numel() > 0;
  const bool rotates_q = rotary.cos.defined() && q.numel() > 0;
  if (!writes && !rotates_q) return {};

  const bool has_one_length = update.lengths.seqlen_k >= 0;
  AppendParams params{
      .dtype = dtype_of(q),
      .shape = shape_of(call),
      .sequences = sequence_params(call, update.lengths),
      .paged = paged_params(call),
      .rotary_interleaved = rotary.interleaved,
      .rotate_queries_in_order = !window_of(call).is_full(),
      .total_q = static_cast<int>(is_packed(call) ? q.size(0) : 0),
      .total_k_new = static_cast<int>(keys.cu_seqlens.defined() ? keys.k.size(0) : 0),
      .seqlen_k_used = has_one_length ? static_cast<int>(update.seqlen_k) : -1};
  params.shape.seqlen_k = static_cast<int>(update.capacity);
  params.sequences.seqlen_k_new = static_cast<int>(keys.length);
  const c10::DeviceIndex device = q.device().index();
  const c10::cuda::CUDAGuard guard(device);
  if (has_device_contents(call)) params.errors = device_record(device);
  if (rotary.cos.defined()) {
    params.rotary_cos = rotary.cos.const_data_ptr();
    params.rotary_sin = rotary.sin.const_data_ptr();
    params.rotary_dim = static_cast<int>(2 * rotary.cos.size(1));
    params.seqlen_rotary = static_cast<int>(rotary.cos.size(0));
  }
  if (writes) {
    check_may_be_written("k_cache", call.k);
    check_may_be_written("v_cache", call.v);
    // Before anything is written: an inference tensor must not be, outside inference mode.
    call.k.unsafeGetTensorImpl()->bump_version();
    call.v.unsafeGetTensorImpl()->bump_version();
    params.k_new = input_view(keys.k);
    params.v_new = input_view(keys.v);
    params.k_cache = output_view(call.k);
    params.v_cache = output_view(call.v);
  }
  Append append;
  if (rotates_q) {
    append.rotated_q = allocate(q.sizes(), q.scalar_type(), q);
    params.q = input_view(q);
    params.q_rotated = output_view(append.rotated_q);
  }
  append.params = params;
  return append;
}

}  // namespace flash_attn_cuda::binding
