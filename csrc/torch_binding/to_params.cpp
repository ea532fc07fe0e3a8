#include "torch_binding/to_params.h"

#include <ATen/cuda/EmptyTensor.h>
#include <ATen/ops/empty_like.h>

#include <cstdint>

#include "torch_binding/check.h"

namespace flash_attn_cuda::binding {
namespace {

TensorView view_at(void* data, const at::Tensor& tensor) {
  return {.data = data,
          .batch_stride = tensor.stride(0),
          .row_stride = tensor.stride(1),
          .head_stride = tensor.stride(2)};
}

// Two indices of an expanded tensor name the same memory; copy_ refuses it with a clear error, a
// kernel would race.
bool is_expanded(const at::Tensor& tensor) {
  for (int dim = 0; dim < tensor.dim(); ++dim) {
    if (tensor.size(dim) > 1 && tensor.stride(dim) == 0) return true;
  }
  return false;
}

}  // namespace

Dtype dtype_of(const at::Tensor& q) {
  return q.scalar_type() == at::kHalf ? Dtype::fp16 : Dtype::bf16;
}

AttentionShape shape_of(const at::Tensor& q, const at::Tensor& k) {
  return {.batch_size = static_cast<int>(q.size(0)),
          .seqlen_q = static_cast<int>(q.size(1)),
          .seqlen_k = static_cast<int>(k.size(1)),
          .num_heads_q = static_cast<int>(q.size(2)),
          .num_heads_k = static_cast<int>(k.size(2)),
          .head_dim = static_cast<int>(q.size(3))};
}

bool has_kernel_layout(const at::Tensor& tensor) {
  constexpr std::int64_t alignment = 16;
  const std::int64_t elements = alignment / tensor.element_size();
  if (tensor.stride(3) != 1 || tensor.is_neg()) return false;
  for (int dim = 0; dim < 3; ++dim) {
    if (tensor.size(dim) > 1 && tensor.stride(dim) % elements != 0) return false;
  }
  return reinterpret_cast<std::uintptr_t>(tensor.const_data_ptr()) % alignment == 0;
}

at::Tensor with_kernel_layout(const at::Tensor& tensor) {
  if (has_kernel_layout(tensor)) return tensor;
  // Not contiguous(): a contiguous tensor can start off a 16-byte boundary.
  return at::empty_like(tensor, tensor.options(), at::MemoryFormat::Contiguous).copy_(tensor);
}

TensorView input_view(const at::Tensor& tensor) {
  return view_at(const_cast<void*>(tensor.const_data_ptr()), tensor);
}

TensorView output_view(const at::Tensor& tensor) {
  return view_at(tensor.mutable_data_ptr(), tensor);
}

at::Tensor allocate(at::IntArrayRef shape, at::ScalarType dtype, const at::Tensor& q) {
  return at::Tensor(at::detail::empty_cuda(shape, dtype, q.device(), std::nullopt));
}

OutputTensor::OutputTensor(const char* name, const std::optional<at::Tensor>& given,
                           at::IntArrayRef shape, const at::Tensor& q) {
  if (given.has_value()) {
    check_like(name, *given, shape, q.scalar_type(), q);
    given_ = *given;
  }
  const bool is_written = given_.defined() && has_kernel_layout(given_) && !is_expanded(given_);
  written_ = is_written ? given_ : allocate(shape, q.scalar_type(), q);
}

at::Tensor OutputTensor::finish() {
  if (!given_.defined()) return written_;
  if (given_.is_same(written_))
    given_.unsafeGetTensorImpl()->bump_version();
  else
    given_.copy_(written_);
  return given_;
}

}  // namespace flash_attn_cuda::binding
