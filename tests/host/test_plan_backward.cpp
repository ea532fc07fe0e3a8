#include <string>

#include "auxiliary/auxiliary.h"
#include "check.h"
#include "fixtures.h"
#include "host/plan.h"
#include "host/plan_steps.h"
#include "no_driver.h"
#include "plan_table.h"
#include "workspaces.h"

using namespace host_tests;

namespace {

BackwardPlan plan(const AttentionShape& shape, Window window = {},
                  const DeviceInfo& device = h200) {
  return plan_backward(call<BackwardParams>(shape, window), device, backward_table());
}

constexpr PlannedCall plans[] = {
    // Tiles cover the keys of every key head.
    {"40 4096 129 16 8 128", "key_tiles=2 heads=8 tiles=640 splits=1"},
    // They run up, and a left bound alone turns them round.
    {"4 4096 4096 16 16 128", "row=hd128_full descends=no"},
    {"4 4096 4096 16 16 128 causal", "row=hd128_windowed descends=no"},
    {"4 4096 4096 16 16 128 left=100", "descends=yes"},
    {"4 4096 4096 16 16 128 left=100 right=100", "descends=no"},

    // A section holds the heads whose queries fill half of L2, 25 MiB. Q, dO and the fp32 dQ of a
    // head: 4096 * 128 * (2 + 2 + 4) bytes = 4 MiB: 6 fit, 8 divide 64.
    {"4 4096 4096 16 16 128", "section=8"},
    {"4 4096 4096 16 8 128", "section=4"},  // 8 MiB a key head: 3 fit, 4 divide 32
    {"4 65536 4096 16 8 128", "section=1"},
    // Q and dO shrink, the fp32 dQ stays at its bucket: 4096 * (4 * 72 + 4 * 128) = 3.1 MiB.
    {"4 4096 4096 16 16 72", "section=8"},
    // Of unequal tiles it evens them out: 2 for each of 132 SMs are 9 heads of 32; 16 divide 64.
    {"4 4096 4096 16 16 128 causal", "section=16"},

    // Splits are the fewest that fill the device twice: 16 key tiles * 4 key heads = 64 CTAs;
    // 2 * 132 wanted: 5 would do, the next divisor of 16 is 8. They share a section.
    {"1 2048 2048 64 4 128", "splits=8 heads=32 tiles=512 section=8"},
    {"2 2048 2048 64 4 128", "splits=4"},  // 128 CTAs: 4 splits give 512, 2 only 256
    {"5 2048 2048 64 4 128", "splits=1"},  // 320 CTAs are enough
    {"1 2048 2048 64 4 128 sms=32", "splits=1"},
    {"1 128 128 2 2 64", "splits=1"},
    {"1 128 4096 8 1 64", "splits=1"},  // long keys, short queries: partials would outgrow dQ
    // They would leave the rows of left padding unwritten.
    {"1 2048 2048 64 4 128 used_k", "splits=8"},
    {"1 2048 2048 64 4 128 used_k leftpad", "splits=1 heads=4"},
    {"1 2048 2048 64 4 128 used_k leftpad packed", "splits=1"},

    // Query tiles are counted over all sequences, in tiles of 64 rows.
    {"4 0 4096 16 16 128", "q_tiles=0"},
    {"4 1 4096 16 16 128", "q_tiles=4"},
    {"4 64 4096 16 16 128", "q_tiles=4"},
    {"4 65 4096 16 16 128", "q_tiles=8"},
    {"4 4096 4096 16 16 128", "q_tiles=256"},
    // The nonempty side of an empty call still has a grid.
    {"4 0 4096 16 2 128 causal", "grid=256 splits=1"},
    {"4 4096 0 16 16 128 causal", "grid=0 splits=1"},
    {"0 4096 4096 16 16 128", "grid=0"},
};

// What the tickets take of every workspace.
constexpr std::size_t tickets_bytes = 256;

float dsink;

void give_sink(BackwardParams& params) {
  params.score.sink = &some_float;
  params.dsink = &dsink;
}

std::int64_t dq_accum_floats(const AttentionShape& shape, const BackwardConfig& config) {
  const std::int64_t rows = (shape.seqlen_q + config.block_m - 1) / config.block_m * config.block_m;
  return std::int64_t{shape.batch_size} * shape.num_heads_q * rows * config.head_dim;
}

}  // namespace

