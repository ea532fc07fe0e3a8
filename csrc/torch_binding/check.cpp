#include "torch_binding/check.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <ostream>

#include "flash_attn/api.h"
#include "torch_binding/to_params.h"

namespace flash_attn_cuda::binding {
namespace {

constexpr std::int64_t max_int = std::numeric_limits<int>::max();
constexpr std::int64_t max_head_dim = 512;
constexpr std::int64_t mask_tile = 128;  // queries, or keys, of a tile of BlockLists

const char* describe(int dims, InputLayout::Kv kv) {
  if (dims == 3) return "3 dimensions (total, heads, head_dim)";
  if (kv == InputLayout::Kv::paged) return "4 dimensions (num_pages, page_size, heads, head_dim)";
  return "4 dimensions (batch, seqlen, heads, head_dim)";
}

void check_sizes(const char* name, const at::Tensor& tensor) {
  for (const std::int64_t size : tensor.sizes()) {
    TORCH_CHECK_VALUE(size <= max_int, name, ": every dimension must be at most ", max_int,
                      ", got shape ", tensor.sizes());
  }
}

void check_input(const char* name, const at::Tensor& tensor, const at::Tensor& q, int dims,
                 InputLayout::Kv kv) {
  TORCH_CHECK_VALUE(tensor.is_cuda(), name, ": must be a CUDA tensor, got one on ",
                    tensor.device());
  TORCH_CHECK_TYPE(tensor.layout() == at::kStrided, name, ": must be a dense tensor, got layout ",
                   tensor.layout());
  TORCH_CHECK_VALUE(tensor.device() == q.device(), name, ": must be on the device of q (",
                    q.device(), "), got ", tensor.device());
  TORCH_CHECK_TYPE(tensor.scalar_type() == q.scalar_type(), name, ": must have the dtype of q (",
                   q.scalar_type(), "), got ", tensor.scalar_type());
  TORCH_CHECK_VALUE(tensor.dim() == dims, name, ": must have ", describe(dims, kv), ", got shape ",
                    tensor.sizes());
  check_sizes(name, tensor);
}

void check_device(const char* name, const at::Tensor& tensor, const at::Tensor& q) {
  TORCH_CHECK_TYPE(tensor.layout() == at::kStrided, name, ": must be a dense tensor, got layout ",
                   tensor.layout());
  TORCH_CHECK_VALUE(tensor.device() == q.device(), name, ": must be on the device of q (",
                    q.device(), "), got ", tensor.device());
}

void check_place(const char* name, const at::Tensor& tensor, at::ScalarType dtype,
                 const at::Tensor& q) {
  check_device(name, tensor, q);
  TORCH_CHECK_TYPE(tensor.scalar_type() == dtype, name, ": dtype must be ", dtype, ", got ",
                   tensor.scalar_type());
}

// The sizes that a dimension may have.
struct SizeRule {
  std::int64_t size = 0;
  bool or_more = false;
  bool or_one = false;

