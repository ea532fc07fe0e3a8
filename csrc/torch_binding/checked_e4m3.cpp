// k and v of e4m3, and scales that kernels write. Which arguments go with them, and the shapes of
// scales, are rules of both sides (generated_rules.h).
#include "torch_binding/check.h"
#include "torch_binding/checked_call.h"
#include "torch_binding/layout.h"
#include "torch_binding/to_params.h"

namespace flash_attn_cuda::binding {
namespace {

// Kernels load 16 bytes at once.
void check_columns(const char* name, const char* dimension, const at::Tensor& tensor) {
  const std::int64_t columns = tensor.size(tensor.dim() - 1);
  TORCH_CHECK_VALUE(columns % vector_bytes == 0, name, ": last dimension (", dimension,
                    ") must be a multiple of ", vector_bytes, " in Float8_e4m3fn, got ", columns);
}

// The same of a tensor that is never copied.
void check_rows(const char* name, const at::Tensor& tensor) {
  bool are_apart = true;
  for (int dim = 0; dim < tensor.dim() - 1; ++dim) {
    are_apart = are_apart && (tensor.size(dim) <= 1 || tensor.stride(dim) % vector_bytes == 0);
  }
  TORCH_CHECK_VALUE(are_apart, name, ": strides of rows must be multiples of ", vector_bytes,
                    " in Float8_e4m3fn, got strides ", tensor.strides());
  if (tensor.is_meta()) return;
  const auto excess = reinterpret_cast<std::uintptr_t>(tensor.const_data_ptr()) % vector_bytes;
  TORCH_CHECK_VALUE(excess == 0, name, ": must begin at a multiple of ", vector_bytes,
                    " bytes in Float8_e4m3fn, got an address ", excess, " after one");
}

void check_not_negated(const char* name, const at::Tensor& scale) {
  TORCH_CHECK_VALUE(!scale.defined() || !scale.is_neg(), name, ": must not be a negated view");
}

// Kernels write scales of new keys into it.
void check_written(const char* name, const at::Tensor& scale, const AttentionCall& call) {
  TORCH_CHECK_VALUE(is_per_token(scale), name, ": must have a scale for every token of k_cache, ",
                    "shape ", in_python(tokens_in_place(call)), ", where quantize writes it, got ",
                    in_python(scale.sizes()));
  TORCH_CHECK_VALUE(!is_expanded(scale), name,
                    ": must not be expanded where quantize writes it, got strides ",
                    scale.strides());
}

void check_written_scales(const AttentionCall& call) {
  check_written("k_descale", call.k_descale, call);
  check_written("v_descale", call.v_descale, call);
  const bool is_one = call.k_descale.is_alias_of(call.v_descale) &&
                      call.k_descale.storage_offset() == call.v_descale.storage_offset();
  require(!is_one, "v_descale: must be another tensor than k_descale where quantize writes it");
}

}  // namespace

void check_e4m3(const AttentionCall& call, const ArgumentNames& names) {
  TORCH_CHECK_TYPE(call.v.scalar_type() == at::kFloat8_e4m3fn, names.v, ": must have the dtype of ",
                   names.k, " (Float8_e4m3fn), got ", call.v.scalar_type());
  TORCH_CHECK_TYPE(!is_of_one_length(call), names.k,
                   ": must have the dtype of q without cu_seqlens_q, got Float8_e4m3fn");
  check_columns(names.k, "head_dim", call.k);
  check_columns(names.v, "head_dim_v", call.v);
  check_not_negated("q_descale", call.q_descale);
  check_not_negated("k_descale", call.k_descale);
  check_not_negated("v_descale", call.v_descale);
  if (!reads_in_place(call)) return;
  check_rows(names.k, call.k);
  check_rows(names.v, call.v);
  if (call.quantizes_tokens) check_written_scales(call);
}

}  // namespace flash_attn_cuda::binding