// Stands in for the generated registry.
std::span<const BackwardInstance* const> flash_attn_cuda::backward_instances() {
  return backward_table();
}

TEST(the_public_function_plans_against_the_registry) {
  const BackwardPlan result = plan_backward(call<BackwardParams>(training), h200);
  CHECK_EQ(result.instance, plan(training).instance);
  CHECK_EQ(result.schedule.grid_size(), plan(training).schedule.grid_size());
}

TEST(plans_of_calls) {
  const auto plan = [](const BackwardParams& params, const DeviceInfo& device) {
    return plan_backward(params, device, backward_table());
  };
  check_plans<BackwardParams>(plans, plan, /*has_tensors=*/false);
}

TEST(splits_divide_the_group_and_partials_stay_within_one_dq) {
  for (const int group : {1, 2, 3, 6, 7, 8, 12, 71}) {
    for (const int seqlen_q : {1, 17, 128, 1000}) {
      for (const int seqlen_k : {1, 64, 300, 5000}) {
        const AttentionShape shape = sizes(1, seqlen_q, seqlen_k, group, 1, 40);
        const BackwardPlan result = plan(shape);
        const int splits = result.dkdv_splits;
        CHECK_EQ(group % splits, 0);
        if (splits == 1) continue;
        const std::int64_t partials = 2ll * splits * seqlen_k * result.instance->config.head_dim;
        CHECK(partials <= dq_accum_floats(shape, result.instance->config));
      }
    }
  }
}

TEST(workspace_buffers_are_aligned_and_do_not_overlap) {
  // With 3 splits of an odd seqlen a partial at head_dim 32 ends on half of 256 bytes.
  for (const int head_dim : {24, 48, 128}) {
    for (const int seqlen : {1, 65, 128, 1001}) {
      for (const int num_heads_k : {1, 9}) {
        auto params =
            with_tensors(call<BackwardParams>(sizes(3, seqlen, seqlen, 9, num_heads_k, head_dim)));
        for (const bool deterministic : {false, true}) {
          for (const bool wants_dsink : {false, true}) {
            params.deterministic = deterministic;
            params.score.sink = wants_dsink ? &some_float : nullptr;
            params.dsink = wants_dsink ? &dsink : nullptr;
            for (const auto* table : {&backward_table(), &sm90_backward_table()})
              check_backward_workspace(plan_backward(params, h200, *table), params);
          }
        }
      }
    }
  }
}

TEST(partial_sums_of_dv_are_as_wide_as_the_row) {
  BackwardInstance narrow = sm90_backward_instance("sm90_hd192_dv128", 192);
  narrow.config.head_dim_v = 128;
  const InstanceList<BackwardInstance> table({narrow});
  const AttentionShape shape = sizes(1, 2048, 2048, 64, 2, 192, 128);
  const BackwardPlan result = plan_backward(with_tensors(call<BackwardParams>(shape)), h200, table);
  const std::size_t rows = std::size_t(result.dkdv_splits) * 2048 * 2;
  CHECK(result.dkdv_splits > 1);
  CHECK_EQ(result.dv_partial.offset - result.dk_partial.offset, rows * 192 * sizeof(float));
  CHECK_EQ(result.workspace_bytes - result.dv_partial.offset, rows * 128 * sizeof(float));
}

TEST(a_fixed_order_adds_its_counters_and_nothing_else) {
  auto params = call<BackwardParams>(training, causal);
  const BackwardPlan free = plan_backward(params, h200, backward_table());
  params.deterministic = true;
  const BackwardPlan ordered = plan_backward(params, h200, backward_table());
  CHECK_EQ(ordered.instance, free.instance);
  CHECK_EQ(ordered.schedule.heads_per_section, free.schedule.heads_per_section);
  CHECK_EQ(ordered.tickets.offset, free.tickets.offset);
  const std::size_t counters = 16 * 64 * 4;  // a head's query tiles of 4 sequences
  CHECK_EQ(ordered.workspace_bytes - free.workspace_bytes, counters * sizeof(int));
}

