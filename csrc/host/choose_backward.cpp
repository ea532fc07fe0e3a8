#include "host/choose_backward.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "host/error.h"
#include "host/plan_steps.h"
#include "shared/mask/block_lists.h"
#include "shared/schedule/tile_parts.h"

namespace flash_attn_cuda {
namespace {

// Most keys of a sweep, in which a CTA takes all key tiles of a head: then the sums of dQ need no
// order but its own, no zeros and no other kernel. What all CTAs go over again and again has to
// stay in L2, or there are so few key tiles that this costs less than those zeros and that kernel;
// and beyond some keys there is little to gain. In a fixed order bits must not depend on the number
// of heads, and so not on which CTA takes their tiles.
constexpr int most_swept_keys = 1024;

bool may_sweep(const BackwardParams& params, const BackwardInstance& instance) {
  return instance.writes_dq && instance.config.ctas_per_tile == 1 && !instance.config.is_wide &&
         !params.deterministic && params.sparsity.lists.data == nullptr;
}

// Rows of queries, of all heads of a tile, with their sums, that every CTA can have in L2.
std::int64_t rows_in_l2(std::int64_t bytes_per_row, const DeviceInfo& device) {
  return 3 * device.l2_bytes / (4 * bytes_per_row * device.num_sms);
}

// Rows of queries and of keys with so few key tiles. Under a mask a later tile sees fewer queries.
int few_rows(const BackwardParams& params, const BackwardConfig& config) {
  return (params.window.is_full() ? 2 : 4) * config.block_n;
}

// Whether heads of known and equal lengths are swept, which have to come out even.
bool pays_to_sweep(const BackwardParams& params, const BackwardPlan& plan,
                   std::int64_t bytes_per_row, const DeviceInfo& device) {
  const AttentionShape& shape = params.shape;
  const SequenceParams& sequences = params.sequences;
  const TileSchedule& schedule = plan.schedule;
  if (is_packed(sequences) || sequences.seqused_q != nullptr || sequences.seqused_k != nullptr ||
      sequences.leftpad_k != nullptr)
    return false;
  if (schedule.num_tiles < 2 || schedule.num_batch_heads == 0 || shape.seqlen_k > most_swept_keys)
    return false;
  const std::int64_t rounds = ceil_div<std::int64_t>(schedule.num_batch_heads, device.num_sms);
  const bool is_even = 10 * std::int64_t{schedule.num_batch_heads} >= 9 * rounds * device.num_sms;
  return is_even &&
         (shape.seqlen_q <= rows_in_l2(bytes_per_row, device) ||
          std::max(shape.seqlen_q, shape.seqlen_k) <= few_rows(params, plan.instance->config));
}

// Packed sequences of at most so many rows are swept; 0: none are. The longest have to be short
// beside what a CTA has to do. Lengths are not known here, but of equal ones, whose queries and
// keys are as many, all together have the least to do; rows of no sequence count as if of one.
int choose_swept_rows(const BackwardParams& params, const BackwardPlan& plan,
                      std::int64_t bytes_per_row, const DeviceInfo& device) {
  constexpr double least_sequences = 3.0;  // of the longest, that a CTA has to do
  const AttentionShape& shape = params.shape;
  const BackwardConfig& config = plan.instance->config;
  if (!is_packed(params.sequences) || shape.batch_size == 0) return 0;
  const double pairs = static_cast<double>(shape.seqlen_q) * shape.seqlen_k / shape.batch_size;
  const double even =
      std::sqrt(pairs * plan.schedule.num_heads / (least_sequences * device.num_sms));
  const std::int64_t most = std::min<std::int64_t>(
      most_swept_keys,
      std::max<std::int64_t>(rows_in_l2(bytes_per_row, device), few_rows(params, config)));
  const auto rows = static_cast<int>(std::min(static_cast<double>(most), even));
  return rows > config.block_n ? rows : 0;
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

// Fewest query heads for a CTA of a group whose tiles are evened out by splits: fewer steps of a
// tile do not outweigh its fp32 partials (benchmarks/results/experiments.md).
std::int64_t least_heads_per_split(const BackwardParams& params) {
  constexpr int long_queries = 8192;
  constexpr int row_columns = 512, long_row_columns = 256;  // of q, of a split's heads
  constexpr int least_rows = 4096;                          // of q, of all its heads
  const AttentionShape& shape = params.shape;
  const int sequences = is_packed(params.sequences) ? std::max(1, shape.batch_size) : 1;
  const int seqlen_q = std::max(1, shape.seqlen_q / sequences);
  const int columns = seqlen_q < long_queries ? row_columns : long_row_columns;
  return std::max(ceil_div(columns, shape.head_dim), ceil_div(least_rows, seqlen_q));
}

}  // namespace

bool splits_even_out_tiles(const BackwardParams& params, const BackwardConfig& config) {
  const Window& window = params.window;
  return config.family == KernelFamily::sm90 && window.left == Window::unbounded &&
         window.right != Window::unbounded && !params.deterministic &&
         params.sparsity.lists.data == nullptr;
}

int choose_dkdv_splits(const BackwardParams& params, const BackwardConfig& config,
                       std::int64_t key_tiles, const DeviceInfo& device) {
  const AttentionShape& shape = params.shape;
  const std::int64_t ctas = key_tiles * shape.num_heads_k * config.ctas_per_tile;
  const std::int64_t wanted = 2 * std::int64_t{device.num_sms};
  if (ctas == 0 || config.is_wide || params.sequences.leftpad_k != nullptr ||
      params.listed.block > 0)
    return 1;

  const std::int64_t group = shape.heads_per_key_head();
  const std::int64_t affordable = group * shape.seqlen_q / (2 * std::int64_t{shape.seqlen_k});
  const std::int64_t largest = std::min(group, affordable);
  const std::int64_t evening =
      splits_even_out_tiles(params, config) ? group / least_heads_per_split(params) : 1;
  std::int64_t splits = 1;
  for (std::int64_t candidate = 2; candidate <= largest; ++candidate) {
    if (ctas * splits >= wanted && candidate > evening) break;
    if (group % candidate == 0) splits = candidate;
  }
  return static_cast<int>(splits);
}

int choose_entries(const BackwardParams& params, const BackwardConfig& config,
                   const DeviceInfo& device) {
  const ListedQueries& listed = params.listed;
  if (listed.block == 0) return 0;
  const auto heads =
      static_cast<int>(std::bit_ceil(static_cast<unsigned>(params.shape.heads_per_key_head())));
  if (heads > config.block_m)
    throw_error("heads_per_key_head must be at most ", config.block_m, " with key_lists, got ",
                params.shape.heads_per_key_head());
  // Beginning and ending a run takes about as long as two steps, and some CTAs for each SM come out
  // even.
  constexpr int least_steps = 4, most_steps = 64;
  constexpr std::int64_t ctas_per_sm = 16;
  const int queries = config.block_m / heads;  // of a step
  const std::int64_t steps =
      std::int64_t{ceil_div(listed.entries, queries)} * listed.tiles_of_block(config.block_n);
  const std::int64_t even = steps / (ctas_per_sm * device.num_sms);
  return queries * static_cast<int>(std::clamp<std::int64_t>(even, least_steps, most_steps));
}

void choose_sweeps(const BackwardParams& params, std::int64_t bytes_per_query,
                   const DeviceInfo& device, BackwardPlan& plan) {
  if (!may_sweep(params, *plan.instance)) return;
  TileSchedule& schedule = plan.schedule;
  const std::int64_t bytes_per_row =
      params.shape.num_heads_q / schedule.num_heads * bytes_per_query;
  plan.table.swept_rows = choose_swept_rows(params, plan, bytes_per_row, device);
  plan.sweeps = pays_to_sweep(params, plan, bytes_per_row, device);
  if (!plan.sweeps) return;
  schedule.heads_per_section = 1;
  plan.num_ctas = std::min(plan.num_ctas, schedule.num_batch_heads);
}

DqPath choose_dq_path(const BackwardParams& params, const BackwardPlan& plan) {
  const Window& window = params.window;
  const BackwardConfig& config = plan.instance->config;
  if (!plan.instance->writes_dq) return config.finishes_dq ? DqPath::finished : DqPath::converted;
  if (params.shape.seqlen_k <= config.block_n || config.is_wide) return DqPath::direct;
  if (plan.sweeps || params.deterministic) return DqPath::ordered;
  const int enough = window.is_full() ? config.finish_keys_full : config.finish_keys_windowed;
  const bool finishes =
      config.finishes_dq && average_keys(params.shape, params.sequences, window) >= enough;
  return finishes ? DqPath::finished : DqPath::converted;
}

int part_counters(const BackwardConfig& config) {
  return config.ctas_per_tile * config.num_warps / 4;
}

std::int64_t part_sums(const BackwardConfig& config) {
  return std::int64_t{config.block_n} * (config.head_dim + config.head_dim_v);
}

SharedTiles choose_shared_tiles(const BackwardParams& params, const BackwardPlan& plan) {
  constexpr int most_list_parts = 4;
  constexpr std::int64_t always_affordable = 1 << 23;  // sums, 32 MiB
  const BackwardConfig& config = plan.instance->config;
  const TileSchedule& schedule = plan.schedule;
  if (!config.shares_tiles || is_packed(params.sequences) || schedule.grid_size() == 0 ||
      plan.dq_path == DqPath::ordered || params.deterministic)
    return {};
  const int q_tiles = plan.q_tiles_per_sequence;
  const int steps = params.shape.num_heads_q / schedule.num_heads * q_tiles;
  SharedTiles shared;
  if (params.sparsity.lists.data != nullptr) {
    shared = {.first = 0,
              .count = ranks_in_parts(schedule) * schedule.num_batch_heads,
              .parts = parts_of_steps(steps, least_part_steps, most_list_parts)};
  } else if (has_even_tiles(params) && q_tiles > 0) {
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

}  // namespace flash_attn_cuda
