// Checks of single tensors and numbers. Each throws naming the argument, the rule and the value,
// and costs a few comparisons when nothing is wrong: TypeError for a dtype, ValueError for a shape,
// a device or a number, NotImplementedError for what is refused. None looks into device memory, and
// none changes what it is given.
#pragma once

#include <ATen/core/Tensor.h>

#include <c10/util/StringUtil.h>

#include <cstdint>
#include <initializer_list>
#include <limits>
#include <optional>
#include <string>
#include <utility>

namespace flash_attn_cuda::binding {

// Kernels count a dimension in 32 bits.
constexpr std::int64_t max_size = std::numeric_limits<int>::max();

// Keys of a sequence, and new ones: kernels add two such numbers in 32 bits.
constexpr std::int64_t max_keys = 1'000'000'000;

// As Python writes them.
std::string in_python(at::ScalarType dtype);
std::string in_python(at::IntArrayRef shape);

// A fact in an error's words, maybe around the name of an argument.
struct Where {
  const char* before;
  const char* name = "";
  const char* after = "";
};

[[noreturn]] void raise_value_error(const char* name, const char* must, const Where& where,
                                    const std::string& got);
[[noreturn]] void raise_not_implemented(const char* name, const char* must, const Where& where,
                                        const std::string& got);

// These raise ValueError for an argument that is not what it must be, maybe where a fact holds, and
// NotImplementedError for what no kernel does (generated_rules.h).
template <class Got>
void require(bool holds, const char* name, const char* must, const Got& got) {
  TORCH_CHECK_VALUE(holds, name, ": must be ", must, ", got ", got);
}
template <class Got>
void require(bool holds, const char* name, const char* must, const Where& where, const Got& got) {
  if (!holds) raise_value_error(name, must, where, c10::str(got));
}
template <class Got>
void refuse(bool is_asked, const char* name, const char* must, const Where& where, const Got& got) {
  if (is_asked) raise_not_implemented(name, must, where, c10::str(got));
}

// The tensor as torch's operators see it. One that was made inside a transform of torch.func, which
// has ended, is a wrapper without memory of its own around it.
at::Tensor unwrapped(const char* name, at::Tensor tensor);
inline std::optional<at::Tensor> unwrapped(const char* name, std::optional<at::Tensor> tensor) {
  if (tensor.has_value()) tensor = unwrapped(name, *std::move(tensor));
  return tensor;
}

// The tensor is dense and on a CUDA device.
void check_cuda(const char* name, const at::Tensor& tensor);

// The GPU of a CUDA tensor runs kernels of this library.
void check_capability(const char* name, const at::Tensor& tensor);

// The tensor is dense and on the device of q, which errors call q_name.
void check_device(const char* name, const at::Tensor& tensor, const at::Tensor& q,
                  const char* q_name = "q");

// The tensor has as many dimensions as the layout names.
void check_dims(const char* name, const at::Tensor& tensor, std::int64_t dims, const char* layout);

// The tensor passes check_device() and has one of these dtypes.
void check_place(const char* name, const at::Tensor& tensor,
                 std::initializer_list<at::ScalarType> dtypes, const at::Tensor& q);

// The tensor passes check_place() and has this shape.
void check_like(const char* name, const at::Tensor& tensor, at::IntArrayRef shape,
                at::ScalarType dtype, const at::Tensor& q);

// The tensor passes check_place() and has one of these shapes, but for empty ones. Kernels read it
// by its strides.
void check_strided(const char* name, const at::Tensor& tensor,
                   std::initializer_list<at::IntArrayRef> shapes,
                   std::initializer_list<at::ScalarType> dtypes, const at::Tensor& q);

// The tensor passes check_like() and is contiguous: kernels read it as a plain array.
void check_array(const char* name, const at::Tensor& tensor, at::IntArrayRef shape,
                 at::ScalarType dtype, const at::Tensor& q);

void check_sizes(const char* name, const at::Tensor& tensor);
void check_16_or_32_bits(const char* name, at::ScalarType dtype);

// Kernels read such a tensor where it lies: it is never copied.
void check_read_in_place(const char* name, const at::Tensor& tensor);

// int64 (2), which nothing reads without dropout.
void check_rng_state(const at::Tensor& rng_state, double p_dropout, const at::Tensor& q);

}  // namespace flash_attn_cuda::binding