  bool allows(std::int64_t given) const {
    return given == size || (or_more && given > size) || (or_one && given == 1);
  }
};

std::ostream& operator<<(std::ostream& stream, const SizeRule& rule) {
  stream << rule.size;
  if (rule.or_more) stream << " or more";
  if (rule.or_one && rule.size != 1) stream << " or 1";
  return stream;
}

// Of a tensor whose batch and heads may be 1 for all of them.
void check_shared_shape(const char* name, const at::Tensor& tensor, const PairExtent& extent,
                        const SizeRule& rows, const SizeRule& columns) {
  const SizeRule batch{.size = extent.batch, .or_one = true};
  const SizeRule heads{.size = extent.heads_q, .or_one = true};
  TORCH_CHECK_VALUE(tensor.dim() == 4 && batch.allows(tensor.size(0)) &&
                        heads.allows(tensor.size(1)) && rows.allows(tensor.size(2)) &&
                        columns.allows(tensor.size(3)),
                    name, ": must have shape (", batch, ", ", heads, ", ", rows, ", ", columns,
                    "), got ", tensor.sizes());
  check_sizes(name, tensor);
}

std::int64_t mask_tiles(std::int64_t seqlen) {
  return seqlen / mask_tile + (seqlen % mask_tile != 0);
}

void check_head_dim(const char* name, const char* dimension, std::int64_t size, bool any) {
  TORCH_CHECK_VALUE(size >= 1 && size <= max_head_dim, name, ": last dimension (", dimension,
                    ") must be from 1 to ", max_head_dim, ", got ", size);
  TORCH_CHECK_VALUE(any || size % 8 == 0, name, ": last dimension (", dimension,
                    ") must be a multiple of 8, got ", size);
}

bool has_contiguous_rows(const at::Tensor& tensor) {
  const std::int64_t last = tensor.dim() - 1;
  return (tensor.stride(last) == 1 || tensor.size(last) == 1) && !tensor.is_neg();
}

}  // namespace

void check_inputs(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                  const InputLayout& layout) {
  using Kv = InputLayout::Kv;
  const int q_dims = layout.packed_q ? 3 : 4;
  const int kv_dims = layout.kv == Kv::packed ? 3 : 4;
  const char* const k_name = layout.k_name;
  check_input("q", q, q, q_dims, Kv::dense);
  TORCH_CHECK_TYPE(q.scalar_type() == at::kHalf || q.scalar_type() == at::kBFloat16,
                   "q: dtype must be float16 or bfloat16, got ", q.scalar_type());
  check_input(k_name, k, q, kv_dims, layout.kv);
  check_input(layout.v_name, v, q, kv_dims, layout.kv);

  const std::int64_t heads_q = q.size(q_dims - 2);
  const std::int64_t heads_k = k.size(kv_dims - 2);
  const std::int64_t head_dim = q.size(q_dims - 1);
  check_head_dim("q", "head_dim", head_dim, layout.any_head_dim);
  TORCH_CHECK_VALUE(heads_q >= 1, "q: must have at least one head, got shape ", q.sizes());
  TORCH_CHECK_VALUE(heads_k >= 1, k_name, ": must have at least one head, got shape ", k.sizes());
  TORCH_CHECK_VALUE(heads_q % heads_k == 0, k_name, ": number of heads must divide that of q (",
                    heads_q, "), got ", heads_k);
  TORCH_CHECK_VALUE(layout.kv != Kv::dense || k.size(0) == q.size(0), k_name,
                    ": batch must be that of q (", q.size(0), "), got ", k.size(0));
  TORCH_CHECK_VALUE(layout.kv != Kv::paged || k.size(1) >= 1, k_name,
                    ": a page must hold at least one key, got shape ", k.sizes());
  TORCH_CHECK_VALUE(k.size(kv_dims - 1) == head_dim, k_name,
                    ": last dimension (head_dim) must be that of q (", head_dim, "), got ",
                    k.size(kv_dims - 1));
  const auto rows_of = [](const at::Tensor& tensor) {
    return tensor.sizes().slice(0, tensor.dim() - 1);
  };
  TORCH_CHECK_VALUE(rows_of(v) == rows_of(k), layout.v_name, ": must have the shape of ", k_name,
                    " but for the last dimension, ", k.sizes(), ", got ", v.sizes());
  check_head_dim(layout.v_name, "head_dim_v", v.size(kv_dims - 1), layout.any_head_dim);

  check_capability("q", q);
}

void check_capability(const char* name, const at::Tensor& tensor) {
  const int capability = device_info(tensor.get_device()).compute_capability;
  TORCH_CHECK(capability >= 80, name,
              ": must be on a GPU of compute capability 8.0 or higher, got ", tensor.device(),
              " of ", capability / 10, ".", capability % 10);
}

void check_like(const char* name, const at::Tensor& tensor, at::IntArrayRef shape,
                at::ScalarType dtype, const at::Tensor& q) {
  check_place(name, tensor, dtype, q);
  TORCH_CHECK_VALUE(tensor.sizes() == shape, name, ": must have shape ", shape, ", got ",
                    tensor.sizes());
}

void check_array(const char* name, const at::Tensor& tensor, at::IntArrayRef shape,
                 at::ScalarType dtype, const at::Tensor& q) {
  check_like(name, tensor, shape, dtype, q);
  TORCH_CHECK_VALUE(tensor.is_contiguous() && !tensor.is_neg(), name,
                    ": must be contiguous, got strides ", tensor.strides());
}

void check_read_in_place(const char* name, const at::Tensor& tensor) {
  const std::int64_t last = tensor.dim() - 1;
  TORCH_CHECK_VALUE(tensor.stride(last) == 1 || tensor.size(last) == 1, name,
                    ": last dimension must have stride 1, got strides ", tensor.strides());
  TORCH_CHECK_VALUE(!tensor.is_neg(), name, ": must not be a negated view");
}

std::int64_t checked_num_sequences(const char* name, const at::Tensor& cu_seqlens,
                                   const at::Tensor& q) {
  check_place(name, cu_seqlens, at::kInt, q);
  TORCH_CHECK_VALUE(cu_seqlens.dim() == 1 && cu_seqlens.size(0) >= 1, name,
                    ": must have shape (batch + 1,), got ", cu_seqlens.sizes());
  TORCH_CHECK_VALUE(cu_seqlens.is_contiguous(), name, ": must be contiguous, got strides ",
                    cu_seqlens.strides());
  TORCH_CHECK_VALUE(cu_seqlens.size(0) <= max_int, name, ": must have at most ", max_int,
                    " entries, got ", cu_seqlens.size(0));
  return cu_seqlens.size(0) - 1;
}

void check_block_table(const at::Tensor& table, std::int64_t rows, const at::Tensor& q) {
  if (!table.defined()) return;
  check_place("block_table", table, at::kInt, q);
  TORCH_CHECK_VALUE(table.dim() == 2, "block_table: must have 2 dimensions (batch, max_pages), ",
                    "got shape ", table.sizes());
  TORCH_CHECK_VALUE(rows < 0 || table.size(0) == rows, "block_table: must have a row for each of ",
                    rows, " sequences, got shape ", table.sizes());
  TORCH_CHECK_VALUE(table.stride(1) == 1 || table.size(1) <= 1,
                    "block_table: rows must be contiguous, got strides ", table.strides());
}

at::Tensor checked_alibi_slopes(const at::Tensor& slopes, std::int64_t batch, const at::Tensor& q) {
  if (!slopes.defined()) return {};
  check_place("alibi_slopes", slopes, at::kFloat, q);
  const std::int64_t heads = q.size(q.dim() - 2);
  const bool is_shared = slopes.dim() == 1 && slopes.size(0) == heads;
  const bool is_per_sequence =
      slopes.dim() == 2 && slopes.size(0) == batch && slopes.size(1) == heads;
  TORCH_CHECK_VALUE(is_shared || is_per_sequence, "alibi_slopes: must have shape (", heads,
                    ",) or (", batch, ", ", heads, "), got ", slopes.sizes());
  return has_contiguous_rows(slopes) ? slopes : contiguous(slopes);
}

at::Tensor checked_block_lists(const char* name, const at::Tensor& tensor, bool by_keys,
                               const PairExtent& extent, const at::Tensor& q) {
  if (!tensor.defined()) return {};
  check_place(name, tensor, at::kInt, q);
  const std::int64_t tiles = mask_tiles(by_keys ? extent.seqlen_k : extent.seqlen_q);
  const std::int64_t others = mask_tiles(by_keys ? extent.seqlen_q : extent.seqlen_k);
  check_shared_shape(name, tensor, extent, {.size = tiles, .or_more = extent.at_least},
                     {.size = 2 + others, .or_more = extent.at_least});
  return contiguous(tensor);
}

at::Tensor checked_mask_bits(const at::Tensor& tensor, const at::Tensor& lists, bool by_keys,
                             const PairExtent& extent, const at::Tensor& q) {
  if (!tensor.defined()) return {};
  TORCH_CHECK_VALUE(lists.defined(), "mask_bits: must be None without lists of blocks, got shape ",
                    tensor.sizes());
  check_place("mask_bits", tensor, at::kInt, q);
  const std::int64_t tiles = lists.size(2);
  const std::int64_t others = lists.size(3) - 2;
  const std::int64_t query_tiles = by_keys ? others : tiles;
  const std::int64_t key_tiles = by_keys ? tiles : others;
  // Lists of packed sequences may be made for longer ones, and then so are the bits.
  const std::int64_t least_rows =
      std::max(extent.seqlen_q, query_tiles > 0 ? (query_tiles - 1) * mask_tile + 1 : 0);
  constexpr std::int64_t words_per_tile = mask_tile / 32;
  check_shared_shape("mask_bits", tensor, extent, {.size = least_rows, .or_more = true},
                     {.size = words_per_tile * key_tiles});
  return contiguous(tensor);
}

at::Tensor checked_bias(const at::Tensor& bias, const PairExtent& extent, const at::Tensor& q) {
  if (!bias.defined()) return {};
  check_device("bias", bias, q);
  TORCH_CHECK_TYPE(bias.scalar_type() == q.scalar_type() || bias.scalar_type() == at::kFloat,
                   "bias: dtype must be that of q (", q.scalar_type(), ") or ", at::kFloat,
                   ", got ", bias.scalar_type());
  check_shared_shape("bias", bias, extent,
                     {.size = extent.seqlen_q, .or_more = extent.at_least, .or_one = true},
                     {.size = extent.seqlen_k, .or_more = extent.at_least});
  return has_contiguous_rows(bias) ? bias : contiguous(bias);
}

void check_rng_state(const at::Tensor& rng_state, double p_dropout, const at::Tensor& q) {
  if (p_dropout == 0.0) return;
  TORCH_CHECK_VALUE(rng_state.defined(),
                    "rng_state: must be that of the forward where p_dropout > 0 (", p_dropout,
                    "), got None");
  check_array("rng_state", rng_state, {2}, at::kLong, q);
}

void check_max_seqlen(const char* name, std::int64_t max_seqlen) {
  TORCH_CHECK_VALUE(max_seqlen >= 0, name, ": must not be negative, got ", max_seqlen);
}

float checked_softmax_scale(double softmax_scale) {
  const float scale = static_cast<float>(softmax_scale);
  TORCH_CHECK_VALUE(std::isfinite(scale), "softmax_scale: must be finite in float32, got ",
                    softmax_scale);
  return scale;
}

float checked_softcap(double softcap) {
  if (softcap <= 0.0) return 0.0f;
  const float cap = static_cast<float>(softcap);
  // Scores are divided by it.
  TORCH_CHECK_VALUE(std::isnormal(cap), "softcap: must be off (0) or a normal number in float32, ",
                    "got ", softcap);
  return cap;
}

void check_p_dropout(const char* name, double p_dropout) {
  TORCH_CHECK_VALUE(p_dropout >= 0.0 && p_dropout < 1.0, name,
                    ": must be at least 0 and below 1, got ", p_dropout);
}

void check_num_splits(std::int64_t num_splits) {
  constexpr std::int64_t most = 256;
  TORCH_CHECK_VALUE(num_splits >= 0 && num_splits <= most,
                    "num_splits: must be from 0 (as many as serve the device) to ", most, ", got ",
                    num_splits);
}

void refuse_generator(bool has_generator) {
  TORCH_CHECK_NOT_IMPLEMENTED(!has_generator, "unused_generator: must be None, got a generator");
}

}  // namespace flash_attn_cuda::binding
