#include "host/plan_steps.h"

#include <algorithm>
#include <cmath>

#include "host/error.h"
#include "host/normalize_window.h"
#include "shared/sequence/sequence.h"

namespace flash_attn_cuda {
namespace {

void check_range(const char* field, int value, int low, int high) {
  if (value < low || value > high) {
    throw_error(field, " must be from ", low, " to ", high, ", got ", value);
  }
}

// Groups in a section, about `wanted`, so that no small section is left over at the end: a divisor
// of all groups where one is near, else the sizes that rounding leaves closest to equal.
std::int64_t groups_per_section(std::int64_t groups, std::int64_t wanted) {
  constexpr std::int64_t most_tried = 64;
  if (wanted >= groups) return groups;
  for (std::int64_t size = wanted; size < std::min(2 * wanted, wanted + most_tried); ++size) {
    if (groups % size == 0) return size;
  }
  return ceil_div(groups, ceil_div(groups, wanted));
}

}  // namespace

void check_call(const AttentionShape& shape, float softmax_scale) {
  check_range("batch_size", shape.batch_size, 0, max_grid);
  check_range("seqlen_q", shape.seqlen_q, 0, max_seqlen);
  check_range("seqlen_k", shape.seqlen_k, 0, max_seqlen);
  check_range("num_heads_q", shape.num_heads_q, 1, max_grid);
  check_range("num_heads_k", shape.num_heads_k, 1, max_grid);
  if (shape.num_heads_q % shape.num_heads_k != 0) {
    throw_error("num_heads_k must divide num_heads_q (", shape.num_heads_q, "), got ",
                shape.num_heads_k);
  }
  check_range("head_dim", shape.head_dim, 1, max_grid);
  check_range("head_dim_v", shape.head_dim_v, 1, max_grid);
  if (!std::isfinite(softmax_scale)) {
    throw_error("softmax_scale must be finite in fp32, got ", softmax_scale);
  }
}

void check_origin(const SequenceParams& sequences, const PagedKvParams& paged,
                  const SparsityParams& sparsity, const AttentionShape& shape) {
  if (sequences.origin == nullptr) return;
  if (sequences.cu_seqlens_q == nullptr || sequences.cu_seqlens_k == nullptr)
    throw_error("cu_seqlens_q and cu_seqlens_k must be given with origin, got null");
  if (paged.block_table != nullptr || sparsity.lists.data != nullptr)
    throw_error("origin must be null where there are pages or lists, got a pointer");
  check_range("seqlen_q with origin", shape.seqlen_q, 0, max_seqlen_with_origin);
  check_range("seqlen_k with origin", shape.seqlen_k, 0, max_seqlen_with_origin);
}

int checked_tiles(int rows, int rows_per_row, int tile_rows) {
  const std::int64_t all_rows = std::int64_t{rows} * rows_per_row;
  const std::int64_t most = max_grid - tile_rows;  // kernels number the rows of whole tiles
  if (all_rows > most) {
    throw_error("rows of queries and of the heads that share a key head must be at most ", most,
                ", got ", rows, " * ", rows_per_row);
  }
  return static_cast<int>(ceil_div(all_rows, std::int64_t{tile_rows}));
}

int most_packed_tiles(const AttentionShape& shape, int tiles, int rows) {
  const std::int64_t sequences = std::int64_t{shape.batch_size} + gap_sequences;
  return static_cast<int>(tiles + std::min<std::int64_t>(sequences, rows));
}

int most_queries(const AttentionShape& shape, const SequenceParams& sequences) {
  const bool is_known = sequences.cu_seqlens_q != nullptr && sequences.max_seqlen_q > 0;
  return is_known ? std::min(sequences.max_seqlen_q, shape.seqlen_q) : shape.seqlen_q;
}

int most_keys(const AttentionShape& shape, const SequenceParams& sequences) {
  const int bound = sequences.max_seqlen_k;
  return bound > 0 ? std::min(bound, shape.seqlen_k) : shape.seqlen_k;
}

int average_keys(const AttentionShape& shape, const SequenceParams& sequences,
                 const Window& window) {
  int seqlen_q = shape.seqlen_q;
  int seqlen_k = shape.seqlen_k;
  if (sequences.cu_seqlens_q != nullptr) seqlen_q /= std::max(1, shape.batch_size);
  if (sequences.cu_seqlens_k != nullptr) seqlen_k /= std::max(1, shape.batch_size);
  constexpr int samples = 16;
  const Band band = band_from_queries(window, seqlen_k - seqlen_q);
  std::int64_t keys = 0;
  for (int sample = 0; sample < samples; ++sample) {
    const auto query = static_cast<int>((2 * sample + 1) * std::int64_t{seqlen_q} / (2 * samples));
    const Reach reach = reach_of(band, query, query, seqlen_k);
    if (!reach.empty()) keys += reach.end - reach.begin;
  }
  return static_cast<int>(keys / samples);
}

void lay_out_table(SequenceTablePlan& table, int batch_size, int max_tiles, int max_q_tiles,
                   WorkspaceLayout& workspace) {
  table.counts = workspace.add<int>(2);
  table.sequences = workspace.add<Sequence>(std::int64_t{batch_size} + gap_sequences);
  table.tiles = workspace.add<TileEntry>(max_tiles, alignof(TileEntry));
  table.q_tiles = workspace.add<TileEntry>(max_q_tiles, alignof(TileEntry));
}

void check_grid(std::int64_t ctas, int splits) {
  if (ctas * splits > max_grid) {
    throw_error("tiles * heads * num_splits must be at most ", max_grid, ", got ", ctas, " * ",
                splits);
  }
}

TileSchedule make_schedule(const ScheduleRequest& request, const DeviceInfo& device) {
  const std::int64_t batch_heads = std::int64_t{request.batch_size} * request.num_heads;
  if (batch_heads > max_grid || batch_heads * request.num_tiles > max_grid) {
    throw_error("batch_size * heads * tiles must be at most ", max_grid, ", got ",
                request.batch_size, " * ", request.num_heads, " * ", request.num_tiles);
  }
  const std::int64_t groups = std::max<std::int64_t>(1, batch_heads / request.heads_per_group);
  const std::int64_t tiles_per_group =
      std::max<std::int64_t>(1, std::int64_t{request.heads_per_group} * request.num_tiles);
  const std::int64_t fitting =
      device.l2_bytes / request.parts_of_l2 / std::max<std::int64_t>(1, request.bytes_per_group);
  const std::int64_t wanted =
      std::max({std::int64_t{1}, fitting, ceil_div(request.min_tiles, tiles_per_group)});
  return {.num_tiles = request.num_tiles,
          .num_heads = request.num_heads,
          .num_batch_heads = static_cast<int>(batch_heads),
          .heads_per_section =
              static_cast<int>(groups_per_section(groups, wanted) * request.heads_per_group),
          .longest_first = request.longest_first};
}

void take_rounds(TileSchedule& schedule, int heads_per_group, int num_ctas) {
  const std::int64_t group_tiles =
      std::max<std::int64_t>(1, std::int64_t{schedule.num_tiles} * heads_per_group);
  const auto heads_of = [&](int rounds) {
    const std::int64_t heads =
        ceil_div(std::int64_t{rounds} * num_ctas, group_tiles) * heads_per_group;
    return static_cast<int>(std::min<std::int64_t>(heads, std::max(1, schedule.num_batch_heads)));
  };
  schedule.heads_per_section = heads_of(1);
  schedule.least_last_heads = heads_of(2);
}

void end_with_low_tiles(TileSchedule& schedule, int heads_per_group, int num_ctas,
                        std::int64_t most_heads) {
  const std::int64_t in_last_round = schedule.grid_size() % num_ctas;
  const std::int64_t heads =
      ceil_div(2 * in_last_round, std::int64_t{heads_per_group}) * heads_per_group;
  if (heads > 0 && heads <= std::min<std::int64_t>(most_heads, schedule.num_batch_heads))
    schedule.least_last_heads = static_cast<int>(heads);
}

}  // namespace flash_attn_cuda
