// Whether kernels can address a tensor where it lies, and copies of those that they cannot.
#pragma once

#include <ATen/core/Tensor.h>

#include <initializer_list>

namespace flash_attn_cuda::binding {

// Contiguous rows of head_dim, every row on a 16-byte boundary; of fp32 at every eighth element.
bool has_kernel_layout(const at::Tensor& tensor);

// Whether kernels can address the tensor as it lies: it has that layout, or, where head_dim is no
// multiple of 16 bytes, it is contiguous.
bool is_addressable(const at::Tensor& tensor);

// The tensor itself where it is addressable, else a contiguous copy.
at::Tensor with_kernel_layout(const at::Tensor& tensor);

// Whether two indices of the tensor name the same memory, as far as its strides tell: copy_ refuses
// to write it with a clear error, a kernel would race.
bool is_expanded(const at::Tensor& tensor);

// Whether two tensors begin at the same number.
bool is_same(const at::Tensor& a, const at::Tensor& b);

// The tensor itself where it is contiguous, else a copy.
at::Tensor contiguous(const at::Tensor& tensor);

// The same of what rounding takes from a result, whose eight bytes go with 16 of that.
bool has_rounding_layout(const at::Tensor& rounding);

// In that layout; undefined where nothing is known, for which operators have an empty tensor.
at::Tensor known_rounding(const at::Tensor& rounding);

// The tensor itself where its last dimension is contiguous, else a contiguous copy.
at::Tensor with_contiguous_rows(const at::Tensor& tensor);

// Tells autograd that these will be written, but for undefined ones; to be called after whatever
// may be refused. Raises for inference tensors outside inference mode, before it tells of others.
void count_writes(std::initializer_list<const at::Tensor*> tensors);

}  // namespace flash_attn_cuda::binding
