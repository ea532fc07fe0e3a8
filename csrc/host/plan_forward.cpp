#include <algorithm>
#include <cstdint>

#include "host/choose_forward.h"
#include "host/error.h"
#include "host/normalize_window.h"
#include "host/plan.h"
#include "host/plan_steps.h"
#include "host/tensor_map.h"
#include "shared/schedule/packed_rows.h"
#include "shared/sequence/splits.h"

namespace flash_attn_cuda {

namespace {

// Tiles of a section of heads under a mask, for short ones to fill the gaps that long ones leave
// (benchmarks/results/experiments.md has what smaller sections cost).
constexpr int tiles_per_sm = 8;
// Tiles of a section with lists, which CTAs take by ticket: they need not come out even.
constexpr int listed_tiles_per_sm = 2;

int bytes_of_queries(const ForwardParams& params) {
  return params.e4m3_products ? 1 : bytes_of(params.dtype);
}
int bytes_of_keys(const ForwardParams& params) {
  return params.e4m3_kv ? 1 : bytes_of(params.dtype);
}
int bytes_of_values(const ForwardParams& params) {
  return params.e4m3_latent ? 1 : bytes_of_keys(params);
}

// Kernels copy 16 bytes of e4m3, and of keys beside it, at a time.
void check_e4m3(const ForwardParams& params) {
  const AttentionShape& shape = params.shape;
  const int bytes = bytes_of_keys(params);
  const bool is_whole =
      shape.head_dim * bytes % vector_bytes == 0 && columns_of_v(params) % vector_bytes == 0;
  if (!is_whole || !has_vector_rows(params.k, bytes) || !has_vector_rows(params.v, 1))
    throw_error("k and v of e4m3 must have rows of whole 16 bytes that begin at 16 bytes");
}

void check_forward(const ForwardParams& params) {
  check_call(params.shape, params.score.softmax_scale);
  if (params.sequences.cu_seqlens_k != nullptr && params.sequences.cu_seqlens_q == nullptr)
    throw_error("cu_seqlens_q must be given where cu_seqlens_k is, got null");
  check_origin(params.sequences, params.paged, params.sparsity, params.shape);
  if (params.e4m3_kv || params.e4m3_latent) check_e4m3(params);
}

bool has_vector_rows(const ForwardParams& params) {
  const int step = elements_of_vector(params.dtype);
  const int bytes = bytes_of(params.dtype);
  return params.shape.head_dim % step == 0 && params.shape.head_dim_v % step == 0 &&
         has_vector_rows(params.q, bytes_of_queries(params)) &&
         has_vector_rows(params.k, bytes_of_keys(params)) &&
         has_vector_rows(params.v, bytes_of_values(params)) && has_vector_rows(params.out, bytes) &&
         (params.qv.data == nullptr || has_vector_rows(params.qv, bytes));
}

// CTAs that fit the device, for kernels whose grid may be as many: ForwardPlan::num_ctas.
int ctas_that_fit(const ForwardInstance& instance, const DeviceInfo& device) {
  if (instance.config.family == KernelFamily::sm90)
    return device.num_sms * instance.config.ctas_per_sm;
  if (instance.config.kind != ForwardKind::decode) return 0;
  // Registers limit rows that say how many CTAs an SM they are for.
  const int wanted = instance.config.ctas_per_sm;
  const int fitting =
      (device.smem_per_block + reserved_smem) / (instance.smem_bytes + reserved_smem);
  return device.num_sms * (wanted > 1 ? std::min(wanted, fitting) : fitting);
}

// Whether sequences may need different numbers of splits: because their lengths may differ, or
// because splits have a length of their own and the capacity says nothing.
bool lengths_decide(const ForwardParams& params, const ForwardPlan& plan) {
  return plan.instance->config.kind == ForwardKind::decode && plan.num_splits > 1 &&
         has_lengths_on_device(params.sequences) && params.keys_per_list == 0 &&
         (params.shape.batch_size > 1 || plan.keys_per_split > 0);
}

// Heads that share tiles.
int heads_per_tile(const ForwardParams& params, const ForwardConfig& config) {
  const bool packs_heads = (config.features & feature::packed_gqa) != 0;
  return packs_heads ? params.shape.heads_per_key_head() : 1;
}

// Rows that a query stands for.
int rows_per_query(const ForwardParams& params, const ForwardConfig& config) {
  const bool packs_heads = (config.features & feature::packed_gqa) != 0;
  return packs_heads ? rows_of_query(params.shape, params.keys_per_list, config.block_m) : 1;
}

// A right bound hides most keys from the first queries, so the last tiles are the long ones.
bool last_tiles_are_long(const Window& window) { return window.right != Window::unbounded; }

TileSchedule schedule_tiles(const ForwardParams& params, const ForwardPlan& plan,
                            const DeviceInfo& device) {
  const AttentionShape& shape = params.shape;
  const ForwardConfig& config = plan.instance->config;
  const bool packed = is_packed(params.sequences);
  const bool is_sparse = params.sparsity.lists.data != nullptr;
  const bool is_even = has_even_tiles(params);
  const bool stays = stays_on_sm(config);
  const int heads = heads_per_tile(params, config);
  const int group = shape.heads_per_key_head();
  const std::int64_t bytes_per_key = std::int64_t{bytes_of_keys(params)} * shape.head_dim +
                                     std::int64_t{bytes_of_values(params)} * shape.head_dim_v;
  // A sequence's keys stay in L2, not all of a packed call's (sm80: not timed).
  const int keys_at_once = stays ? most_keys(shape, params.sequences) : shape.seqlen_k;
  const int tiles_wanted = stays && is_sparse ? listed_tiles_per_sm : tiles_per_sm;
  int num_tiles = checked_tiles(shape.seqlen_q, rows_per_query(params, config), config.block_m);
  if (packed && params.keys_per_list == 0)
    num_tiles = most_packed_tiles(shape, num_tiles, shape.seqlen_q);
  TileSchedule schedule =
      make_schedule({.num_tiles = num_tiles,
                     .batch_size = packed ? 1 : shape.batch_size,
                     .num_heads = shape.num_heads_q / heads,
                     .heads_per_group = group / heads,
                     .bytes_per_group = bytes_per_key * keys_at_once,
                     .min_tiles = is_even ? 0 : tiles_wanted * std::int64_t{device.num_sms},
                     .longest_first = last_tiles_are_long(params.window) && !packed,
                     .parts_of_l2 = packed && stays ? 8 : 2},
                    device);
  if (!stays) return schedule;
  if (is_even) {
    schedule.heads_per_section = group;  // neighbours ask for the same keys at once
  } else if (!packed && !is_sparse) {
    take_rounds(schedule, group, plan.num_ctas);
  }
  // Short steps leave out what queries a tile lacks.
  const int last_rows = shape.seqlen_q - (num_tiles - 1) * config.block_m;
  if (is_even && config.ctas_per_sm > 1 && num_tiles > 1 && 4 * last_rows <= 3 * config.block_m)
    end_with_low_tiles(
        schedule, group, plan.num_ctas,
        device.l2_bytes / 2 / std::max<std::int64_t>(1, bytes_per_key * shape.seqlen_k) * group);
  return schedule;
}

// Whether a tile's neighbour has the same keys, so that two CTAs may visit them together: of 64
// rows, where the tiles of every sequence are even in number.
bool has_pairs_of_tiles(const ForwardParams& params, const ForwardPlan& plan) {
  constexpr int rows = 64;
  if (plan.instance->config.block_m != rows) return false;
  return is_packed(params.sequences) ? params.shape.heads_per_key_head() % (2 * rows) == 0
                                     : plan.schedule.num_tiles % 2 == 0;
}

// CTAs share the keys of tiles unless there are so many that each may have whole ones.
void plan_latent(const ForwardParams& params, ForwardPlan& plan) {
  constexpr std::int64_t many = 8;  // tiles for every CTA
  const SplitParams& split = params.split;
  const std::int64_t tiles = plan.schedule.grid_size();
  plan.in_pairs = plan.num_ctas > 1 && has_pairs_of_tiles(params, plan);
  const int each = plan.in_pairs ? 2 : 1;
  plan.grid = tiles == 0 ? 0 : plan.num_ctas / each * each;
  plan.num_splits = 1;
  if (split.batch_invariant) {
    plan.keys_per_split = invariant_split_keys;
    plan.num_splits = ceil_div(most_keys_of_decode(params), invariant_split_keys);
  } else if (split.num_splits > 1) {
    const int blocks = ceil_div(most_keys_of_decode(params), plan.instance->config.block_n);
    plan.num_splits = std::min(split.num_splits, std::max(1, blocks));
  }
  const bool has_parts = plan.num_splits > 1;
  const bool is_whole = split.num_splits == 1 || split.batch_invariant || tiles >= many * plan.grid;
  plan.sharing = has_parts ? TileSharing::parts : is_whole ? TileSharing::whole : TileSharing::even;
}

// Parts of tiles. Where CTAs share blocks evenly, from one part to the next either the CTA or the
// tile is another.
void lay_out_latent(ForwardPlan& plan, WorkspaceLayout& workspace) {
  if (plan.sharing == TileSharing::whole) return;
  const ForwardConfig& config = plan.instance->config;
  const std::int64_t tiles = plan.schedule.grid_size();
  const std::int64_t parts =
      plan.sharing == TileSharing::even ? tiles + plan.grid : tiles * plan.num_splits;
  plan.out_partial = workspace.add<float>(parts * config.block_m * config.head_dim_v);
  plan.lse_partial = workspace.add<float>(parts * config.block_m);
  plan.parts_of_tiles = workspace.add<PartsOfTile>(tiles);
}

void lay_out(const ForwardParams& params, ForwardPlan& plan) {
  const ForwardConfig& config = plan.instance->config;
  const std::int64_t rows = query_rows(params) * params.shape.num_heads_q;
  WorkspaceLayout workspace;
  if (is_packed(params.sequences))
    lay_out_table(plan.table, params.shape.batch_size, plan.schedule.num_tiles, 0, workspace);
  // Where CTAs that stay get several tiles of unequal length, they take tickets.
  if (stays_on_sm(config) && !has_even_tiles(params) && plan.schedule.grid_size() > plan.num_ctas)
    plan.tickets = workspace.add<unsigned long long>(1);
  if (config.kind == ForwardKind::latent) {
    lay_out_latent(plan, workspace);
  } else if (plan.num_splits > 1) {
    const bool decodes = config.kind == ForwardKind::decode;
    const int columns = decodes ? config.head_dim_v : params.shape.head_dim_v;
    plan.out_partial = workspace.add<float>(rows * plan.num_splits * columns);
    plan.lse_partial = workspace.add<float>(rows * plan.num_splits);
    if (decodes) {
      plan.arrivals = workspace.add<unsigned long long>(rows);
      plan.item_tickets = workspace.add<unsigned long long>(1, alignof(unsigned long long));
    }
  }
  plan.workspace_bytes = workspace.bytes();
}

}  // namespace

ForwardPlan plan_forward(const ForwardParams& given, const DeviceInfo& device,
                         std::span<const ForwardInstance* const> instances) {
  check_forward(given);
  ForwardParams params = given;
  params.window = normalize_window(given.window, given.shape, given.sequences);
  ForwardPlan plan;
  plan.window = params.window;
  plan.extents = tensor_extents(params.shape, params.sequences, params.paged);
  plan.has_vector_rows = has_vector_rows(params);
  plan.instance = &choose_instance(params, plan.extents, plan.has_vector_rows, device, instances);
  const ForwardConfig& config = plan.instance->config;
  if (params.max_logits != nullptr && !can_write_max_logits(config))
    throw_error("max_logits must be null where ", plan.instance->name, " runs a call");
  plan.num_ctas = ctas_that_fit(*plan.instance, device);
  plan.schedule = schedule_tiles(params, plan, device);
  if (is_packed(params.sequences)) {
    plan.table = {.tile_rows = config.block_m,
                  .rows_per_query = rows_per_query(params, config),
                  .tiles_descend = last_tiles_are_long(params.window)};
  }
  if (config.kind == ForwardKind::latent) {
    plan_latent(params, plan);
    lay_out(params, plan);
    return plan;
  }
  const std::int64_t tiles =
      plan.schedule.grid_size() * ctas_of_columns(config.columns_per_cta, params.shape.head_dim_v);
  plan.num_splits = choose_splits(params, *plan.instance, tiles, device);
  check_grid(tiles, plan.num_splits);
  if (params.split.batch_invariant && config.kind == ForwardKind::decode)
    plan.keys_per_split = invariant_split_keys;
  plan.lengths_decide = lengths_decide(params, plan);
  // Where lengths decide, a CTA for every possible item, or as many as fit, which take tickets.
  const bool draws_or_walks = stays_on_sm(config) || plan.lengths_decide;
  plan.grid = tiles * plan.num_splits;
  if (draws_or_walks) plan.grid = std::min<std::int64_t>(plan.grid, plan.num_ctas);
  lay_out(params, plan);
  return plan;
}

ForwardPlan plan_forward(const ForwardParams& params, const DeviceInfo& device) {
  return plan_forward(params, device, forward_instances());
}

}  // namespace flash_attn_cuda
