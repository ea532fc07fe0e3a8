#include <algorithm>
#include <string>

#include "check.h"
#include "fixtures.h"
#include "host/plan.h"
#include "host/plan_steps.h"

using namespace host_tests;

namespace {

constexpr AttentionShape training{.batch_size = 4,
                                  .seqlen_q = 4096,
                                  .seqlen_k = 4096,
                                  .num_heads_q = 16,
                                  .num_heads_k = 16,
                                  .head_dim = 128};

BackwardPlan plan(const AttentionShape& shape, Window window = {},
                  const DeviceInfo& device = h200) {
  return plan_backward(call<BackwardParams>(shape, window), device, backward_table());
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
  shape.head_dim =
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
                       .head_dim = 128};
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
                       .head_dim = 64};
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
                                   .head_dim = 40};
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
                 .head_dim = 64})
               .dkdv_splits,
           1);
}

TEST(workspace_buffers_are_aligned_and_do_not_overlap) {
  const auto check = [](const AttentionShape& shape) {
    const BackwardPlan result = plan(shape);
    const BackwardConfig& config = result.instance->config;
    struct Buffer {
      std::size_t offset;
      std::int64_t floats;
    };
    const std::int64_t query_heads = shape.batch_size * shape.num_heads_q;
    std::vector<Buffer> buffers{{result.lse_log2_offset, query_heads * result.seqlen_q_rounded},
                                {result.dq_accum_offset, dq_accum_floats(shape, config)}};
    if (result.dkdv_splits > 1) {
      const std::int64_t partial = std::int64_t{result.dkdv_splits} * shape.batch_size *
                                   shape.num_heads_k * shape.seqlen_k * config.head_dim;
      buffers.push_back({result.dk_partial_offset, partial});
      buffers.push_back({result.dv_partial_offset, partial});
    }
    std::sort(buffers.begin(), buffers.end(),
              [](const Buffer& a, const Buffer& b) { return a.offset < b.offset; });
    std::size_t end = 0;
    for (const Buffer& buffer : buffers) {
      CHECK_EQ(buffer.offset % 256, std::size_t{0});
      CHECK(buffer.offset >= end);
      end = buffer.offset + static_cast<std::size_t>(buffer.floats) * sizeof(float);
    }
    CHECK(result.workspace_bytes >= end);
    CHECK(result.workspace_bytes < end + 256);
  };
  // With 3 splits of an odd seqlen a partial at head_dim 32 ends on half of 256 bytes.
  for (const int head_dim : {24, 48, 128}) {
    for (const int seqlen : {1, 65, 128, 1001}) {
      for (const int num_heads_k : {1, 9}) {
        check({.batch_size = 3,
               .seqlen_q = seqlen,
               .seqlen_k = seqlen,
               .num_heads_q = 9,
               .num_heads_k = num_heads_k,
               .head_dim = head_dim});
      }
    }
  }
}

TEST(row_statistics_are_rounded_up_to_128) {
  AttentionShape shape = training;
  for (const auto& [seqlen, rounded] : {std::pair{0, 0}, {1, 128}, {128, 128}, {129, 256}}) {
    shape.seqlen_q = seqlen;
    CHECK_EQ(plan(shape).seqlen_q_rounded, rounded);
  }
}

TEST(workspaces_past_4_gib_are_counted_in_64_bits) {
  AttentionShape shape = training;
  shape.seqlen_q = shape.seqlen_k = 1 << 20;
  // 64 heads * 2^20 rows * (128 + 1) floats.
  CHECK_EQ(plan(shape).workspace_bytes, std::size_t{64} * (1 << 20) * 129 * 4);
}

TEST(the_nonempty_side_of_an_empty_call_still_has_a_grid) {
  AttentionShape no_queries = training;
  no_queries.seqlen_q = 0;
  no_queries.num_heads_k = 2;
  const BackwardPlan zero_keys_gradient = plan(no_queries, causal);
  CHECK_EQ(zero_keys_gradient.schedule.grid_size(), 32 * 8);
  CHECK_EQ(zero_keys_gradient.dkdv_splits, 1);
  CHECK_EQ(zero_keys_gradient.workspace_bytes, std::size_t{0});

  AttentionShape no_keys = training;
  no_keys.seqlen_k = 0;
  CHECK_EQ(plan(no_keys, causal).schedule.grid_size(), 0);
  CHECK_EQ(plan(no_keys, causal).dkdv_splits, 1);
  CHECK(plan(no_keys).workspace_bytes > 0);

  AttentionShape no_batch = training;
  no_batch.batch_size = 0;
  CHECK_EQ(plan(no_batch).schedule.grid_size(), 0);
  CHECK_EQ(plan(no_batch).workspace_bytes, std::size_t{0});
}

TEST(too_many_rows_are_refused_and_nothing_overflows_on_the_way) {
  AttentionShape shape = training;
  shape.batch_size = shape.num_heads_q = shape.num_heads_k = 2'147'483'647;
  shape.seqlen_q = shape.seqlen_k = max_seqlen;
  CHECK_ERROR(plan(shape),
              "batch_size * num_heads_q * seqlen_q (rounded up to 128) must be at most");
  shape.batch_size = 0;
  CHECK_ERROR(plan(shape), "0 * 2147483647 * 1000000000");
  shape.batch_size = 1;
  shape.num_heads_q = shape.num_heads_k = 17;
  CHECK_EQ(plan(shape).workspace_bytes, std::size_t{17} * max_seqlen * 129 * 4);
  shape.num_heads_q = shape.num_heads_k = 18;
  CHECK_ERROR(plan(shape), "1 * 18 * 1000000000");
  shape.seqlen_q = 1;
  shape.num_heads_q = shape.num_heads_k = 1 << 10;
  CHECK_ERROR(plan(shape), "batch_size * heads * tiles must be at most 2147483647");
}
