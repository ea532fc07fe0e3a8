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
#include <tuple>
#include <utility>

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

// As has_both_kernels, of which the answers are kept.
bool has_kernels(const at::Tensor& q, bool drops) {
  using Key = std::tuple<int, Dtype, int, bool>;
  static std::mutex mutex;
  static std::map<Key, bool> known;
  const int device = q.device().index();
  const int head_dim = static_cast<int>(q.size(-1));
  const Key key{device, dtype_of(q), head_dim, drops};
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = known.find(key);
  if (found != known.end()) return found->second;
  return known[key] = has_both_kernels(dtype_of(q), head_dim, drops, device_info(device));
}

// By what both passes see, so that they agree: the same decisions about dropout, the same lse of a
// row without keys.
bool takes(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, double dropout_p) {
  constexpr int head_dim_step = 8;
  constexpr int most_head_dim = 512;
  const auto type = q.scalar_type();
  if ((type != at::kHalf && type != at::kBFloat16) || k.scalar_type() != type ||
      v.scalar_type() != type)
    return false;
  const std::int64_t head_dim = q.size(-1);
  return head_dim > 0 && head_dim <= most_head_dim && head_dim % head_dim_step == 0 &&
         k.size(-1) == head_dim && v.size(-1) == head_dim && q.stride(-1) == 1 &&
         k.stride(-1) == 1 && v.stride(-1) == 1 && has_kernels(q, dropout_p > 0.0);
}

// -- an operator's arguments ----------------------------------------------------------------------

// Where they stand in the operator's schema, which grows from one torch to the next; -1: not there.
struct Places {
  explicit Places(const c10::FunctionSchema& schema)
      : count(schema.arguments().size()),
        q(of(schema, "query")),
        k(of(schema, "key")),
        v(of(schema, "value")),
        cu_seqlens_q(of(schema, "cum_seq_q")),
        cu_seqlens_k(of(schema, "cum_seq_k")),
        max_seqlen_q(of(schema, "max_q")),
        max_seqlen_k(of(schema, "max_k")),
        dropout_p(of(schema, "dropout_p")),
        causal(of(schema, "is_causal")),
        wants_debug_mask(of(schema, "return_debug_mask")),
        scale(of(schema, "scale")),
        window_left(of(schema, "window_size_left")),
        window_right(of(schema, "window_size_right")),
        seqused_k(of(schema, "seqused_k")),
        alibi_slopes(of(schema, "alibi_slopes")),
        block_table(of(schema, "block_table")),
        num_splits(of(schema, "num_splits")),
        out(of(schema, "out")),
        grad_out(of(schema, "grad_out")),
        lse(of(schema, "logsumexp")),
        rng_state(std::max(of(schema, "rng_state"), of(schema, "philox_seed"))) {}

  std::size_t count;
  int q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, causal,
      wants_debug_mask, scale, window_left, window_right, seqused_k, alibi_slopes, block_table,
      num_splits, out, grad_out, lse, rng_state;

 private:
  static int of(const c10::FunctionSchema& schema, const char* name) {
    return schema.argumentIndexWithName(name).value_or(-1);
  }
};

// A call's arguments, the last ones on the stack.
class Arguments {
 public:
  Arguments(const Places& places, const Stack& stack)
      : first_(stack.data() + stack.size() - places.count) {}

  bool has(int place) const { return place >= 0 && !first_[place].isNone(); }
  const at::Tensor& tensor(int place) const { return first_[place].toTensor(); }
  at::Tensor optional_tensor(int place) const { return has(place) ? tensor(place) : at::Tensor(); }
  std::int64_t integer(int place, std::int64_t otherwise) const {
    return has(place) ? first_[place].toInt() : otherwise;
  }
  double number(int place) const { return has(place) ? first_[place].toDouble() : 0.0; }
  bool flag(int place) const { return has(place) && first_[place].toBool(); }

 private:
  const c10::IValue* first_;
};

// -- the operators --------------------------------------------------------------------------------

// SDPA's operators have (batch, heads, seqlen, head_dim), the others what this package has.
class AtenOperator : public c10::OperatorKernel {
 public:
  AtenOperator(const c10::OperatorHandle& op, bool heads_first)
      : places_(op.schema()),
        heads_first_(heads_first),
        before_(op.getComputedKernelForDispatchKey(c10::DispatchKey::CUDA)) {}

 protected:
  at::Tensor seqlen_first(const at::Tensor& tensor) const {
    return heads_first_ ? tensor.transpose(1, 2) : tensor;
  }

  bool takes_call(const Arguments& given) const {
    return takes(given.tensor(places_.q), given.tensor(places_.k), given.tensor(places_.v),
                 given.number(places_.dropout_p));
  }

  AttentionCall call_of(const Arguments& given) const {
    AttentionCall call{.q = seqlen_first(given.tensor(places_.q)),
                       .k = seqlen_first(given.tensor(places_.k)),
                       .v = seqlen_first(given.tensor(places_.v)),
                       .dropout_p = given.number(places_.dropout_p),
                       .causal = given.flag(places_.causal),
                       .window_size_left = given.integer(places_.window_left, -1),
                       .window_size_right = given.integer(places_.window_right, -1),
                       .alibi_slopes = given.optional_tensor(places_.alibi_slopes),
                       .cu_seqlens_q = given.optional_tensor(places_.cu_seqlens_q),
                       .seqused_k = given.optional_tensor(places_.seqused_k),
                       .block_table = given.optional_tensor(places_.block_table),
                       .num_splits = given.integer(places_.num_splits, 0)};
    if (given.has(places_.scale)) call.softmax_scale = given.number(places_.scale);
    if (is_packed(call)) {
      call.cu_seqlens_k = given.optional_tensor(places_.cu_seqlens_k);
      call.max_seqlen_q = given.integer(places_.max_seqlen_q, 0);
      call.max_seqlen_k = given.integer(places_.max_seqlen_k, 0);
    }
    return call;
  }

