// From tensors to the kernel library's plain structs, and the allocation of what a call writes.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "flash_attn/api.h"

namespace flash_attn_cuda::binding {

Dtype dtype_of(const at::Tensor& q);
AttentionShape shape_of(const at::Tensor& q, const at::Tensor& k);

// Whether kernels can address the tensor as it lies: contiguous rows of head_dim, every row on a
// 16-byte boundary.
bool has_kernel_layout(const at::Tensor& tensor);

// The tensor itself where it has that layout, else a contiguous copy.
at::Tensor with_kernel_layout(const at::Tensor& tensor);

TensorView input_view(const at::Tensor& tensor);
TensorView output_view(const at::Tensor& tensor);

// Uninitialised and contiguous on the device of q. Skips the dispatcher: on a small call its cost
// would show.
at::Tensor allocate(at::IntArrayRef shape, at::ScalarType dtype, const at::Tensor& q);

// A tensor a call writes that its caller may have given. Where kernels cannot write the given one,
// they write a temporary and finish() copies it over.
class OutputTensor {
 public:
  OutputTensor(const char* name, const std::optional<at::Tensor>& given, at::IntArrayRef shape,
               const at::Tensor& q);
  TensorView view() const { return output_view(written_); }
  at::Tensor finish();

 private:
  at::Tensor given_;  // undefined where the caller gave none
  at::Tensor written_;
};

}  // namespace flash_attn_cuda::binding
