#include <string>

#include "auxiliary/auxiliary.h"
#include "check.h"
#include "fixtures.h"
#include "host/plan.h"
#include "host/plan_steps.h"
#include "no_driver.h"
#include "workspaces.h"

using namespace host_tests;

namespace {

BackwardPlan plan(const AttentionShape& shape, Window window = {},
                  const DeviceInfo& device = h200) {
  return plan_backward(call<BackwardParams>(shape, window), device, backward_table());
}

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

TEST(tiles_cover_the_keys_of_every_key_head) {
  AttentionShape shape = training;
  shape.num_heads_k = 8;
  shape.seqlen_k = 129;
  shape.batch_size = 40;
  const BackwardPlan result = plan(shape);
  CHECK_EQ(result.schedule.num_tiles, 2);
  CHECK_EQ(result.schedule.num_heads, 8);
  CHECK_EQ(result.schedule.num_batch_heads, 320);
  CHECK_EQ(result.dkdv_splits, 1);
}

TEST(causal_tiles_run_up_and_a_left_bound_alone_turns_them_round) {
  CHECK_EQ(std::string(plan(training, causal).instance->name), "hd128_windowed");
  CHECK(!plan(training, causal).schedule.longest_first);
  CHECK(plan(training, {.left = 100, .right = Window::unbounded}).schedule.longest_first);
  CHECK(!plan(training, {.left = 100, .right = 100}).schedule.longest_first);
  CHECK(!plan(training).schedule.longest_first);
}

TEST(a_section_holds_the_heads_whose_queries_fill_half_of_l2) {
  // Q, dO and the fp32 dQ of a head: 4096 * 128 * (2 + 2 + 4) bytes = 4 MiB; half of L2 is 25 MiB:
  // 6 fit, 8 divide 64.
  CHECK_EQ(plan(training).schedule.heads_per_section, 8);
  AttentionShape shape = training;
  shape.num_heads_k = 8;  // 8 MiB a key head: 3 fit, 4 divide 32
  CHECK_EQ(plan(shape).schedule.heads_per_section, 4);
  shape.seqlen_q = 65'536;
  CHECK_EQ(plan(shape).schedule.heads_per_section, 1);
  shape.head_dim = shape.head_dim_v =
      72;  // Q and dO shrink, the fp32 dQ stays at its bucket: 4096 * (4 * 72 + 4 * 128) = 3.1 MiB
  shape.seqlen_q = 4096;
  shape.num_heads_k = 16;
  CHECK_EQ(plan(shape).schedule.heads_per_section, 8);
}

TEST(a_section_of_unequal_tiles_is_large_enough_to_even_them_out) {
  // 2 tiles for each of 132 SMs are 9 heads of 32 tiles; 16 divide 64.
  CHECK_EQ(plan(training, causal).schedule.heads_per_section, 16);
}

TEST(splits_are_the_fewest_that_fill_the_device_twice) {
  AttentionShape shape = sizes(1, 2048, 2048, 64, 4, 128);
  // 16 key tiles * 4 key heads = 64 CTAs; 2 * 132 wanted: 5 would do, the next divisor of 16 is 8.
  const BackwardPlan result = plan(shape);
  CHECK_EQ(result.dkdv_splits, 8);
  CHECK_EQ(result.schedule.num_heads, 32);
  CHECK_EQ(result.schedule.grid_size(), 16 * 32);
  CHECK_EQ(result.schedule.heads_per_section % result.dkdv_splits, 0);

  shape.batch_size = 2;  // 128 CTAs: 4 splits give 512, 2 only 256
  CHECK_EQ(plan(shape).dkdv_splits, 4);
  shape.batch_size = 5;  // 320 CTAs are enough
  CHECK_EQ(plan(shape).dkdv_splits, 1);
  DeviceInfo small = h200;
  small.num_sms = 32;
  shape.batch_size = 1;
  CHECK_EQ(plan(shape, {}, small).dkdv_splits, 1);
}

TEST(without_grouped_heads_there_is_nothing_to_split) {
  AttentionShape shape = sizes(1, 128, 128, 2, 2, 64);
  CHECK_EQ(plan(shape).dkdv_splits, 1);
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
  // Long keys, short queries: the partials would outgrow dQ.
  CHECK_EQ(plan(sizes(1, 128, 4096, 8, 1, 64)).dkdv_splits, 1);
}

TEST(left_padding_rules_splits_out) {
  // Their partial sums would leave the rows of the padding unwritten.
  const AttentionShape shape = sizes(1, 2048, 2048, 64, 4, 128);
  auto params = call<BackwardParams>(shape);
  CHECK_EQ(plan_backward(params, h200, backward_table()).dkdv_splits, 8);
  params.sequences.seqused_k = &some_int;
  CHECK_EQ(plan_backward(params, h200, backward_table()).dkdv_splits, 8);
  params.sequences.leftpad_k = &some_int;
  const BackwardPlan padded = plan_backward(params, h200, backward_table());
  CHECK_EQ(padded.dkdv_splits, 1);
  CHECK_EQ(padded.schedule.num_heads, 4);
  params.sequences.cu_seqlens_q = params.sequences.cu_seqlens_k = &some_int;
  CHECK_EQ(plan_backward(params, h200, backward_table()).dkdv_splits, 1);
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

TEST(query_tiles_are_counted_over_all_sequences) {
  AttentionShape shape = training;  // 4 sequences, tiles of 64 rows
  for (const auto& [seqlen, tiles] : {std::pair{0, 0}, {1, 4}, {64, 4}, {65, 8}, {4096, 256}}) {
    shape.seqlen_q = seqlen;
    CHECK_EQ(plan(shape).q_tiles, tiles);
  }
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
           std::size_t{16} * 4 * 4096 / 16 * sizeof(float));
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

TEST(the_order_of_turns_is_the_order_of_starts) {
  for (const auto& [window, descends] : {std::pair{Window{}, false},
                                         {causal, false},
                                         {Window{.left = 100, .right = 100}, false},
                                         {Window{.left = 100, .right = Window::unbounded}, true}}) {
    const BackwardPlan result = plan(training, window);
    CHECK_EQ(result.tiles_descend, descends);
    CHECK_EQ(result.schedule.longest_first, descends);
  }
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

TEST(the_nonempty_side_of_an_empty_call_still_has_a_grid) {
  AttentionShape no_queries = training;
  no_queries.seqlen_q = 0;
  no_queries.num_heads_k = 2;
  const BackwardPlan zero_keys_gradient = plan(no_queries, causal);
  CHECK_EQ(zero_keys_gradient.schedule.grid_size(), 32 * 8);
  CHECK_EQ(zero_keys_gradient.dkdv_splits, 1);
  CHECK_EQ(zero_keys_gradient.workspace_bytes, tickets_bytes);

  AttentionShape no_keys = training;
  no_keys.seqlen_k = 0;
  CHECK_EQ(plan(no_keys, causal).schedule.grid_size(), 0);
  CHECK_EQ(plan(no_keys, causal).dkdv_splits, 1);
  CHECK(plan(no_keys).workspace_bytes > tickets_bytes);

  AttentionShape no_batch = training;
  no_batch.batch_size = 0;
  CHECK_EQ(plan(no_batch).schedule.grid_size(), 0);
  CHECK_EQ(plan(no_batch).workspace_bytes, tickets_bytes);
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