  Places places_;
  bool heads_first_;
  c10::SafeKernelFunction before_;
};

class ForwardOperator : public AtenOperator {
 public:
  using AtenOperator::AtenOperator;

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
    const Arguments given(places_, *stack);
    const at::Tensor query = given.tensor(places_.q);  // not a reference into what is dropped
    const bool is_packed = given.optional_tensor(places_.cu_seqlens_q).defined();
    const bool has_lengths = given.has(places_.seqused_k) || given.has(places_.block_table);
    const bool can_write = places_.out < 0 || given.tensor(places_.out).stride(-1) == 1;
    if ((has_lengths && !is_packed) || !can_write || !takes_call(given)) {
      before_.callBoxed(op, keys, stack);
      return;
    }
    AttentionCall call = call_of(given);
    call.return_softmax = given.flag(places_.wants_debug_mask);
    // With the query's strides, as compilers expect.
    const at::Tensor out = places_.out >= 0 ? given.tensor(places_.out) : at::empty_like(query);
    call.out = seqlen_first(out);
    Results results = run_forward_call(checked_call(call, Pass::forward));
    const std::int64_t seqlen_q = call.q.size(1), seqlen_k = call.k.size(1);
    torch::jit::drop(*stack, places_.count);
    if (places_.out >= 0) {
      stack->emplace_back(std::move(results.softmax_lse));
      return;
    }
    stack->emplace_back(out);
    stack->emplace_back(std::move(results.softmax_lse));
    if (heads_first_) {
      stack->emplace_back(at::Tensor());  // no cu_seqlens
      stack->emplace_back(at::Tensor());
      stack->emplace_back(seqlen_q);
      stack->emplace_back(seqlen_k);
    }
    stack->emplace_back(results.rng_state.defined() ? results.rng_state.view(at::kUInt64)
                                                    : allocate({2}, at::kUInt64, query));
    stack->emplace_back(allocate({}, at::kUInt64, query));  // has no meaning any more
    stack->emplace_back(debug_mask(results.S_dmask, query));
  }

 private:
  // torch's ends at multiples of 128.
  static at::Tensor debug_mask(const at::Tensor& probabilities, const at::Tensor& query) {
    if (!probabilities.defined()) return allocate({0}, query.scalar_type(), query);
    constexpr std::int64_t multiple = 128;
    const auto missing = [&](std::int64_t size) { return (multiple - size % multiple) % multiple; };
    return at::constant_pad_nd(
        probabilities, {0, missing(probabilities.size(-1)), 0, missing(probabilities.size(-2))});
  }
};

class BackwardOperator : public AtenOperator {
 public:
  using AtenOperator::AtenOperator;

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
    const Arguments given(places_, *stack);
    if (!takes_call(given)) {
      before_.callBoxed(op, keys, stack);
      return;
    }
    AttentionCall call = call_of(given);
    call.deterministic = at::globalContext().deterministicAlgorithms();
    const at::Tensor dq = at::empty_like(given.tensor(places_.q));
    const at::Tensor dk = at::empty_like(given.tensor(places_.k));
    const at::Tensor dv = at::empty_like(given.tensor(places_.v));
    Incoming incoming{.dout = seqlen_first(given.tensor(places_.grad_out)),
                      .out = seqlen_first(given.tensor(places_.out)),
                      .softmax_lse = given.tensor(places_.lse),
                      .dq = seqlen_first(dq),
                      .dk = seqlen_first(dk),
                      .dv = seqlen_first(dv)};
    if (call.dropout_p > 0.0) incoming.rng_state = given.tensor(places_.rng_state).view(at::kLong);
    run_backward_call(checked_call(call, Pass::backward), incoming);
    torch::jit::drop(*stack, places_.count);
    stack->emplace_back(dq);
    stack->emplace_back(dk);
    stack->emplace_back(dv);
  }
};

struct Taken {
  const char* name;
  bool heads_first;
  bool is_forward;
};

constexpr Taken operators[] = {
    {"_flash_attention_forward", false, true},
    {"_flash_attention_forward_no_dropout_inplace", false, true},
    {"_flash_attention_backward", false, false},
    {"_scaled_dot_product_flash_attention", true, true},
    {"_scaled_dot_product_flash_attention_backward", true, false},
};

std::mutex library_mutex;
std::unique_ptr<torch::Library> library;

template <class Operator>
torch::CppFunction kernel_of(const c10::OperatorHandle& op, bool heads_first) {
  return torch::CppFunction::makeFromBoxedFunctor(std::make_unique<Operator>(op, heads_first));
}

}  // namespace

void take_aten_operators() {
  const std::lock_guard<std::mutex> lock(library_mutex);
  if (library) return;
  auto made = std::make_unique<torch::Library>(torch::Library::IMPL, "aten", c10::DispatchKey::CUDA,
                                               __FILE__, __LINE__);
  for (const Taken& taken : operators) {
    const std::string name = std::string("aten::") + taken.name;
    const auto op = c10::Dispatcher::singleton().findSchema({name, ""});
    if (!op.has_value()) continue;  // younger than this torch
    made->impl(taken.name, taken.is_forward ? kernel_of<ForwardOperator>(*op, taken.heads_first)
                                            : kernel_of<BackwardOperator>(*op, taken.heads_first));
  }
  library = std::move(made);
}

void give_back_aten_operators() {
  const std::lock_guard<std::mutex> lock(library_mutex);
  library.reset();
}

}  // namespace flash_attn_cuda::binding
