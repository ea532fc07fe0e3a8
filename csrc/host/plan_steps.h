// What planning a forward and planning a backward have in common.
#pragma once

#include <cstdint>

#include "host/select_instance.h"
#include "host/tensor_map.h"
#include "host/workspace_layout.h"

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

// check_call() for a call whose sequences are shards of longer ones; nothing for others.
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

// Keys that a query sees, on average over some of a sequence or, of packed ones, over some of one
// of average length: what a row of the kernel table for long calls is chosen by.
int average_keys(const AttentionShape& shape, const SequenceParams& sequences,
                 const Window& window);

inline bool is_packed(const SequenceParams& sequences) { return sequences.cu_seqlens_q != nullptr; }

// Whether all tiles take as long, in either pass; `params` have a normalised window.
template <class Params>
bool has_even_tiles(const Params& params) {
  return params.window.is_full() && !is_packed(params.sequences) &&
         params.sparsity.lists.data == nullptr;
}

// What a call of either pass needs of a kernel; `params` have a normalised window. loads_keys: sm90
// kernels load K and V by TMA.
template <class Params>
KernelRequest common_request(const Params& params, const TensorExtents& extents,
                             bool loads_keys = true) {
  const ScoreParams& score = params.score;
  FeatureSet features = score.features();
  if (params.dropout.threshold > 0) features |= feature::dropout;
  if (params.sparsity.lists.data != nullptr) features |= feature::block_sparse;
  if (params.tangents.is_given) features |= feature::tangent;
  return {.dtype = params.dtype,
          .mask = params.window.is_full() ? MaskKind::full : MaskKind::windowed,
          .head_dim = params.shape.head_dim,
          .head_dim_v = params.shape.head_dim_v,
          .features = features,
          .keys_per_query = average_keys(params.shape, params.sequences, params.window),
          .fp32_results = params.fp32_results,
          .suits_sm90 = score.softmax_scale >= 0.0f &&
                        tma_can_move(params.q, params.dtype, extents.q) &&
                        (!loads_keys || (tma_can_move(params.k, params.dtype, extents.k) &&
                                         tma_can_move(params.v, params.dtype, extents.v))) &&
                        tma_can_load_bias(score.bias, params.dtype, params.shape)};
}

// The buffers of a packed call's table (shared/sequence/sequence.h), one after the other.
void lay_out_table(SequenceTablePlan& table, int batch_size, int max_tiles, int max_q_tiles,
                   WorkspaceLayout& workspace);

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

// A section is at least as many whole groups as fit in its share of L2, which leaves the rest to
// what streams past, and at least one. Tiles of unequal length need min_tiles in a section: its
// short tiles then fill the gaps that its long ones leave. Sections are equally large where they
// can be, so that the grid does not end on a small one that starts with long tiles. Throws Error
// when the grid is larger than CUDA's.
TileSchedule make_schedule(const ScheduleRequest& request, const DeviceInfo& device);

// Sections for num_ctas CTAs that stay and take tiles of unequal length by ticket: of about a tile
// for each CTA, so that neighbours ask for what the heads read at the same time. The last one has
// two: nothing comes after it to fill the gaps that its long tiles leave.
void take_rounds(TileSchedule& schedule, int heads_per_group, int num_ctas);

// Where the last tile of each head is a low one, and the grid is no whole rounds of num_ctas: the
// low tiles of the last heads, at most most_heads, end it. As rounds go forth and back, a CTA with
// a tile in the last round then has a low one in it and another in the round before.
void end_with_low_tiles(TileSchedule& schedule, int heads_per_group, int num_ctas,
                        std::int64_t most_heads);

}  // namespace flash_attn_cuda
