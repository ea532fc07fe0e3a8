// combine: partial results of attention over splits of the keys become one.
#include <ATen/ops/empty_strided.h>

#include <limits>

#include "flash_attn/api.h"
#include "torch_binding/check.h"
#include "torch_binding/functions.h"
#include "torch_binding/launch_scope.h"
#include "torch_binding/layout.h"
#include "torch_binding/to_params.h"

namespace flash_attn_cuda::binding {
namespace {

void check_partials(const at::Tensor& out_partial, const at::Tensor& lse_partial) {
  check_cuda("out_partial", out_partial);
  check_place("out_partial", out_partial, {at::kFloat}, out_partial);
  TORCH_CHECK_VALUE(out_partial.dim() == 5, "out_partial: must have 5 dimensions (splits, batch, ",
                    "seqlen, heads, head_dim), got shape ", out_partial.sizes());
  check_sizes("out_partial", out_partial);
  TORCH_CHECK_VALUE(out_partial.size(4) >= 1, "out_partial: last dimension (head_dim) must be at ",
                    "least 1, got shape ", out_partial.sizes());
  check_like("lse_partial", lse_partial, out_partial.sizes().slice(0, 4), {at::kFloat},
             out_partial);
}

at::ScalarType checked_out_dtype(const OptionalTensor& out,
                                 std::optional<at::ScalarType> out_dtype) {
  const at::ScalarType dtype =
      out_dtype.value_or(out.has_value() ? out->scalar_type() : at::kFloat);
  check_16_or_32_bits(out_dtype.has_value() ? "out_dtype" : "out", dtype);
  return dtype;
}

// (batch, seqlen, heads), as FlashAttention-3 returns it; the rows of a head are neighbours, which
// is how kernels write an LSE.
at::Tensor allocate_lse(const at::Tensor& out_partial) {
  const std::int64_t batch = out_partial.size(1);
  const std::int64_t seqlen = out_partial.size(2);
  const std::int64_t heads = out_partial.size(3);
  return at::empty_strided({batch, seqlen, heads}, {heads * seqlen, 1, seqlen},
                           out_partial.options().dtype(at::kFloat));
}

}  // namespace

std::vector<at::Tensor> combine(const at::Tensor& out_partial, const at::Tensor& lse_partial,
                                const OptionalTensor& out,
                                std::optional<at::ScalarType> out_dtype) {
  check_partials(out_partial, lse_partial);
  const at::ScalarType dtype = checked_out_dtype(out, out_dtype);
  const std::int64_t batch = out_partial.size(1);
  const std::int64_t seqlen = out_partial.size(2);
  const std::int64_t heads = out_partial.size(3);

  const LaunchScope scope(out_partial);
  OutputTensor output("out", out.value_or(at::Tensor()), out_partial.sizes().slice(1), dtype,
                      out_partial);
  at::Tensor softmax_lse = allocate_lse(out_partial);
  count_writes({&output.given()});
  if (out_partial.size(0) == 0) {  // no split, no key
    output.written().zero_();
    softmax_lse.fill_(-std::numeric_limits<float>::infinity());
  } else if (softmax_lse.numel() > 0) {
    const at::Tensor outs = with_kernel_layout(contiguous(out_partial));
    const at::Tensor lses = contiguous(lse_partial);
    const TensorView view = output.view();
    run_combine({.out_dtype = dtype_of(output.written()),
                 .out_fp32 = dtype == at::kFloat,
                 .num_splits = static_cast<int>(outs.size(0)),
                 .head_dim = static_cast<int>(outs.size(4)),
                 .num_heads = static_cast<int>(heads),
                 .rows = batch * seqlen,
                 .out_partial = outs.const_data_ptr<float>(),
                 .lse_partial = lses.const_data_ptr<float>(),
                 .out = view.data,
                 .out_batch_stride = view.batch_stride,
                 .out_row_stride = view.row_stride,
                 .out_head_stride = view.head_stride,
                 .rows_per_batch = seqlen,
                 .lse = {.data = softmax_lse.mutable_data_ptr<float>(),
                         .batch_stride = softmax_lse.stride(0),
                         .head_stride = softmax_lse.stride(2)}},
                scope.stream);
  }
  return {output.finish(), std::move(softmax_lse)};
}

}  // namespace flash_attn_cuda::binding
