#include "host/plan_steps.h"

#include <algorithm>
#include <cmath>

#include "host/error.h"
#include "shared/sequence.h"

namespace flash_attn_cuda {
namespace {

void check_range(const char* field, int value, int low, int high) {
  if (value < low || value > high) {
    throw_error(field, " must be from ", low, " to ", high, ", got ", value);
  }
}

// Groups in a section, about `wanted`, so that no small section is left over at the end: a divisor
// of all groups where one is near, else the sizes that rounding leaves closest to equal.
std::int64_t section_size(std::int64_t groups, std::int64_t wanted) {
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

int checked_tiles(int rows, int rows_per_row, int tile_rows) {
  const std::int64_t tiles = ceil_div(std::int64_t{rows} * rows_per_row, std::int64_t{tile_rows});
  if (tiles > max_grid) {
    throw_error("tiles of ", tile_rows, " rows must be at most ", max_grid, ", got ", tiles);
  }
  return static_cast<int>(tiles);
}

int most_packed_tiles(const AttentionShape& shape, int tiles, int rows) {
  const std::int64_t sequences = std::int64_t{shape.batch_size} + gap_sequences;
  const std::int64_t most = tiles + std::min<std::int64_t>(sequences, rows);
  if (most > max_grid) {
    throw_error("tiles of all sequences must be at most ", max_grid, ", got up to ", most);
  }
  return static_cast<int>(most);
}

std::size_t table_bytes(int batch_size, const SequenceTablePlan& plan) {
  return SequenceTable::bytes(batch_size, plan);
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
      device.l2_bytes / 2 / std::max<std::int64_t>(1, request.bytes_per_group);
  const std::int64_t wanted =
      std::max({std::int64_t{1}, fitting, ceil_div(request.min_tiles, tiles_per_group)});
  return {
      .num_tiles = request.num_tiles,
      .num_heads = request.num_heads,
      .num_batch_heads = static_cast<int>(batch_heads),
      .heads_per_section = static_cast<int>(section_size(groups, wanted) * request.heads_per_group),
      .longest_first = request.longest_first};
}

}  // namespace flash_attn_cuda
