#include "torch_binding/append.h"

#include <algorithm>

#include "torch_binding/check.h"
#include "torch_binding/errors.h"
#include "torch_binding/layout.h"
#include "torch_binding/to_params.h"

namespace flash_attn_cuda::binding {
namespace {

// Such numbers are copied two at a time, as words of 16 bits: rows have a multiple of 16 of them
// and begin at multiples of 16 bytes.
void copy_as_words(AppendParams& params) {
  params.e4m3_cache = false;
  params.shape.head_dim /= 2;
  params.shape.head_dim_v /= 2;
  for (TensorView* view : {&params.k_new, &params.v_new, &params.k_cache, &params.v_cache}) {
    view->batch_stride /= 2;
    view->row_stride /= 2;
    view->head_stride /= 2;
  }
}

void check_may_be_written(const char* name, const at::Tensor& cache) {
  TORCH_CHECK_VALUE(!is_expanded(cache), name,
                    ": must not name memory twice where keys are appended, got strides ",
                    cache.strides());
}

void check_packed_new_keys(const AttentionCall& call) {
  if (call.cu_seqlens_k_new.defined()) return;
  require(is_packed(call), "cu_seqlens_k_new: must be given where k is packed, got None");
  TORCH_CHECK_VALUE(call.k_new.size(0) == call.q.size(0), "k: must have as many rows as q (",
                    call.q.size(0), ") without cu_seqlens_k_new, got ", call.k_new.size(0));
}

// Kernels number the rows of all sequences, and add those of packed keys to what the cache holds.
void check_rows(const char* name, std::int64_t rows, std::int64_t most) {
  TORCH_CHECK_VALUE(rows <= most, name, ": must have at most ", most,
                    " rows of all sequences, got ", rows);
}

// (batch, length, heads_k, head_dim), or packed (total, heads_k, head_dim).
void check_new_keys(const AttentionCall& call, std::int64_t batch) {
  const at::Tensor& q = call.q;
  const at::Tensor& k = call.k_new;
  const at::Tensor& v = call.v_new;
  if (!k.defined()) return;
  const bool are_packed = has_packed_new_keys(call);
  TORCH_CHECK_VALUE(are_packed || (k.dim() == 4 && !call.cu_seqlens_k_new.defined()),
                    "k: must have 4 dimensions (batch, seqlen, heads, head_dim), or 3 (total, ",
                    "heads, head_dim), as with cu_seqlens_k_new, got shape ", k.sizes());
  const std::int64_t heads = call.k.size(2);
  const std::int64_t head_dim = call.k.size(3);
  const at::ScalarType dtype = appends_fp8(call) ? at::kFloat8_e4m3fn : q.scalar_type();
  if (!are_packed) {
    check_like("k", k, {batch, k.size(1), heads, head_dim}, dtype, q);
  } else {
    check_like("k", k, {k.size(0), heads, head_dim}, dtype, q);
    check_packed_new_keys(call);
  }
  check_like("v", v, with_columns(k.sizes(), call.v.size(3)), dtype, q);
  check_rows("k", are_packed ? k.size(0) : batch * k.size(1), are_packed ? max_keys : max_size);
  if (k.numel() == 0) return;
  check_may_be_written("k_cache", call.k);
  check_may_be_written("v_cache", call.v);
}

void check_lengths(const AttentionCall& call) {
  const std::int64_t capacity = cache_capacity(call);
  const std::int64_t length = seqlen_k_new(call);
  const bool is_number = call.seqlen_k.has_value();
  const std::int64_t seqlen_k = call.seqlen_k.value_or(0);
  require(!call.seqused_k.defined() || !is_number,
          "cache_seqlens: must be a tensor or a number, got both");
  require(call.seqused_k.defined() || is_number || !call.k_new.defined(),
          "cache_seqlens: must be given where k is, got None");
  TORCH_CHECK_VALUE(length <= capacity, "k: must have at most as many rows as the cache (",
                    capacity, "), got ", length);
  TORCH_CHECK_VALUE(seqlen_k >= 0 && seqlen_k <= capacity - length,
                    "cache_seqlens: must be from 0 to the rows of the cache (", capacity,
                    ") less the new keys (", length, "), got ", seqlen_k);
}

void check_rotary(const AttentionCall& call) {
  const at::Tensor& cos = call.rotary_cos;
  const at::Tensor& sin = call.rotary_sin;
  const at::Tensor& q = call.q;
  if (!cos.defined()) return;
  if (!is_packed(call)) check_rows("q", q.size(0) * q.size(1), max_size);
  const std::int64_t head_dim = q.size(q.dim() - 1);
  TORCH_CHECK_VALUE(cos.dim() == 2 && cos.size(1) >= 1 && cos.size(1) <= head_dim / 2,
                    "rotary_cos: must have shape (seqlen_rotary, rotary_dim / 2) with a ",
                    "rotary_dim from 2 to head_dim (", head_dim, "), got ", cos.sizes());
  TORCH_CHECK_VALUE(cos.size(0) <= max_size, "rotary_cos: must have at most ", max_size,
                    " rows, got ", cos.size(0));
  check_array("rotary_cos", cos, cos.sizes(), q.scalar_type(), q);
  check_array("rotary_sin", sin, cos.sizes(), q.scalar_type(), q);
}

// The kernel checks lengths that lie on the device.
void check_rotary_rows(const AttentionCall& call) {
  if (!call.rotary_cos.defined() || !call.seqlen_k.has_value() || is_packed(call) ||
      has_packed_new_keys(call))
    return;
  const std::int64_t queries =
      window_of(call).is_full() ? std::min<std::int64_t>(call.q.size(1), 1) : call.q.size(1);
  const std::int64_t rotated = std::max(queries, seqlen_k_new(call));
  const std::int64_t rows = *call.seqlen_k + rotated;
  TORCH_CHECK_VALUE(rotated == 0 || call.rotary_cos.size(0) >= rows,
                    "rotary_cos: must have a row for every position, ", rows, " in all, got ",
                    call.rotary_cos.size(0));
}

}  // namespace

void check_append(const AttentionCall& call, std::int64_t batch) {
  check_new_keys(call, batch);
  check_rotary(call);
  check_lengths(call);
  check_rotary_rows(call);
}

Append begin_append(const AttentionCall& call) {
  const at::Tensor& q = call.q;
  const bool writes = call.k_new.defined() && call.k_new.numel() > 0;
  const bool rotates_q = call.rotary_cos.defined() && q.numel() > 0;
  if (!writes && !rotates_q) return {};

  AppendParams params{
      .dtype = dtype_of(q),
      .e4m3_cache = is_fp8(call),
      .quantizes_tokens = call.quantizes_tokens && writes,
      .shape = shape_of(call),
      .sequences = sequence_params(call),
      .paged = paged_params(call),
      .rotary_interleaved = call.rotary_interleaved,
      .rotate_queries_in_order = !window_of(call).is_full(),
      .total_q = static_cast<int>(is_packed(call) ? q.size(0) : 0),
      .total_k_new = static_cast<int>(has_packed_new_keys(call) ? call.k_new.size(0) : 0),
      .seqlen_k_used = static_cast<int>(call.seqlen_k.value_or(-1))};
  if (has_device_contents(call)) params.errors = device_record(q.device().index());
  if (call.rotary_cos.defined()) {
    params.rotary_cos = call.rotary_cos.const_data_ptr();
    params.rotary_sin = call.rotary_sin.const_data_ptr();
    params.rotary_dim = static_cast<int>(2 * call.rotary_cos.size(1));
    params.seqlen_rotary = static_cast<int>(call.rotary_cos.size(0));
  }
  if (writes) {
    params.k_scale = scale_view(call.k_descale, call.quantizes_tokens);
    params.v_scale = scale_view(call.v_descale, call.quantizes_tokens);
    params.k_new = input_view(call.k_new);
    params.v_new = input_view(call.v_new);
    params.k_cache = output_view(call.k);
    params.v_cache = output_view(call.v);
    if (appends_fp8(call)) copy_as_words(params);
  }
  Append append;
  if (writes) append.written = {call.k, call.v};
  if (params.quantizes_tokens) append.written = {call.k, call.v, call.k_descale, call.v_descale};
  if (rotates_q) {
    append.rotated_q = allocate(q.sizes(), q.scalar_type(), q);
    params.q = input_view(q);
    params.q_rotated = output_view(append.rotated_q);
  }
  append.params = params;
  return append;
}

}  // namespace flash_attn_cuda::binding
