#include "torch_binding/to_params.h"

#include <ATen/ExpandUtils.h>
#include <ATen/cuda/EmptyTensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "shared/scores/exact_sum.h"
#include "torch_binding/check.h"
#include "torch_binding/layout.h"
#include "torch_binding/listed_queries.h"
#include "torch_binding/over_pairs.h"

namespace flash_attn_cuda::binding {
namespace {

// Planning asks where a tensor lies, and never reads it: this stands for one without memory.
alignas(vector_bytes) constexpr float stand_in[4] = {};

// The elements, null for an undefined tensor.
const void* data_of(const at::Tensor& tensor) {
  if (!tensor.defined()) return nullptr;
  return tensor.is_meta() ? stand_in : tensor.const_data_ptr();
}

const int* int_data(const at::Tensor& tensor) { return static_cast<const int*>(data_of(tensor)); }

const float* float_data(const at::Tensor& tensor) {
  return static_cast<const float*>(data_of(tensor));
}

// A dimension of one entry may have any stride; 0 keeps it from looking misaligned.
std::int64_t stride_of(const at::Tensor& tensor, int dim) {
  return tensor.size(dim) > 1 ? tensor.stride(dim) : 0;
}

TensorView view_at(void* data, const at::Tensor& tensor) {
  const int first = tensor.dim() - 3;
  return {.data = data,
          .batch_stride = first == 0 ? 0 : stride_of(tensor, 0),
          .row_stride = stride_of(tensor, first),
          .head_stride = stride_of(tensor, first + 1)};
}

template <class Number>
RowView<Number> rows_at(Number* data, const at::Tensor& tensor) {
  const int heads = tensor.dim() - 2;
  return {.data = data,
          .batch_stride = heads == 0 ? 0 : tensor.stride(0),
          .head_stride = tensor.stride(heads)};
}

// Elements of a bias, or of what is like it, before that of query 0 and key 0. Rows of a bias by
// distance overlap: each begins an element before the last one.
std::int64_t first_pair(const AttentionCall& call) {
  return call.bias_by_distance ? extent_of(call).seqlen_q : 0;
}

std::int64_t row_stride_of_bias(const AttentionCall& call, const at::Tensor& bias) {
  return call.bias_by_distance ? -1 : stride_of(bias, 2);
}

// bias: the call's, or its tangent.
BiasParams bias_params(const AttentionCall& call, const at::Tensor& bias) {
  if (!bias.defined()) return {};
  const std::int64_t first = first_pair(call);
  const std::int64_t rows = call.bias_by_distance ? std::max<std::int64_t>(first, 1)
                            : bias.size(2) > 1    ? bias.size(2)
                                                  : shape_of(call).seqlen_q;
  return {.data = static_cast<const char*>(data_of(bias)) + first * bias.element_size(),
          .is_fp32 = bias.scalar_type() == at::kFloat,
          .batch_stride = stride_of(bias, 0),
          .head_stride = stride_of(bias, 1),
          .row_stride = row_stride_of_bias(call, bias),
          .rows = static_cast<int>(rows),
          .columns = static_cast<int>(bias.size(3) - first)};
}

// Whether an element of the bias is that of several pairs.
bool shares_bias(const AttentionCall& call) {
  const at::Tensor& bias = call.bias;
  const AttentionShape shape = shape_of(call);
  const auto is_shared = [&bias](int dim, int by) { return bias.size(dim) == 1 && by > 1; };
  return is_shared(0, shape.batch_size) || is_shared(1, shape.num_heads_q) ||
         is_shared(2, shape.seqlen_q);
}

// The sizes of the bias without sharing.
at::DimVector pairs_of_bias(const AttentionCall& call) {
  const at::Tensor& bias = call.bias;
  const AttentionShape shape = shape_of(call);
  return {shape.batch_size, shape.num_heads_q,
          bias.size(2) > 1 ? bias.size(2) : std::int64_t{shape.seqlen_q}, bias.size(3)};
}

// Whether the gradient of a shared bias is that of each pair first, whose sum is repeatable, where
// that takes no more memory than exact sums.
bool sums_pairs_afterwards(const AttentionCall& call) {
  if (!call.deterministic || call.bias_by_distance || !shares_bias(call)) return false;
  constexpr std::int64_t bytes_of_exact_sum = words_of_exact_sum * sizeof(std::int64_t);
  double pairs = 1.0;
  for (const std::int64_t size : pairs_of_bias(call)) pairs *= static_cast<double>(size);
  return pairs * sizeof(float) <= static_cast<double>(call.bias.numel() * bytes_of_exact_sum);
}

BiasParams relative_bias_params(const at::Tensor& bias) {
  return {.data = data_of(bias),
          .is_fp32 = bias.scalar_type() == at::kFloat,
          .head_stride = stride_of(bias, 0),
          .reach = static_cast<int>(bias.size(1) / 2)};
}

ScoreParams score_params(const AttentionCall& call) {
  const at::Tensor& slopes = call.alibi_slopes;
  return {.softmax_scale = static_cast<float>(*call.softmax_scale),
          .softcap = static_cast<float>(call.softcap),
          .alibi_slopes = float_data(slopes),
          .alibi_batch_stride = slopes.defined() && slopes.dim() == 2 ? slopes.stride(0) : 0,
          .bias = call.relative_bias.defined() ? relative_bias_params(call.relative_bias)
                                               : bias_params(call, call.bias),
          .sink = float_data(call.sink)};
}

// lists: by tiles of queries for a forward, by tiles of keys for a backward.
SparsityParams sparsity_params(const AttentionCall& call, const at::Tensor& lists) {
  const at::Tensor& bits = call.mask_bits;
  SparsityParams params;
  if (lists.defined()) {
    params.lists = {.data = int_data(lists),
                    .batch_stride = stride_of(lists, 0),
                    .head_stride = stride_of(lists, 1),
                    .tiles = static_cast<int>(lists.size(2)),
                    .others = static_cast<int>(lists.size(3) - 2)};
  }
  if (bits.defined()) {
    params.bits = {.data = reinterpret_cast<const std::uint32_t*>(int_data(bits)),
                   .batch_stride = stride_of(bits, 0),
                   .head_stride = stride_of(bits, 1),
                   .row_stride = stride_of(bits, 2),
                   .rows = static_cast<int>(bits.size(2)),
                   .words = static_cast<int>(bits.size(3))};
  }
  return params;
}

// What both passes are told.
template <class Params>
Params common_params(const AttentionCall& call, const at::Tensor& lists) {
  Params params;
  params.dtype = dtype_in_16_bits(call) == at::kHalf ? Dtype::fp16 : Dtype::bf16;
  params.shape = shape_of(call);
  params.sequences = sequence_params(call);
  params.window = window_of(call);
  params.score = score_params(call);
  params.dropout.threshold = dropout_threshold(call.dropout_p);
  params.sparsity = sparsity_params(call, lists);
  params.q = input_view(call.q);
  params.k = input_view(call.k);
  params.v = input_view(call.v);
  params.fp32_results = call.fp32_results;
  return params;
}

}  // namespace

Dtype dtype_of(const at::Tensor& q) {
  return q.scalar_type() == at::kHalf ? Dtype::fp16 : Dtype::bf16;
}

AttentionShape shape_of(const AttentionCall& call) {
  const int q_rows = call.q.dim() - 3;
  const int k_rows = call.k.dim() - 3;
  const std::int64_t seqlen_k = is_paged(call) ? capacity_of(call) : call.k.size(k_rows);
  return {.batch_size = static_cast<int>(batch_of(call)),
          .seqlen_q = static_cast<int>(call.q.size(q_rows)),
          .seqlen_k = static_cast<int>(seqlen_k),
          .num_heads_q = static_cast<int>(heads_q_of(call)),
          .num_heads_k = static_cast<int>(heads_k_of(call)),
          .head_dim = static_cast<int>(head_dim_of(call)),
          .head_dim_v = static_cast<int>(head_dim_v_of(call))};
}

at::DimVector with_columns(at::IntArrayRef sizes, std::int64_t columns) {
  at::DimVector result(sizes);
  result.back() = columns;
  return result;
}

at::DimVector output_sizes(const AttentionCall& call) {
  return with_columns(call.q.sizes(), value_columns_of(call));
}

at::DimVector lse_sizes(const AttentionCall& call) {
  const at::Tensor& q = call.q;
  if (is_packed(call)) return {q.size(1), q.size(0)};
  return {q.size(0), q.size(2), q.size(1)};
}

DeviceInfo device_of_call(const AttentionCall& call) {
  DeviceInfo device = device_info(call.q.device().index());
  device.num_sms = std::max(1, device.num_sms - static_cast<int>(call.sm_margin));
  return device;
}

SequenceParams sequence_params(const AttentionCall& call) {
  const at::Tensor& entries = is_paged(call) ? call.block_table : call.k;
  const std::int64_t most_q = is_packed(call) ? call.q.size(0) : 0;
  const std::int64_t most_k =
      is_packed(call) && !call.over_cache ? std::numeric_limits<int>::max() : 0;
  return {.cu_seqlens_q = int_data(call.cu_seqlens_q),
          .cu_seqlens_k = int_data(call.cu_seqlens_k),
          .seqused_q = int_data(call.seqused_q),
          .seqused_k = int_data(call.seqused_k),
          .leftpad_k = int_data(call.leftpad_k),
          .origin = int_data(call.origin),
          .kv_batch_idx = int_data(call.cache_batch_idx),
          .cu_seqlens_k_new = int_data(call.cu_seqlens_k_new),
          .seqlen_k_new = static_cast<int>(seqlen_k_new(call)),
          .max_seqlen_q = static_cast<int>(std::min(call.max_seqlen_q, most_q)),
          .num_kv_batches = call.cache_batch_idx.defined() ? static_cast<int>(entries.size(0)) : 0,
          .max_seqlen_k = static_cast<int>(std::min(call.max_seqlen_k, most_k))};
}

ForwardParams forward_params(const AttentionCall& call) {
  auto params = common_params<ForwardParams>(call, call.block_rows);
  if (call.seqlen_k.has_value()) {  // new keys are among them
    params.shape.seqlen_k = static_cast<int>(*call.seqlen_k + seqlen_k_new(call));
    params.sequences.seqlen_k_new = 0;
  }
  params.e4m3_kv = is_fp8(call);
  params.e4m3_products = multiplies_fp8(call);
  params.e4m3_latent = is_fp8_latent(call);
  params.values_include_rope = call.values_include_rope;
  params.shape.head_dim_v = static_cast<int>(value_columns_of(call));
  params.scales = {.q = scale_view(call.q_descale, head_dim_of(call)),
                   .k = scale_view(call.k_descale, head_dim_of(call)),
                   .v = scale_view(call.v_descale, head_dim_v_of(call))};
  if (call.qv.defined()) params.qv = view_at(const_cast<void*>(data_of(call.qv)), call.qv);
  if (call.key_lists.defined() && call.q.numel() > 0) {
    params.key_lists = view_at(const_cast<void*>(data_of(call.key_lists)), call.key_lists);
    params.keys_per_list = static_cast<int>(call.key_lists.size(-1) * call.key_list_block);
    params.key_list_block = static_cast<int>(call.key_list_block);
  }
  if (call.tree_mask.defined()) {
    const at::Tensor& mask = call.tree_mask;
    params.tree = {.data = static_cast<const std::uint8_t*>(data_of(mask)),
                   .batch_stride = mask.dim() == 3 ? stride_of(mask, 0) : 0,
                   .row_stride = stride_of(mask, mask.dim() - 2),
                   .columns = static_cast<int>(mask.size(-1))};
  }
  params.paged = paged_params(call);
  params.split = {.num_splits = static_cast<int>(call.num_splits),
                  .batch_invariant = call.batch_invariant};
  return params;
}

BackwardParams backward_params(const AttentionCall& call) {
  auto params = common_params<BackwardParams>(call, call.block_columns);
  params.deterministic = call.deterministic;
  params.listed = listed_queries(call);
  return params;
}

TangentParams tangent_params(const AttentionCall& call, const Tangents& tangents) {
  const auto view_of = [](const at::Tensor& tensor) {
    return tensor.defined() ? input_view(tensor) : TensorView{};
  };
  return {.is_given = true,
          .q = view_of(tangents.tq),
          .k = view_of(tangents.tk),
          .v = view_of(tangents.tv),
          .bias = bias_params(call, tangents.tbias),
          .sink = float_data(tangents.tsink),
          .out = output_view(tangents.tout),
          .out_rounding = view_of(tangents.tout_rounding),
          .lse = output_rows(tangents.tlse)};
}

at::Tensor allocate_bias_gradient(const AttentionCall& call) {
  const at::Tensor& bias = call.bias;
  const AttentionShape shape = shape_of(call);
  const bool is_shared = shares_bias(call);
  const bool has_pairs = !is_shared || sums_pairs_afterwards(call);
  const bool visits_all = has_pairs && !call.bias_by_distance && !has_device_contents(call) &&
                          window_of(call).is_full() && !call.block_columns.defined() &&
                          shape.batch_size > 0 && shape.seqlen_q > 0;
  at::DimVector sizes(bias.sizes());
  if (is_shared && call.deterministic) {
    if (has_pairs) {
      sizes = pairs_of_bias(call);
    } else {
      sizes.insert(sizes.begin(), words_of_exact_sum);
    }
  }
  const at::ScalarType dtype = !is_shared                         ? bias.scalar_type()
                               : call.deterministic && !has_pairs ? at::kLong
                                                                  : at::kFloat;
  const at::TensorOptions options = bias.options().dtype(dtype);
  return visits_all ? at::empty(sizes, options) : at::zeros(sizes, options);
}

at::Tensor finish_bias_gradient(const AttentionCall& call, const at::Tensor& written) {
  if (!call.deterministic || !shares_bias(call)) return written;
  if (sums_pairs_afterwards(call)) return at::sum_to(written, call.bias.sizes());
  at::Tensor sum = at::zeros(call.bias.sizes(), written.options().dtype(at::kDouble));
  for (int word = 0; word < exact_sum_words; ++word)
    sum.add_(written.select(0, word), std::ldexp(1.0, log2_unit(word)));
  return sum
      .masked_fill_(written.select(0, infinite_numbers).ne(0),
                    std::numeric_limits<double>::quiet_NaN())
      .to(at::kFloat);
}

at::Tensor allocate_sink_gradient(const AttentionCall& call) {
  if (!call.sink.defined()) return {};
  // Kernels write it if there are queries.
  return call.q.numel() > 0 ? allocate(call.sink.sizes(), at::kFloat, call.q)
                            : at::zeros(call.sink.sizes(), call.q.options().dtype(at::kFloat));
}

BiasGradient bias_gradient(const AttentionCall& call, const at::Tensor& written) {
  if (!written.defined()) return {};
  const bool is_exact = written.scalar_type() == at::kLong;
  const at::Tensor dbias = is_exact ? written.select(0, 0) : written;
  return {.data = static_cast<char*>(dbias.mutable_data_ptr()) +
                  first_pair(call) * dbias.element_size(),
          .is_fp32 = dbias.scalar_type() == at::kFloat,
          .batch_stride = stride_of(dbias, 0),
          .head_stride = stride_of(dbias, 1),
          .row_stride = row_stride_of_bias(call, dbias),
          .is_summed = shares_bias(call) && !sums_pairs_afterwards(call),
          .word_stride = is_exact ? written.stride(0) : 0};
}

PagedKvParams paged_params(const AttentionCall& call) {
  if (!is_paged(call)) return {};
  const at::Tensor& table = call.block_table;
  return {.block_table = int_data(table),
          .table_stride = table.stride(0),
          .max_pages = static_cast<int>(table.size(1)),
          .page_size = static_cast<int>(call.k.size(1)),
          .num_pages = static_cast<int>(call.k.size(0))};
}

RngSource rng_of_state(const at::Tensor& rng_state) {
  const std::int64_t* const data = rng_state.const_data_ptr<std::int64_t>();
  return {.seed_pointer = data, .offset_pointer = data + 1};
}

TensorView input_view(const at::Tensor& tensor) {
  return view_at(const_cast<void*>(tensor.const_data_ptr()), tensor);
}

TensorView output_view(const at::Tensor& tensor) {
  return view_at(tensor.mutable_data_ptr(), tensor);
}

ScaleView scale_view(const at::Tensor& scale, std::int64_t columns, bool is_written) {
  if (!scale.defined()) return {};
  const int heads = std::min<int>(scale.dim() - 1, 2);
  const bool per_token = is_per_token(scale);
  ScaleView view{.data = static_cast<float*>(is_written ? scale.mutable_data_ptr()
                                                        : const_cast<void*>(data_of(scale))),
                 .per_token = per_token,
                 .is_e8m0 = scale.scalar_type() == at::kFloat8_e8m0fnu,
                 .batch_stride = heads == 0 ? 0 : stride_of(scale, 0),
                 .row_stride = per_token ? stride_of(scale, 1) : 0,
                 .head_stride = stride_of(scale, heads)};
  if (scale.dim() == 4) {
    const auto group = static_cast<std::uint64_t>(columns / scale.size(3));
    view.group_shift = static_cast<std::int8_t>(std::countr_zero(group));
    view.group_stride = static_cast<std::int32_t>(stride_of(scale, 3));
  }
  return view;
}

RowView<float> output_rows(const at::Tensor& tensor) {
  return rows_at(tensor.mutable_data_ptr<float>(), tensor);
}

RowView<const float> input_rows(const at::Tensor& tensor) {
  if (!tensor.defined()) return {};
  return rows_at(tensor.const_data_ptr<float>(), tensor);
}

at::Tensor allocate(at::IntArrayRef shape, at::ScalarType dtype, const at::Tensor& q) {
  return at::Tensor(at::detail::empty_cuda(shape, dtype, q.device(), std::nullopt));
}

at::Tensor without_memory(at::IntArrayRef shape, const at::Tensor& like) {
  return at::empty(shape, like.options().device(at::kMeta));
}

at::Tensor allocate_rows(const at::Tensor& q, std::int64_t rows) {
  if (q.dim() == 3) return allocate({q.size(1), rows}, at::kFloat, q);
  return allocate({q.size(0), q.size(2), rows}, at::kFloat, q);
}

OutputTensor::OutputTensor(const char* name, const at::Tensor& given, at::IntArrayRef shape,
                           at::ScalarType dtype, const at::Tensor& q, bool is_read) {
  if (given.defined()) {
    check_like(name, given, shape, dtype, q);
    given_ = given;
  }
  const bool is_written = given_.defined() && is_addressable(given_) && !is_expanded(given_);
  written_ = is_written ? given_ : allocate(shape, dtype, q);
  if (is_read && !is_written) written_.copy_(given_);
}

at::Tensor OutputTensor::finish() {
  if (!given_.defined()) return written_;
  if (!given_.is_same(written_)) given_.copy_(written_);
  return given_;
}

}  // namespace flash_attn_cuda::binding
