#include <algorithm>
#include <string>

#include "auxiliary/auxiliary.h"
#include "check.h"
#include "fixtures.h"
#include "host/plan.h"
#include "host/plan_steps.h"
#include "no_driver.h"

using namespace host_tests;

namespace {

constexpr AttentionShape training{.batch_size = 4,
                                  .seqlen_q = 4096,
                                  .seqlen_k = 4096,
                                  .num_heads_q = 16,
                                  .num_heads_k = 16,
                                  .head_dim = 128,
                                  .head_dim_v = 128};

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
  AttentionShape shape{.batch_size = 1,
                       .seqlen_q = 2048,
                       .seqlen_k = 2048,
                       .num_heads_q = 64,
                       .num_heads_k = 4,
                       .head_dim = 128,
                       .head_dim_v = 128};
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
  AttentionShape shape{.batch_size = 1,
                       .seqlen_q = 128,
                       .seqlen_k = 128,
                       .num_heads_q = 2,
                       .num_heads_k = 2,
                       .head_dim = 64,
                       .head_dim_v = 64};
  CHECK_EQ(plan(shape).dkdv_splits, 1);
}

TEST(splits_divide_the_group_and_partials_stay_within_one_dq) {
  for (const int group : {1, 2, 3, 6, 7, 8, 12, 71}) {
    for (const int seqlen_q : {1, 17, 128, 1000}) {
      for (const int seqlen_k : {1, 64, 300, 5000}) {
        const AttentionShape shape{.batch_size = 1,
                                   .seqlen_q = seqlen_q,
                                   .seqlen_k = seqlen_k,
                                   .num_heads_q = group,
                                   .num_heads_k = 1,
                                   .head_dim = 40,
                                   .head_dim_v = 40};
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
  CHECK_EQ(plan({.batch_size = 1,
                 .seqlen_q = 128,
                 .seqlen_k = 4096,
                 .num_heads_q = 8,
                 .num_heads_k = 1,
                 .head_dim = 64,
                 .head_dim_v = 64})
               .dkdv_splits,
           1);
}

TEST(left_padding_rules_splits_out) {
  // Their partial sums would leave the rows of the padding unwritten.
  const AttentionShape shape{.batch_size = 1,
                             .seqlen_q = 2048,
                             .seqlen_k = 2048,
                             .num_heads_q = 64,
                             .num_heads_k = 4,
                             .head_dim = 128,
                             .head_dim_v = 128};
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
  const auto check = [](const AttentionShape& shape, bool deterministic, bool wants_dsink,
                        const InstanceList<BackwardInstance>& table) {
    auto params = with_tensors(call<BackwardParams>(shape));
    params.deterministic = deterministic;
    if (wants_dsink) give_sink(params);
    const BackwardPlan result = plan_backward(params, h200, table);
    const BackwardConfig& config = result.instance->config;
    const std::size_t query_tiles = std::size_t(shape.num_heads_q) * result.q_tiles;
    const std::size_t rows_bytes = query_tiles * config.block_m * sizeof(float);
    CHECK_EQ(std::size_t(dq_accum_floats(shape, config)) * sizeof(float),
             rows_bytes * config.head_dim);
    std::vector<Buffer> buffers{{result.lse_log2_offset, rows_bytes},
                                {result.softmax_d_offset, rows_bytes},
                                {result.tickets_offset, sizeof(int)}};
    CHECK(!result.sweeps);
    if (result.dq_path != DqPath::direct)
      buffers.push_back({result.dq_accum_offset, rows_bytes * config.head_dim});
    CHECK_EQ(result.takes_turns, deterministic && result.dq_path != DqPath::direct);
    CHECK_EQ(result.counts_additions, result.takes_turns || result.dq_path == DqPath::finished);
    if (result.counts_additions)
      buffers.push_back({result.additions_offset, query_tiles * sizeof(int)});
    if (result.dq_path == DqPath::finished)
      buffers.push_back({result.given_back_offset, 2 * result.num_ctas * sizeof(int)});
    if (result.shared_tiles.parts > 1) {
      CHECK(config.family == KernelFamily::sm90 && !deterministic);
      const std::int64_t places = result.shared_tiles.places();
      buffers.push_back(
          {result.part_sums_offset, places * config.block_n * 2 * config.head_dim * sizeof(float)});
      buffers.push_back({result.part_counters_offset, result.part_counters * sizeof(int)});
    }
    if (wants_dsink) {
      buffers.push_back({result.sink_shares_offset,
                         std::size_t(shape.num_heads_q) * result.sink_shares * sizeof(float)});
    }
    if (result.dkdv_splits > 1) {
      const std::size_t partial = sizeof(float) * result.dkdv_splits * shape.batch_size *
                                  shape.num_heads_k * shape.seqlen_k;
      buffers.push_back({result.dk_partial_offset, partial * config.head_dim});
      buffers.push_back({result.dv_partial_offset, partial * config.head_dim_v});
    }
    check_workspace(buffers, result.workspace_bytes);
  };
  // With 3 splits of an odd seqlen a partial at head_dim 32 ends on half of 256 bytes.
  for (const int head_dim : {24, 48, 128}) {
    for (const int seqlen : {1, 65, 128, 1001}) {
      for (const int num_heads_k : {1, 9}) {
        const AttentionShape shape{.batch_size = 3,
                                   .seqlen_q = seqlen,
                                   .seqlen_k = seqlen,
                                   .num_heads_q = 9,
                                   .num_heads_k = num_heads_k,
                                   .head_dim = head_dim,
                                   .head_dim_v = head_dim};
        for (const bool deterministic : {false, true}) {
          for (const bool wants_dsink : {false, true}) {
            check(shape, deterministic, wants_dsink, backward_table());
            check(shape, deterministic, wants_dsink, sm90_backward_table());
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
  const AttentionShape shape{.batch_size = 1,
                             .seqlen_q = 2048,
                             .seqlen_k = 2048,
                             .num_heads_q = 64,
                             .num_heads_k = 2,
                             .head_dim = 192,
                             .head_dim_v = 128};
  const BackwardPlan result = plan_backward(with_tensors(call<BackwardParams>(shape)), h200, table);
  const std::size_t rows = std::size_t(result.dkdv_splits) * 2048 * 2;
  CHECK(result.dkdv_splits > 1);
  CHECK_EQ(result.dv_partial_offset - result.dk_partial_offset, rows * 192 * sizeof(float));
  CHECK_EQ(result.workspace_bytes - result.dv_partial_offset, rows * 128 * sizeof(float));
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
  CHECK_EQ(ordered.tickets_offset, free.tickets_offset);
  const std::size_t counters = 16 * 64 * 4;  // a head's query tiles of 4 sequences
  CHECK_EQ(ordered.workspace_bytes - free.workspace_bytes, counters * sizeof(int));
}

TEST(a_sinks_gradient_adds_its_shares_and_nothing_else) {
  auto params = call<BackwardParams>(training, causal);
  const BackwardPlan without = plan_backward(params, h200, backward_table());
  CHECK_EQ(without.sink_shares, 0);
  params.score.sink = &some_float;  // that is constant
  CHECK_EQ(plan_backward(params, h200, backward_table()).workspace_bytes, without.workspace_bytes);
  params.dsink = &dsink;
  const BackwardPlan with = plan_backward(params, h200, backward_table());
  CHECK_EQ(with.instance, without.instance);
  CHECK_EQ(with.tickets_offset, without.tickets_offset);
  // 16 lanes a row of 128: blocks of 16 rows.
  CHECK_EQ(with.sink_shares, 4 * 4096 / 16);
  CHECK_EQ(with.workspace_bytes - without.workspace_bytes,
           std::size_t{16} * 4 * 4096 / 16 * sizeof(float));
  params.shape.seqlen_q = 0;
  CHECK_EQ(plan_backward(params, h200, backward_table()).sink_shares, 0);

  auto packed = packed_call<BackwardParams>(training);
  give_sink(packed);
  const BackwardPlan result = plan_backward(packed, h200, backward_table());
  CHECK_EQ(result.sink_shares, result.q_tiles * 64 / 16);
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
  for (const int tile_rows : {32, 64, 128}) {
    for (int head_dim = 8; head_dim <= 256; head_dim += 8) {
      const AttentionShape shape{.head_dim_v = head_dim};
      const int lanes = preprocess_lanes(shape, tile_rows);
      CHECK(lanes <= 32 && std::has_single_bit(unsigned(lanes)));
      CHECK(8 * lanes >= head_dim);
      const int rows = preprocess_threads / lanes;
      CHECK_EQ(preprocess_blocks_per_tile(shape, tile_rows) * rows, tile_rows);
    }
  }
  CHECK_EQ(preprocess_lanes({.head_dim_v = 64}, 128), 8);
  CHECK_EQ(preprocess_lanes({.head_dim_v = 72}, 64), 16);
  CHECK_EQ(preprocess_lanes({.head_dim_v = 8}, 128), 2);
}

TEST(a_kernel_that_writes_dq_sums_it_where_a_sequence_may_have_two_key_tiles) {
  AttentionShape shape = training;
  for (const auto& [seqlen_k, sums] :
       {std::pair{1, false}, {128, false}, {129, true}, {4096, true}}) {
    shape.seqlen_k = seqlen_k;
    const auto params = with_tensors(call<BackwardParams>(shape));
    const BackwardPlan result = plan_backward(params, h200, sm90_backward_table());
    CHECK(result.instance->writes_dq);
    CHECK_EQ(result.instance->config.block_n, 128);
    CHECK_EQ(result.dq_path != DqPath::direct, sums);
    CHECK(plan(shape).dq_path == DqPath::converted);
  }
}

TEST(dq_is_finished_beside_the_products_where_queries_see_many_keys) {
  const auto finishes = [](int seqlen_q, int seqlen_k, const Window& window, int head_dim = 128) {
    AttentionShape shape = training;
    shape.seqlen_q = seqlen_q;
    shape.seqlen_k = seqlen_k;
    shape.head_dim = shape.head_dim_v = head_dim;
    const auto params = with_tensors(call<BackwardParams>(shape, window));
    const BackwardPlan result = plan_backward(params, h200, sm90_backward_table());
    CHECK_EQ(result.instance->config.head_dim, head_dim);
    CHECK_EQ(result.counts_additions, result.dq_path == DqPath::finished);
    return result.dq_path == DqPath::finished;
  };
  CHECK(!finishes(4096, 128, {}));
  CHECK(!finishes(4096, 256, {}));
  CHECK(finishes(4096, 512, {}));
  CHECK(finishes(1, 1024, {}));
  CHECK(!finishes(512, 512, causal));
  CHECK(finishes(1024, 1024, causal));
  CHECK(finishes(64, 1024, causal));  // the last queries
  CHECK(!finishes(4096, 4096, {.left = 300, .right = 0}));
  CHECK(finishes(4096, 4096, {.left = 2000, .right = 0}));
  CHECK(!finishes(4096, 640, {}, 64));
  CHECK(finishes(4096, 1024, {}, 64));
  CHECK(!finishes(8192, 8192, causal, 64));
  CHECK(!finishes(4096, 4096, {}, 256));

  auto packed = with_tensors(packed_call<BackwardParams>(training, causal));
  const auto plan_packed = [&] { return plan_backward(packed, h200, sm90_backward_table()); };
  for (const auto& [total, wanted] : {std::pair{4 * 500, false}, {4 * 1000, true}}) {
    packed.shape.seqlen_q = packed.shape.seqlen_k = total;
    CHECK_EQ(plan_packed().dq_path == DqPath::finished, wanted);
  }
}

TEST(the_last_tiles_of_an_even_grid_have_parts_where_they_leave_ctas_idle) {
  const auto shared = [](int heads, int seqlen, auto change, int head_dim = 128) {
    const AttentionShape shape{.batch_size = 1,
                               .seqlen_q = seqlen,
                               .seqlen_k = seqlen,
                               .num_heads_q = heads,
                               .num_heads_k = heads,
                               .head_dim = head_dim,
                               .head_dim_v = head_dim};
    auto params = with_tensors(call<BackwardParams>(shape));
    change(params);
    const BackwardPlan result = plan_backward(params, h200, sm90_backward_table());
    const SharedTiles& tiles = result.shared_tiles;
    if (tiles.parts > 1) {
      CHECK(result.sweeps == false && !result.takes_turns);
      CHECK_EQ(tiles.first + tiles.count, result.schedule.grid_size());
      CHECK_EQ(tiles.count, result.schedule.grid_size() % h200.num_sms);
      CHECK_EQ(result.part_counters, 2 * tiles.places());
    }
    return tiles.parts;
  };
  const auto as_it_is = [](auto&) {};
  CHECK_EQ(shared(16, 16'384, as_it_is), 3);  // 2048 tiles are 15 rounds of 132 and 68
  CHECK_EQ(shared(16, 2048, as_it_is), 1);    // 256 are two but for eight
  CHECK_EQ(shared(33, 512, as_it_is), 1);     // one
  CHECK_EQ(shared(1, 8192, as_it_is), 2);     // 64 tiles of 128 steps
  CHECK(shared(1, 512, as_it_is) > 1);
  CHECK_EQ(shared(32, 16'384, as_it_is, 64), 8);  // 4096: 31 and four
  CHECK_EQ(shared(16, 16'384, as_it_is, 256), 1);
  CHECK_EQ(shared(16, 16'384, [](auto& p) { p.window = causal; }), 1);
  CHECK_EQ(shared(16, 16'384, [](auto& p) { p.deterministic = true; }), 1);
  CHECK_EQ(shared(16, 16'384, [](auto& p) { p.score.softcap = 1.0f; }), 1);
  CHECK_EQ(shared(16, 16'384, [](auto& p) { p.score.softmax_scale = -1.0f; }), 1);
}

TEST(a_fixed_order_stores_the_first_part_of_dq_and_needs_no_other_kernel) {
  for (const int seqlen : {100, 600, 4096}) {
    AttentionShape shape = training;
    shape.seqlen_q = shape.seqlen_k = seqlen;
    auto params = with_tensors(call<BackwardParams>(shape, causal));
    params.deterministic = true;
    const BackwardPlan result = plan_backward(params, h200, sm90_backward_table());
    const bool has_one_tile = seqlen <= result.instance->config.block_n;
    CHECK(result.dq_path == (has_one_tile ? DqPath::direct : DqPath::ordered));
    CHECK_EQ(result.takes_turns, !has_one_tile);

    params.score.softmax_scale = -1.0f;  // sm80 kernels add to zeros, and a kernel follows
    const BackwardPlan of_sm80 = plan_backward(params, h200, sm90_backward_table());
    CHECK(of_sm80.instance->config.family == KernelFamily::sm80);
    CHECK(of_sm80.dq_path == DqPath::converted);
    CHECK(of_sm80.takes_turns && of_sm80.counts_additions);
  }
}

TEST(a_cta_sweeps_a_head_where_heads_fill_the_device_and_their_data_l2) {
  struct Expected {
    int batch_heads, seqlen, head_dim;
    bool sweeps;
  };
  for (const Expected& expected : {Expected{132, 512, 64, true},
                                   {119, 512, 64, true},   // 0.9 of 132
                                   {118, 512, 64, false},  // too few
                                   {133, 512, 64, false},  // one more than a round
                                   {238, 512, 64, true},   // 0.9 of two rounds
                                   {132, 129, 64, true},   // two key tiles
                                   {132, 128, 64, false},  // nothing to sum
                                   {132, 560, 64, true},   // 560 * 512 bytes of 132: 36 MiB of 50
                                   {132, 640, 64, false},  // 41 MiB
                                   {132, 256, 128, true},  // twice the bytes a query
                                   {132, 512, 128, false}}) {
    const AttentionShape shape{.batch_size = expected.batch_heads,
                               .seqlen_q = expected.seqlen,
                               .seqlen_k = expected.seqlen,
                               .num_heads_q = 1,
                               .num_heads_k = 1,
                               .head_dim = expected.head_dim,
                               .head_dim_v = expected.head_dim};
    auto params = with_tensors(call<BackwardParams>(shape, causal));
    const BackwardPlan result = plan_backward(params, h200, sm90_backward_table());
    CHECK_EQ(result.sweeps, expected.sweeps);
    if (!result.sweeps) continue;
    CHECK(result.dq_path == DqPath::ordered);
    CHECK(!result.takes_turns && !result.counts_additions);
    CHECK_EQ(result.schedule.heads_per_section, 1);
    CHECK_EQ(result.num_ctas, std::min(expected.batch_heads, h200.num_sms));
    // A CTA has the sums of a head, and no more.
    const BackwardConfig& config = result.instance->config;
    const int rows = (expected.seqlen + config.block_m - 1) / config.block_m * config.block_m;
    CHECK_EQ(result.tickets_offset - result.dq_accum_offset,
             sizeof(float) * result.num_ctas * rows * config.head_dim);
  }
}

TEST(no_cta_sweeps_what_may_be_uneven_or_has_another_kernel) {
  const AttentionShape shape{.batch_size = 1,
                             .seqlen_q = 512,
                             .seqlen_k = 512,
                             .num_heads_q = 132,
                             .num_heads_k = 132,
                             .head_dim = 64,
                             .head_dim_v = 64};
  const auto sweeps = [&](auto change) {
    auto params = with_tensors(call<BackwardParams>(shape));
    change(params);
    return plan_backward(params, h200, sm90_backward_table()).sweeps;
  };
  CHECK(sweeps([](BackwardParams&) {}));
  CHECK(sweeps([](BackwardParams& params) { params.score.softcap = 1.0f; }));
  CHECK(sweeps([](BackwardParams& params) { params.shape.seqlen_k = 1024; }));
  CHECK(!sweeps([](BackwardParams& params) { params.shape.seqlen_k = 1025; }));
  CHECK(!sweeps([](BackwardParams& params) { params.score.softmax_scale = -1.0f; }));  // sm80
  CHECK(!sweeps([](BackwardParams& params) { params.deterministic = true; }));
  for (const auto lengths :
       {&SequenceParams::seqused_q, &SequenceParams::seqused_k, &SequenceParams::leftpad_k})
    CHECK(!sweeps([=](BackwardParams& params) { params.sequences.*lengths = &some_int; }));
  CHECK(!sweeps([](BackwardParams& params) {
    params.sequences.cu_seqlens_q = params.sequences.cu_seqlens_k = &some_int;
  }));
  CHECK(!sweeps([](BackwardParams& params) { params.sparsity.lists.data = &some_int; }));
}

TEST(a_sweep_may_be_of_some_of_the_query_heads_of_a_key_head) {
  const AttentionShape shape{.batch_size = 33,
                             .seqlen_q = 260,
                             .seqlen_k = 130,
                             .num_heads_q = 8,
                             .num_heads_k = 1,
                             .head_dim = 64,
                             .head_dim_v = 64};
  const BackwardPlan result =
      plan_backward(with_tensors(call<BackwardParams>(shape)), h200, sm90_backward_table());
  CHECK_EQ(result.dkdv_splits, 4);
  CHECK(result.sweeps);
  CHECK_EQ(result.num_ctas, 132);
  CHECK_EQ(result.tickets_offset - result.dq_accum_offset, sizeof(float) * 132 * 2 * 384 * 64);
}

TEST(sections_of_sm90_keep_to_a_quarter_of_l2_unless_key_tiles_wait_for_one_another) {
  const auto section = [](const Window& window, bool deterministic, int seqlen = 4096) {
    AttentionShape shape = training;
    shape.seqlen_q = shape.seqlen_k = seqlen;
    auto params = with_tensors(call<BackwardParams>(shape, window));
    params.deterministic = deterministic;
    return plan_backward(params, h200, sm90_backward_table()).schedule.heads_per_section;
  };
  // 4 MiB a head, 12.5 MiB: 3 fit, 4 divide 64.
  CHECK_EQ(section({}, false), 4);
  CHECK_EQ(section(causal, false), 4);  // 3 of 4 tiles for each of 132 SMs: 99 are 4 heads of 32
  // 2 tiles for each of 132 SMs are 9 heads of 32; 16 divide 64.
  CHECK_EQ(section({}, true), 16);
  CHECK_EQ(section({}, true, 8192), 8);
  // 8 tiles of a head at a time are 16 heads, or more of few tiles.
  CHECK_EQ(section(causal, true), 16);
  CHECK_EQ(section(causal, true, 8192), 16);
  CHECK_EQ(section(causal, true, 1024), 64);  // 33 would do
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

// The kernels of Hopper GPUs

namespace {

BackwardPlan sm90_plan(const BackwardParams& params, const DeviceInfo& device = h200) {
  return plan_backward(params, device, sm90_backward_table());
}

// The row that serves the training call, or this one, on tensors of its own, after `change`.
template <class Change>
std::string sm90_chosen(Change change, const AttentionShape& shape = training,
                        const DeviceInfo& device = h200) {
  auto params = with_tensors(call<BackwardParams>(shape));
  change(params);
  return sm90_plan(params, device).instance->name;
}

constexpr auto nothing = [](BackwardParams&) {};

}  // namespace

TEST(a_cta_an_sm_draws_the_tiles_of_sm90_kernels) {
  for (const bool deterministic : {false, true}) {
    auto params = with_tensors(call<BackwardParams>(training, causal));
    params.deterministic = deterministic;
    const BackwardPlan hopper = sm90_plan(params);
    CHECK_EQ(std::string(hopper.instance->name), "sm90_hd128");
    CHECK_EQ(hopper.num_ctas, 132);
    CHECK_EQ(hopper.schedule.grid_size(), 64 * 32);  // tiles, however many CTAs there are
    const BackwardPlan ampere = sm90_plan(params, a100);
    CHECK_EQ(std::string(ampere.instance->name), "hd128");
    CHECK_EQ(ampere.num_ctas, 0);
    params.score.softmax_scale = -1.0f;
    const BackwardPlan same_gpu = sm90_plan(params);
    CHECK_EQ(std::string(same_gpu.instance->name), "hd128");
    CHECK_EQ(same_gpu.num_ctas, 0);
  }
  DeviceInfo smaller = h200;
  smaller.num_sms = 114;
  CHECK_EQ(sm90_plan(with_tensors(call<BackwardParams>(training)), smaller).num_ctas, 114);
}

// What a call of wide heads gets, by the SMs of its GPU.
TEST(two_ctas_draw_a_tile_of_wide_heads) {
  AttentionShape shape = training;
  shape.head_dim = shape.head_dim_v = 256;
  const auto plan = [&](int num_sms, const Window& window = causal, bool deterministic = false) {
    DeviceInfo device = h200;
    device.num_sms = num_sms;
    auto params = with_tensors(call<BackwardParams>(shape, window));
    params.deterministic = deterministic;
    return sm90_plan(params, device);
  };
  CHECK_EQ(plan(132).instance->config.ctas_per_tile, 2);
  CHECK_EQ(plan(132).num_ctas, 132);
  CHECK_EQ(plan(131).num_ctas, 130);                  // whole pairs
  CHECK_EQ(plan(1).num_ctas, 2);                      // or one
  CHECK_EQ(plan(132).schedule.grid_size(), 64 * 32);  // tiles, not CTAs
  // Three quarters of a tile for each pair are five heads of ten tiles, two for each pair, in
  // turns, 14; so many that 64 heads come out even.
  shape.seqlen_q = shape.seqlen_k = 1280;
  CHECK_EQ(plan(132).schedule.heads_per_section, 8);
  CHECK_EQ(plan(132, causal, true).schedule.heads_per_section, 16);
  // No sweeps of what single CTAs would sweep.
  shape.seqlen_q = shape.seqlen_k = 129;
  shape.batch_size = 132;
  shape.num_heads_q = shape.num_heads_k = 1;
  CHECK(!plan(132).sweeps);
  BackwardInstance single = sm90_backward_instance("single", 256);
  single.config.ctas_per_tile = 1;
  const InstanceList<BackwardInstance> table({single});
  CHECK(plan_backward(with_tensors(call<BackwardParams>(shape, causal)), h200, table).sweeps);
  // Splits of the query heads fill the device twice, CTAs, not tiles.
  shape = {.batch_size = 1,
           .seqlen_q = 2048,
           .seqlen_k = 1024,
           .num_heads_q = 64,
           .num_heads_k = 8,
           .head_dim = 256,
           .head_dim_v = 256};
  CHECK_EQ(plan(132).dkdv_splits, 4);  // 8 tiles * 8 heads * 2 CTAs * 4 > 264
}

TEST(tiles_are_those_of_the_sm90_row) {
  AttentionShape shape = training;
  const auto tiles_of = [&](int head_dim) {
    shape.head_dim = shape.head_dim_v = head_dim;
    const BackwardPlan result = sm90_plan(with_tensors(call<BackwardParams>(shape)));
    CHECK_EQ(result.instance->config.family, KernelFamily::sm90);
    return std::pair{result.schedule.num_tiles, result.q_tiles};
  };
  CHECK(tiles_of(64) == (std::pair{4096 / 128, 4 * 4096 / 128}));
  CHECK(tiles_of(128) == (std::pair{4096 / 128, 4 * 4096 / 64}));
  CHECK(tiles_of(256) == (std::pair{4096 / 128, 4 * 4096 / 64}));
}

TEST(sm90_kernels_run_on_hopper_gpus_with_the_shared_memory_they_need) {
  CHECK_EQ(sm90_chosen(nothing), "sm90_hd128");
  DeviceInfo device = h200;
  for (const int capability : {80, 86, 89, 100, 103, 120}) {
    device.compute_capability = capability;
    CHECK_EQ(sm90_chosen(nothing, training, device), "hd128");
  }
  device = h200;
  device.smem_per_block = 200 * 1024;
  CHECK_EQ(sm90_chosen(nothing, training, device), "sm90_hd128");
  device.smem_per_block = 200 * 1024 - 1;
  CHECK_EQ(sm90_chosen(nothing, training, device), "hd128");
}

TEST(sm90_kernels_take_scales_that_are_not_negative) {
  for (const float scale : {1.0f, 1e-44f, 1e38f, 0.0f, -0.0f})
    CHECK_EQ(sm90_chosen([=](auto& p) { p.score.softmax_scale = scale; }), "sm90_hd128");
  for (const float scale : {-1.0f, -1e-44f, -1e38f})
    CHECK_EQ(sm90_chosen([=](auto& p) { p.score.softmax_scale = scale; }), "hd128");
}

TEST(sm90_kernels_take_tensors_that_tma_can_move) {
  AttentionShape single = training;
  single.batch_size = single.num_heads_q = single.num_heads_k = 1;
  constexpr std::int64_t too_far = std::int64_t{1} << 39;  // elements: 2^40 bytes
  for (TensorView BackwardParams::* view :
       {&BackwardParams::q, &BackwardParams::k, &BackwardParams::v, &BackwardParams::dout,
        &BackwardParams::dk, &BackwardParams::dv}) {
    for (std::int64_t TensorView::* stride :
         {&TensorView::batch_stride, &TensorView::row_stride, &TensorView::head_stride}) {
      // Expanded, unaligned, and further apart than a descriptor can say.
      for (const std::int64_t value : {std::int64_t{0}, std::int64_t{2049}, too_far})
        CHECK_EQ(sm90_chosen([=](auto& p) { p.*view.*stride = value; }), "hd128");
      CHECK_EQ(sm90_chosen([=](auto& p) { p.*view.*stride = too_far - 8; }), "sm90_hd128");
    }
    for (const int bytes : {2, 8}) {
      const auto shifted = [=](auto& p) {
        (p.*view).data = static_cast<char*>((p.*view).data) + bytes;
      };
      CHECK_EQ(sm90_chosen(shifted), "hd128");
    }
    // With one element along a dimension its stride is nobody's.
    CHECK_EQ(sm90_chosen([=](auto& p) { (p.*view).batch_stride = 0; }, single), "sm90_hd128");
    CHECK_EQ(sm90_chosen([=](auto& p) { (p.*view).head_stride = 0; }, single), "sm90_hd128");
  }
}

TEST(tensors_of_the_kernels_around_the_main_one_lie_anyhow) {
  for (TensorView BackwardParams::* view : {&BackwardParams::out, &BackwardParams::dq}) {
    CHECK_EQ(sm90_chosen([=](auto& p) { (p.*view).row_stride = std::int64_t{1} << 39; }),
             "sm90_hd128");
  }
  CHECK_EQ(sm90_chosen([](auto& p) { p.out.head_stride = 0; }), "sm90_hd128");
}

TEST(packed_tensors_have_no_batch_stride) {
  AttentionShape shape = training;
  shape.seqlen_q = 10'000;
  shape.seqlen_k = 12'000;
  auto params = with_tensors(packed_call<BackwardParams>(shape));
  for (TensorView BackwardParams::* view :
       {&BackwardParams::q, &BackwardParams::k, &BackwardParams::v, &BackwardParams::dout,
        &BackwardParams::dk, &BackwardParams::dv})
    (params.*view).batch_stride = 0;
  const BackwardPlan packed = sm90_plan(params);
  CHECK_EQ(std::string(packed.instance->name), "sm90_hd128");
  CHECK_EQ(packed.num_ctas, 132);
  CHECK_EQ(packed.table.tile_rows, 128);
  CHECK_EQ(packed.table.q_tile_rows, 64);
  params.sequences = {};
  CHECK_EQ(std::string(sm90_plan(params).instance->name), "hd128");
}

TEST(features_choose_among_sm90_kernels_and_fall_back) {
  const auto with_features = [](auto change, const char* on_hopper, const char* elsewhere) {
    CHECK_EQ(sm90_chosen(change), on_hopper);
    CHECK_EQ(sm90_chosen(change, training, rtx4090), elsewhere);
  };
  with_features([](auto& p) { p.deterministic = true; }, "sm90_hd128", "hd128");
  with_features([](auto& p) { p.score.softcap = 20.0f; }, "sm90_hd128_dropout", "hd128_dropout");
  with_features([](auto& p) { p.score.alibi_slopes = &some_float; }, "sm90_hd128_dropout",
                "hd128_dropout");
  with_features([](auto& p) { p.dropout.threshold = 1; }, "sm90_hd128_dropout", "hd128_dropout");
}
