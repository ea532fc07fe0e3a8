#include "torch_binding/aten_operators.h"

#include <ATen/Context.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "flash_attn/instance.h"
#include "host/error.h"
#include "host/select_instance.h"
#include "torch_binding/backward.h"
#include "torch_binding/checked_call.h"
#include "torch_binding/forward.h"
#include "torch_binding/to_params.h"

namespace flash_attn_cuda::binding {
namespace {

using torch::jit::Stack;

// -- which calls ----------------------------------------------------------------------------------

bool has_both_kernels(Dtype dtype, int head_dim, bool drops, const DeviceInfo& device) {
  const KernelRequest request{.dtype = dtype,
                              .mask = MaskKind::windowed,
                              .head_dim = head_dim,
                              .head_dim_v = head_dim,
                              .features = drops ? feature::dropout : FeatureSet{0}};
  try {
    select_instance(forward_instances(), request, device);
    select_instance(backward_instances(), request, device);
  } catch (const Error&) {
    return false;
  }
  return true;
}

// has_both_kernels(), whose answers are kept.
bool has_kernels(const AttentionCall& call) {
  using Key = std::tuple<int, Dtype, int, bool>;
  static std::mutex mutex;
  static std::map<Key, bool> known;
  const int device = call.q.device().index();
  const int head_dim = static_cast<int>(call.q.size(-1));
  const Key key{device, dtype_of(call.q), head_dim, drops(call)};
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = known.find(key);
  if (found != known.end()) return found->second;
  return known[key] =
             has_both_kernels(dtype_of(call.q), head_dim, drops(call), device_info(device));
}

// Both passes see what decides here, so that they agree: on dropout's decisions, and on the lse of
// a row without keys.
bool has_form_of_kernels(const AttentionCall& call) {
  const auto type = call.q.scalar_type();
  const std::int64_t head_dim = call.q.size(-1);
  const auto fits = [&](const at::Tensor& tensor) {
    return tensor.scalar_type() == type && tensor.size(-1) == head_dim && tensor.stride(-1) == 1;
  };
  if (type != at::kHalf && type != at::kBFloat16) return false;
  return head_dim > 0 && head_dim <= max_head_dim &&
         head_dim % elements_of_vector(dtype_of(call.q)) == 0 && fits(call.q) && fits(call.k) &&
         fits(call.v);
}

// torch's kernel is not given lengths of sequences that are not packed.
bool is_taken(const AttentionCall& call) {
  const bool has_lengths = call.seqused_k.defined() || is_paged(call);
  const bool can_write = !call.out.defined() || call.out.stride(-1) == 1;
  return (is_packed(call) || !has_lengths) && can_write && has_form_of_kernels(call);
}

// -- an operator's arguments ----------------------------------------------------------------------

// aten's names of fields, where they are not the field's.
constexpr std::pair<std::string_view, const char*> names_in_aten[] = {
    {"q", "query"},
    {"k", "key"},
    {"v", "value"},
    {"softmax_scale", "scale"},
    {"causal", "is_causal"},
    {"cu_seqlens_q", "cum_seq_q"},
    {"cu_seqlens_k", "cum_seq_k"},
    {"max_seqlen_q", "max_q"},
    {"max_seqlen_k", "max_k"},
    {"return_softmax", "return_debug_mask"},
    {"dout", "grad_out"},
    {"softmax_lse", "logsumexp"},
};

// Where a field stands in an operator's schema, which grows from one torch to the next; -1: not
// there.
int place_of(const char* field, const c10::FunctionSchema& schema) {
  const auto place = [&](const char* name) {
    return schema.argumentIndexWithName(name).value_or(-1);
  };
  for (const auto& [ours, of_aten] : names_in_aten) {
    if (ours == field) return place(of_aten);
  }
  // SDPA's backward has two tensors for the random state, the first of which is ours.
  if (std::string_view(field) == "rng_state") return std::max(place(field), place("philox_seed"));
  return place(field);
}

// Fields of a description as an operator's arguments have them.
template <class Described>
class Reader {
 public:
  explicit Reader(const c10::FunctionSchema& schema) {
    Described described;
    visit_fields(described, [&](const char* name, auto& /*field*/, bool /*is_required*/) {
      places_.push_back(place_of(name, schema));
    });
  }

  Described read(const c10::IValue* arguments) const {
    Described described;
    auto place = places_.begin();
    visit_fields(described, [&]<class Field>(const char*, Field& field, bool) {
      const int at = *place++;
      if (at >= 0 && !arguments[at].isNone()) field = arguments[at].to<Field>();
    });
    return described;
  }

 private:
  std::vector<int> places_;
};

// -- the operators --------------------------------------------------------------------------------

// torch's ends at multiples of 128.
at::Tensor debug_mask(const at::Tensor& probabilities, const at::Tensor& query) {
  if (!probabilities.defined()) return allocate({0}, query.scalar_type(), query);
  constexpr std::int64_t multiple = 128;
  const auto missing = [&](std::int64_t size) { return (multiple - size % multiple) % multiple; };
  return at::constant_pad_nd(
      probabilities, {0, missing(probabilities.size(-1)), 0, missing(probabilities.size(-2))});
}

// SDPA's operators have (batch, heads, seqlen, head_dim), the others what this package has.
class AtenOperator : public c10::OperatorKernel {
 public:
  explicit AtenOperator(const c10::OperatorHandle& op)
      : num_arguments_(op.schema().arguments().size()),
        is_backward_(place_of("dout", op.schema()) >= 0),
        heads_first_(op.schema().name().starts_with("aten::_scaled_dot_product")),
        call_(op.schema()),
        incoming_(op.schema()),
        before_(op.getComputedKernelForDispatchKey(c10::DispatchKey::CUDA)) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
    const AttentionCall given = given_call(*stack);
    if (!is_taken(given) || !has_kernels(given)) {
      before_.callBoxed(op, keys, stack);
    } else if (is_backward_) {
      const Incoming incoming = given_incoming(*stack);
      torch::jit::drop(*stack, num_arguments_);
      run_backward(given, incoming, *stack);
    } else {
      torch::jit::drop(*stack, num_arguments_);
      run_forward(given, *stack);
    }
  }

