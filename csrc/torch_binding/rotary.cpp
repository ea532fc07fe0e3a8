// rotary: rotary embedding by itself, in place or as a new tensor.

#include "flash_attn/api.h"
#include "torch_binding/check.h"
#include "torch_binding/functions.h"
#include "torch_binding/launch_scope.h"
#include "torch_binding/layout.h"
#include "torch_binding/to_params.h"

namespace flash_attn_cuda::binding {
namespace {

void check_floating(const char* name, const at::Tensor& tensor, const at::Tensor& x) {
  check_device(name, tensor, x, "x");
  check_16_or_32_bits(name, tensor.scalar_type());
}

void check_x(const at::Tensor& x, bool is_packed) {
  check_cuda("x", x);
  check_floating("x", x, x);
  TORCH_CHECK_VALUE(
      x.dim() == (is_packed ? 3 : 4), "x: must have shape ",
      is_packed ? "(total, heads, head_dim) with cu_seqlens" : "(batch, seqlen, heads, head_dim)",
      ", got ", x.sizes());
  check_sizes("x", x);
  check_capability("x", x);
}

void check_tables(const at::Tensor& cos, const at::Tensor& sin, const at::Tensor& x) {
  const std::int64_t head_dim = x.size(x.dim() - 1);
  check_floating("cos", cos, x);
  TORCH_CHECK_VALUE(cos.dim() == 2 && cos.size(1) <= head_dim / 2,
                    "cos: must have shape (positions, rotary_dim / 2) with rotary_dim at most "
                    "head_dim (",
                    head_dim, "), got ", cos.sizes());
  check_floating("sin", sin, x);
  TORCH_CHECK_VALUE(sin.sizes() == cos.sizes(), "sin: must have the shape of cos, ", cos.sizes(),
                    ", got ", sin.sizes());
}

void check_indices(const char* name, const at::Tensor& tensor, const at::Tensor& x) {
  check_device(name, tensor, x, "x");
  TORCH_CHECK_TYPE(tensor.scalar_type() == at::kInt || tensor.scalar_type() == at::kLong, name,
                   ": dtype must be int32 or int64, got ", tensor.scalar_type());
}

// Sequences of x; cu_seqlens tells them where x is packed.
std::int64_t checked_sequences(const OptionalTensor& cu_seqlens, const at::Tensor& x) {
  if (!cu_seqlens.has_value()) return x.size(0);
  check_indices("cu_seqlens", *cu_seqlens, x);
  TORCH_CHECK_VALUE(
      cu_seqlens->dim() == 1 && cu_seqlens->size(0) >= 1 && cu_seqlens->size(0) <= max_size,
      "cu_seqlens: must have shape (batch + 1,), got ", cu_seqlens->sizes());
  return cu_seqlens->size(0) - 1;
}

void check_offsets(const at::Tensor& offsets, std::int64_t sequences, const at::Tensor& x) {
  check_indices("seqlen_offsets", offsets, x);
  TORCH_CHECK_VALUE(offsets.sizes() == at::IntArrayRef{sequences},
                    "seqlen_offsets: must have shape (batch,) = (", sequences, ",), got ",
                    offsets.sizes());
}

// What only the device knows, the kernel finds out.
void check_positions(const at::Tensor& x, const at::Tensor& cos, std::int64_t offset) {
  TORCH_CHECK_VALUE(offset >= 0, "seqlen_offset: must not be negative, got ", offset);
  TORCH_CHECK_VALUE(offset <= cos.size(0) && x.size(1) <= cos.size(0) - offset,
                    "cos: must have a row for each position from seqlen_offset (", offset, ") on, ",
                    x.size(1), " in all, got ", cos.size(0));
}

RotaryTable table_of(const at::Tensor& table) {
  return {.data = table.const_data_ptr(),
          .dtype = dtype_of(table),
          .is_fp32 = table.scalar_type() == at::kFloat,
          .row_stride = table.size(0) > 1 ? table.stride(0) : 0};
}

IndexArray indices_of(const at::Tensor& tensor) {
  if (!tensor.defined()) return {};
  if (tensor.scalar_type() == at::kInt) return {.narrow = tensor.const_data_ptr<std::int32_t>()};
  return {.wide = tensor.const_data_ptr<std::int64_t>()};
}

at::Tensor contiguous_or_none(const OptionalTensor& tensor) {
  return tensor.has_value() ? contiguous(*tensor) : at::Tensor();
}

}  // namespace

at::Tensor rotary(const at::Tensor& given_x, const at::Tensor& given_cos,
                  const at::Tensor& given_sin, std::int64_t seqlen_offset,
                  const OptionalTensor& given_offsets, const OptionalTensor& given_cu_seqlens,
                  bool interleaved, bool inplace, bool conjugate) {
  const at::Tensor x = unwrapped("x", given_x);
  const at::Tensor cos = unwrapped("cos", given_cos);
  const at::Tensor sin = unwrapped("sin", given_sin);
  const OptionalTensor seqlen_offsets = unwrapped("seqlen_offsets", given_offsets);
  const OptionalTensor cu_seqlens = unwrapped("cu_seqlens", given_cu_seqlens);
  check_x(x, cu_seqlens.has_value());
  check_tables(cos, sin, x);
  const std::int64_t sequences = checked_sequences(cu_seqlens, x);
  if (seqlen_offsets.has_value())
    check_offsets(*seqlen_offsets, sequences, x);
  else if (!cu_seqlens.has_value())
    check_positions(x, cos, seqlen_offset);
  TORCH_CHECK_VALUE(!inplace || !is_expanded(x), "x: must not name memory twice where it is ",
                    "rotated in place, got strides ", x.strides());

  const LaunchScope scope(x);
  // Before anything is written: an inference tensor must not be, outside inference mode.
  if (inplace) x.unsafeGetTensorImpl()->bump_version();
  const at::Tensor source = with_contiguous_rows(x);
  const at::Tensor result = inplace ? source : allocate(x.sizes(), x.scalar_type(), x);
  if (x.numel() > 0) {
    const at::Tensor cosines = with_contiguous_rows(cos);
    const at::Tensor sines = with_contiguous_rows(sin);
    const at::Tensor bounds = contiguous_or_none(cu_seqlens);
    const at::Tensor offsets = contiguous_or_none(seqlen_offsets);
    const std::int64_t rows = x.dim() - 3;
    run_rotary({.dtype = dtype_of(x),
                .is_fp32 = x.scalar_type() == at::kFloat,
                .batch_size = static_cast<int>(sequences),
                .seqlen = static_cast<int>(x.size(rows)),
                .num_heads = static_cast<int>(x.size(rows + 1)),
                .head_dim = static_cast<int>(x.size(rows + 2)),
                .rotary_dim = static_cast<int>(2 * cos.size(1)),
                .x = input_view(source),
                .out = output_view(result),
                .cos = table_of(cosines),
                .sin = table_of(sines),
                .positions = cos.size(0),
                .cu_seqlens = indices_of(bounds),
                .offsets = indices_of(offsets),
                .offset = seqlen_offset,
                .interleaved = interleaved,
                .conjugate = conjugate},
               scope.stream);
  }
  if (!inplace || result.is_same(x)) return result;
  return x.copy_(result);
}

}  // namespace flash_attn_cuda::binding
