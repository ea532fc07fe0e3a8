#include <algorithm>
#include <cmath>

#include "auxiliary/auxiliary.h"
#include "host/average_keys.h"
#include "host/error.h"
#include "host/normalize_window.h"
#include "host/plan.h"
#include "host/plan_steps.h"
#include "host/select_instance.h"
#include "host/tensor_map.h"
#include "host/workspace_layout.h"
#include "shared/gradient/finishes_dq.h"
#include "shared/mask/block_lists.h"
#include "shared/mask/block_range.h"
#include "shared/schedule/tile_parts.h"

namespace flash_attn_cuda {
namespace {

// The kernels around the main one give a query row up to 32 threads, in blocks of 256.
constexpr std::int64_t max_query_rows = max_grid * 8;

FeatureSet features_of(const BackwardParams& params) {
  FeatureSet features = 0;
  if (params.score.softcap > 0.0f) features |= feature::softcap;
  if (params.score.alibi_slopes != nullptr) features |= feature::alibi;
  if (params.dropout.threshold > 0) features |= feature::dropout;
  if (params.deterministic) features |= feature::deterministic;
  if (params.sparsity.lists.data != nullptr) features |= feature::block_sparse;
  if (params.score.bias.data != nullptr) features |= feature::bias;
  return features;
}

void check_backward(const BackwardParams& params) {
  check_call(params.shape, params.score.softmax_scale);
  check_origin(params.sequences, {}, params.sparsity, params.shape);
  const auto check_multiple = [](const char* field, int value) {
    if (value % 8 != 0) throw_error(field, " must be a multiple of 8 in a backward, got ", value);
  };
  check_multiple("head_dim", params.shape.head_dim);
  check_multiple("head_dim_v", params.shape.head_dim_v);
  const SequenceParams& sequences = params.sequences;
  if ((sequences.cu_seqlens_q == nullptr) != (sequences.cu_seqlens_k == nullptr)) {
    throw_error("cu_seqlens_q and cu_seqlens_k must be given together, got ",
                sequences.cu_seqlens_q == nullptr ? "cu_seqlens_k" : "cu_seqlens_q", " alone");
  }
  if (params.dsink != nullptr && params.score.sink == nullptr) {
    throw_error("sink must be given with dsink, got dsink alone");
  }
  if (params.accumulate && !params.fp32_results) {
    throw_error("fp32_results must be given with accumulate, got accumulate alone");
  }
}

// sm90 kernels store tiles of it in 16 bits by TMA, or add eight neighbours at a time to sums.
bool can_write_dbias(const BackwardParams& params) {
  const BiasGradient& dbias = params.dbias;
  if (dbias.data == nullptr) return true;
  const PairTensor tensor = pair_tensor(dbias, params.score.bias, params.shape);
  return tma_can_move(tensor) && tensor.columns % 8 == 0 && (dbias.is_summed || !dbias.is_fp32);
}

bool suits_sm90(const BackwardParams& params) {
  const TensorExtent queries = query_extent(params.shape, params.sequences);
  const TensorExtent keys = key_extent(params.shape, params.sequences);
  return params.score.softmax_scale >= 0.0f && tma_can_move(params.q, queries) &&
         tma_can_move(params.dout, queries) && tma_can_move(params.k, keys) &&
         tma_can_move(params.v, keys) && tma_can_move(params.dk, keys) &&
         tma_can_move(params.dv, keys) && tma_can_load_bias(params.score.bias, params.shape) &&
         can_write_dbias(params);
}

// Query tiles of one head, over all sequences. Also keeps every size below within 64 bits.
int count_query_tiles(const AttentionShape& shape, int block_m, bool is_packed) {
  const int per_sequence = checked_tiles(shape.seqlen_q, 1, block_m);
  const std::int64_t tiles = is_packed ? most_packed_tiles(shape, per_sequence, shape.seqlen_q)
                                       : std::int64_t{per_sequence} * shape.batch_size;
  if (tiles > max_query_rows / block_m / shape.num_heads_q) {
    throw_error("query rows of all sequences (rounded up to ", block_m,
                ") times num_heads_q must be at most ", max_query_rows, ", got ", tiles * block_m,
                " * ", shape.num_heads_q);
  }
  return static_cast<int>(tiles);
}

// What a section of heads holds at least: so many tiles, and as many heads as fill a part of L2.
struct LeastSection {
  std::int64_t tiles;
  int parts_of_l2;
};

LeastSection least_section(const BackwardParams& params, const BackwardConfig& config, bool is_even,
                           int tiles_per_head, const DeviceInfo& device) {
  const std::int64_t at_a_time = device.num_sms / config.ctas_per_tile;  // tiles
  // One CTA has an SM to itself, and two tiles for each, or each pair, even out a causal grid.
  const LeastSection usual{.tiles = is_even ? 0 : 2 * at_a_time, .parts_of_l2 = 2};
  if (config.family != KernelFamily::sm90) return usual;
  // Key tiles of a head that wait for one another are better off with few beside them: under a mask
  // eight or so of a head at a time.
  if (params.deterministic) {
    const std::int64_t tiles_of_heads = is_even ? 0 : at_a_time / 8 * tiles_per_head;
    return {.tiles = std::max(2 * at_a_time, tiles_of_heads), .parts_of_l2 = 2};
  }
  // What neighbouring heads have of a row lies side by side in memory, and short sequences take
  // longer if it is read and written in small parts. Beside lists nobody has tried how small.
  if (params.sequences.cu_seqlens_q != nullptr) {
    constexpr int bytes_of_row = 512;
    const int bytes_of_head = sizeof(std::uint16_t) * params.shape.head_dim;
    const int heads =
        params.sparsity.lists.data != nullptr ? 1 : ceil_div(bytes_of_row, bytes_of_head);
    return {.tiles = std::max(2 * at_a_time, std::int64_t{heads} * tiles_per_head),
            .parts_of_l2 = 16};
  }
  // Of lists two heads at a time: with one, a mask of documents takes 3 % longer, with four, what
  // random lists add to leaves L2.
  if (params.sparsity.lists.data != nullptr)
    return {.tiles = 2 * std::int64_t{tiles_per_head}, .parts_of_l2 = 4};
  // CTAs that draw their tiles come out even with fewer of them, and what they read and add to
  // stays in L2. Those of equal length come out even anyhow.
  return is_even ? LeastSection{.tiles = 0, .parts_of_l2 = 8}
                 : LeastSection{.tiles = 3 * at_a_time / 4, .parts_of_l2 = 4};
}

// How many CTAs share the query heads of one key head. As few as give every SM two CTAs: each split
// costs an fp32 partial of dK and dV, and all partials together stay within the size of dQ in fp32,
// which most calls need as well.
int choose_dkdv_splits(const AttentionShape& shape, const BackwardConfig& config,
                       std::int64_t key_tiles, const DeviceInfo& device) {
  const std::int64_t ctas = key_tiles * shape.num_heads_k * config.ctas_per_tile;
  const std::int64_t wanted = 2 * std::int64_t{device.num_sms};
  if (ctas == 0 || config.is_wide) return 1;

  const std::int64_t group = shape.num_heads_q / shape.num_heads_k;
  const std::int64_t affordable = group * shape.seqlen_q / (2 * std::int64_t{shape.seqlen_k});
  const std::int64_t largest = std::min(group, affordable);
  std::int64_t splits = 1;
  for (std::int64_t candidate = 2; candidate <= largest && ctas * splits < wanted; ++candidate) {
    if (group % candidate == 0) splits = candidate;
  }
  return static_cast<int>(splits);
}

// Of sweeps, in which a CTA takes all key tiles of a head: then the sums of dQ need no order but
// its own, no zeros and no other kernel. What all CTAs go over again and again has to stay in L2,
// or there are so few key tiles that this costs less than those zeros and that kernel; and beyond
// some keys there is little to gain. In a fixed order bits must not depend on the number of heads,
// and so not on who takes their tiles.
constexpr int most_swept_keys = 1024;

bool may_sweep(const BackwardParams& params, const BackwardInstance& instance) {
  return instance.writes_dq && instance.config.ctas_per_tile == 1 && !instance.config.is_wide &&
         !params.deterministic &&
         params.sparsity.lists.data == nullptr;
}

// Rows of queries, of all heads of a tile, with their sums, that every CTA can have in L2.
std::int64_t rows_in_l2(std::int64_t bytes_per_row, const DeviceInfo& device) {
  return 3 * device.l2_bytes / (4 * bytes_per_row * device.num_sms);
}

// Rows of queries and of keys with so few key tiles. Under a mask a later tile sees fewer queries.
int few_rows(const BackwardConfig& config, const Window& window) {
  return (window.is_full() ? 2 : 4) * config.block_n;
}

// Whether heads of known and equal lengths are swept, which have to come out even.
bool pays_to_sweep(const BackwardParams& params, const Window& window, const TileSchedule& schedule,
                   const BackwardConfig& config, std::int64_t bytes_per_row,
                   const DeviceInfo& device) {
  const AttentionShape& shape = params.shape;
  const SequenceParams& sequences = params.sequences;
  if (sequences.cu_seqlens_q != nullptr || sequences.seqused_q != nullptr ||
      sequences.seqused_k != nullptr || sequences.leftpad_k != nullptr)
    return false;
  if (schedule.num_tiles < 2 || schedule.num_batch_heads == 0 || shape.seqlen_k > most_swept_keys)
    return false;
  const std::int64_t rounds = ceil_div<std::int64_t>(schedule.num_batch_heads, device.num_sms);
  const bool is_even = 10 * std::int64_t{schedule.num_batch_heads} >= 9 * rounds * device.num_sms;
  return is_even && (shape.seqlen_q <= rows_in_l2(bytes_per_row, device) ||
                     std::max(shape.seqlen_q, shape.seqlen_k) <= few_rows(config, window));
}

// Packed sequences of at most so many rows are swept; 0: none are. The longest have to be short
// beside what a CTA has to do. Lengths are not known here, but of equal ones, whose queries and
// keys are as many, all together have the least to do; rows of nobody count as if they had some.
int choose_swept_rows(const BackwardParams& params, const Window& window,
                      const TileSchedule& schedule, const BackwardConfig& config,
                      std::int64_t bytes_per_row, const DeviceInfo& device) {
  constexpr double least_sequences = 3.0;  // of the longest, that a CTA has to do
  const AttentionShape& shape = params.shape;
  if (params.sequences.cu_seqlens_q == nullptr || shape.batch_size == 0) return 0;
  const double pairs = static_cast<double>(shape.seqlen_q) * shape.seqlen_k / shape.batch_size;
  const double even = std::sqrt(pairs * schedule.num_heads / (least_sequences * device.num_sms));
  const std::int64_t most = std::min<std::int64_t>(
      most_swept_keys,
      std::max<std::int64_t>(rows_in_l2(bytes_per_row, device), few_rows(config, window)));
  const auto rows = static_cast<int>(std::min(static_cast<double>(most), even));
  return rows > config.block_n ? rows : 0;
}

// The few warps that finish dq beside the products keep up where a query sees enough keys; below, a
// kernel that follows is faster.
DqPath choose_dq_path(const BackwardParams& params, const Window& window,
                      const BackwardInstance& instance, bool sweeps) {
  const BackwardConfig& config = instance.config;
  if (!instance.writes_dq) return config.finishes_dq ? DqPath::finished : DqPath::converted;
  if (params.shape.seqlen_k <= config.block_n || config.is_wide) return DqPath::direct;
  if (sweeps || params.deterministic) return DqPath::ordered;
  const int enough = window.is_full() ? config.finish_keys_full : config.finish_keys_windowed;
  const bool finishes =
      config.finishes_dq && average_keys(params.shape, params.sequences, window) >= enough;
  return finishes ? DqPath::finished : DqPath::converted;
}

// Of a part's counters one for each warpgroup that holds dK and dV.
int part_counters(const BackwardConfig& config) {
  return config.ctas_per_tile * config.num_warps / 4;
}

// dK and dV of a tile.
std::int64_t part_sums(const BackwardConfig& config) {
  return std::int64_t{config.block_n} * (config.head_dim + config.head_dim_v);
}

// The last tiles of a grid of equal ones, where they leave most CTAs idle: how many, and into how
// many parts they are cut so that as little time as possible goes by until all have ended.
SharedTiles last_tiles(std::int64_t tiles, int at_a_time, int steps, int q_tiles) {
  // In steps: what a part takes besides its own, and what the last one takes for the sums of each.
  constexpr double part_cost = 3.0;
  constexpr double sum_cost = 0.6;
  const std::int64_t left = tiles % at_a_time;
  if (left == 0) return {};
  // Four, or as many as come to a round.
  const std::int64_t most_parts =
      std::min<std::int64_t>({std::max<std::int64_t>(4, at_a_time / left), 8, q_tiles});
  const auto cost = [&](int parts) {
    const auto rounds = static_cast<double>(ceil_div<std::int64_t>(left * parts, at_a_time));
    return rounds * (static_cast<double>(ceil_div(steps, parts)) + part_cost) + sum_cost * parts;
  };
  SharedTiles shared{.first = static_cast<int>(tiles - left), .count = static_cast<int>(left)};
  for (int parts = 2; parts <= most_parts; ++parts) {
    if (cost(parts) < cost(shared.parts)) shared.parts = parts;
  }
  return shared;
}

// Tiles that CTAs share: of lists those of the first ranks, which may be long; else the last ones,
// where no order of dQ's additions or of dK's steps is promised. Of packed sequences the host does
// not know them.
SharedTiles choose_shared_tiles(const BackwardParams& params, const BackwardPlan& plan,
                                bool is_even) {
  constexpr int most_list_parts = 4;
  constexpr std::int64_t always_affordable = 1 << 23;  // sums, 32 MiB
  const BackwardConfig& config = plan.instance->config;
  const TileSchedule& schedule = plan.schedule;
  if (!config.shares_tiles || params.sequences.cu_seqlens_q != nullptr ||
      schedule.grid_size() == 0 || plan.dq_path == DqPath::ordered || params.deterministic)
    return {};
  const int q_tiles = checked_tiles(params.shape.seqlen_q, 1, config.block_m);
  const int steps = params.shape.num_heads_q / schedule.num_heads * q_tiles;
  SharedTiles shared;
  if (params.sparsity.lists.data != nullptr) {
    shared = {.first = 0,
              .count = ranks_in_parts(schedule) * schedule.num_batch_heads,
              .parts = parts_of_steps(steps, least_part_steps, most_list_parts)};
  } else if (is_even && q_tiles > 0) {
    shared = last_tiles(schedule.grid_size(), plan.num_ctas / config.ctas_per_tile, steps, q_tiles);
  }
  // The preprocess kernel has a query row to zero each counter, and sums take no more memory than
  // those of dQ, unless they are few.
  const std::int64_t rows = std::int64_t{params.shape.num_heads_q} * plan.q_tiles * config.block_m;
  const std::int64_t affordable = std::max(rows * config.head_dim, always_affordable);
  const bool fits = shared.places() * part_counters(config) <= rows &&
                    shared.places() * part_sums(config) <= affordable &&
                    schedule.grid_size() + shared.more_tickets() <= max_grid;
  return fits && shared.parts > 1 ? shared : SharedTiles{};
}

}  // namespace

BackwardPlan plan_backward(const BackwardParams& params, const DeviceInfo& device,
                           std::span<const BackwardInstance* const> instances) {
  const AttentionShape& shape = params.shape;
  check_backward(params);
  const Window window = normalize_window(params.window, shape, params.sequences);
  const BackwardInstance& instance =
      select_instance(instances,
                      {.dtype = params.dtype,
                       .mask = window.is_full() ? MaskKind::full : MaskKind::windowed,
                       .head_dim = shape.head_dim,
                       .head_dim_v = shape.head_dim_v,
                       .features = features_of(params),
                       .keys_per_query = average_keys(params.shape, params.sequences, window),
                       .fp32_results = params.fp32_results,
                       .suits_sm90 = suits_sm90(params)},
                      device);
  const BackwardConfig& config = instance.config;
  const bool is_packed = params.sequences.cu_seqlens_q != nullptr;
  // A right bound hides most queries from the last keys, so the long tiles come first as they are;
  // a left bound alone does the opposite.
  const bool tiles_descend = window.left != Window::unbounded && window.right == Window::unbounded;

  BackwardPlan plan;
  plan.instance = &instance;
  const int ctas_per_tile = config.ctas_per_tile;
  if (config.family == KernelFamily::sm90)
    plan.num_ctas = std::max(1, device.num_sms / ctas_per_tile) * ctas_per_tile;
  plan.q_tiles = count_query_tiles(shape, config.block_m, is_packed);
  plan.tiles_descend = tiles_descend;
  WorkspaceLayout workspace;
  int key_tiles = checked_tiles(shape.seqlen_k, 1, config.block_n);
  if (is_packed) {
    key_tiles = most_packed_tiles(shape, key_tiles, shape.seqlen_k);
    plan.table = {.used = true,
                  .max_tiles = key_tiles,
                  .tile_rows = config.block_n,
                  .tiles_descend = tiles_descend,
                  .q_tile_rows = config.block_m,
                  .max_q_tiles = plan.q_tiles};
    plan.table.offset = workspace.add_bytes(table_bytes(shape.batch_size, plan.table));
  }
  const int grid_batches = is_packed ? 1 : shape.batch_size;
  // Partial sums cover whole sequences; rows of left padding belong to none.
  plan.dkdv_splits =
      params.sequences.leftpad_k != nullptr
          ? 1
          : choose_dkdv_splits(shape, config, grid_batches * std::int64_t{key_tiles}, device);
  const bool is_even = window.is_full() && !is_packed && params.sparsity.lists.data == nullptr;
  const LeastSection section = least_section(params, config, is_even, key_tiles, device);
  const std::int64_t bytes_per_query =
      sizeof(std::uint16_t) * (shape.head_dim + shape.head_dim_v) +  // Q and dO
      sizeof(float) * config.head_dim;                               // the sum of dQ
  const std::int64_t group = shape.num_heads_q / shape.num_heads_k;
  // Those of a sequence stay in L2, not all of a packed call's (sm80: not timed).
  const int queries_at_once =
      config.family == KernelFamily::sm90 ? most_queries(shape, params.sequences) : shape.seqlen_q;
  plan.schedule = make_schedule({.num_tiles = key_tiles,
                                 .batch_size = grid_batches,
                                 .num_heads = shape.num_heads_k * plan.dkdv_splits,
                                 .heads_per_group = plan.dkdv_splits,
                                 .bytes_per_group = group * bytes_per_query * queries_at_once,
                                 .min_tiles = section.tiles,
                                 .longest_first = tiles_descend && !is_packed,
                                 .parts_of_l2 = section.parts_of_l2},
                                device);
  const std::int64_t heads_per_tile = group / plan.dkdv_splits;
  if (may_sweep(params, instance)) {
    const std::int64_t bytes_per_row = heads_per_tile * bytes_per_query;
    plan.sweeps = pays_to_sweep(params, window, plan.schedule, config, bytes_per_row, device);
    plan.table.swept_rows =
        choose_swept_rows(params, window, plan.schedule, config, bytes_per_row, device);
  }
  if (plan.sweeps) {
    plan.schedule.heads_per_section = 1;
    plan.num_ctas = std::min(plan.num_ctas, plan.schedule.num_batch_heads);
  }

  const std::int64_t query_tiles = std::int64_t{shape.num_heads_q} * plan.q_tiles;
  plan.lse_log2_offset = workspace.add_floats(query_tiles * config.block_m);
  plan.softmax_d_offset = workspace.add_floats(query_tiles * config.block_m);
  const std::int64_t summed_tiles =
      plan.sweeps
          ? plan.num_ctas * heads_per_tile * checked_tiles(shape.seqlen_q, 1, config.block_m)
          : query_tiles;
  const std::int64_t sums = summed_tiles * config.block_m * config.head_dim;
  plan.dq_path = choose_dq_path(params, window, instance, plan.sweeps);
  if (plan.dq_path != DqPath::direct) plan.dq_accum_offset = workspace.add_floats(sums);
  plan.tickets_offset = workspace.add_bytes(2 * sizeof(int));
  plan.takes_turns = params.deterministic && plan.dq_path != DqPath::direct;
  plan.counts_additions = plan.takes_turns || plan.dq_path == DqPath::finished;
  if (plan.counts_additions) plan.additions_offset = workspace.add_floats(query_tiles);
  if (plan.dq_path == DqPath::finished) {
    plan.given_back_offset = workspace.add_bytes(sizeof(int) * finishing_warps * plan.num_ctas);
  }
  if (params.dsink != nullptr) {
    plan.sink_shares = plan.q_tiles * preprocess_blocks_per_tile(shape, config.block_m);
    plan.sink_shares_offset =
        workspace.add_floats(std::int64_t{shape.num_heads_q} * plan.sink_shares);
  }
  plan.shared_tiles = choose_shared_tiles(params, plan, is_even);
  if (plan.shared_tiles.parts > 1) {
    const std::int64_t places = plan.shared_tiles.places();
    plan.part_sums_offset = workspace.add_floats(places * part_sums(config));
    plan.part_counters = static_cast<int>(places * part_counters(config));
    plan.part_counters_offset = workspace.add_floats(plan.part_counters);
  }
  if (plan.dkdv_splits > 1) {
    const std::int64_t rows = plan.dkdv_splits * key_rows(params) * shape.num_heads_k;
    plan.dk_partial_offset = workspace.add_floats(rows * config.head_dim);
    plan.dv_partial_offset = workspace.add_floats(rows * config.head_dim_v);
  }
  plan.workspace_bytes = workspace.bytes();
  return plan;
}

BackwardPlan plan_backward(const BackwardParams& params, const DeviceInfo& device) {
  return plan_backward(params, device, backward_instances());
}

}  // namespace flash_attn_cuda
