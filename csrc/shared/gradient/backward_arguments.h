// What the host hands to the kernels of a backward, whatever their family.
#pragma once

#include <algorithm>

#include "flash_attn/instance.h"
#include "shared/dropout/dropout.h"
#include "shared/gradient/finishes_dq.h"
#include "shared/schedule/turns.h"
#include "shared/scores/score_modifiers.h"
#include "shared/scores/score_scale.h"
#include "shared/sequence/sequence.h"

namespace flash_attn_cuda {

struct BackwardArguments {
  BackwardParams params;
  TileSchedule schedule;  // tile: key block; head: key head * dkdv_splits + split
  SequenceTable table;
  int dkdv_splits;
  int q_tiles;               // of a head, over all sequences
  int q_tiles_per_sequence;  // 0 where the table has first_q_tile
  float scale_log2;          // from a score to powers of two, signed
  float keep_probability;    // 1 without dropout
  float score_factor;        // what was left out of dS: dK and dQ are this times their products
  const float* lse_log2;     // (num_heads_q, q_tiles, block_m), +inf where a row has no key or does
                             // not exist
  const float* softmax_d;    // same shape
  const float* tangent_lse;  // the same of rows with tangents, and rowsum(dO * tangent of O)
  const float* tangent_dot;
  float* dq_accum;     // tiles of block_m * head_dim in fragment order: (num_heads_q, q_tiles)
                       // of them, if sweep_tiles > 1 (CTAs, heads of a sweep,
                       // q_tiles_per_sequence)
  DqTurns turns;       // whose it is to add to a tile of dq_accum, where plan.takes_turns
  bool tiles_descend;  // a sequence's last key tile comes first
  int* additions;      // (num_heads_q, q_tiles): steps that have left their dQ, in pairs of CTAs
                       // counted by both; with lists, for each head of the schedule,
                       // shared_tiles.parts for each key tile; or null
  DqPath dq_path;
  int sweep_tiles;  // key tiles that a CTA takes at once: 1, or all of a head
  int swept_rows;   // packed sequences of at most so many rows are taken as one tile
  int* tickets;  // CTAs, or tiles, that have started; strips of dQ taken (sm90/backward/finish.h)
  int* given_back;    // (CTAs, finishing warps): the first strip that one took and left, or -1
  float* dk_partial;  // (dkdv_splits, rows of k, num_heads_k, head_dim), used if dkdv_splits > 1
  float* dv_partial;  // (dkdv_splits, rows of k, num_heads_k, head_dim_v)
  std::int64_t partial_rows;
  SharedTiles shared_tiles;
  float* part_sums;          // (places of parts, CTAs of a tile, key warpgroups): dK and dV in
                             // fragment order
  int* part_counters;        // the same shape; those of a tile's first part count parts that end
  const float* sink_shares;  // (num_heads_q, sink_shares_per_head), of which each head's add up to
                             // its element of dsink
  int sink_shares_per_head;
  int ctas_per_tile;  // sm80: those that share the columns of dK, dV and dQ
};

struct ConvertDqArguments {
  BackwardParams params;
  SequenceTable table;
  int q_tiles;               // of a head, over all sequences
  int q_tiles_per_sequence;  // without a table
  float factor;              // of the sum
  const float* dq_accum;
  const unsigned* strips_drawn;  // whose rows are dq by now, but for those given back; null: none
  const int* given_back;         // strips given back and their neighbour, if any; -1: none
  unsigned num_given_back;
  int swept_rows;     // sequences of at most so many rows have dq already
  int ctas_per_tile;  // sm80: those that share the columns of dQ
};

// sm80: CTAs that share the columns of a key tile's gradients.
inline int ctas_per_tile(const BackwardConfig& config, const AttentionShape& shape) {
  return ctas_of_columns(config.columns_per_cta, std::max(shape.head_dim, shape.head_dim_v));
}

// What */backward/scores.h leaves out of dS.
inline float score_factor(const BackwardParams& params) {
  return params.score.softmax_scale / keep_probability(params.dropout.threshold);
}

// The arguments of the instance that the plan chose; can_modify: its kernel scales scores itself
// where the call modifies them.
inline BackwardArguments backward_arguments(const BackwardPlan& plan, const BackwardParams& params,
                                            bool can_modify) {
  void* workspace = params.workspace;
  const bool scales_scores = can_modify && modifies_scores(params.score);
  int* additions = plan.additions.in(workspace);
  return {
      .params = params,
      .schedule = plan.schedule,
      .table = SequenceTable::at(workspace, plan.table),
      .dkdv_splits = plan.dkdv_splits,
      .q_tiles = plan.q_tiles,
      .q_tiles_per_sequence = plan.q_tiles_per_sequence,
      .scale_log2 = log2e * (scales_scores ? score_unit(params.score) : params.score.softmax_scale),
      .keep_probability = keep_probability(params.dropout.threshold),
      .score_factor = score_factor(params),
      .lse_log2 = plan.lse_log2.in(workspace),
      .softmax_d = plan.softmax_d.in(workspace),
      .tangent_lse = plan.tangent_lse.in(workspace),
      .tangent_dot = plan.tangent_dot.in(workspace),
      .dq_accum = plan.dq_accum.in(workspace),
      .turns = {.counters = plan.takes_turns ? additions : nullptr,
                .tiles_descend = plan.tiles_descend,
                .words = plan.turn_words},
      .tiles_descend = plan.tiles_descend,
      .additions = additions,
      .dq_path = plan.dq_path,
      .sweep_tiles = plan.sweeps ? plan.schedule.num_tiles : 1,
      .swept_rows = plan.table.swept_rows,
      .tickets = plan.tickets.in(workspace),
      .given_back = plan.given_back.in(workspace),
      .dk_partial = plan.dk_partial.in(workspace),
      .dv_partial = plan.dv_partial.in(workspace),
      .partial_rows = key_rows(params),
      .shared_tiles = plan.shared_tiles,
      .part_sums = plan.part_sums.in(workspace),
      .part_counters = plan.part_counters.in(workspace),
      .sink_shares = plan.sink_shares.in(workspace),
      .sink_shares_per_head = plan.sink_shares_per_head,
      .ctas_per_tile = ctas_per_tile(plan.instance->config, params.shape)};
}

inline ConvertDqArguments convert_dq_arguments(const BackwardPlan& plan,
                                               const BackwardParams& params) {
  void* workspace = params.workspace;
  auto const* tickets = reinterpret_cast<const unsigned*>(plan.tickets.in(workspace));
  // Where there are no keys the main kernel was not launched.
  const bool was_finishing = plan.dq_path == DqPath::finished && plan.grid > 0;
  return {.params = params,
          .table = SequenceTable::at(workspace, plan.table),
          .q_tiles = plan.q_tiles,
          .q_tiles_per_sequence = plan.q_tiles_per_sequence,
          .factor = score_factor(params),
          .dq_accum = plan.dq_accum.in(workspace),
          .strips_drawn = was_finishing ? tickets + 1 : nullptr,
          .given_back = plan.given_back.in(workspace),
          .num_given_back = was_finishing ? static_cast<unsigned>(plan.grid) * finishing_warps : 0,
          .swept_rows = plan.table.swept_rows,
          .ctas_per_tile =
              ctas_of_columns(plan.instance->config.columns_per_cta, params.shape.head_dim)};
}

}  // namespace flash_attn_cuda
