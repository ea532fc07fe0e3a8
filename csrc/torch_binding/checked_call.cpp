#include "torch_binding/checked_call.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "host/normalize_window.h"
#include "torch_binding/check.h"
#include "torch_binding/to_params.h"

namespace flash_attn_cuda::binding {
namespace {

constexpr std::int64_t most_margin = 1 << 16;  // of multiprocessors: more than any device has

const char* k_name_of(const CallArguments& given) { return given.over_cache ? "k_cache" : "k"; }
const char* v_name_of(const CallArguments& given) { return given.over_cache ? "v_cache" : "v"; }

CallOptions checked_options(const CallArguments& given) {
  const std::int64_t head_dim = given.q.size(given.q.dim() - 1);
  const double scale = given.softmax_scale.value_or(1.0 / std::sqrt(static_cast<double>(head_dim)));
  return {.window = checked_window(given.causal, given.window_size_left, given.window_size_right),
          .softmax_scale = checked_softmax_scale(scale),
          .softcap = checked_softcap(given.softcap),
          .p_dropout = checked_p_dropout(given.dropout_p_name, given.dropout_p),
          .deterministic = given.deterministic,
          .fp32_results = given.fp32_results,
          .sm_margin = static_cast<int>(std::clamp<std::int64_t>(given.sm_margin, 0, most_margin))};
}

// A checked max_seqlen as AttentionCall has it.
int useful_bound(std::int64_t max_seqlen, std::int64_t total) {
  return static_cast<int>(std::min(max_seqlen, total));
}

// Returns how many there are.
std::int64_t set_packed_queries(const CallArguments& given, AttentionCall& call) {
  const std::int64_t batch = checked_num_sequences("cu_seqlens_q", *given.cu_seqlens_q, given.q);
  call.cu_seqlens_q = *given.cu_seqlens_q;
  check_max_seqlen("max_seqlen_q", given.max_seqlen_q);
  call.max_seqlen_q = useful_bound(given.max_seqlen_q, given.q.size(0));
  return batch;
}

void set_packed_keys(const CallArguments& given, std::int64_t batch, AttentionCall& call) {
  const bool is_paged = given.block_table.has_value();
  check_max_seqlen("max_seqlen_k", given.max_seqlen_k);
  call.max_seqlen_k = useful_bound(given.max_seqlen_k, std::numeric_limits<int>::max());
  if (!given.cu_seqlens_k.has_value()) {
    TORCH_CHECK_VALUE(is_paged && given.seqused_k.has_value(),
                      "cu_seqlens_k: must be given, got None");
    return;
  }
  const std::int64_t batch_k = checked_num_sequences("cu_seqlens_k", *given.cu_seqlens_k, given.q);
  TORCH_CHECK_VALUE(batch_k == batch, "cu_seqlens_k: must have as many entries as cu_seqlens_q (",
                    batch + 1, "), got ", batch_k + 1);
  // Of pages it tells lengths, which seqused_k replaces, as in FlashAttention-2.
  if (!is_paged || !given.seqused_k.has_value()) call.cu_seqlens_k = *given.cu_seqlens_k;
}

MaskTensors checked_masks(const CallArguments& given, Pass pass, std::int64_t batch) {
  const at::Tensor& q = given.q;
  const bool is_packed = given.cu_seqlens_q.has_value();
  const PairExtent extent{.batch = batch,
                          .heads_q = q.size(q.dim() - 2),
                          .seqlen_q = is_packed ? given.max_seqlen_q : q.size(1),
                          .seqlen_k = is_packed ? given.max_seqlen_k : given.k.size(1),
                          .at_least = is_packed};
  MaskTensors masks;
  if (pass != Pass::backward)
    masks.block_rows =
        checked_block_lists("block_rows", given.block_rows, /*by_keys=*/false, extent, q);
  if (pass != Pass::forward)
    masks.block_columns =
        checked_block_lists("block_columns", given.block_columns, /*by_keys=*/true, extent, q);
  const bool by_keys = masks.block_columns.defined();
  masks.bits = checked_mask_bits(given.mask_bits, by_keys ? masks.block_columns : masks.block_rows,
                                 by_keys, extent, q);
  if (pass == Pass::both && masks.bits.defined())
    checked_mask_bits(given.mask_bits, masks.block_rows, /*by_keys=*/false, extent, q);
  masks.bias = checked_bias(given.bias, extent, q);
  masks.sink = checked_sink(given.sink, q);
  return masks;
}

void check_cache_entries(const CallArguments& given, std::int64_t batch) {
  const bool is_paged = given.block_table.has_value();
  const bool are_chosen = given.cache_batch_idx.has_value();
  TORCH_CHECK_VALUE(is_paged || are_chosen || given.k.size(0) == batch,
                    "k_cache: batch must be that of q (", batch, ") without cache_batch_idx, got ",
                    given.k.size(0));
  const at::Tensor& entries = is_paged ? *given.block_table : given.k;
  TORCH_CHECK_VALUE(
      batch == 0 || !are_chosen || entries.size(0) > 0, is_paged ? "block_table" : "k_cache",
      ": must have an entry for cache_batch_idx to name, got shape ", entries.sizes());
}

at::Tensor checked_origin(const CallArguments& given, std::int64_t batch) {
  if (!given.origin.has_value()) return {};
  TORCH_CHECK_VALUE(given.cu_seqlens_q.has_value(),
                    "origin: must be None without cu_seqlens_q, got a tensor");
  const auto check = [](const char* what, bool is_there) {
    TORCH_CHECK_NOT_IMPLEMENTED(!is_there, "origin: must be None with ", what, ", got a tensor");
  };
  check("a block_table", given.block_table.has_value());
  check("a cache", given.over_cache);
  check("a mask or a bias", given.block_rows.has_value() || given.bias.has_value());
  check("return_softmax", given.return_softmax && given.dropout_p > 0.0);
  const std::int64_t rows = std::max(given.q.size(0), given.k.size(0));
  TORCH_CHECK_VALUE(rows <= max_seqlen_with_origin, "origin: must be None for more than ",
                    max_seqlen_with_origin, " rows, got ", rows);
  check_array("origin", *given.origin, {batch, 4}, at::kInt, given.q);
  return *given.origin;
}

void check_refused(const CallArguments& given) {
  const bool has_pages = given.block_table.has_value();
  TORCH_CHECK_NOT_IMPLEMENTED(given.dropout_p == 0.0 || !(has_pages || given.over_cache),
                              given.dropout_p_name, ": must be 0 with a block_table, got ",
                              given.dropout_p);
  TORCH_CHECK_NOT_IMPLEMENTED(
      !(has_pages || given.over_cache) || !(given.block_rows.has_value() || given.bias.has_value()),
      "attn_mask: must be None with a block_table");
  TORCH_CHECK_NOT_IMPLEMENTED(!(given.fp32_results && (has_pages || given.over_cache)),
                              "fp32_results: must be False with a block_table, got True");
  TORCH_CHECK_NOT_IMPLEMENTED(
      !(given.fp32_results && (given.block_rows.has_value() || given.bias.has_value())),
      "fp32_results: must be False with a mask or a bias, got True");
  TORCH_CHECK_VALUE(given.over_cache || !(given.k_new.has_value() || given.rotary_cos.has_value() ||
                                          given.cache_batch_idx.has_value()),
                    "over_cache: must be set where keys are appended or entries chosen");
}

}  // namespace

AttentionCall checked_call(const CallArguments& given, Pass pass) {
  using Kv = InputLayout::Kv;
  const bool is_packed = given.cu_seqlens_q.has_value();
  const bool over_cache = given.over_cache;
  const Kv entries = over_cache ? Kv::cache : (is_packed ? Kv::packed : Kv::dense);
  check_inputs(given.q, given.k, given.v,
               {.packed_q = is_packed,
                .kv = given.block_table.has_value() ? Kv::paged : entries,
                .k_name = k_name_of(given),
                .v_name = v_name_of(given),
                .any_head_dim = over_cache});
  return described_call(given, pass);
}

AttentionCall described_call(const CallArguments& given, Pass pass) {
  const bool is_packed = given.cu_seqlens_q.has_value();
  const bool is_paged = given.block_table.has_value();
  const bool over_cache = given.over_cache;
  TORCH_CHECK_VALUE(is_packed || !given.cu_seqlens_k.has_value(),
                    "cu_seqlens_q: must be given where cu_seqlens_k is, got None");
  check_refused(given);

  AttentionCall call{.q = given.q, .k = given.k, .v = given.v};
  call.cache.reads_in_place = is_paged || over_cache;
  if (call.cache.reads_in_place) {
    check_read_in_place(k_name_of(given), given.k);
    check_read_in_place(v_name_of(given), given.v);
  }
  const std::int64_t batch = is_packed ? set_packed_queries(given, call) : given.q.size(0);
  if (over_cache) {
    check_cache_entries(given, batch);
    call.cache.kv_batch_idx =
        checked_per_sequence("cache_batch_idx", given.cache_batch_idx, batch, given.q);
  } else if (is_packed) {
    set_packed_keys(given, batch, call);
  }
  const bool names_entries = given.cache_batch_idx.has_value();
  call.cache.block_table =
      checked_block_table(given.block_table, names_entries ? -1 : batch, given.q);
  call.seqused_q = checked_per_sequence("seqused_q", given.seqused_q, batch, given.q);
  call.seqused_k = checked_per_sequence(over_cache ? "cache_seqlens" : "seqused_k", given.seqused_k,
                                        batch, given.q);
  call.leftpad_k = checked_per_sequence(over_cache ? "cache_leftpad" : "leftpad_k", given.leftpad_k,
                                        batch, given.q);
  call.origin = checked_origin(given, batch);
  call.alibi_slopes = checked_alibi_slopes(given.alibi_slopes, batch, given.q);
  call.masks = checked_masks(given, pass, batch);
  call.options = checked_options(given);
  return call;
}

void use_kernel_layout(AttentionCall& call) {
  const auto adopt = [](at::Tensor& tensor) {
    if (!is_addressable(tensor)) tensor = with_kernel_layout(tensor);
  };
  adopt(call.q);
  if (call.cache.reads_in_place) return;
  adopt(call.k);
  adopt(call.v);
}

void check_gradients_exist(const AttentionCall& call, bool wants_dbias) {
  TORCH_CHECK_NOT_IMPLEMENTED(!call.cache.reads_in_place,
                              "block_table: must be None in a call whose gradients are wanted");
  TORCH_CHECK_NOT_IMPLEMENTED(!call.options.deterministic || !call.masks.block_columns.defined(),
                              "deterministic: must be False with block_columns, got True");
  TORCH_CHECK_NOT_IMPLEMENTED(!call.options.deterministic || !call.masks.bias.defined(),
                              "deterministic: must be False with a bias, got True");
  TORCH_CHECK_VALUE(!wants_dbias || call.masks.bias.defined(),
                    "wants_dbias: must be False without a bias, got True");
  TORCH_CHECK_NOT_IMPLEMENTED(!wants_dbias || call.options.softcap == 0.0f,
                              "wants_dbias: must be False with softcap (", call.options.softcap,
                              "), got True");
}

}  // namespace flash_attn_cuda::binding
