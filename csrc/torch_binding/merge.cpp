// merge: attention over some keys takes in attention over others, in place.

#include "flash_attn/merge.h"
#include "torch_binding/check.h"
#include "torch_binding/functions.h"
#include "torch_binding/launch_scope.h"
#include "torch_binding/layout.h"
#include "torch_binding/to_params.h"

namespace flash_attn_cuda::binding {
namespace {

void check_rows(const char* name, const at::Tensor& tensor, const at::Tensor& out) {
  TORCH_CHECK_VALUE(has_kernel_layout(tensor) && !is_expanded(tensor), name,
                    ": must have rows of head_dim contiguous columns at 16 bytes, got strides ",
                    tensor.strides(), " of shape ", out.sizes());
}

void check_out(const at::Tensor& out) {
  TORCH_CHECK_VALUE(out.is_cuda(), "out: must be a CUDA tensor, got one on ", out.device());
  TORCH_CHECK_TYPE(out.layout() == at::kStrided && out.scalar_type() == at::kFloat,
                   "out: must be a dense tensor of ", at::kFloat, ", got ", out.layout(), " of ",
                   out.scalar_type());
  TORCH_CHECK_VALUE(out.dim() == 3, "out: must have shape (rows, heads, head_dim), got ",
                    out.sizes());
  TORCH_CHECK_VALUE(out.size(2) > 0 && out.size(2) % 8 == 0,
                    "out: head_dim must be a positive multiple of 8, got ", out.size(2));
  // A block of the kernel has 16 rows of a head.
  TORCH_CHECK_VALUE((out.size(0) / 16 + 1) * out.size(1) <= max_size && out.size(2) <= max_size,
                    "out: must be of fewer rows and heads, got shape ", out.sizes());
  check_rows("out", out, out);
}

void check_lse(const char* name, const at::Tensor& lse, const at::Tensor& out) {
  check_like(name, lse, {out.size(1), out.size(0)}, at::kFloat, out);
  TORCH_CHECK_VALUE(lse.size(1) <= 1 || lse.stride(1) == 1, name,
                    ": must have the rows of a head side by side, got strides ", lse.strides());
}

TensorView view_of(const at::Tensor& tensor) {
  return {
      .data = tensor.data_ptr(), .row_stride = tensor.stride(0), .head_stride = tensor.stride(1)};
}

}  // namespace

void merge(const at::Tensor& out, const at::Tensor& softmax_lse, const at::Tensor& part,
           const at::Tensor& part_lse, const OptionalTensor& result,
           const OptionalTensor& rounding) {
  check_out(out);
  check_like("part", part, out.sizes(), at::kFloat, out);
  check_rows("part", part, out);
  check_lse("softmax_lse", softmax_lse, out);
  check_lse("part_lse", part_lse, out);
  TORCH_CHECK_VALUE(!is_expanded(softmax_lse), "softmax_lse: must not name memory twice, got ",
                    "strides ", softmax_lse.strides());
  if (result.has_value()) {
    const at::ScalarType dtype = result->scalar_type();
    TORCH_CHECK_TYPE(dtype == at::kHalf || dtype == at::kBFloat16,
                     "result: dtype must be float16 or bfloat16, got ", dtype);
    check_like("result", *result, out.sizes(), dtype, out);
    check_rows("result", *result, out);
  }
  if (rounding.has_value()) {
    TORCH_CHECK_VALUE(result.has_value(), "rounding: must be None without result, got a tensor");
    check_like("rounding", *rounding, out.sizes(), at::kChar, out);
    TORCH_CHECK_VALUE(has_rounding_layout(*rounding) && !is_expanded(*rounding),
                      "rounding: must have ", "rows of contiguous columns at 8 bytes, got strides ",
                      rounding->strides());
  }
  if (out.numel() == 0) return;

  const LaunchScope scope(out);
  const at::Tensor narrow = result.value_or(at::Tensor());
  const at::Tensor taken = rounding.value_or(at::Tensor());
  count_writes({&out, &softmax_lse, &narrow, &taken});
  run_merge(
      {.rows = out.size(0),
       .num_heads = static_cast<int>(out.size(1)),
       .head_dim = static_cast<int>(out.size(2)),
       .out = view_of(out),
       .part = view_of(part),
       .lse = {.data = softmax_lse.data_ptr<float>(), .head_stride = softmax_lse.stride(0)},
       .part_lse = {.data = part_lse.const_data_ptr<float>(), .head_stride = part_lse.stride(0)},
       .result = result.has_value() ? view_of(*result) : TensorView{},
       .result_dtype = result.has_value() ? dtype_of(*result) : Dtype::bf16,
       .rounding = rounding.has_value() ? view_of(*rounding) : TensorView{}},
      scope.stream);
}

}  // namespace flash_attn_cuda::binding
