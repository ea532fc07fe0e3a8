// What the host hands to the kernels of a backward, whatever their family.
#pragma once

#include <algorithm>
#include <cfloat>

#include "flash_attn/instance.h"
#include "shared/dropout/dropout.h"
#include "shared/gradient/finishes_dq.h"
#include "shared/schedule/turns.h"
#include "shared/scores/score_modifiers.h"
#include "shared/sequence/sequence.h"

namespace flash_attn_cuda {

struct BackwardArguments {
  BackwardParams params;
  TileSchedule schedule;  // tile: key block; head: key head * dkdv_splits + split
  SequenceTable table;
  int dkdv_splits;
  int q_tiles;               // of a head, over all sequences
  int q_tiles_per_sequence;  // 0 where the table has first_q_tile
  float scale_log2;          // what turns a score into powers of two, signed
  float keep_probability;    // 1 without dropout
  float score_factor;        // what was left out of dS: dK and dQ are this times their products
  const float* lse_log2;     // (num_heads_q, q_tiles, block_m), +inf where a row has no key or does
                             // not exist
  const float* softmax_d;    // same shape
  float* dq_accum;     // tiles of block_m * head_dim in fragment order: (num_heads_q, q_tiles)
                       // of them, if sweep_tiles > 1 (CTAs, heads of a sweep,
                       // q_tiles_per_sequence)
  DqTurns turns;       // whose it is to add to a tile of dq_accum, where plan.takes_turns
  bool tiles_descend;  // a sequence's last key tile comes first
  int* additions;      // (num_heads_q, q_tiles): steps that have left their dQ, in pairs of CTAs
                       // counted by both; beside lists, for each head of the schedule,
                       // shared_tiles.parts for each key tile; or null
  DqPath dq_path;
  int sweep_tiles;  // key tiles that a CTA draws at once: 1, or all of a head
  int swept_rows;   // packed sequences of at most so many rows are drawn as one tile
  int* tickets;  // CTAs, or tiles, that have started; strips of dQ drawn (sm90/backward/finish.h)
  int* given_back;    // (CTAs, finishing warps): the first strip that one drew and left, or -1
  float* dk_partial;  // (dkdv_splits, rows of k, num_heads_k, head_dim), used if dkdv_splits > 1
  float* dv_partial;  // the same of head_dim_v
  std::int64_t partial_rows;
  SharedTiles shared_tiles;
  float* part_sums;          // (places of parts, CTAs of a tile, key warpgroups): dK and dV in
                             // fragment order
  int* part_counters;        // the same shape, of which a tile's first part's count those that end
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
  const int* given_back;         // those and their neighbour, if any; -1: none
  unsigned num_given_back;
  int swept_rows;     // sequences of at most so many rows have dq already
  int ctas_per_tile;  // sm80: those that share the columns of dQ
};

// What the CTAs of an sm90 kernel draw: tiles, some of them in parts.
inline std::int64_t count_tickets(const BackwardPlan& plan) {
  return plan.schedule.grid_size() + plan.shared_tiles.more_tickets();
}
inline unsigned launched_ctas(const BackwardPlan& plan) {
  const int per_tile = plan.instance->config.ctas_per_tile;
  return static_cast<unsigned>(
      std::min<std::int64_t>(count_tickets(plan) * per_tile, plan.num_ctas));
}

// What */backward/scores.h leaves out of dS.
inline float score_factor(const BackwardParams& params) {
  return params.score.softmax_scale / keep_probability(params.dropout.threshold);
}

// Of the instance that the plan chose; can_modify: its kernel scales scores itself
// where the call modifies them.
inline BackwardArguments backward_arguments(const BackwardPlan& plan, const BackwardParams& params,
                                            bool can_modify) {
  constexpr float log2e = 1.44269504088896f;
  const AttentionShape& shape = params.shape;
  const int block_m = plan.instance->config.block_m;
  char* workspace = static_cast<char*>(params.workspace);
  const bool scales_scores = can_modify && modifies_scores(params.score);
  return {
      .params = params,
      .schedule = plan.schedule,
      .table = SequenceTable::at(workspace, shape.batch_size, plan.table),
      .dkdv_splits = plan.dkdv_splits,
      .q_tiles = plan.q_tiles,
      .q_tiles_per_sequence = plan.table.used ? 0 : (shape.seqlen_q + block_m - 1) / block_m,
      .scale_log2 = log2e * (scales_scores ? score_unit(params.score) : params.score.softmax_scale),
      .keep_probability = keep_probability(params.dropout.threshold),
      .score_factor = score_factor(params),
      .lse_log2 = reinterpret_cast<const float*>(workspace + plan.lse_log2_offset),
      .softmax_d = reinterpret_cast<const float*>(workspace + plan.softmax_d_offset),
      .dq_accum = reinterpret_cast<float*>(workspace + plan.dq_accum_offset),
      .turns = turns_of(plan, params),
      .tiles_descend = plan.tiles_descend,
      .additions = addition_counters(plan, params),
      .dq_path = plan.dq_path,
      .sweep_tiles = plan.sweeps ? plan.schedule.num_tiles : 1,
      .swept_rows = plan.table.swept_rows,
      .tickets = reinterpret_cast<int*>(workspace + plan.tickets_offset),
      .given_back = reinterpret_cast<int*>(workspace + plan.given_back_offset),
      .dk_partial = reinterpret_cast<float*>(workspace + plan.dk_partial_offset),
      .dv_partial = reinterpret_cast<float*>(workspace + plan.dv_partial_offset),
      .partial_rows = key_rows(params),
      .shared_tiles = plan.shared_tiles,
      .part_sums = reinterpret_cast<float*>(workspace + plan.part_sums_offset),
      .part_counters = reinterpret_cast<int*>(workspace + plan.part_counters_offset),
      .sink_shares = reinterpret_cast<const float*>(workspace + plan.sink_shares_offset),
      .sink_shares_per_head = plan.sink_shares};
}

inline ConvertDqArguments convert_dq_arguments(const BackwardPlan& plan,
                                               const BackwardParams& params) {
  const int block_m = plan.instance->config.block_m;
  char* workspace = static_cast<char*>(params.workspace);
  auto const* tickets = reinterpret_cast<const unsigned*>(workspace + plan.tickets_offset);
  // Where there are no keys the main kernel was not launched.
  const bool was_finishing = plan.dq_path == DqPath::finished && plan.schedule.grid_size() > 0;
  return {.params = params,
          .table = SequenceTable::at(workspace, params.shape.batch_size, plan.table),
          .q_tiles = plan.q_tiles,
          .q_tiles_per_sequence = (params.shape.seqlen_q + block_m - 1) / block_m,
          .factor = score_factor(params),
          .dq_accum = reinterpret_cast<const float*>(workspace + plan.dq_accum_offset),
          .strips_drawn = was_finishing ? tickets + 1 : nullptr,
          .given_back = reinterpret_cast<const int*>(workspace + plan.given_back_offset),
          .num_given_back = was_finishing ? launched_ctas(plan) * finishing_warps : 0,
          .swept_rows = plan.table.swept_rows};
}

}  // namespace flash_attn_cuda
