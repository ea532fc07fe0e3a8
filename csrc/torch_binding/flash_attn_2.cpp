#include "torch_binding/flash_attn_2.h"

#include <ATen/core/Generator.h>
#include <torch/csrc/Exceptions.h>

#include <cstdint>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "torch_binding/backward.h"
#include "torch_binding/check.h"
#include "torch_binding/checked_call.h"
#include "torch_binding/forward.h"
#include "torch_binding/to_params.h"

namespace flash_attn_cuda::binding {
namespace {

namespace py = pybind11;

using Description = std::tuple<AttentionCall, Incoming>;

// -- what the functions run -----------------------------------------------------------------------

at::Tensor or_empty(at::Tensor tensor, at::ScalarType dtype, const at::Tensor& q) {
  return tensor.defined() ? tensor : allocate({0}, dtype, q);
}

// As errors call a call's arguments.
ArgumentNames names_in_flash_attn_2(const AttentionCall& call) {
  ArgumentNames names = names_of(call);
  names.dropout_p = "p_dropout";
  return names;
}

// They have no argument for scales.
void check_16_bits(const AttentionCall& call) {
  TORCH_CHECK_TYPE(!is_fp8(call), names_of(call).k, ": must have the dtype of q (",
                   in_python(call.q.scalar_type()), "), got ", in_python(call.k.scalar_type()));
}

// [out, softmax_lse, S_dmask, rng_state]
std::vector<at::Tensor> forward_outputs(Description given) {
  AttentionCall& described = std::get<AttentionCall>(given);
  check_16_bits(described);
  const ArgumentNames names = names_in_flash_attn_2(described);
  const AttentionCall call = checked_call(std::move(described), Pass::forward, &names);
  Results results = run_forward_call(call);
  return {std::move(results.out), std::move(results.softmax_lse),
          or_empty(std::move(results.S_dmask), call.q.scalar_type(), call.q),
          or_empty(std::move(results.rng_state), at::kLong, call.q)};
}

// [out, softmax_lse]
std::vector<at::Tensor> cache_outputs(Description given) {
  std::get<AttentionCall>(given).over_cache = true;
  std::vector<at::Tensor> results = forward_outputs(std::move(given));
  results.resize(2);  // no dropout
  return results;
}

// [dq, dk, dv, softmax_d]
std::vector<at::Tensor> backward_outputs(Description given) {
  auto& [call, incoming] = given;
  check_16_bits(call);
  incoming.wants_softmax_d = true;
  const ArgumentNames names = names_in_flash_attn_2(call);
  Gradients results =
      run_backward_call(checked_call(std::move(call), Pass::backward, &names), incoming);
  return {std::move(results.dq), std::move(results.dk), std::move(results.dv),
          std::move(results.softmax_d)};
}

// -- arguments ------------------------------------------------------------------------------------

// A field's argument has the field's name, where FlashAttention-2 has no other one for it.
template <class Described, class Type>
constexpr Field<Described, Type> named(const char* name, const Field<Described, Type>& field) {
  return {name, field.place};
}

template <class Described, class Type>
void tell(Description& call, const Field<Described, Type>& field, const Type& value) {
  if constexpr (std::is_same_v<Type, at::Tensor>)
    std::get<Described>(call).*field.place = unwrapped(field.name, value);
  else
    std::get<Described>(call).*field.place = value;
}

// A tensor that may be None.
template <class Described>
struct Maybe {
  using Value = OptionalTensor;
  const char* name;
  at::Tensor Described::* place;
};

template <class Described>
constexpr Maybe<Described> maybe(const Field<Described, at::Tensor>& field) {
  return {field.name, field.place};
}

template <class Described>
void tell(Description& call, const Maybe<Described>& field, const OptionalTensor& value) {
  if (value.has_value()) std::get<Described>(call).*field.place = unwrapped(field.name, *value);
}

// An argument that need not be given.
template <class Described, class Type>
struct Defaulted : Field<Described, Type> {
  Type value;
};

template <class Described, class Type>
constexpr Defaulted<Described, Type> with_default(const Field<Described, Type>& field, Type value) {
  return {field, value};
}

// An argument that no field is.
struct Ignored {
  using Value = bool;
  const char* name;
};

void tell(Description& /*call*/, const Ignored& /*argument*/, bool /*value*/) {}

// FlashAttention-2 raises for it as well.
struct Refused {
  using Value = std::optional<at::Generator>;
  const char* name;
};

void tell(Description& /*call*/, const Refused& argument, const Refused::Value& value) {
  TORCH_CHECK_NOT_IMPLEMENTED(!value.has_value(), argument.name, ": must be None, got a generator");
}

template <class Argument>
py::arg in_python(const Argument& argument) {
  return py::arg(argument.name);
}

template <class Described, class Type>
py::arg_v in_python(const Defaulted<Described, Type>& argument) {
  return py::arg(argument.name) = argument.value;
}

// A function of these arguments, which runs `run` on what they describe.
template <class Run, class... Arguments>
void define(py::module& module, const char* name, const char* documentation, Run run,
            const Arguments&... arguments) {
  const auto function = [=](const typename Arguments::Value&... values) {
    Description call;
    (tell(call, arguments, values), ...);
    return run(std::move(call));
  };
  module.def(name, torch::wrap_pybind_function_no_gil(function), documentation,
             in_python(arguments)...);
}

}  // namespace

void define_flash_attn_2(py::module& module) {
  using namespace fields_of_call;
  namespace incoming = fields_of_incoming;
  constexpr auto p_dropout = named("p_dropout", dropout_p);
  constexpr auto is_causal = named("is_causal", causal);
  constexpr auto window_left = named("window_left", window_size_left);
  constexpr auto window_right = named("window_right", window_size_right);
  constexpr Ignored zero_tensors{"zero_tensors"};  // every row is written anyway
  constexpr Refused unused_generator{"unused_generator"};

  define(module, "fwd",
         "FlashAttention-2's forward, outside autograd. Writes out where given. A negative window\n"
         "bound is none; softcap <= 0 is off. S_dmask and rng_state are empty without dropout;\n"
         "S_dmask (batch, heads_q, seqlen_q, seqlen_k), with return_softmax alone, has the\n"
         "probabilities, negative where dropped.",
         forward_outputs, q, k, v, maybe(out), maybe(alibi_slopes), p_dropout, softmax_scale,
         is_causal, window_left, window_right, softcap, return_softmax, unused_generator);
  define(
      module, "varlen_fwd",
      "fwd of packed sequences: q (total_q, heads_q, head_dim), k and v (total_k, heads_k,\n"
      "head_dim), or with block_table (num_pages, page_size, heads_k, head_dim), where\n"
      "cu_seqlens_k, or seqused_k, gives lengths. softmax_lse (heads_q, total_q), S_dmask (batch,\n"
      "heads_q, max_seqlen_q, max_seqlen_k). max_seqlen_* are upper bounds. num_splits 0 splits\n"
      "the keys of paged calls alone.",
      forward_outputs, q, k, v, maybe(out), cu_seqlens_q, maybe(cu_seqlens_k), maybe(seqused_k),
      maybe(leftpad_k), maybe(block_table), maybe(alibi_slopes), max_seqlen_q, max_seqlen_k,
      p_dropout, softmax_scale, zero_tensors, is_causal, window_left, window_right, softcap,
      return_softmax, unused_generator, with_default(num_splits, std::int64_t{0}));
  define(
      module, "bwd",
      "FlashAttention-2's backward. Writes dq, dk, dv where given. softmax_d (batch, heads_q,\n"
      "seqlen_q rounded up to 128) is rowsum(dout * out). rng_state is the forward's, needed with\n"
      "dropout.",
      backward_outputs, incoming::dout, q, k, v, incoming::out, incoming::softmax_lse,
      maybe(incoming::dq), maybe(incoming::dk), maybe(incoming::dv), maybe(alibi_slopes), p_dropout,
      softmax_scale, is_causal, window_left, window_right, softcap, deterministic, unused_generator,
      maybe(incoming::rng_state));
  define(module, "varlen_bwd",
         "bwd of packed sequences; softmax_lse and softmax_d are (heads_q, total_q).",
         backward_outputs, incoming::dout, q, k, v, incoming::out, incoming::softmax_lse,
         maybe(incoming::dq), maybe(incoming::dk), maybe(incoming::dv), cu_seqlens_q, cu_seqlens_k,
         maybe(alibi_slopes), max_seqlen_q, max_seqlen_k, p_dropout, softmax_scale, zero_tensors,
         is_causal, window_left, window_right, softcap, deterministic, unused_generator,
         maybe(incoming::rng_state));
  define(module, "fwd_kvcache",
         "FlashAttention-2's attention over a cache -> [out, softmax_lse]: (batch, capacity,\n"
         "heads_k, head_dim), or with block_table (num_pages, page_size, heads_k, head_dim), of\n"
         "any head_dim and never copied. First k and v go into it behind the seqlens_k keys of\n"
         "each sequence, and k and q are rotated. num_splits 0 is as many as serve the device.",
         cache_outputs, q, named("kcache", k), named("vcache", v), maybe(named("k", k_new)),
         maybe(named("v", v_new)), maybe(named("seqlens_k", seqused_k)), maybe(rotary_cos),
         maybe(rotary_sin), maybe(cache_batch_idx), maybe(leftpad_k), maybe(block_table),
         maybe(alibi_slopes), maybe(out), softmax_scale, is_causal, window_left, window_right,
         softcap, named("is_rotary_interleaved", rotary_interleaved), num_splits);
}

}  // namespace flash_attn_cuda::binding