  // The call as the operator's arguments, the last ones on the stack, have it.
  AttentionCall given_call(const Stack& stack) const {
    AttentionCall given = call_.read(first(stack));
    if (is_backward_) {  // those of Incoming
      given.out.reset();
      given.rng_state.reset();
    }
    return given;
  }

  // The call as this package describes it.
  AttentionCall call_of(const AttentionCall& given) const {
    AttentionCall call = given;
    for (at::Tensor* tensor : {&call.q, &call.k, &call.v}) *tensor = seqlen_first(*tensor);
    call.deterministic = at::globalContext().deterministicAlgorithms();
    if (!is_packed(call)) {  // aten has lengths of such sequences as well
      call.cu_seqlens_k.reset();
      call.max_seqlen_q = call.max_seqlen_k = 0;
    }
    return call;
  }

 private:
  const c10::IValue* first(const Stack& stack) const {
    return stack.data() + stack.size() - num_arguments_;
  }

  at::Tensor seqlen_first(const at::Tensor& tensor) const {
    return heads_first_ ? tensor.transpose(1, 2) : tensor;
  }

  Incoming given_incoming(const Stack& stack) const {
    Incoming incoming = incoming_.read(first(stack));
    incoming.dout = seqlen_first(incoming.dout);
    incoming.out = seqlen_first(incoming.out);
    return incoming;
  }

  void run_forward(const AttentionCall& given, Stack& results) const {
    AttentionCall call = call_of(given);
    const std::int64_t seqlen_q = call.q.size(1), seqlen_k = call.k.size(1);
    // Compilers expect the query's strides.
    const at::Tensor out = given.out.defined() ? given.out : at::empty_like(given.q);
    call.out = seqlen_first(out);
    Results found = run_forward_call(checked_call(std::move(call), Pass::forward));
    if (!given.out.defined()) results.emplace_back(out);
    results.emplace_back(std::move(found.softmax_lse));
    if (given.out.defined()) return;
    if (heads_first_) {
      results.emplace_back(at::Tensor());  // no cu_seqlens
      results.emplace_back(at::Tensor());
      results.emplace_back(seqlen_q);
      results.emplace_back(seqlen_k);
    }
    results.emplace_back(found.rng_state.defined() ? found.rng_state.view(at::kUInt64)
                                                   : allocate({2}, at::kUInt64, given.q));
    results.emplace_back(allocate({}, at::kUInt64, given.q));  // has no meaning any more
    results.emplace_back(debug_mask(found.S_dmask, given.q));
  }

  void run_backward(const AttentionCall& given, Incoming incoming, Stack& results) const {
    if (drops(given)) incoming.rng_state = incoming.rng_state.view(at::kLong);
    const at::Tensor dq = at::empty_like(given.q);
    const at::Tensor dk = at::empty_like(given.k);
    const at::Tensor dv = at::empty_like(given.v);
    incoming.dq = seqlen_first(dq);
    incoming.dk = seqlen_first(dk);
    incoming.dv = seqlen_first(dv);
    run_backward_call(checked_call(call_of(given), Pass::backward), incoming);
    for (const at::Tensor& gradient : {dq, dk, dv}) results.emplace_back(gradient);
  }

  std::size_t num_arguments_;
  bool is_backward_;
  bool heads_first_;
  Reader<AttentionCall> call_;
  Reader<Incoming> incoming_;
  c10::SafeKernelFunction before_;
};

constexpr const char* operators[] = {
    "_flash_attention_forward",
    "_flash_attention_forward_no_dropout_inplace",
    "_flash_attention_backward",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_backward",
};

std::mutex library_mutex;
std::unique_ptr<torch::Library> library;

}  // namespace

void take_aten_operators() {
  const std::lock_guard<std::mutex> lock(library_mutex);
  if (library) return;
  auto made = std::make_unique<torch::Library>(torch::Library::IMPL, "aten", c10::DispatchKey::CUDA,
                                               __FILE__, __LINE__);
  for (const char* name : operators) {
    const auto op = c10::Dispatcher::singleton().findSchema({std::string("aten::") + name, ""});
    if (!op.has_value()) continue;  // younger than this torch
    made->impl(name, torch::CppFunction::makeFromBoxedFunctor(std::make_unique<AtenOperator>(*op)));
  }
  library = std::move(made);
}

void give_back_aten_operators() {
  const std::lock_guard<std::mutex> lock(library_mutex);
  library.reset();
}

std::optional<AttentionCall> call_of_aten(const c10::OperatorHandle& op, const Stack& stack) {
  const AtenOperator taken(op);
  const AttentionCall given = taken.given_call(stack);
  if (!is_taken(given)) return std::nullopt;
  return taken.call_of(given);
}

}  // namespace flash_attn_cuda::binding
