#include "torch_binding/layout.h"

#include <ATen/ops/empty_like.h>

#include <algorithm>
#include <cstdint>

#include "flash_attn/config.h"

namespace flash_attn_cuda::binding {
namespace {

bool has_whole_vectors(const at::Tensor& tensor) {
  return tensor.size(tensor.dim() - 1) * tensor.element_size() % vector_bytes == 0;
}

// Autograd records the copy, so that second derivatives reach the tensor.
at::Tensor contiguous_copy(const at::Tensor& tensor) {
  return at::empty_like(tensor, tensor.options(), at::MemoryFormat::Contiguous).copy_(tensor);
}

// Contiguous rows, every one at so many elements from where others begin, the first at so many
// bytes.
bool has_rows_of_vectors(const at::Tensor& tensor, std::int64_t elements, std::int64_t bytes) {
  const int last = tensor.dim() - 1;
  if (tensor.stride(last) != 1 || tensor.is_neg()) return false;
  for (int dim = 0; dim < last; ++dim) {
    if (tensor.size(dim) > 1 && tensor.stride(dim) % elements != 0) return false;
  }
  return reinterpret_cast<std::uintptr_t>(tensor.const_data_ptr()) % bytes == 0;
}

}  // namespace

bool has_kernel_layout(const at::Tensor& tensor) {
  // A dimension of fp32 results has as many elements as one of 16 bits.
  const std::int64_t bytes = std::min<std::int64_t>(tensor.element_size(), bytes_of(Dtype::bf16));
  return has_rows_of_vectors(tensor, vector_bytes / bytes, vector_bytes);
}

bool has_rounding_layout(const at::Tensor& rounding) {
  constexpr std::int64_t elements = vector_bytes / bytes_of(Dtype::bf16);
  return has_rows_of_vectors(rounding, elements, elements);
}

at::Tensor known_rounding(const at::Tensor& rounding) {
  if (!rounding.defined() || rounding.numel() == 0) return at::Tensor();
  return has_rounding_layout(rounding) ? rounding : contiguous_copy(rounding);
}

bool is_addressable(const at::Tensor& tensor) {
  return has_whole_vectors(tensor) ? has_kernel_layout(tensor)
                                   : tensor.is_contiguous() && !tensor.is_neg();
}

at::Tensor with_kernel_layout(const at::Tensor& tensor) {
  if (is_addressable(tensor)) return tensor;
  // Not contiguous(): a contiguous tensor can start off a 16-byte boundary.
  return contiguous_copy(tensor);
}

bool is_expanded(const at::Tensor& tensor) {
  for (int dim = 0; dim < tensor.dim(); ++dim) {
    if (tensor.size(dim) > 1 && tensor.stride(dim) == 0) return true;
  }
  return false;
}

bool is_same(const at::Tensor& a, const at::Tensor& b) {
  return a.is_alias_of(b) && a.storage_offset() == b.storage_offset();
}

at::Tensor contiguous(const at::Tensor& tensor) {
  return tensor.is_contiguous() && !tensor.is_neg() ? tensor : contiguous_copy(tensor);
}

at::Tensor with_contiguous_rows(const at::Tensor& tensor) {
  const std::int64_t last = tensor.dim() - 1;
  const bool has_them = (tensor.stride(last) == 1 || tensor.size(last) <= 1) && !tensor.is_neg();
  return has_them ? tensor : contiguous_copy(tensor);
}

void count_writes(std::initializer_list<const at::Tensor*> tensors) {
  for (const bool is_inference : {true, false}) {
    for (const at::Tensor* tensor : tensors) {
      if (tensor->defined() && tensor->is_inference() == is_inference)
        tensor->unsafeGetTensorImpl()->bump_version();
    }
  }
}

}  // namespace flash_attn_cuda::binding
