#include "torch_binding/check.h"

#include <cmath>
#include <limits>

#include "flash_attn/api.h"

namespace flash_attn_cuda::binding {
namespace {

constexpr std::int64_t max_int = std::numeric_limits<int>::max();
constexpr std::int64_t max_head_dim = 256;

void check_input(const char* name, const at::Tensor& tensor, const at::Tensor& q) {
  TORCH_CHECK_VALUE(tensor.is_cuda(), name, ": must be a CUDA tensor, got one on ",
                    tensor.device());
  TORCH_CHECK_TYPE(tensor.layout() == at::kStrided, name, ": must be a dense tensor, got layout ",
                   tensor.layout());
  TORCH_CHECK_VALUE(tensor.device() == q.device(), name, ": must be on the device of q (",
                    q.device(), "), got ", tensor.device());
  TORCH_CHECK_TYPE(tensor.scalar_type() == q.scalar_type(), name, ": must have the dtype of q (",
                   q.scalar_type(), "), got ", tensor.scalar_type());
  TORCH_CHECK_VALUE(tensor.dim() == 4, name,
                    ": must have 4 dimensions (batch, seqlen, heads, head_dim), got shape ",
                    tensor.sizes());
  for (const std::int64_t size : tensor.sizes()) {
    TORCH_CHECK_VALUE(size <= max_int, name, ": every dimension must be at most ", max_int,
                      ", got shape ", tensor.sizes());
  }
}

}  // namespace

void check_inputs(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
  check_input("q", q, q);
  TORCH_CHECK_TYPE(q.scalar_type() == at::kHalf || q.scalar_type() == at::kBFloat16,
                   "q: dtype must be float16 or bfloat16, got ", q.scalar_type());
  check_input("k", k, q);
  check_input("v", v, q);

  const std::int64_t heads_q = q.size(2);
  const std::int64_t heads_k = k.size(2);
  const std::int64_t head_dim = q.size(3);
  TORCH_CHECK_VALUE(head_dim >= 1 && head_dim <= max_head_dim,
                    "q: last dimension (head_dim) must be from 1 to ", max_head_dim, ", got ",
                    head_dim);
  TORCH_CHECK_VALUE(head_dim % 8 == 0, "q: last dimension (head_dim) must be a multiple of 8, got ",
                    head_dim);
  TORCH_CHECK_VALUE(heads_q >= 1, "q: must have at least one head, got shape ", q.sizes());
  TORCH_CHECK_VALUE(heads_k >= 1, "k: must have at least one head, got shape ", k.sizes());
  TORCH_CHECK_VALUE(heads_q % heads_k == 0, "k: number of heads must divide that of q (", heads_q,
                    "), got ", heads_k);
  TORCH_CHECK_VALUE(k.size(0) == q.size(0), "k: batch must be that of q (", q.size(0), "), got ",
                    k.size(0));
  TORCH_CHECK_VALUE(k.size(3) == head_dim, "k: last dimension (head_dim) must be that of q (",
                    head_dim, "), got ", k.size(3));
  TORCH_CHECK_VALUE(v.sizes() == k.sizes(), "v: must have the shape of k, ", k.sizes(), ", got ",
                    v.sizes());

  const int capability = device_info(q.get_device()).compute_capability;
  TORCH_CHECK(capability >= 80, "q: must be on a GPU of compute capability 8.0 or higher, got ",
              q.device(), " of ", capability / 10, ".", capability % 10);
}

void check_like(const char* name, const at::Tensor& tensor, at::IntArrayRef shape,
                at::ScalarType dtype, const at::Tensor& q) {
  TORCH_CHECK_TYPE(tensor.layout() == at::kStrided, name, ": must be a dense tensor, got layout ",
                   tensor.layout());
  TORCH_CHECK_VALUE(tensor.device() == q.device(), name, ": must be on the device of q (",
                    q.device(), "), got ", tensor.device());
  TORCH_CHECK_TYPE(tensor.scalar_type() == dtype, name, ": dtype must be ", dtype, ", got ",
                   tensor.scalar_type());
  TORCH_CHECK_VALUE(tensor.sizes() == shape, name, ": must have shape ", shape, ", got ",
                    tensor.sizes());
}

float checked_softmax_scale(double softmax_scale) {
  const float scale = static_cast<float>(softmax_scale);
  TORCH_CHECK_VALUE(std::isfinite(scale), "softmax_scale: must be finite in float32, got ",
                    softmax_scale);
  return scale;
}

Window checked_window(bool is_causal, std::int64_t left, std::int64_t right) {
  TORCH_CHECK_NOT_IMPLEMENTED(left < 0, "window_left: must be -1 (unlimited), got ", left);
  TORCH_CHECK_NOT_IMPLEMENTED(is_causal || right <= 0,
                              "window_right: must be -1 (unlimited) or 0 (causal), got ", right);
  return {.left = Window::unbounded, .right = is_causal || right == 0 ? 0 : Window::unbounded};
}

void refuse_later_arguments(double p_dropout, double softcap, bool has_alibi_slopes,
                            bool has_generator) {
  TORCH_CHECK_NOT_IMPLEMENTED(p_dropout == 0.0, "p_dropout: must be 0.0, got ", p_dropout);
  TORCH_CHECK_NOT_IMPLEMENTED(!(softcap > 0.0), "softcap: must be 0.0, got ", softcap);
  TORCH_CHECK_NOT_IMPLEMENTED(!has_alibi_slopes, "alibi_slopes: must be None, got a tensor");
  TORCH_CHECK_NOT_IMPLEMENTED(!has_generator, "unused_generator: must be None, got a generator");
}

}  // namespace flash_attn_cuda::binding
