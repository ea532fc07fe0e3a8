// From tensors to the kernel library's plain structs, and the allocation of what a call writes.
#pragma once

#include <ATen/core/DimVector.h>
#include <ATen/core/Tensor.h>

#include "flash_attn/api.h"
#include "torch_binding/call.h"

namespace flash_attn_cuda::binding {

Dtype dtype_of(const at::Tensor& q);
AttentionShape shape_of(const AttentionCall& call);

// The sizes with `columns` as the last one, and so those of the call's result.
at::DimVector with_columns(at::IntArrayRef sizes, std::int64_t columns);
at::DimVector output_sizes(const AttentionCall& call);
at::DimVector lse_sizes(const AttentionCall& call);

// The call's device, without the multiprocessors that are left to other kernels.
DeviceInfo device_of_call(const AttentionCall& call);

SequenceParams sequence_params(const AttentionCall& call);

// Everything that planning and kernels ask, but for what a call allocates: its results, the
// workspace and what random numbers come from.
ForwardParams forward_params(const AttentionCall& call);
BackwardParams backward_params(const AttentionCall& call);
PagedKvParams paged_params(const AttentionCall& call);

// Of tensors where kernels can address them; tout and tlse are given as they are.
TangentParams tangent_params(const AttentionCall& call, const Tangents& tangents);

// rng_state: int64 (2), seed and offset.
RngSource rng_of_state(const at::Tensor& rng_state);

// What kernels write of the gradient of the call's bias, contiguous in its shape: fp32 where pairs
// share an element, else of the bias's dtype; zero where some pair is not visited. Where shared
// elements are to repeat to the bit, an element for each pair, or the words of exact sums (int64).
at::Tensor allocate_bias_gradient(const AttentionCall& call);

// Of what was written, in the bias's shape.
at::Tensor finish_bias_gradient(const AttentionCall& call, const at::Tensor& written);

// fp32 (heads_q); undefined where the call has no such input.
at::Tensor allocate_sink_gradient(const AttentionCall& call);

// written: as allocated; undefined: not wanted.
BiasGradient bias_gradient(const AttentionCall& call, const at::Tensor& written);

// Three dimensions: packed sequences.
TensorView input_view(const at::Tensor& tensor);
TensorView output_view(const at::Tensor& tensor);

// A descale of a checked call, of rows of so many columns, laid out as call/fields.py says; of an
// undefined one: none.
ScaleView scale_view(const at::Tensor& scale, std::int64_t columns, bool is_written = false);

// A contiguous (batch, heads, rows) or (heads, rows) tensor.
RowView<float> output_rows(const at::Tensor& tensor);
RowView<const float> input_rows(const at::Tensor& tensor);  // of an undefined one: none

// Uninitialised and contiguous on the device of q. Skips the dispatcher: on a small call its cost
// would show.
at::Tensor allocate(at::IntArrayRef shape, at::ScalarType dtype, const at::Tensor& q);

// Stands for such a tensor where a call is planned alone.
at::Tensor without_memory(at::IntArrayRef shape, const at::Tensor& like);

// For the same: like the call's q, k, v and out.
template <class Params>
TangentParams tangents_without_memory(const Params& params, bool is_given) {
  return {.is_given = is_given, .q = params.q, .k = params.k, .v = params.v, .out = params.out};
}

// One fp32 number per query and head of q: (batch, heads, rows), or (heads, total_q).
at::Tensor allocate_rows(const at::Tensor& q, std::int64_t rows);

// A tensor a call writes that its caller may have given, which count_writes() is to be told. Where
// kernels cannot write the given one, they write a temporary and finish() copies it over. is_read:
// they add to what is there.
class OutputTensor {
 public:
  OutputTensor(const char* name, const at::Tensor& given, at::IntArrayRef shape,
               at::ScalarType dtype, const at::Tensor& q, bool is_read = false);
  const at::Tensor& given() const { return given_; }
  const at::Tensor& written() const { return written_; }
  TensorView view() const { return output_view(written_); }
  at::Tensor finish();

 private:
  at::Tensor given_;  // undefined where the caller gave none
  at::Tensor written_;
};

}  // namespace flash_attn_cuda::binding
