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

// Kernels number the rows of all sequences, and add those of packed keys to what the cache holds.
void check_rows(const char* name, std::int64_t rows, std::int64_t most) {
  TORCH_CHECK_VALUE(rows <= most, name, ": must have at most ", most,
                    " rows of all sequences, got ", rows);
}

void check_new_keys(const AttentionCall& call, std::int64_t batch) {
  const at::Tensor& k = call.k_new;
  const at::Tensor& v = call.v_new;
  if (!k.defined()) return;
  const bool are_packed = has_packed_new_keys(call);
  at::DimVector sizes(k.sizes());
  if (!are_packed) sizes.front() = batch;
  sizes.end()[-2] = heads_k_of(call);
  check_like("k", k, with_columns(sizes, head_dim_of(call)), k.scalar_type(), call.q);
  check_like("v", v, with_columns(sizes, head_dim_v_of(call)), v.scalar_type(), call.q);
  check_rows("k", are_packed ? k.size(0) : batch * k.size(1), are_packed ? max_keys : max_size);
  if (k.numel() == 0) return;
  check_may_be_written("k_cache", call.k);
  check_may_be_written("v_cache", call.v);
}

void check_lengths(const AttentionCall& call) {
  const std::int64_t capacity = capacity_of(call);
  const std::int64_t length = seqlen_k_new(call);
  TORCH_CHECK_VALUE(length <= capacity, "k: must fit the cache, which holds ", capacity,
                    " rows of a sequence, got ", length);
  const std::int64_t seqlen_k = call.seqlen_k.value_or(0);
  TORCH_CHECK_VALUE(seqlen_k >= 0 && seqlen_k <= capacity - length,
                    "cache_seqlens: must be from 0 to ", capacity - length, ", for ", length,
                    " new keys and a cache of ", capacity, ", got ", seqlen_k);
}

void check_rotary(const AttentionCall& call) {
  const at::Tensor& cos = call.rotary_cos;
  if (!cos.defined()) return;
  if (!is_packed(call)) check_rows("q", call.q.size(0) * call.q.size(1), max_size);
  check_sizes("rotary_cos", cos);
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
      .e4m3_latent = is_fp8_latent(call),
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
    params.k_scale = scale_view(call.k_descale, head_dim_of(call), call.quantizes_tokens);
    params.v_scale = scale_view(call.v_descale, head_dim_v_of(call), call.quantizes_tokens);
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
