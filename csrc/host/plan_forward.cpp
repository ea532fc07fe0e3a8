#include <algorithm>
#include <cstdint>

#include "host/average_keys.h"
#include "host/error.h"
#include "host/normalize_window.h"
#include "host/plan.h"
#include "host/plan_steps.h"
#include "host/select_instance.h"
#include "host/tensor_map.h"
#include "host/workspace_layout.h"
#include "shared/mask/block_lists.h"
#include "shared/mask/block_range.h"
#include "shared/sequence/splits.h"

namespace flash_attn_cuda {

namespace {

// Of a section of heads under a mask, for short tiles to fill the gaps that long ones leave
// (docs/forward_sm80.md has what smaller sections cost).
constexpr int tiles_per_sm = 8;
// The same beside lists, whose tiles CTAs draw: those of a section need not come out even.
constexpr int listed_tiles_per_sm = 2;

FeatureSet features_of(const ForwardParams& params) {
  FeatureSet features = 0;
  if (params.score.softcap > 0.0f) features |= feature::softcap;
  if (params.score.alibi_slopes != nullptr) features |= feature::alibi;
  if (params.dropout.threshold > 0) features |= feature::dropout;
  if (params.paged.block_table != nullptr) features |= feature::paged_kv;
  if (params.sparsity.lists.data != nullptr) features |= feature::block_sparse;
  if (params.score.bias.data != nullptr) features |= feature::bias;
  return features;
}

// Whether 16-byte copies can read and write the tensor's rows.
bool has_vector_rows(const TensorView& view) {
  constexpr std::int64_t elements = 8;
  return reinterpret_cast<std::uintptr_t>(view.data) % 16 == 0 &&
         view.batch_stride % elements == 0 && view.row_stride % elements == 0 &&
         view.head_stride % elements == 0;
}

bool has_vector_rows(const ForwardParams& params) {
  return params.shape.head_dim % 8 == 0 && params.shape.head_dim_v % 8 == 0 &&
         has_vector_rows(params.q) && has_vector_rows(params.k) && has_vector_rows(params.v) &&
         has_vector_rows(params.out);
}

// Queries or keys, whichever are more, of the sequences that most of the work is in, about: of
// packed ones neither the longest alone nor the many short ones. Where bits must not depend on the
// batch or the size of a cache, as if they were long.
int typical_seqlen(const ForwardParams& params) {
  const AttentionShape& shape = params.shape;
  const SequenceParams& sequences = params.sequences;
  if (params.split.batch_invariant) return max_seqlen;
  std::int64_t queries = shape.seqlen_q;
  std::int64_t keys = shape.seqlen_k;
  if (sequences.cu_seqlens_q != nullptr) {
    constexpr int times_average = 4;
    const int average = ceil_div(shape.seqlen_q, std::max(1, shape.batch_size));
    queries = std::min<std::int64_t>(most_queries(shape, sequences),
                                     std::int64_t{times_average} * average);
    if (sequences.cu_seqlens_k != nullptr)
      keys = queries * shape.seqlen_k / std::max(1, shape.seqlen_q);
  }
  return static_cast<int>(std::min<std::int64_t>(std::max(queries, keys), max_seqlen));
}

// What may choose a row for long calls; where bits must not depend on the batch, nothing may.
int keys_per_query(const ForwardParams& params, const Window& window) {
  return params.split.batch_invariant ? 0 : average_keys(params.shape, params.sequences, window);
}

// Rows of a sequence's queries and of the heads that share a key head.
std::int64_t packed_rows(const ForwardParams& params) {
  const AttentionShape& shape = params.shape;
  return std::int64_t{most_queries(shape, params.sequences)} *
         (shape.num_heads_q / shape.num_heads_k);
}

// The decode kernels read keys as fast as memory gives them, but once for every 16 rows. They are
// also the ones that copy element by element, and whose bits can be independent of the batch.
bool prefers_decode(const ForwardParams& params) {
  if (!has_vector_rows(params)) return true;
  if (params.dropout.threshold > 0) return false;
  const bool is_packed = params.sequences.cu_seqlens_q != nullptr;
  if (params.split.batch_invariant && is_packed) return true;
  constexpr std::int64_t rows_with_cache = 64;
  constexpr std::int64_t rows_without = 16;
  const bool has_cache = params.sequences.seqused_k != nullptr ||
                         params.paged.block_table != nullptr || params.split.num_splits != 1;
  return packed_rows(params) <= (has_cache ? rows_with_cache : rows_without);
}

// sm90 kernels load boxes that lie in one page and begin where the swizzle of shared memory does.
bool has_boxes(const PagedKvParams& paged, const SequenceParams& sequences) {
  constexpr int swizzled_rows = 8;
  return paged.block_table == nullptr ||
         (paged.page_size % swizzled_rows == 0 && sequences.leftpad_k == nullptr);
}

bool suits_sm90(const ForwardParams& params) {
  const TensorExtent queries = query_extent(params.shape, params.sequences);
  const TensorExtent keys = in_pages(key_extent(params.shape, params.sequences), params.paged);
  return has_boxes(params.paged, params.sequences) && params.score.softmax_scale >= 0.0f &&
         tma_can_move(params.q, queries) && tma_can_move(params.out, queries) &&
         tma_can_move(params.k, keys) && tma_can_move(params.v, keys) &&
         tma_can_load_bias(params.score.bias, params.shape) &&
         tma_can_load_bits(params.sparsity.bits, params.shape);
}

// Tiles of the whole call in an sm90 row, at most.
std::int64_t most_tiles(const ForwardParams& params, const ForwardConfig& row) {
  const AttentionShape& shape = params.shape;
  const std::int64_t tiles = ceil_div(shape.seqlen_q, row.block_m);
  const bool is_packed = params.sequences.cu_seqlens_q != nullptr;
  return (is_packed ? tiles + shape.batch_size : tiles * shape.batch_size) * shape.num_heads_q;
}

// Keys that a tile of so many rows sees, at most.
int most_keys_of_tile(const Window& window, const AttentionShape& shape, int rows) {
  if (window.left == Window::unbounded || window.right == Window::unbounded) return shape.seqlen_k;
  const std::int64_t keys = std::int64_t{window.left} + window.right + rows;
  return static_cast<int>(std::min<std::int64_t>(keys, shape.seqlen_k));
}

// Of a tile that may be split or lower than others: with less it does not matter.
constexpr int least_keys_of_tile = 1024;

// Over a dense cache a plain row is the faster one unless it leaves half the SMs without a tile.
// `row`: that which could split.
bool wants_splits(const ForwardParams& params, const Window& window, const ForwardConfig& row,
                  const DeviceInfo& device) {
  if (params.split.num_splits == 1 || params.split.batch_invariant) return false;
  const std::int64_t tiles = most_tiles(params, row);
  if (params.split.num_splits > 1) return tiles < device.num_sms;
  return 2 * tiles <= device.num_sms &&
         most_keys_of_tile(window, params.shape, row.block_m) >= least_keys_of_tile;
}

// The plain row of a narrow head has tiles of more queries than that over caches, and a row for
// long calls than the usual one. If those of fewer need no more rounds of the device, each is
// shorter.
bool wants_lower_tiles(const ForwardParams& params, const Window& window,
                       const ForwardConfig& plain, const ForwardConfig& lower,
                       const DeviceInfo& device) {
  const bool is_packed = params.sequences.cu_seqlens_q != nullptr;
  if (is_packed || params.split.batch_invariant || plain.block_m <= lower.block_m ||
      most_keys_of_tile(window, params.shape, lower.block_m) < least_keys_of_tile)
    return false;
  const auto rounds = [&](const ForwardConfig& row) {
    return ceil_div(most_tiles(params, row), std::int64_t{device.num_sms});
  };
  return rounds(lower) <= rounds(plain);
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
// depend on the number of its heads.
bool wants_smaller_steps(const ForwardParams& params, const Window& window,
                         const ForwardConfig& plain, const ForwardConfig& short_row,
                         const DeviceInfo& device) {
  constexpr int longest = 1024;
  constexpr int warpgroup_rows = 64;
  constexpr double share_that_pays = 0.78;  // 577 has 0.77, 800 0.805
  const AttentionShape& shape = params.shape;
  const bool is_packed = params.sequences.cu_seqlens_q != nullptr;
  if (short_row.block_n >= plain.block_n || !window.is_full() || is_packed ||
      params.split.batch_invariant || std::max(shape.seqlen_q, shape.seqlen_k) > longest ||
      most_tiles(params, plain) < device.num_sms)
    return false;
  return padded_pairs(shape, warpgroup_rows, short_row.block_n, narrow_step_keys) <=
         share_that_pays * padded_pairs(shape, plain.block_m, plain.block_n, 0);
}

// The row of a call that neither decodes nor splits. One for long calls has higher tiles; where
// lower ones need no more rounds of the device, it is the usual row.
const ForwardInstance& select_plain(const ForwardParams& params, const Window& window,
                                    const KernelRequest& request, const DeviceInfo& device,
                                    std::span<const ForwardInstance* const> instances) {
  const ForwardInstance& row = select_instance(instances, request, device);
  KernelRequest of_any_length = request;
  of_any_length.keys_per_query = 0;
  const ForwardInstance* usual = find_instance(instances, of_any_length, device);
  const bool prefers_usual = usual != nullptr && usual != &row &&
                             wants_lower_tiles(params, window, row.config, usual->config, device);
  return prefers_usual ? *usual : row;
}

const ForwardInstance& choose_instance(const ForwardParams& params, const Window& window,
                                       const DeviceInfo& device,
                                       std::span<const ForwardInstance* const> instances) {
  KernelRequest request{.dtype = params.dtype,
                        .mask = window.is_full() ? MaskKind::full : MaskKind::windowed,
                        .head_dim = params.shape.head_dim,
                        .head_dim_v = params.shape.head_dim_v,
                        .kind = ForwardKind::decode,
                        .features = features_of(params),
                        .seqlen = typical_seqlen(params),
                        .keys_per_query = keys_per_query(params, window),
                        .is_causal = window.right != Window::unbounded,
                        .fp32_results = params.fp32_results,
                        .suits_sm90 = suits_sm90(params)};
  if (prefers_decode(params)) {
    const ForwardInstance* decode = find_instance(instances, request, device);
    if (decode != nullptr || !has_vector_rows(params))
      return select_instance(instances, request, device);
  }
  request.kind = ForwardKind::tiles;
  const ForwardInstance& plain = select_plain(params, window, request, device, instances);
  if (plain.config.family != KernelFamily::sm90) return plain;
  KernelRequest short_request = request;
  short_request.seqlen = 1;  // whatever the length
  const ForwardInstance* short_row = find_instance(instances, short_request, device);
  if (short_row != nullptr && short_row != &plain &&
      wants_smaller_steps(params, window, plain.config, short_row->config, device))
    return *short_row;
  request.features |= feature::split_kv;
  const ForwardInstance* over_cache = find_instance(instances, request, device);
  const bool prefers_cache_row =
      over_cache != nullptr && over_cache->config.family == KernelFamily::sm90 &&
      (wants_splits(params, window, over_cache->config, device) ||
       wants_lower_tiles(params, window, plain.config, over_cache->config, device));
  return prefers_cache_row ? *over_cache : plain;
}

// Keys of a split whose bits must not depend on anything but the sequence.
constexpr int invariant_split_keys = 512;

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

// Warps, or groups of them, that take keys of their own.
int warp_groups(const ForwardConfig& decode) {
  return decode.columns_per_warp == 0
             ? decode.num_warps
             : decode.num_warps / (decode.head_dim / decode.columns_per_warp);
}

// CTAs that share the device's time evenly. A second decode CTA on an SM adds little to the loads
// that one has under way.
int ctas_at_once(const ForwardInstance& instance, const DeviceInfo& device) {
  if (instance.config.kind == ForwardKind::decode) return device.num_sms;
  constexpr int smem_over_block = 1024;  // reserved by the system for every block
  const int resident = device.smem_per_block / (instance.smem_bytes + smem_over_block);
  return std::clamp(resident, 1, 4) * device.num_sms;
}

int choose_splits(const ForwardParams& params, const Window& window,
                  const ForwardInstance& instance, std::int64_t ctas, const DeviceInfo& device) {
  const AttentionShape& shape = params.shape;
  const ForwardConfig& config = instance.config;
  const bool decodes = config.kind == ForwardKind::decode;
  if ((config.features & feature::split_kv) == 0 || ctas == 0 || shape.seqlen_k == 0) return 1;
  if (params.split.batch_invariant)
    return decodes ? ceil_div(most_keys(shape, params.sequences), invariant_split_keys) : 1;

  // Partial results, which a caller who asks for many need not expect to be gigabytes, cost more
  // than an uneven last round. Rows for caches also have lower tiles, which is another reason to
  // run one.
  const bool has_pages = params.paged.block_table != nullptr;
  if (config.family == KernelFamily::sm90 &&
      (ctas >= device.num_sms || (!has_pages && !wants_splits(params, window, config, device))))
    return 1;
  const int keys_per_step = config.block_n * (decodes ? warp_groups(config) : 1);
  const int keys = decodes ? shape.seqlen_k : most_keys_of_tile(window, shape, config.block_m);
  const int steps = ceil_div(keys, keys_per_step);
  if (params.split.num_splits > 0) return std::min(params.split.num_splits, std::max(1, steps));
  constexpr int least_steps = 2;
  const int most = std::max(1, steps / least_steps);
  const bool uneven = shape.batch_size > 1 && has_lengths_on_device(params.sequences);
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

}  // namespace

ForwardPlan plan_forward(const ForwardParams& params, const DeviceInfo& device,
                         std::span<const ForwardInstance* const> instances) {
  const AttentionShape& shape = params.shape;
  check_call(shape, params.score.softmax_scale);
  if (params.sequences.cu_seqlens_k != nullptr && params.sequences.cu_seqlens_q == nullptr)
    throw_error("cu_seqlens_q must be given where cu_seqlens_k is, got null");
  check_origin(params.sequences, params.paged, params.sparsity, shape);
  const Window window = normalize_window(params.window, shape, params.sequences);
  const ForwardInstance& instance = choose_instance(params, window, device, instances);
  const ForwardConfig& config = instance.config;
  const bool is_packed = params.sequences.cu_seqlens_q != nullptr;
  // A right bound hides most keys from the first queries, so the last tiles are the long ones.
  const bool longest_first = window.right != Window::unbounded;

  const int group = shape.num_heads_q / shape.num_heads_k;
  const bool packs_heads = (config.features & feature::packed_gqa) != 0;
  const int rows_per_query = packs_heads ? group : 1;
  ForwardPlan plan;
  plan.instance = &instance;
  int num_tiles = checked_tiles(shape.seqlen_q, rows_per_query, config.block_m);
  WorkspaceLayout workspace;
  if (is_packed) {
    num_tiles = most_packed_tiles(shape, num_tiles, shape.seqlen_q);
    plan.table = {.used = true,
                  .max_tiles = num_tiles,
                  .tile_rows = config.block_m,
                  .rows_per_query = rows_per_query,
                  .tiles_descend = longest_first};
    plan.table.offset = workspace.add_bytes(table_bytes(shape.batch_size, plan.table));
  }
  const bool is_sparse = params.sparsity.lists.data != nullptr;
  const bool is_even = window.is_full() && !is_packed && !is_sparse;
  const bool stays = config.family == KernelFamily::sm90;
  const int tiles_wanted = stays && is_sparse ? listed_tiles_per_sm : tiles_per_sm;
  const std::int64_t bytes_per_key = sizeof(std::uint16_t) * (shape.head_dim + shape.head_dim_v);
  // Those of a sequence stay in L2, not all of a packed call's (sm80: not timed).
  const int keys_at_once = stays ? most_keys(shape, params.sequences) : shape.seqlen_k;
  plan.schedule =
      make_schedule({.num_tiles = num_tiles,
                     .batch_size = is_packed ? 1 : shape.batch_size,
                     .num_heads = packs_heads ? shape.num_heads_k : shape.num_heads_q,
                     .heads_per_group = packs_heads ? 1 : group,
                     .bytes_per_group = bytes_per_key * keys_at_once,
                     .min_tiles = is_even ? 0 : tiles_wanted * std::int64_t{device.num_sms},
                     .longest_first = longest_first && !is_packed,
                     .parts_of_l2 = is_packed && stays ? 8 : 2},
                    device);

  if (stays) {
    plan.num_ctas = device.num_sms * config.ctas_per_sm;
    // Tiles of unequal length, of which CTAs get more than one.
    plan.draws_tiles = !is_even && plan.schedule.grid_size() > plan.num_ctas;
    if (is_even) {
      plan.schedule.heads_per_section = group;  // neighbours ask for the same keys at once
    } else if (!is_packed && !is_sparse) {
      take_rounds(plan.schedule, group, plan.num_ctas);
    }
    // Short steps leave out what queries a tile lacks.
    const int last_rows = shape.seqlen_q - (num_tiles - 1) * config.block_m;
    if (is_even && config.ctas_per_sm > 1 && num_tiles > 1 && 4 * last_rows <= 3 * config.block_m)
      end_with_low_tiles(
          plan.schedule, group, plan.num_ctas,
          device.l2_bytes / 2 / std::max<std::int64_t>(1, bytes_per_key * shape.seqlen_k) * group);
    if (plan.draws_tiles) plan.tickets_offset = workspace.add_bytes(sizeof(std::uint64_t));
  }
  plan.num_splits = choose_splits(params, window, instance, plan.schedule.grid_size(), device);
  check_grid(plan.schedule.grid_size(), plan.num_splits);
  if (params.split.batch_invariant && config.kind == ForwardKind::decode)
    plan.keys_per_split = invariant_split_keys;
  if (plan.num_splits > 1) {
    const std::int64_t rows = query_rows(params) * shape.num_heads_q * plan.num_splits;
    const bool decodes = config.kind == ForwardKind::decode;
    plan.out_partial_offset =
        workspace.add_floats(rows * (decodes ? config.head_dim_v : shape.head_dim_v));
    plan.lse_partial_offset = workspace.add_floats(rows);
    if (decodes) {
      const std::int64_t words = query_rows(params) * shape.num_heads_q + 1;
      plan.arrivals_offset =
          workspace.add_bytes(static_cast<std::size_t>(words) * sizeof(std::uint64_t));
    }
  }
  plan.workspace_bytes = workspace.bytes();
  return plan;
}

ForwardPlan plan_forward(const ForwardParams& params, const DeviceInfo& device) {
  return plan_forward(params, device, forward_instances());
}

}  // namespace flash_attn_cuda
