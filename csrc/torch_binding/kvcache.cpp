// fwd_kvcache: attention over a cache, which may first take new keys and values.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/full.h>
#include <c10/cuda/CUDAGuard.h>

#include <algorithm>

#include "flash_attn/api.h"
#include "torch_binding/check.h"
#include "torch_binding/checked_call.h"
#include "torch_binding/forward.h"
#include "torch_binding/functions.h"
#include "torch_binding/to_params.h"

namespace flash_attn_cuda::binding {
namespace {

// Keys and values to be written behind what the cache holds; k undefined: none.
struct NewKeys {
  at::Tensor k, v;          // (batch, length, heads_k, head_dim), packed (total, ...)
  at::Tensor cu_seqlens;    // of packed ones
  std::int64_t length = 0;  // of every sequence where they are not packed
};

// cos undefined: no rotation.
struct Rotary {
  at::Tensor cos, sin;  // (seqlen_rotary, rotary_dim / 2)
  bool interleaved = true;
};

// Keys that the cache holds before the call: on the device, or one number for every sequence.
struct CacheLengths {
  at::Tensor on_device;
  std::int64_t on_host = -1;
};

NewKeys checked_new_keys(const OptionalTensor& k, const OptionalTensor& v,
                         const OptionalTensor& cu_seqlens_k_new, const AttentionCall& call,
                         std::int64_t batch) {
  TORCH_CHECK_VALUE(k.has_value() || !v.has_value(), "k: must be given where v is, got None");
  TORCH_CHECK_VALUE(v.has_value() || !k.has_value(), "v: must be given where k is, got None");
  TORCH_CHECK_VALUE(k.has_value() || !cu_seqlens_k_new.has_value(),
                    "k: must be given where cu_seqlens_k_new is, got None");
  if (!k.has_value()) return {};
  const at::Tensor& q = call.q;
  const std::int64_t heads = call.k.size(2);
  const std::int64_t head_dim = call.k.size(3);
  const bool is_packed = k->dim() == 3;
  TORCH_CHECK_VALUE(is_packed || k->dim() == 4, "k: must have 4 dimensions (batch, seqlen, heads, ",
                    "head_dim), or 3 (total, heads, head_dim), got shape ", k->sizes());
  TORCH_CHECK_VALUE(is_packed || !cu_seqlens_k_new.has_value(),
                    "k: must have 3 dimensions (total, heads, head_dim) with cu_seqlens_k_new, ",
                    "got shape ", k->sizes());
  NewKeys keys;
  if (is_packed) {
    check_like("k", *k, {k->size(0), heads, head_dim}, q.scalar_type(), q);
    if (cu_seqlens_k_new.has_value()) {
      const std::int64_t given = checked_num_sequences("cu_seqlens_k_new", *cu_seqlens_k_new, q);
      TORCH_CHECK_VALUE(given == batch, "cu_seqlens_k_new: must have ", batch + 1, " entries, got ",
                        given + 1);
      keys.cu_seqlens = *cu_seqlens_k_new;
    } else {
      TORCH_CHECK_VALUE(call.is_packed(), "cu_seqlens_k_new: must be given where k is packed, ",
                        "got None");
      TORCH_CHECK_VALUE(k->size(0) == q.size(0), "k: must have as many rows as q (", q.size(0),
                        ") without cu_seqlens_k_new, got ", k->size(0));
      keys.cu_seqlens = call.cu_seqlens_q;
    }
  } else {
    check_like("k", *k, {batch, k->size(1), heads, head_dim}, q.scalar_type(), q);
    keys.length = k->size(1);
  }
  check_like("v", *v, with_columns(k->sizes(), call.v.size(3)), q.scalar_type(), q);
  keys.k = with_kernel_layout(*k);
  keys.v = with_kernel_layout(*v);
  return keys;
}

CacheLengths checked_lengths(const OptionalTensor& seqlens_k, OptionalInt seqlen_k,
                             const NewKeys& keys, bool has_rotary, std::int64_t capacity,
                             std::int64_t batch, const at::Tensor& q) {
  TORCH_CHECK_VALUE(!seqlens_k.has_value() || !seqlen_k.has_value(),
                    "cache_seqlens: must be a tensor or a number, got both");
  const bool is_given = seqlens_k.has_value() || seqlen_k.has_value();
  TORCH_CHECK_VALUE(is_given || !keys.k.defined(),
                    "cache_seqlens: must be given where k is, got None");
  TORCH_CHECK_VALUE(is_given || !has_rotary,
                    "cache_seqlens: must be given where rotary_cos is, got None");
  TORCH_CHECK_VALUE(keys.length <= capacity, "k: must have at most as many rows as the cache (",
                    capacity, "), got ", keys.length);
  if (!seqlen_k.has_value())
    return {.on_device = checked_per_sequence("cache_seqlens", seqlens_k, batch, q)};
  TORCH_CHECK_VALUE(*seqlen_k >= 0 && *seqlen_k <= capacity - keys.length,
                    "cache_seqlens: must be from 0 to the rows of the cache (", capacity,
                    ") less the new keys (", keys.length, "), got ", *seqlen_k);
  if (!keys.cu_seqlens.defined()) return {.on_host = *seqlen_k};
  return {.on_device = at::full({batch}, *seqlen_k, q.options().dtype(at::kInt))};
}

Rotary checked_rotary(const OptionalTensor& cos, const OptionalTensor& sin, bool interleaved,
                      const at::Tensor& q) {
  TORCH_CHECK_VALUE(cos.has_value() || !sin.has_value(),
                    "rotary_cos: must be given where rotary_sin is, got None");
  TORCH_CHECK_VALUE(sin.has_value() || !cos.has_value(),
                    "rotary_sin: must be given where rotary_cos is, got None");
  if (!cos.has_value()) return {};
  const std::int64_t most = q.size(q.dim() - 1) / 2;
  TORCH_CHECK_VALUE(cos->dim() == 2 && cos->size(1) >= 1 && cos->size(1) <= most,
                    "rotary_cos: must have shape (seqlen_rotary, rotary_dim / 2) with a ",
                    "rotary_dim from 2 to head_dim (", q.size(q.dim() - 1), "), got ",
                    cos->sizes());
  constexpr std::int64_t most_rows = 2'147'483'647;
  TORCH_CHECK_VALUE(cos->size(0) <= most_rows, "rotary_cos: must have at most ", most_rows,
                    " rows, got ", cos->size(0));
  check_array("rotary_cos", *cos, cos->sizes(), q.scalar_type(), q);
  check_array("rotary_sin", *sin, cos->sizes(), q.scalar_type(), q);
  return {.cos = *cos, .sin = *sin, .interleaved = interleaved};
}

// Of lengths on the device the kernel finds out.
void check_rotary_rows(const Rotary& rotary, const AttentionCall& call, const NewKeys& keys,
                       std::int64_t length) {
  if (!rotary.cos.defined() || length < 0 || call.is_packed()) return;
  const std::int64_t queries =
      call.options.window.is_full() ? std::min<std::int64_t>(call.q.size(1), 1) : call.q.size(1);
  const std::int64_t rotated = std::max(queries, keys.length);
  TORCH_CHECK_VALUE(rotated == 0 || rotary.cos.size(0) >= length + rotated,
                    "rotary_cos: must have a row for every position, ", length + rotated,
                    " in all, got ", rotary.cos.size(0));
}

void check_may_be_written(const char* name, const at::Tensor& cache) {
  for (int dim = 0; dim < cache.dim(); ++dim) {
    TORCH_CHECK_VALUE(cache.size(dim) <= 1 || cache.stride(dim) != 0, name,
                      ": must not name memory twice where keys are appended, got strides ",
                      cache.strides());
  }
}

// What writes the new keys into the cache, if there is anything to do; the call's q becomes the
// rotated one.
std::optional<AppendParams> prepare_append(AttentionCall& call, const NewKeys& keys,
                                           const Rotary& rotary, const CacheLengths& lengths,
                                           std::int64_t capacity) {
  const bool writes = keys.k.defined() && keys.k.numel() > 0;
  const bool rotates_q = rotary.cos.defined() && call.q.numel() > 0;
  if (!writes && !rotates_q) return std::nullopt;

  AppendParams params{
      .dtype = dtype_of(call.q),
      .shape = shape_of(call),
      .sequences = sequence_params(call),
      .paged = paged_params(call),
      .rotary_interleaved = rotary.interleaved,
      .rotate_queries_in_order = !call.options.window.is_full(),
      .total_q = static_cast<int>(call.is_packed() ? call.q.size(0) : 0),
      .total_k_new = static_cast<int>(keys.cu_seqlens.defined() ? keys.k.size(0) : 0)};
  params.shape.seqlen_k = static_cast<int>(capacity);
  params.sequences.seqlen_k_new = static_cast<int>(keys.length);
  params.seqlen_k_used = static_cast<int>(lengths.on_host);
  const c10::DeviceIndex device = call.q.device().index();
  const c10::cuda::CUDAGuard guard(device);
  if (call.has_device_contents()) params.errors = device_record(device);
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
  const at::Tensor q = call.q;
  if (rotates_q) {
    call.q = allocate(q.sizes(), q.scalar_type(), q);
    params.q = input_view(q);
    params.q_rotated = output_view(call.q);
  }
  return params;
}

}  // namespace

std::vector<at::Tensor> fwd_kvcache(
    const at::Tensor& q, const at::Tensor& kcache, const at::Tensor& vcache,
    const OptionalTensor& k, const OptionalTensor& v, const OptionalTensor& seqlens_k,
    const OptionalTensor& rotary_cos, const OptionalTensor& rotary_sin,
    const OptionalTensor& cache_batch_idx, const OptionalTensor& leftpad_k,
    const OptionalTensor& block_table, const OptionalTensor& alibi_slopes,
    const OptionalTensor& out, double softmax_scale, bool is_causal, std::int64_t window_left,
    std::int64_t window_right, double softcap, bool is_rotary_interleaved, std::int64_t num_splits,
    const OptionalTensor& cu_seqlens_q, OptionalInt max_seqlen_q,
    const OptionalTensor& cu_seqlens_k_new, bool batch_invariant, OptionalInt seqlen_k,
    const OptionalTensor& sink) {
  const bool is_packed = cu_seqlens_q.has_value();
  const bool is_paged = block_table.has_value();
  check_inputs(q, kcache, vcache,
               {.packed_q = is_packed,
                .kv = is_paged ? InputLayout::Kv::paged : InputLayout::Kv::cache,
                .k_name = "k_cache",
                .v_name = "v_cache",
                .any_head_dim = true});
  check_read_in_place("k_cache", kcache);
  check_read_in_place("v_cache", vcache);
  const std::int64_t batch =
      is_packed ? checked_num_sequences("cu_seqlens_q", *cu_seqlens_q, q) : q.size(0);
  TORCH_CHECK_VALUE(is_paged || cache_batch_idx.has_value() || kcache.size(0) == batch,
                    "k_cache: batch must be that of q (", batch, ") without cache_batch_idx, got ",
                    kcache.size(0));
  const at::Tensor& entries = is_paged ? *block_table : kcache;
  TORCH_CHECK_VALUE(batch == 0 || !cache_batch_idx.has_value() || entries.size(0) > 0,
                    is_paged ? "block_table" : "k_cache",
                    ": must have an entry for cache_batch_idx to name, got shape ",
                    entries.sizes());

  const at::NoGradGuard no_grad;
  AttentionCall call{.q = q, .k = kcache, .v = vcache};
  if (is_packed && max_seqlen_q.has_value()) {
    check_max_seqlen("max_seqlen_q", max_seqlen_q);
    call.max_seqlen_q = useful_bound(*max_seqlen_q, q.size(0));
  }
  call.cu_seqlens_q = cu_seqlens_q.value_or(at::Tensor());
  call.leftpad_k = checked_per_sequence("cache_leftpad", leftpad_k, batch, q);
  call.cache.kv_batch_idx = checked_per_sequence("cache_batch_idx", cache_batch_idx, batch, q);
  call.cache.block_table =
      checked_block_table(block_table, cache_batch_idx.has_value() ? -1 : batch, q);
  call.alibi_slopes = checked_alibi_slopes(alibi_slopes, batch, q);
  call.masks.sink = checked_sink(sink, q);
  call.options = {.window = checked_window(is_causal, window_left, window_right),
                  .softmax_scale = checked_softmax_scale(softmax_scale),
                  .softcap = checked_softcap(softcap)};
  const int splits = checked_num_splits(num_splits);

  const std::int64_t capacity = cache_capacity(kcache, call.cache.block_table);
  const NewKeys keys = checked_new_keys(k, v, cu_seqlens_k_new, call, batch);
  const Rotary rotary = checked_rotary(rotary_cos, rotary_sin, is_rotary_interleaved, q);
  const CacheLengths lengths =
      checked_lengths(seqlens_k, seqlen_k, keys, rotary.cos.defined(), capacity, batch, q);
  check_rotary_rows(rotary, call, keys, lengths.on_host);
  call.seqused_k = lengths.on_device;
  call.cache.cu_seqlens_k_new = keys.cu_seqlens;
  if (lengths.on_host >= 0)
    call.cache.seqlen_k = static_cast<int>(lengths.on_host + keys.length);
  else
    call.cache.seqlen_k_new = static_cast<int>(keys.length);

  OutputTensor output("out", out, output_sizes(call), q);
  call.q = with_kernel_layout(q);
  const at::Tensor given_q = call.q;  // read by what appends
  const auto to_append = prepare_append(call, keys, rotary, lengths, capacity);
  ForwardResults results =
      run_forward_call(call, output.view(),
                       {.split = {.num_splits = splits, .batch_invariant = batch_invariant},
                        .append = to_append.has_value() ? &*to_append : nullptr,
                        .names = {.seqused_k = "cache_seqlens", .leftpad_k = "cache_leftpad"}});
  return {output.finish(), std::move(results.softmax_lse)};
}

}  // namespace flash_attn_cuda::binding