// Main kernels of the sm90 family sum the shares, if they are launched.
TEST(the_last_block_of_a_head_sums_a_sinks_gradient) {
  auto params = with_tensors(call<BackwardParams>(training));
  CHECK(!plan_backward(params, h200, backward_table()).sink_arrivals.exists());
  give_sink(params);
  CHECK_EQ(plan_backward(params, h200, backward_table()).sink_arrivals.count,
           params.shape.num_heads_q);
  CHECK(!plan_backward(params, h200, sm90_backward_table()).sink_arrivals.exists());
  params.shape.seqlen_k = 0;
  const BackwardPlan without_keys = plan_backward(params, h200, sm90_backward_table());
  CHECK_EQ(without_keys.grid, 0);
  CHECK_EQ(without_keys.sink_arrivals.count, params.shape.num_heads_q);
}

TEST(a_sinks_gradient_adds_its_shares_and_nothing_else) {
  auto params = call<BackwardParams>(training, causal);
  const BackwardPlan without = plan_backward(params, h200, backward_table());
  CHECK_EQ(without.sink_shares_per_head, 0);
  params.score.sink = &some_float;  // that is constant
  CHECK_EQ(plan_backward(params, h200, backward_table()).workspace_bytes, without.workspace_bytes);
  params.dsink = &dsink;
  const BackwardPlan with = plan_backward(params, h200, backward_table());
  CHECK_EQ(with.instance, without.instance);
  CHECK_EQ(with.tickets.offset, without.tickets.offset);
  // 16 lanes a row of 128: blocks of 16 rows.
  CHECK_EQ(with.sink_shares_per_head, 4 * 4096 / 16);
  CHECK_EQ(with.workspace_bytes - without.workspace_bytes,
           std::size_t{16} * 4 * 4096 / 16 * sizeof(float) + 256);  // and a counter for each head
  params.shape.seqlen_q = 0;
  CHECK_EQ(plan_backward(params, h200, backward_table()).sink_shares_per_head, 0);

  auto packed = packed_call<BackwardParams>(training);
  give_sink(packed);
  const BackwardPlan result = plan_backward(packed, h200, backward_table());
  CHECK_EQ(result.sink_shares_per_head, result.q_tiles * 64 / 16);
  packed.score.sink = nullptr;
  CHECK_ERROR(plan_backward(packed, h200, backward_table()),
              "sink must be given with dsink, got dsink alone");
}

TEST(sums_are_fp32_and_change_no_plan) {
  auto params = with_tensors(call<BackwardParams>(training));
  params.accumulate = true;
  CHECK_ERROR(plan_backward(params, h200, backward_table()),
              "fp32_results must be given with accumulate, got accumulate alone");
  params.fp32_results = true;
  const BackwardPlan sums = plan_backward(params, h200, backward_table());
  params.accumulate = false;
  const BackwardPlan results = plan_backward(params, h200, backward_table());
  CHECK_EQ(sums.instance, results.instance);
  CHECK_EQ(sums.workspace_bytes, results.workspace_bytes);
}

TEST(blocks_of_the_preprocess_are_rows_of_one_tile) {
  const auto call_of = [](int head_dim_v) {
    BackwardParams params;
    params.shape.head_dim_v = head_dim_v;
    return params;
  };
  for (const int tile_rows : {32, 64, 128}) {
    for (int head_dim = 8; head_dim <= 256; head_dim += 8) {
      const BackwardParams params = call_of(head_dim);
      const int lanes = preprocess_lanes(params, tile_rows);
      CHECK(lanes <= 32 && std::has_single_bit(unsigned(lanes)));
      CHECK(8 * lanes >= head_dim);
      const int rows = preprocess_threads / lanes;
      CHECK_EQ(preprocess_blocks_per_tile(params, tile_rows) * rows, tile_rows);
    }
  }
  CHECK_EQ(preprocess_lanes(call_of(64), 128), 8);
  CHECK_EQ(preprocess_lanes(call_of(72), 64), 16);
  CHECK_EQ(preprocess_lanes(call_of(8), 128), 2);
}

