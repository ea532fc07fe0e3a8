// k and v of e4m3, and the scales of what they, and q before it was converted, stand for.
#include <ostream>

#include "torch_binding/check.h"
#include "torch_binding/checked_call.h"
#include "torch_binding/layout.h"
#include "torch_binding/to_params.h"

namespace flash_attn_cuda::binding {
namespace {

// -- k and v --------------------------------------------------------------------------------------

void check_refused_beside_e4m3(const AttentionCall& call, const char* dropout_p_name) {
  TORCH_CHECK_NOT_IMPLEMENTED(call.dropout_p == 0.0, dropout_p_name,
                              ": must be 0 with k and v of Float8_e4m3fn, got ", call.dropout_p);
  refuse(has_masks(call) || call.block_columns.defined(),
         "attn_mask: must be None with k and v of Float8_e4m3fn, got a tensor");
  refuse(call.fp32_results, "fp32_results: must be False with k and v of Float8_e4m3fn, got True");
  refuse(call.origin.defined(), "origin: must be None with k and v of Float8_e4m3fn, got a tensor");
}

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

void check_keys_and_values(const AttentionCall& call) {
  const char* const k_name = k_name_of(call);
  const char* const v_name = v_name_of(call);
  TORCH_CHECK_TYPE(is_packed(call) || reads_in_place(call), k_name,
                   ": must have the dtype of q without cu_seqlens_q, got Float8_e4m3fn");
  check_columns(k_name, "head_dim", call.k);
  check_columns(v_name, "head_dim_v", call.v);
  if (!reads_in_place(call)) return;
  check_rows(k_name, call.k);
  check_rows(v_name, call.v);
}

// -- scales ---------------------------------------------------------------------------------------

// The shapes that a scale may have.
struct ScaleShapes {
  std::int64_t batch = 0;
  std::int64_t heads = 0;
  at::IntArrayRef per_token;  // empty: none

  bool allow(const at::Tensor& scale) const {
    if (is_per_token(scale)) return scale.sizes() == per_token;
    if (scale.dim() == 1) return scale.size(0) == heads;
    return scale.dim() == 2 && scale.size(0) == batch && scale.size(1) == heads;
  }
};

std::ostream& operator<<(std::ostream& stream, const ScaleShapes& shapes) {
  const bool has_tokens = !shapes.per_token.empty();
  stream << "(" << shapes.heads << ",)" << (has_tokens ? ", " : " or ") << "(" << shapes.batch
         << ", " << shapes.heads << ")";
  if (!has_tokens) return stream;
  return stream << " or (" << shapes.per_token[0] << ", " << shapes.per_token[1] << ", "
                << shapes.per_token[2] << ")";
}

void check_scale(const char* name, const at::Tensor& scale, const AttentionCall& call,
                 const ScaleShapes& shapes) {
  if (!scale.defined()) return;
  TORCH_CHECK_VALUE(has_e4m3(call), name, ": must be None where ", k_name_of(call),
                    " is not of Float8_e4m3fn, got a tensor");
  check_place(name, scale, at::kFloat, call.q);
  TORCH_CHECK_VALUE(!scale.is_neg(), name, ": must not be a negated view");
  TORCH_CHECK_VALUE(shapes.allow(scale), name, ": must have shape ", shapes, ", got ",
                    scale.sizes());
}

// Kernels write scales of new keys into it.
void check_written(const char* name, const at::Tensor& scale) {
  TORCH_CHECK_VALUE(is_per_token(scale), name,
                    ": must have a scale for each token with quantizes_tokens, got shape ",
                    scale.sizes());
  TORCH_CHECK_VALUE(!is_expanded(scale), name,
                    ": must not name memory twice with quantizes_tokens, got strides ",
                    scale.strides());
}

void check_quantized_tokens(const AttentionCall& call) {
  require(has_e4m3(call),
          "quantizes_tokens: must be False where k_cache is not of Float8_e4m3fn, got True");
  require(call.k_new.defined(), "quantizes_tokens: must be False without new keys, got True");
  require(call.k_new.scalar_type() != at::kFloat8_e4m3fn,
          "quantizes_tokens: must be False where k is of Float8_e4m3fn, got True");
  check_written("k_descale", call.k_descale);
  check_written("v_descale", call.v_descale);
  const bool is_one = call.k_descale.is_alias_of(call.v_descale) &&
                      call.k_descale.storage_offset() == call.v_descale.storage_offset();
  require(!is_one, "v_descale: must not be k_descale with quantizes_tokens");
}

}  // namespace

void check_scales(const AttentionCall& call, std::int64_t batch, const char* dropout_p_name) {
  const at::IntArrayRef tokens = call.k.sizes().slice(0, call.k.dim() - 1);
  const ScaleShapes of_queries{.batch = batch, .heads = tokens.back(), .per_token = {}};
  ScaleShapes of_keys = of_queries;
  // Of packed keys one for each token would look like one for each sequence.
  if (tokens.size() == 3) of_keys.per_token = tokens;
  if (has_e4m3(call)) {
    TORCH_CHECK_TYPE(call.v.scalar_type() == at::kFloat8_e4m3fn, v_name_of(call),
                     ": must have the dtype of ", k_name_of(call), " (Float8_e4m3fn), got ",
                     call.v.scalar_type());
    check_refused_beside_e4m3(call, dropout_p_name);
    check_keys_and_values(call);
  } else {
    check_16_bits(call);
  }
  const auto check_given = [&call](const char* name, const at::Tensor& scale, const char* of) {
    TORCH_CHECK_VALUE(!has_e4m3(call) || scale.defined(), name, ": must be given where ", of,
                      " is of Float8_e4m3fn, got None");
  };
  check_given("k_descale", call.k_descale, k_name_of(call));
  check_given("v_descale", call.v_descale, v_name_of(call));
  check_scale("q_descale", call.q_descale, call, of_queries);
  check_scale("k_descale", call.k_descale, call, of_keys);
  check_scale("v_descale", call.v_descale, call, of_keys);
  if (call.quantizes_tokens) check_quantized_tokens(call);
}

}  // namespace flash_attn_cuda::binding
