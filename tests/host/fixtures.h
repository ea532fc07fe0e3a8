// Devices and instance lists for planning tests.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <span>
#include <utility>
#include <vector>

#include "check.h"
#include "flash_attn/instance.h"
#include "shared/sequence/sequence.h"

namespace host_tests {

using namespace flash_attn_cuda;

inline constexpr DeviceInfo a100{
    .compute_capability = 80, .num_sms = 108, .smem_per_block = 163 * 1024, .l2_bytes = 40 << 20};
inline constexpr DeviceInfo rtx4090{
    .compute_capability = 89, .num_sms = 128, .smem_per_block = 99 * 1024, .l2_bytes = 72 << 20};
inline constexpr DeviceInfo h200{
    .compute_capability = 90, .num_sms = 132, .smem_per_block = 227 * 1024, .l2_bytes = 50 << 20};

// (B, Sq, Sk, Hq, Hk, D, Dv) of a call; values are as wide as keys unless it says otherwise.
constexpr AttentionShape sizes(int batch_size, int seqlen_q, int seqlen_k, int num_heads_q,
                               int num_heads_k, int head_dim, int head_dim_v = 0) {
  return {.batch_size = batch_size,
          .seqlen_q = seqlen_q,
          .seqlen_k = seqlen_k,
          .num_heads_q = num_heads_q,
          .num_heads_k = num_heads_k,
          .head_dim = head_dim,
          .head_dim_v = head_dim_v == 0 ? head_dim : head_dim_v};
}

// A call of a training step: 16k tokens in sequences of 4,096.
inline constexpr AttentionShape training = sizes(4, 4096, 4096, 16, 16, 128);

inline ForwardInstance forward_instance(const char* name, int head_dim, MaskKind mask,
                                        KernelFamily family = KernelFamily::sm80,
                                        Dtype dtype = Dtype::bf16, int smem_bytes = 48 * 1024) {
  return {.name = name,
          .config = {.family = family,
                     .dtype = dtype,
                     .mask = mask,
                     .head_dim = head_dim,
                     .head_dim_v = head_dim,
                     .kind = ForwardKind::tiles,
                     .block_m = 128,
                     .block_n = 64,
                     .num_warps = 4,
                     .most_causal_seqlen = 0,
                     .most_full_seqlen = 0,
                     .features = 0},
          .smem_bytes = smem_bytes,
          .launch = nullptr};
}

// A row that carries features, of training or of a KV cache.
inline ForwardInstance features_instance(const char* name, int head_dim, FeatureSet features) {
  ForwardInstance instance = forward_instance(name, head_dim, MaskKind::windowed);
  instance.config.features = features;
  return instance;
}

inline constexpr FeatureSet training_features =
    feature::softcap | feature::alibi | feature::dropout;
inline constexpr FeatureSet cache_features =
    feature::softcap | feature::alibi | feature::paged_kv | feature::split_kv;

inline constexpr FeatureSet masked_features =
    training_features | feature::block_sparse | feature::bias;
inline constexpr FeatureSet paged_masked_features = masked_features | feature::paged_kv;

inline constexpr FeatureSet any_mask = masked_features | feature::deterministic;

// A row of derivatives in a direction, for whatever those come with.
inline constexpr FeatureSet jvp_features = masked_features | feature::tangent;
inline ForwardInstance jvp_instance(const char* name, int head_dim) {
  ForwardInstance instance = features_instance(name, head_dim, jvp_features);
  instance.config.block_m = head_dim > 128 ? 32 : 64;
  instance.config.block_n = head_dim > 128 ? 16 : 64;
  instance.config.columns_per_cta = head_dim > 256 ? 256 : 0;
  instance.smem_bytes = (head_dim > 128 ? 113 : 98) * 1024;
  return instance;
}

inline ForwardInstance decode_instance(const char* name, int head_dim) {
  ForwardInstance instance = forward_instance(name, head_dim, MaskKind::windowed);
  instance.config.kind = ForwardKind::decode;
  instance.config.block_m = 16;
  instance.config.block_n = 16;
  instance.config.features = cache_features | feature::packed_gqa | feature::bias;
  instance.smem_bytes = 97 * 1024;
  return instance;
}

inline ForwardInstance e4m3_instance(ForwardInstance instance) {
  instance.config.features |= feature::e4m3_kv;
  return instance;
}

// A row of wgmma kernels, for causal and for other calls of at most so many queries or, with 0 and
// 0, for any.
inline ForwardInstance sm90_instance(const char* name, int head_dim, int block_m = 128,
                                     int most_causal_seqlen = 0, FeatureSet features = 0,
                                     int most_full_seqlen = 0) {
  ForwardInstance instance =
      forward_instance(name, head_dim, MaskKind::windowed, KernelFamily::sm90);
  instance.config.block_m = block_m;
  instance.config.block_n = 128;
  instance.config.num_warps = block_m / 16;
  instance.config.most_causal_seqlen = most_causal_seqlen;
  instance.config.most_full_seqlen = most_full_seqlen;
  instance.config.features = features;
  instance.smem_bytes = 200 * 1024;
  return instance;
}

// Rows of absorbed latent attention: of wgmma kernels for so many rows of a sequence, and of the
// decode kernel, in which two warps share the columns.
inline constexpr FeatureSet latent_features = feature::latent | feature::softcap |
                                              feature::paged_kv | feature::split_kv |
                                              feature::packed_gqa;
inline ForwardInstance latent_instance(const char* name, int rows) {
  ForwardInstance instance = sm90_instance(name, 64, rows, 0, latent_features);
  instance.config.head_dim_v = 512;
  instance.config.kind = ForwardKind::latent;
  instance.config.block_n = 64;
  instance.config.num_warps = rows == 64 ? 8 : 4;
  return instance;
}
inline ForwardInstance decode_latent_instance(const char* name, int num_warps, int smem_kib) {
  ForwardInstance instance = decode_instance(name, 64);
  instance.config.head_dim_v = 512;
  instance.config.num_warps = num_warps;
  instance.config.columns_per_warp = 256;
  instance.config.features = latent_features;
  instance.smem_bytes = smem_kib * 1024;
  return instance;
}

// Of lists of blocks.
inline constexpr FeatureSet listed_features = feature::softcap | feature::key_lists;
inline ForwardInstance decode_lists_instance(const char* name, int head_dim) {
  ForwardInstance instance = decode_instance(name, head_dim);
  instance.config.features = listed_features | feature::split_kv | feature::packed_gqa;
  return instance;
}

inline BackwardInstance backward_instance(const char* name, int head_dim, MaskKind mask,
                                          int block_m = 64, int block_n = 128,
                                          FeatureSet features = feature::deterministic) {
  return {.name = name,
          .config = {.family = KernelFamily::sm80,
                     .dtype = Dtype::bf16,
                     .mask = mask,
                     .head_dim = head_dim,
                     .head_dim_v = head_dim,
                     .block_m = block_m,
                     .block_n = block_n,
                     .num_warps = 8,
                     .features = features},
          .smem_bytes = 96 * 1024,
          .launch = nullptr,
          .convert_dq = [](const BackwardPlan&, const BackwardParams&, Stream) {}};
}

inline BackwardInstance sm90_backward_instance(const char* name, int head_dim, int block_m = 64,
                                               FeatureSet features = feature::deterministic) {
  BackwardInstance instance =
      backward_instance(name, head_dim, MaskKind::windowed, block_m, 128, features);
  instance.config.family = KernelFamily::sm90;
  instance.config.ctas_per_tile = head_dim > 128 ? 2 : 1;
  const bool is_plain = (features & ~(feature::deterministic | feature::block_sparse)) == 0;
  if (head_dim <= 128 && is_plain) {
    instance.config.finishes_dq = instance.config.shares_tiles = true;
    instance.config.finish_keys_full = head_dim == 64 ? 768 : 384;
    instance.config.finish_keys_windowed = head_dim == 64 ? std::numeric_limits<int>::max() : 384;
  }
  instance.smem_bytes = 200 * 1024;
  instance.writes_dq = (features & feature::block_sparse) == 0;
  return instance;
}

// A row of the second backward, likewise.
inline constexpr FeatureSet hvp_features = jvp_features | feature::deterministic;
inline BackwardInstance hvp_instance(const char* name, int head_dim) {
  const int block_m = head_dim > 256 ? 16 : head_dim > 128 ? 32 : 64;
  BackwardInstance instance =
      backward_instance(name, head_dim, MaskKind::windowed, block_m, 32, hvp_features);
  instance.config.num_warps = 4;
  instance.config.columns_per_cta = head_dim > 256 ? 128 : 0;
  instance.smem_bytes = (head_dim > 256 ? 180 : head_dim > 128 ? 120 : 94) * 1024;
  return instance;
}

// Instances and the list of pointers that selection takes.
template <class Instance>
class InstanceList {
 public:
  explicit InstanceList(std::vector<Instance> instances) : instances_(std::move(instances)) {
    for (const Instance& instance : instances_) pointers_.push_back(&instance);
  }
  operator std::span<const Instance* const>() const { return pointers_; }

