// What planning a forward and planning a backward have in common.
#pragma once

#include <cstdint>

#include "flash_attn/api.h"

namespace flash_attn_cuda {

// Keeps seqlen_q + seqlen_k plus a few tiles within int, which is what index arithmetic in kernels
// uses.
inline constexpr int max_seqlen = 1'000'000'000;

inline constexpr std::int64_t max_grid =
    2'147'483'647;  // blocks along x, and the range of blockIdx.x as int

template <class Integer>
constexpr Integer ceil_div(Integer dividend, Integer divisor) {
  return dividend / divisor + (dividend % divisor != 0);
}

// Throws Error naming the field, the rule and the value unless kernels can compute this call.
void check_call(const AttentionShape& shape, float softmax_scale);

// The same of a call whose sequences are parts of longer ones; nothing for others.
void check_origin(const SequenceParams& sequences, const PagedKvParams& paged,
                  const SparsityParams& sparsity, const AttentionShape& shape);

// Tiles of `tile_rows` that `rows` * rows_per_row rows fill. Throws Error where kernels could not
// number the rows.
int checked_tiles(int rows, int rows_per_row, int tile_rows);

// What checked_tiles becomes when the rows are shared out to batch_size sequences, in the worst
// case: each of them, and the rows that belong to none, ends on a tile of its own.
int most_packed_tiles(const AttentionShape& shape, int tiles, int rows);

// Queries, or keys, of the longest sequence, as far as the host knows.
int most_queries(const AttentionShape& shape, const SequenceParams& sequences);
int most_keys(const AttentionShape& shape, const SequenceParams& sequences);

// Bytes of a packed call's table (shared/sequence/sequence.h).
std::size_t table_bytes(int batch_size, const SequenceTablePlan& plan);

// Throws Error when a grid of `ctas` for each of `splits` is larger than CUDA's.
void check_grid(std::int64_t ctas, int splits);

struct ScheduleRequest {
  int num_tiles;
  int batch_size;
  int num_heads;
  int heads_per_group;           // neighbouring heads that read the same data
  std::int64_t bytes_per_group;  // of that data
  std::int64_t min_tiles;        // in a section, as far as there are as many
  bool longest_first;
  int parts_of_l2 = 2;  // of which a section fills one, or more where min_tiles are
};

// A section is at least as many whole groups as fit in its part of L2, which leaves the rest to
// what streams past, and at least one. Tiles of unequal length need min_tiles in a section: its
// short tiles then fill the gaps that its long ones leave. Sections are equally large where they
// can be, so that the grid does not end on a small one that starts with long tiles. Throws Error
// when the grid is larger than CUDA's.
TileSchedule make_schedule(const ScheduleRequest& request, const DeviceInfo& device);

// The same for num_ctas CTAs that stay and draw tiles of unequal length: sections of about a tile
// for each CTA, so that neighbours ask for what the heads read at the same time. The last one has
// two: nothing comes after it to fill the gaps that its long tiles leave.
void take_rounds(TileSchedule& schedule, int heads_per_group, int num_ctas);

// Where the last tile of each head is a low one, and the grid is no whole rounds of num_ctas: the
// low tiles of the last heads, at most most_heads, end it. As rounds go forth and back, who takes
// part in the last round then has a low one in it and another in the round before.
void end_with_low_tiles(TileSchedule& schedule, int heads_per_group, int num_ctas,
                        std::int64_t most_heads);

}  // namespace flash_attn_cuda