TEST(features_choose_the_row) {
  const FeatureSet all =
      feature::deterministic | feature::softcap | feature::alibi | feature::dropout;
  const InstanceList<BackwardInstance> table(
      {backward_instance("plain", 128, MaskKind::windowed),
       backward_instance("features", 128, MaskKind::windowed, 64, 128, all)});
  const auto chosen = [&](auto change) {
    auto params = call<BackwardParams>(training);
    change(params);
    return std::string(plan_backward(params, h200, table).instance->name);
  };
  CHECK_EQ(chosen([](auto&) {}), "plain");
  CHECK_EQ(chosen([](auto& p) { p.deterministic = true; }), "plain");
  CHECK_EQ(chosen([](auto& p) { p.score.softcap = 30.0f; }), "features");
  CHECK_EQ(chosen([](auto& p) { p.score.softcap = -1.0f; }), "plain");  // off
  CHECK_EQ(chosen([](auto& p) { p.score.alibi_slopes = &some_float; }), "features");
  CHECK_EQ(chosen([](auto& p) { p.dropout.threshold = 1; }), "features");
  auto params = call<BackwardParams>(training);
  params.dropout.threshold = 1;
  CHECK_ERROR(plan_backward(params, h200, backward_table()),
              "no compiled backward kernel covers dtype bf16, head_dim 128, full mask, features "
              "dropout");
}

TEST(workspaces_past_4_gib_are_counted_in_64_bits) {
  AttentionShape shape = training;
  shape.seqlen_q = shape.seqlen_k = 1 << 20;
  // 64 heads * 2^20 rows * (128 of dQ + 2 of statistics) floats.
  CHECK_EQ(plan(shape).workspace_bytes, std::size_t{64} * (1 << 20) * 130 * 4 + tickets_bytes);
}

TEST(an_empty_call_has_tickets_alone) {
  CHECK_EQ(plan(sizes(4, 0, 4096, 16, 2, 128), causal).workspace_bytes, tickets_bytes);
  CHECK_EQ(plan(sizes(0, 4096, 4096, 16, 16, 128)).workspace_bytes, tickets_bytes);
  CHECK(plan(sizes(4, 4096, 0, 16, 16, 128)).workspace_bytes > tickets_bytes);
}

TEST(too_many_rows_are_refused_and_nothing_overflows_on_the_way) {
  AttentionShape shape = training;
  shape.batch_size = shape.num_heads_q = shape.num_heads_k = 2'147'483'647;
  shape.seqlen_q = shape.seqlen_k = max_seqlen;
  CHECK_ERROR(plan(shape),
              "query rows of all sequences (rounded up to 64) times num_heads_q must be at most "
              "17179869176, got 2147483647000000000 * 2147483647");
  shape.batch_size = 0;
  CHECK_EQ(plan(shape).schedule.grid_size(), 0);
  shape.batch_size = 1;
  shape.num_heads_q = shape.num_heads_k = 17;
  CHECK_EQ(plan(shape).workspace_bytes, std::size_t{17} * max_seqlen * 130 * 4 + tickets_bytes);
  shape.num_heads_q = shape.num_heads_k = 18;
  CHECK_ERROR(plan(shape), "got 1000000000 * 18");
  shape.seqlen_q = 1;
  shape.num_heads_q = shape.num_heads_k = 1 << 10;
  CHECK_ERROR(plan(shape), "batch_size * heads * tiles must be at most 2147483647");
}

TEST(what_no_backward_can_compute_is_refused_by_name) {
  const auto with = [](auto change) {
    auto params = call<BackwardParams>(training);
    change(params);
    return plan_backward(params, h200, backward_table());
  };
  CHECK_ERROR(with([](auto& p) { p.shape.head_dim = p.shape.head_dim_v = 59; }),
              "head_dim must be a multiple of 8 in a backward, got 59");
  CHECK_ERROR(with([](auto& p) { p.shape.head_dim_v = 59; }),
              "head_dim_v must be a multiple of 8 in a backward, got 59");
  CHECK_ERROR(with([](auto& p) { p.shape.head_dim = p.shape.head_dim_v = 0; }),
              "head_dim must be from 1");
  CHECK_ERROR(with([](auto& p) { p.shape.head_dim_v = 0; }), "head_dim_v must be from 1");
  CHECK_ERROR(with([](auto& p) { p.shape.seqlen_q = -1; }), "seqlen_q must be from 0");
  CHECK_ERROR(with([](auto& p) { p.sequences.cu_seqlens_q = &some_int; }),
              "cu_seqlens_q and cu_seqlens_k must be given together, got cu_seqlens_q alone");
  CHECK_ERROR(with([](auto& p) { p.sequences.cu_seqlens_k = &some_int; }),
              "got cu_seqlens_k alone");
}
