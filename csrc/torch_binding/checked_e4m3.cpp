// k and v, or v alone, of e4m3 as kernels read them. Which arguments go with them, and the shapes
// of scales, are rules of both sides (generated_rules.h).
#include "torch_binding/check.h"
#include "torch_binding/checked_call.h"
#include "torch_binding/generated_rules.h"

namespace flash_attn_cuda::binding {
namespace {

// Kernels load 16 bytes at once of a tensor that is never copied.
void check_rows(const char* name, const at::Tensor& tensor) {
  const std::int64_t elements = vector_bytes / tensor.element_size();
  bool are_apart = true;
  for (int dim = 0; dim < tensor.dim() - 1; ++dim) {
    are_apart = are_apart && (tensor.size(dim) <= 1 || tensor.stride(dim) % elements == 0);
  }
  TORCH_CHECK_VALUE(are_apart, name, ": strides of rows must be multiples of ", elements, " of ",
                    in_python(tensor.scalar_type()), ", got strides ", tensor.strides());
  if (tensor.is_meta()) return;
  const auto excess = reinterpret_cast<std::uintptr_t>(tensor.const_data_ptr()) % vector_bytes;
  TORCH_CHECK_VALUE(excess == 0, name, ": must begin at a multiple of ", vector_bytes, " bytes of ",
                    in_python(tensor.scalar_type()), ", got an address ", excess, " after one");
}

void check_not_negated(const char* name, const at::Tensor& scale) {
  TORCH_CHECK_VALUE(!scale.defined() || !scale.is_neg(), name, ": must not be a negated view");
}

}  // namespace

void check_e4m3(const AttentionCall& call, const ArgumentNames& names) {
  check_e4m3_tensors(call, names);
  check_not_negated("q_descale", call.q_descale);
  check_not_negated("k_descale", call.k_descale);
  check_not_negated("v_descale", call.v_descale);
  if (call.v_descale.dim() == 4)
    TORCH_CHECK_VALUE(call.v_descale.stride(3) <= max_size, "v_descale: the last stride must be ",
                      "at most ", max_size, ", got strides ", call.v_descale.strides());
  if (!reads_in_place(call)) return;
  check_rows(names.k, call.k);
  check_rows(names.v, call.v);
}

}  // namespace flash_attn_cuda::binding
