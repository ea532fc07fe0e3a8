#include "host/choose_forward.h"

#include <algorithm>
#include <cstdint>

#include "host/normalize_window.h"
#include "host/plan_steps.h"
#include "shared/mask/block_lists.h"
#include "shared/sequence/splits.h"

namespace flash_attn_cuda {
namespace {

// Queries or keys, whichever are more, of the sequences that most of the work is in, about: of
// packed ones neither the longest alone nor the many short ones. Where bits must not depend on the
// batch or the size of a cache, as if they were long.
int typical_seqlen(const ForwardParams& params) {
  const AttentionShape& shape = params.shape;
  const SequenceParams& sequences = params.sequences;
  if (params.split.batch_invariant) return max_seqlen;
  std::int64_t queries = shape.seqlen_q;
  std::int64_t keys = shape.seqlen_k;
  if (is_packed(sequences)) {
    constexpr int times_average = 4;
    const int average = ceil_div(shape.seqlen_q, std::max(1, shape.batch_size));
    queries = std::min<std::int64_t>(most_queries(shape, sequences),
                                     std::int64_t{times_average} * average);
    if (sequences.cu_seqlens_k != nullptr)
      keys = queries * shape.seqlen_k / std::max(1, shape.seqlen_q);
  }
  return static_cast<int>(std::min<std::int64_t>(std::max(queries, keys), max_seqlen));
}

// Rows of a sequence's queries and of the heads that share a key head.
std::int64_t packed_rows(const ForwardParams& params) {
  const AttentionShape& shape = params.shape;
  return std::int64_t{most_queries(shape, params.sequences)} * shape.heads_per_key_head();
}

// The decode kernels read keys as fast as memory gives them, but once for every 16 rows. They are
// also the ones whose bits can be independent of the batch.
bool prefers_decode(const ForwardParams& params) {
  if (params.dropout.threshold > 0 || params.tangents.is_given || params.max_logits != nullptr ||
      params.e4m3_products)
    return false;
  const bool has_cache = params.sequences.seqused_k != nullptr ||
                         params.paged.block_table != nullptr || params.split.num_splits != 1;
  if (params.score.wants(feature::bias) && !has_cache) return false;
  if (params.split.batch_invariant && is_packed(params.sequences)) return true;
  constexpr std::int64_t rows_with_cache = 64;
  constexpr std::int64_t rows_without = 16;
  return packed_rows(params) <= (has_cache ? rows_with_cache : rows_without);
}

// Tiles of the whole call in an sm90 row, at most.
std::int64_t most_tiles(const ForwardParams& params, const ForwardConfig& row) {
  const AttentionShape& shape = params.shape;
  const std::int64_t tiles = ceil_div(shape.seqlen_q, row.block_m);
  return (is_packed(params.sequences) ? tiles + shape.batch_size : tiles * shape.batch_size) *
         shape.num_heads_q;
}

// Keys that a tile of so many rows sees, at most.
int most_keys_of_tile(const ForwardParams& params, int rows) {
  const Window& window = params.window;
  std::int64_t keys = params.shape.seqlen_k;
  if (window.left != Window::unbounded && window.right != Window::unbounded)
    keys = std::min(keys, std::int64_t{window.left} + window.right + rows);
  return static_cast<int>(keys);
}

// The keys from which on it matters that a tile is split, or lower than others.
constexpr int least_keys_of_tile = 1024;

// Over a dense cache a plain row is the faster one unless it leaves half the SMs without a tile.
// `row`: that which could split.
bool wants_splits(const ForwardParams& params, const ForwardConfig& row, const DeviceInfo& device) {
  if (params.split.num_splits == 1 || params.split.batch_invariant) return false;
  const std::int64_t tiles = most_tiles(params, row);
  if (params.split.num_splits > 1) return tiles < device.num_sms;
  return 2 * tiles <= device.num_sms &&
         most_keys_of_tile(params, row.block_m) >= least_keys_of_tile;
}

// The plain row of a narrow head has tiles of more queries than that over caches, and a row for
// long calls than the usual one. If those of fewer need no more rounds of the device, each is
// shorter.
bool wants_lower_tiles(const ForwardParams& params, const ForwardConfig& plain,
                       const ForwardConfig& lower, const DeviceInfo& device) {
  if (is_packed(params.sequences) || params.split.batch_invariant ||
      plain.block_m <= lower.block_m ||
      most_keys_of_tile(params, lower.block_m) < least_keys_of_tile)
    return false;
  const auto rounds = [&](const ForwardConfig& row) {
    return ceil_div(most_tiles(params, row), std::int64_t{device.num_sms});
  };
  return rounds(lower) <= rounds(plain);
}

// Whether a row of tall tiles pads the queries no further than the plain one, in rounds of the
// device over padded keys that take about as long or less. Longer calls, and those of which a
// window hides most, are better off with the plain row (benchmarks/results/experiments.md); lengths
// that the host does not know are not looked at. As with lower tiles, the bits of such a call may
// depend on the number of its heads.
bool wants_tall_tiles(const ForwardParams& params, const ForwardConfig& plain,
                      const ForwardConfig& tall, const DeviceInfo& device) {
  constexpr int longest = 4096;
  constexpr double about_as_long = 1.02;
  const AttentionShape& shape = params.shape;
  const bool is_plain = plain.most_causal_seqlen == 0 && plain.most_full_seqlen == 0;
  if (!is_plain || plain.head_dim != tall.head_dim || plain.head_dim_v != tall.head_dim_v ||
      is_packed(params.sequences) || params.split.batch_invariant ||
      params.window.left != Window::unbounded || std::max(shape.seqlen_q, shape.seqlen_k) > longest)
    return false;
  const auto padded_queries = [&](const ForwardConfig& row) {
    return std::int64_t{ceil_div(shape.seqlen_q, row.block_m)} * row.block_m;
  };
  const auto length = [&](const ForwardConfig& row) {  // of the rounds
    const std::int64_t rounds = ceil_div(most_tiles(params, row), std::int64_t{device.num_sms});
    const int steps = ceil_div(shape.seqlen_k, row.block_n);
    return static_cast<double>(rounds * row.block_m) * (steps * row.block_n);
  };
  return padded_queries(tall) <= padded_queries(plain) &&
         length(tall) <= about_as_long * length(plain);
}

// Pairs of a head for which steps of so many queries and keys take time, if up to narrow_keys at
// the end of a sequence are a step of as many; 0: none are.
std::int64_t padded_pairs(const AttentionShape& shape, int queries, int keys, int narrow_keys) {
  const std::int64_t padded_queries = std::int64_t{ceil_div(shape.seqlen_q, queries)} * queries;
  const int end = shape.seqlen_k % keys;
  const int last_step = end == 0 ? 0 : end <= narrow_keys ? narrow_keys : keys;
  return padded_queries * (shape.seqlen_k - end + last_step);
}

// A row for short sequences may have smaller steps, in which warps without queries do little. That
// makes it the faster one for somewhat longer sequences too, where their ends would fill little of
// the plain row's steps (docs/forward_sm90.md). As with lower tiles, the bits of such a call may
// depend on the number of its heads. usual: the plain row, or that of tall tiles.
bool wants_smaller_steps(const ForwardParams& params, const ForwardConfig& plain,
                         const ForwardConfig& usual, const ForwardConfig& short_row,
                         const DeviceInfo& device) {
  constexpr int longest = 1024;
  constexpr int warpgroup_rows = 64;
  // Of the plain row's pairs 577 has 0.77, 800 0.805; of tall tiles' 577 has 0.77, 640 0.83.
  constexpr double share_that_pays = 0.78;
  const AttentionShape& shape = params.shape;
  if (short_row.block_n >= plain.block_n || !params.window.is_full() ||
      is_packed(params.sequences) || params.split.batch_invariant ||
      std::max(shape.seqlen_q, shape.seqlen_k) > longest ||
      most_tiles(params, plain) < device.num_sms)
    return false;
  return padded_pairs(shape, warpgroup_rows, short_row.block_n, narrow_step_keys) <=
         share_that_pays * padded_pairs(shape, usual.block_m, usual.block_n, 0);
}

// The row of a call that neither decodes nor splits. One for long calls has higher tiles; where
// lower ones need no more rounds of the device, it is the usual row.
const ForwardInstance& select_plain(const ForwardParams& params, const KernelRequest& request,
                                    const DeviceInfo& device,
                                    std::span<const ForwardInstance* const> instances) {
  const ForwardInstance& row = select_instance(instances, request, device);
  KernelRequest of_any_length = request;
  of_any_length.keys_per_query = 0;
  const ForwardInstance* usual = find_instance(instances, of_any_length, device);
  const bool prefers_usual = usual != nullptr && usual != &row &&
                             wants_lower_tiles(params, row.config, usual->config, device);
  return prefers_usual ? *usual : row;
}

KernelRequest request_of(const ForwardParams& params, const TensorExtents& extents) {
  KernelRequest request = common_request(params, extents, !params.e4m3_kv);
  // Rows that read pages clamp the distances of a relative bias.
  if (params.paged.block_table != nullptr || params.score.bias.is_relative())
    request.features |= feature::paged_kv;
  if (params.e4m3_kv) request.features |= feature::e4m3_kv;
  if (params.e4m3_products) {
    request.features |= feature::e4m3_products;
    const auto can_move = [](const TensorView& view, const TensorExtent& extent) {
      return tma_can_move(view, Dtype::e4m3, extent);
    };
    request.suits_sm90 = params.score.softmax_scale >= 0.0f && can_move(params.q, extents.q) &&
                         can_move(params.k, extents.k) && can_move(params.v, extents.v);
  }
  // Rows that can split keys read tree masks.
  if (params.window.has_tree) request.features |= feature::split_kv;
  request.seqlen = typical_seqlen(params);
  // Where bits must not depend on the batch, nothing may choose a row for long calls.
  if (params.split.batch_invariant) request.keys_per_query = 0;
  request.is_causal = params.window.right != Window::unbounded;
  if (params.tangents.is_given) {
    // sm90 kernels load the tangents of all three.
    const TangentParams& tangents = params.tangents;
    const auto suits = [&](const TensorView& view, const TensorExtent& extent) {
      return view.data != nullptr && tma_can_move(view, params.dtype, extent);
    };
    request.suits_sm90 = request.suits_sm90 && suits(tangents.q, extents.q) &&
                         suits(tangents.k, extents.k) && suits(tangents.v, extents.v);
  }
  // Bytes that become fp16 are copied row by row, from pages of any size.
  const bool copies_rows = params.e4m3_kv && !params.e4m3_products;
  const bool finds_keys = copies_rows || has_boxes(params.paged, params.sequences);
  request.suits_sm90 = request.suits_sm90 && finds_keys &&
                       tma_can_move(params.out, params.dtype, extents.out) &&
                       tma_can_load_bits(params.sparsity.bits, params.shape);
  return request;
}

// The fewest splits of tiles of so many steps that take about as long as the best number.
int fewest_splits(std::int64_t tiles, int slots, int steps, int most) {
  if (tiles >= std::int64_t{most_tiles_per_slot} * slots) return 1;
  const auto cost = [&](int splits) {
    return cost_of_splits(static_cast<int>(tiles), slots, steps, splits);
  };
  most = std::min(most, static_cast<int>(most_tiles_per_slot * slots / tiles));
  float least = cost(1);
  for (int splits = 2; splits <= most; ++splits) least = std::min(least, cost(splits));
  int chosen = 1;
  while (!is_about_as_long(cost(chosen), least)) ++chosen;
  return chosen;
}

// Of absorbed latent attention: the sm90 row of the fewest rows that has those of a sequence, or of
// the most that there are; a decode kernel where neither TMA nor vectors can load the tensors. With
// lists of keys rows are of one query. Rows of e4m3 convert, and have vectors; a decode kernel does
// so as well, and alone where scales are of e8m0 or rotary columns are values.
const ForwardInstance& choose_latent(const ForwardParams& params, const TensorExtents& extents,
                                     bool has_vectors, const DeviceInfo& device,
                                     std::span<const ForwardInstance* const> instances) {
  const bool is_e4m3 = params.e4m3_latent;
  const std::int64_t most_rows = is_e4m3 ? 32 : 64;
  KernelRequest request = request_of(params, extents);
  request.kind = ForwardKind::latent;
  const std::int64_t rows =
      has_key_lists(params) ? params.shape.heads_per_key_head() : packed_rows(params);
  request.latent_rows = static_cast<int>(std::min(rows, most_rows));
  const FeatureSet features = request.features | feature::paged_kv | feature::latent;
  request.features = features | (is_e4m3 ? feature::e4m3_kv : 0);
  const auto can_load = [&](const TensorView& view, const TensorExtent& extent) {
    if (is_e4m3) return has_vectors;
    return loads_rows(params) ? has_vectors && has_near_rows(view, params.dtype, extent)
                              : tma_can_move(view, params.dtype, extent);
  };
  request.suits_sm90 = !params.values_include_rope && !params.scales.v.is_e8m0 &&
                       tma_can_move(params.q, params.dtype, extents.q) &&
                       tma_can_move(params.qv, params.dtype, extents.q) &&
                       can_load(params.k, extents.k) && can_load(params.v, extents.v);
  const ForwardInstance* found = find_instance(instances, request, device);
  if (found != nullptr) return *found;
  request.kind = ForwardKind::decode;
  request.latent_rows = 0;
  request.features = features;
  return select_instance(instances, request, device);
}

// CTAs that share the device's time evenly. A second decode CTA on an SM adds little to the loads
// that one has under way, but converts e4m3 while the other waits.
int ctas_at_once(const ForwardInstance& instance, const DeviceInfo& device) {
  const bool decodes = instance.config.kind == ForwardKind::decode;
  const int resident = device.smem_per_block / (instance.smem_bytes + reserved_smem);
  return std::clamp(resident, 1, decodes ? instance.config.ctas_per_sm : 4) * device.num_sms;
}

}  // namespace

bool has_e4m3_products(const ForwardParams& given, const DeviceInfo& device,
                       std::span<const ForwardInstance* const> instances) {
  constexpr std::int64_t few_rows = 64;
  if (packed_rows(given) <= few_rows || given.scales.k.per_token || given.scales.v.per_token)
    return false;
  ForwardParams params = given;
  params.window = normalize_window(given.window, given.shape, given.sequences);
  KernelRequest request =
      request_of(params, tensor_extents(params.shape, params.sequences, params.paged));
  request.kind = ForwardKind::tiles;
  return find_instance(instances, request, device) != nullptr;
}

const ForwardInstance& choose_instance(const ForwardParams& params, const TensorExtents& extents,
                                       bool has_vectors, const DeviceInfo& device,
                                       std::span<const ForwardInstance* const> instances) {
  if (params.qv.data != nullptr)
    return choose_latent(params, extents, has_vectors, device, instances);
  KernelRequest request = request_of(params, extents);
  request.kind = ForwardKind::decode;
  if (has_key_lists(params)) {
    request.features |= feature::key_lists;
    return select_instance(instances, request, device);
  }
  if (!has_vectors) return select_instance(instances, request, device);
  KernelRequest tiles_request = request;
  tiles_request.kind = ForwardKind::tiles;
  const bool has_paged_bias =
      params.score.wants(feature::bias) && (request.features & feature::paged_kv) != 0;
  if (prefers_decode(params) ||
      (has_paged_bias && find_instance(instances, tiles_request, device) == nullptr)) {
    const ForwardInstance* decode = find_instance(instances, request, device);
    if (decode != nullptr) return *decode;
  }
  request = tiles_request;
  const ForwardInstance& plain = select_plain(params, request, device, instances);
  if (!stays_on_sm(plain.config)) return plain;
  KernelRequest tall_request = request;
  tall_request.kind = ForwardKind::tall;
  const ForwardInstance* tall = find_instance(instances, tall_request, device);
  const bool prefers_tall =
      tall != nullptr && wants_tall_tiles(params, plain.config, tall->config, device);
  KernelRequest short_request = request;
  short_request.seqlen = 1;  // whatever the length
  const ForwardInstance* short_row = find_instance(instances, short_request, device);
  if (short_row != nullptr && short_row != &plain &&
      wants_smaller_steps(params, plain.config, prefers_tall ? tall->config : plain.config,
                          short_row->config, device))
    return *short_row;
  if (prefers_tall) return *tall;
  if (params.max_logits != nullptr) return plain;
  request.features |= feature::split_kv;
  const ForwardInstance* over_cache = find_instance(instances, request, device);
  const bool prefers_cache_row =
      over_cache != nullptr && over_cache->config.family == KernelFamily::sm90 &&
      (wants_splits(params, over_cache->config, device) ||
       wants_lower_tiles(params, plain.config, over_cache->config, device));
  return prefers_cache_row ? *over_cache : plain;
}

int most_keys_of_decode(const ForwardParams& params) {
  return params.keys_per_list > 0 ? params.keys_per_list
                                  : most_keys(params.shape, params.sequences);
}

int choose_splits(const ForwardParams& params, const ForwardInstance& instance, std::int64_t ctas,
                  const DeviceInfo& device) {
  const AttentionShape& shape = params.shape;
  const ForwardConfig& config = instance.config;
  const bool decodes = config.kind == ForwardKind::decode;
  if ((config.features & feature::split_kv) == 0 || ctas == 0 || shape.seqlen_k == 0 ||
      params.max_logits != nullptr)
    return 1;
  if (params.split.batch_invariant)
    return decodes ? ceil_div(most_keys_of_decode(params), invariant_split_keys) : 1;

  // Partial results, which a caller who asks for many need not expect to be gigabytes, cost more
  // than an uneven last round. Rows for caches also have lower tiles, which is another reason to
  // run one.
  const bool has_pages = params.paged.block_table != nullptr;
  if (config.family == KernelFamily::sm90 &&
      (ctas >= device.num_sms || (!has_pages && !wants_splits(params, config, device))))
    return 1;
  const int keys_per_step = config.block_n * (decodes ? warps_with_own_keys(config) : 1);
  const bool has_lists = params.keys_per_list > 0;
  const int keys = has_lists ? params.keys_per_list
                   : decodes ? shape.seqlen_k
                             : most_keys_of_tile(params, config.block_m);
  const int steps = ceil_div(keys, keys_per_step);
  if (params.split.num_splits > 0) return std::min(params.split.num_splits, std::max(1, steps));
  constexpr int least_steps = 2;
  const int most = std::max(1, steps / least_steps);
  const bool uneven = shape.batch_size > 1 && has_lengths_on_device(params.sequences) && !has_lists;
  if (!uneven || !decodes) return fewest_splits(ctas, ctas_at_once(instance, device), steps, most);

  // Lengths that the host does not know: the kernel itself shares the splits out by length
  // (sm80/decode/split.h). More of them cost memory for partial results.
  constexpr std::int64_t most_partial_bytes = 256 << 20;
  constexpr int most_useful = 32;
  const std::int64_t bytes = std::max<std::int64_t>(1, query_rows(params)) * shape.num_heads_q *
                             (config.head_dim_v + 1) * std::int64_t{sizeof(float)};
  const auto affordable =
      static_cast<int>(std::clamp<std::int64_t>(most_partial_bytes / bytes, 1, most_useful));
  return std::min(most, affordable);
}

}  // namespace flash_attn_cuda
