// What a backward's workspace holds, whatever the call: for tests of plans.
#pragma once

#include "fixtures.h"
#include "host/plan.h"
#include "host/plan_steps.h"

namespace host_tests {

// Checks that there are the buffers that the plan's kernels need and no others, and where they lie.
// Not of sweeps, whose sums are a CTA's.
inline void check_backward_workspace(const BackwardPlan& plan, const BackwardParams& params) {
  const BackwardConfig& config = plan.instance->config;
  const AttentionShape& shape = params.shape;
  const std::size_t query_tiles = std::size_t(shape.num_heads_q) * plan.q_tiles;
  const std::size_t rows = query_tiles * config.block_m;
  const std::int64_t places = plan.shared_tiles.places();
  const std::size_t partial_rows =
      std::size_t(plan.dkdv_splits) * key_rows(params) * shape.num_heads_k;
  const bool finishes = plan.dq_path == DqPath::finished;
  const bool has_tangents = params.tangents.is_given;
  const bool has_parts = plan.shared_tiles.parts > 1;
  const bool has_splits = plan.dkdv_splits > 1;

  const std::size_t counters =
      plan.turn_words == 0
          ? 1
          : plan.turn_words * ctas_of_columns(config.columns_per_cta, shape.head_dim);

  CHECK(!plan.sweeps);
  CHECK_EQ(plan.takes_turns, params.deterministic && plan.dq_path != DqPath::direct);
  std::vector<Bytes> buffers;
  const auto holds = [&](bool is_needed, const auto& buffer, std::size_t count) {
    CHECK_EQ(buffer.exists(), is_needed);
    if (is_needed) buffers.push_back(bytes_of_buffer(buffer, count));
  };
  holds(true, plan.lse_log2, rows);
  holds(true, plan.softmax_d, rows);
  holds(true, plan.tickets, 2);
  holds(has_tangents, plan.tangent_lse, rows);
  holds(has_tangents, plan.tangent_dot, rows);
  holds(plan.dq_path != DqPath::direct, plan.dq_accum, rows * config.head_dim);
  holds(plan.takes_turns || finishes, plan.additions, query_tiles * counters);
  holds(finishes, plan.given_back, std::size_t{2} * plan.num_ctas);
  holds(has_parts, plan.part_sums, places * config.block_n * 2 * config.head_dim);
  holds(has_parts, plan.part_counters, places * config.ctas_per_tile * 2);
  holds(params.dsink != nullptr, plan.sink_shares,
        std::size_t(shape.num_heads_q) * plan.sink_shares_per_head);
  holds(plan.sink_arrivals.exists(), plan.sink_arrivals, shape.num_heads_q);
  holds(has_splits, plan.dk_partial, partial_rows * config.head_dim);
  holds(has_splits, plan.dv_partial, partial_rows * config.head_dim_v);
  if (plan.table.used()) buffers.push_back(bytes_of_table(plan.table));
  check_workspace(buffers, plan.workspace_bytes);
}

}  // namespace host_tests
