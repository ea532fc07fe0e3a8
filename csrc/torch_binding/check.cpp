#include "torch_binding/check.h"

#include <ATen/ops/alias.h>

#include <algorithm>
#include <utility>

#include "flash_attn/api.h"

namespace flash_attn_cuda::binding {
namespace {

constexpr c10::DispatchKeySet wrappers({c10::DispatchKey::FuncTorchGradWrapper,
                                        c10::DispatchKey::FuncTorchBatched});

bool is_given(at::IntArrayRef shape) { return !shape.empty(); }
bool is_given(at::ScalarType /*dtype*/) { return true; }

template <class Allowed>
std::string any_of(std::initializer_list<Allowed> allowed) {
  std::string text;
  for (const Allowed& each : allowed) {
    if (is_given(each)) text += (text.empty() ? "" : " or ") + in_python(each);
  }
  return text;
}

}  // namespace

std::string in_python(at::ScalarType dtype) {
  return c10::str("torch.", c10::getDtypeNames(dtype).first);
}

std::string in_python(at::IntArrayRef shape) {
  return c10::str("(", c10::Join(", ", shape), shape.size() == 1 ? ",)" : ")");
}

void raise_value_error(const char* name, const char* must, const Where& where,
                       const std::string& got) {
  TORCH_CHECK_VALUE(false, name, ": must be ", must, " ", where.before, where.name, where.after,
                    ", got ", got);
}

void raise_not_implemented(const char* name, const char* must, const Where& where,
                           const std::string& got) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, name, ": must be ", must, " ", where.before, where.name,
                              where.after, ", got ", got);
}

at::Tensor unwrapped(const char* name, at::Tensor tensor) {
  if (!tensor.key_set().has_any(wrappers)) return tensor;
  // The dispatcher takes off what is left of a transform, but for torch.vmap.
  const bool is_mapped = tensor.key_set().has(c10::DispatchKey::FuncTorchBatched);
  at::Tensor inner = is_mapped ? std::move(tensor) : at::alias(tensor);
  TORCH_CHECK_NOT_IMPLEMENTED(!inner.key_set().has_any(wrappers), name,
                              ": must not be wrapped by a transform of torch.func here, got a "
                              "tensor that was kept from inside torch.vmap, or is inside one");
  return inner;
}

void check_cuda(const char* name, const at::Tensor& tensor) {
  TORCH_CHECK_VALUE(tensor.is_cuda(), name, ": must be a CUDA tensor, got one on ",
                    tensor.device());
  check_device(name, tensor, tensor);
}

void check_capability(const char* name, const at::Tensor& tensor) {
  const int capability = device_info(tensor.get_device()).compute_capability;
  TORCH_CHECK(capability >= 80, name,
              ": must be on a GPU of compute capability 8.0 or higher, got ", tensor.device(),
              " of ", capability / 10, ".", capability % 10);
}

void check_device(const char* name, const at::Tensor& tensor, const at::Tensor& q,
                  const char* q_name) {
  TORCH_CHECK_TYPE(tensor.layout() == at::kStrided, name, ": must be a dense tensor, got layout ",
                   tensor.layout());
  TORCH_CHECK_VALUE(tensor.device() == q.device(), name, ": must be on the device of ", q_name,
                    " (", q.device(), "), got ", tensor.device());
}

void check_dims(const char* name, const at::Tensor& tensor, std::int64_t dims, const char* layout) {
  TORCH_CHECK_VALUE(tensor.dim() == dims, name, ": must have ", dims, " dimensions ", layout,
                    ", got shape ", in_python(tensor.sizes()));
}

void check_place(const char* name, const at::Tensor& tensor,
                 std::initializer_list<at::ScalarType> dtypes, const at::Tensor& q) {
  check_device(name, tensor, q);
  const bool fits = std::ranges::find(dtypes, tensor.scalar_type()) != dtypes.end();
  TORCH_CHECK_TYPE(fits, name, ": dtype must be ", any_of(dtypes), ", got ",
                   in_python(tensor.scalar_type()));
}

void check_like(const char* name, const at::Tensor& tensor, at::IntArrayRef shape,
                at::ScalarType dtype, const at::Tensor& q) {
  check_place(name, tensor, {dtype}, q);
  TORCH_CHECK_VALUE(tensor.sizes() == shape, name, ": must have shape ", in_python(shape), ", got ",
                    in_python(tensor.sizes()));
}

void check_strided(const char* name, const at::Tensor& tensor,
                   std::initializer_list<at::IntArrayRef> shapes,
                   std::initializer_list<at::ScalarType> dtypes, const at::Tensor& q) {
  check_place(name, tensor, dtypes, q);
  const bool fits = std::ranges::any_of(
      shapes, [&](at::IntArrayRef shape) { return !shape.empty() && tensor.sizes() == shape; });
  TORCH_CHECK_VALUE(fits, name, ": must have shape ", any_of(shapes), ", got ",
                    in_python(tensor.sizes()));
}

void check_array(const char* name, const at::Tensor& tensor, at::IntArrayRef shape,
                 at::ScalarType dtype, const at::Tensor& q) {
  check_like(name, tensor, shape, dtype, q);
  TORCH_CHECK_VALUE(tensor.is_contiguous() && !tensor.is_neg(), name,
                    ": must be contiguous, got strides ", tensor.strides());
}

void check_sizes(const char* name, const at::Tensor& tensor) {
  for (const std::int64_t size : tensor.sizes()) {
    TORCH_CHECK_VALUE(size <= max_size, name, ": every dimension must be at most ", max_size,
                      ", got shape ", tensor.sizes());
  }
}

void check_16_or_32_bits(const char* name, at::ScalarType dtype) {
  TORCH_CHECK_TYPE(dtype == at::kHalf || dtype == at::kBFloat16 || dtype == at::kFloat, name,
                   ": dtype must be float16, bfloat16 or float32, got ", dtype);
}

void check_read_in_place(const char* name, const at::Tensor& tensor) {
  const std::int64_t last = tensor.dim() - 1;
  TORCH_CHECK_VALUE(tensor.stride(last) == 1 || tensor.size(last) == 1, name,
                    ": last dimension must have stride 1, got strides ", tensor.strides());
  TORCH_CHECK_VALUE(!tensor.is_neg(), name, ": must not be a negated view");
}

void check_rng_state(const at::Tensor& rng_state, double p_dropout, const at::Tensor& q) {
  if (p_dropout > 0.0) check_array("rng_state", rng_state, {2}, at::kLong, q);
}

}  // namespace flash_attn_cuda::binding