 private:
  std::vector<Instance> instances_;
  std::vector<const Instance*> pointers_;
};

inline const InstanceList<ForwardInstance>& forward_table() {
  static const InstanceList<ForwardInstance> table({
      forward_instance("hd64_full", 64, MaskKind::full),
      forward_instance("hd64_windowed", 64, MaskKind::windowed),
      forward_instance("hd128_full", 128, MaskKind::full),
      forward_instance("hd128_windowed", 128, MaskKind::windowed),
  });
  return table;
}

// As the table of an installation: plain rows before those with features, then decode rows, those
// for masks and for derivatives in a direction last.
inline std::vector<ForwardInstance> complete_forward_rows() {
  return {
      forward_instance("hd64", 64, MaskKind::windowed),
      features_instance("hd64_features", 64, training_features),
      features_instance("hd64_cache", 64, cache_features),
      forward_instance("hd128", 128, MaskKind::windowed),
      features_instance("hd128_features", 128, training_features),
      features_instance("hd128_cache", 128, cache_features),
      decode_instance("hd64_decode", 64),
      decode_instance("hd128_decode", 128),
      decode_lists_instance("hd128_decode_lists", 128),
      decode_latent_instance("hd64_dv512_decode_latent", 4, 136),
      decode_latent_instance("hd64_dv512_decode_latent_smem99k", 2, 95),
      features_instance("hd64_masked", 64, paged_masked_features),
      features_instance("hd128_masked", 128, paged_masked_features),
      jvp_instance("hd128_tangent", 128),
      jvp_instance("hd512_tangent", 512),
      e4m3_instance(features_instance("hd128_e4m3", 128, cache_features)),
      e4m3_instance(decode_instance("hd64_decode_e4m3", 64)),
      e4m3_instance(decode_instance("hd128_decode_e4m3", 128)),
  };
}

inline const InstanceList<ForwardInstance>& complete_forward_table() {
  static const InstanceList<ForwardInstance> table(complete_forward_rows());
  return table;
}

// The same with the wgmma kernels that come before them.
inline const InstanceList<ForwardInstance>& sm90_forward_table() {
  static const InstanceList<ForwardInstance> table([] {
    std::vector<ForwardInstance> rows = {
        sm90_instance("sm90_hd64_short", 64, 128, 1280),
        sm90_instance("sm90_hd64", 64, 192),
        sm90_instance("sm90_hd64_dropout", 64, 128, 0, training_features),
        sm90_instance("sm90_hd128", 128),
        sm90_instance("sm90_hd128_dropout", 128, 128, 0, training_features),
        sm90_instance("sm90_hd64_tangent", 64, 128, 0, feature::tangent),
        sm90_instance("sm90_hd128_tangent", 128, 128, 0, feature::tangent),
        sm90_instance("sm90_hd64_sparse", 64, 128, 0, feature::block_sparse),
        sm90_instance("sm90_hd128_sparse", 128, 128, 0, feature::block_sparse),
        sm90_instance("sm90_hd64_bias", 64, 128, 0, feature::bias),
        sm90_instance("sm90_hd128_bias", 128, 128, 0, feature::bias),
        sm90_instance("sm90_hd64_cache", 64, 128, 0, feature::paged_kv | feature::split_kv),
        sm90_instance("sm90_hd128_cache", 128, 128, 0, feature::paged_kv | feature::split_kv),
        sm90_instance("sm90_hd128_cache_modifiers", 128, 128, 0,
                      feature::softcap | feature::alibi | feature::paged_kv | feature::split_kv),
        e4m3_instance(
            sm90_instance("sm90_hd128_e4m3", 128, 128, 0, feature::paged_kv | feature::split_kv)),
        latent_instance("sm90_hd64_dv512_rows16", 16),
        latent_instance("sm90_hd64_dv512_rows32", 32),
        latent_instance("sm90_hd64_dv512_rows64", 64),
        e4m3_instance(latent_instance("sm90_hd64_dv512_rows16_e4m3", 16)),
        e4m3_instance(latent_instance("sm90_hd64_dv512_rows32_e4m3", 32)),
    };
    const std::vector<ForwardInstance> others = complete_forward_rows();
    rows.insert(rows.end(), others.begin(), others.end());
    return rows;
  }());
  return table;
}

inline const InstanceList<BackwardInstance>& backward_table() {
  static const InstanceList<BackwardInstance> table({
      backward_instance("hd32_full", 32, MaskKind::full),
      backward_instance("hd64_full", 64, MaskKind::full),
      backward_instance("hd64_windowed", 64, MaskKind::windowed),
      backward_instance("hd128_full", 128, MaskKind::full),
      backward_instance("hd128_windowed", 128, MaskKind::windowed),
  });
  return table;
}

inline constexpr FeatureSet backward_features = feature::deterministic | training_features;

// As the table of an installation: wgmma kernels first, plain rows before those with features,
// those for masks and the second backward's last.
inline const InstanceList<BackwardInstance>& sm90_backward_table() {
  static const InstanceList<BackwardInstance> table({
      sm90_backward_instance("sm90_hd64", 64, 128),
      sm90_backward_instance("sm90_hd64_dropout", 64, 64, backward_features),
      sm90_backward_instance("sm90_hd128", 128),
      sm90_backward_instance("sm90_hd128_dropout", 128, 64, backward_features),
      sm90_backward_instance("sm90_hd256", 256),
      sm90_backward_instance("sm90_hd256_dropout", 256, 64, backward_features),
      sm90_backward_instance("sm90_hd64_sparse", 64, 64, feature::block_sparse),
      sm90_backward_instance("sm90_hd128_sparse", 128, 64, feature::block_sparse),
      sm90_backward_instance("sm90_hd64_bias", 64, 64, feature::bias),
      sm90_backward_instance("sm90_hd128_bias", 128, 64, feature::bias),
      backward_instance("hd64", 64, MaskKind::windowed),
      backward_instance("hd64_dropout", 64, MaskKind::windowed, 64, 128, backward_features),
      backward_instance("hd128", 128, MaskKind::windowed),
      backward_instance("hd128_dropout", 128, MaskKind::windowed, 64, 128, backward_features),
      backward_instance("hd256", 256, MaskKind::windowed, 64, 64),
      backward_instance("hd256_dropout", 256, MaskKind::windowed, 64, 64, backward_features),
      backward_instance("hd64_masked", 64, MaskKind::windowed, 64, 128, any_mask),
      backward_instance("hd128_masked", 128, MaskKind::windowed, 64, 128, any_mask),
      backward_instance("hd256_masked", 256, MaskKind::windowed, 64, 64, any_mask),
      backward_instance("hd128_lists", 128, MaskKind::windowed, 64, 64,
                        listed_features | feature::deterministic),
      hvp_instance("hd128_tangent", 128),
      hvp_instance("hd256_tangent", 256),
      hvp_instance("hd512_tangent", 512),
  });
  return table;
}

inline constexpr Window causal{.left = Window::unbounded, .right = 0};

template <class Params>
Params call(const AttentionShape& shape, Window window = {}) {
  Params params;
  params.shape = shape;
  params.window = window;
  params.score.softmax_scale = 0.125f;
  return params;
}

// What stands for an array in device memory: planning looks whether there is one, no more.
inline constexpr int some_int = 0;
inline constexpr float some_float = 0.0f;

// The same call with every sequence packed into one batch entry; shape.seqlen_q and seqlen_k are
// then totals.
template <class Params>
Params packed_call(const AttentionShape& shape, Window window = {}) {
  auto params = call<Params>(shape, window);
  params.sequences.cu_seqlens_q = &some_int;
  params.sequences.cu_seqlens_k = &some_int;
  return params;
}

// An address where there is room for any tensor.
inline void* some_address() { return reinterpret_cast<void*>(std::uintptr_t{1} << 44); }

// A contiguous (.., rows, heads, head_dim) tensor.
inline TensorView contiguous_view(std::int64_t rows, int heads, int head_dim) {
  const std::int64_t row_stride = std::int64_t{heads} * head_dim;
  return {.data = some_address(),
          .batch_stride = rows * row_stride,
          .row_stride = row_stride,
          .head_stride = head_dim};
}

// The call with such tensors; without, planning takes strides of 0 for those of expanded ones.
inline ForwardParams with_tensors(ForwardParams params) {
  const AttentionShape& shape = params.shape;
  params.q = params.out = contiguous_view(shape.seqlen_q, shape.num_heads_q, shape.head_dim);
  params.k = params.v = contiguous_view(shape.seqlen_k, shape.num_heads_k, shape.head_dim);
  return params;
}
inline BackwardParams with_tensors(BackwardParams params) {
  const AttentionShape& shape = params.shape;
  params.q = params.out = params.dout = params.dq =
      contiguous_view(shape.seqlen_q, shape.num_heads_q, shape.head_dim);
  params.k = params.v = params.dk = params.dv =
      contiguous_view(shape.seqlen_k, shape.num_heads_k, shape.head_dim);
  return params;
}

// The call's derivative in a direction, with tangents of q, k and v. Those of the results are
// written by a forward and read by a backward.
template <class Params>
Params with_tangents(Params params) {
  static float lse;
  params.tangents = {.is_given = true,
                     .q = params.q,
                     .k = params.k,
                     .v = params.v,
                     .bias = {},
                     .sink = nullptr,
                     .out = params.out,
                     .out_rounding = {},
                     .lse = {.data = &lse, .batch_stride = 0, .head_stride = 0}};
  return params;
}

// A contiguous bias of every head and query, in the call's dtype, and its gradient, which is no sum
// where there is one sequence.
inline BiasParams contiguous_bias(const AttentionShape& shape) {
  return {.data = some_address(),
          .head_stride = std::int64_t{shape.seqlen_q} * shape.seqlen_k,
          .row_stride = shape.seqlen_k,
          .rows = shape.seqlen_q,
          .columns = shape.seqlen_k};
}
inline BiasGradient contiguous_dbias(const AttentionShape& shape) {
  const BiasParams bias = contiguous_bias(shape);
  const bool is_summed = shape.batch_size > 1;
  return {.data = some_address(),
          .is_fp32 = is_summed,
          .head_stride = bias.head_stride,
          .row_stride = bias.row_stride,
          .is_summed = is_summed};
}

// A buffer (offset, bytes) of a workspace, of so many elements.
using Bytes = std::pair<std::size_t, std::size_t>;

template <class T>
Bytes bytes_of_buffer(const Buffer<T>& buffer, std::size_t count) {
  CHECK_EQ(static_cast<std::size_t>(buffer.count), count);
  return {buffer.offset, count * sizeof(T)};
}

// From a packed call's table to the end of its last list.
inline Bytes bytes_of_table(const SequenceTablePlan& table) {
  return {table.counts.offset,
          table.q_tiles.offset + table.q_tiles.count * sizeof(TileEntry) - table.counts.offset};
}

// Checks that buffers of a workspace are aligned and apart, and that it ends with the last one.
inline void check_workspace(std::vector<Bytes> buffers, std::size_t workspace_bytes) {
  constexpr std::size_t alignment = 256;
  std::sort(buffers.begin(), buffers.end());
  std::size_t end = 0;
  for (const auto& [offset, bytes] : buffers) {
    CHECK_EQ(offset % alignment, std::size_t{0});
    CHECK(offset >= end);
    end = offset + bytes;
  }
  CHECK(workspace_bytes >= end);
  CHECK(workspace_bytes < end + alignment);
}

}  // namespace host_tests
