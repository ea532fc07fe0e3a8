#include <cmath>
#include <string>

#include "check.h"
#include "fixtures.h"
#include "host/plan.h"
#include "host/plan_steps.h"
#include "no_driver.h"

using namespace host_tests;

namespace {

ForwardPlan plan(const AttentionShape& shape, Window window = {}, const DeviceInfo& device = h200) {
  return plan_forward(call<ForwardParams>(shape, window), device, forward_table());
}

}  // namespace

// Stands in for the generated registry.
std::span<const ForwardInstance* const> flash_attn_cuda::forward_instances() {
  return forward_table();
}

TEST(the_public_function_plans_against_the_registry) {
  const ForwardPlan result = plan_forward(call<ForwardParams>(training), h200);
  CHECK_EQ(result.instance, plan(training).instance);
  CHECK_EQ(result.schedule.grid_size(), plan(training).schedule.grid_size());
}

TEST(tiles_cover_the_queries_of_every_head) {
  AttentionShape shape = training;
  for (const auto& [seqlen_q, tiles] :
       {std::pair{1, 1}, {127, 1}, {128, 1}, {129, 2}, {4096, 32}}) {
    shape.seqlen_q = seqlen_q;
    const TileSchedule schedule = plan(shape).schedule;
    CHECK_EQ(schedule.num_tiles, tiles);
    CHECK_EQ(schedule.num_heads, 16);
    CHECK_EQ(schedule.num_batch_heads, 64);
    CHECK_EQ(schedule.grid_size(), 64 * tiles);
  }
}

TEST(the_window_chooses_the_row_and_the_direction) {
  CHECK_EQ(std::string(plan(training).instance->name), "hd128_full");
  CHECK(!plan(training).schedule.longest_first);
  CHECK_EQ(std::string(plan(training, causal).instance->name), "hd128_windowed");
  CHECK(plan(training, causal).schedule.longest_first);
  const Window right_unbounded{.left = 100, .right = Window::unbounded};
  CHECK_EQ(std::string(plan(training, right_unbounded).instance->name), "hd128_windowed");
  CHECK(!plan(training, right_unbounded).schedule.longest_first);

  AttentionShape decode = training;
  decode.seqlen_q = 1;
  CHECK_EQ(std::string(plan(decode, causal).instance->name), "hd128_full");
  CHECK(!plan(decode, causal).schedule.longest_first);
}

TEST(sequences_whose_ends_fill_little_of_a_step_get_smaller_ones) {
  ForwardInstance narrow = sm90_instance("short", 64, 128, 1280, 0, 256);
  narrow.config.block_n = 64;
  const InstanceList<ForwardInstance> rows({narrow, sm90_instance("plain", 64, 192)});
  AttentionShape shape = training;
  shape.batch_size = 16;
  shape.head_dim = shape.head_dim_v = 64;
  const auto chosen = [&](int seqlen_q, int seqlen_k, const auto& change) {
    shape.seqlen_q = seqlen_q;
    shape.seqlen_k = seqlen_k;
    ForwardParams params = with_tensors(call<ForwardParams>(shape));
    change(params);
    return std::string(plan_forward(params, h200, rows).instance->name);
  };
  const auto as_it_is = [](ForwardParams&) {};
  for (const int seqlen : {197, 256, 257, 320, 400, 448, 577, 769})
    CHECK_EQ(chosen(seqlen, seqlen, as_it_is), "short");
  for (const int seqlen : {384, 512, 640, 700, 800, 1000, 1024, 1025, 1345})
    CHECK_EQ(chosen(seqlen, seqlen, as_it_is), "plain");
  CHECK_EQ(chosen(77, 1024, as_it_is), "short");
  CHECK_EQ(chosen(77, 1025, as_it_is), "plain");
  CHECK_EQ(chosen(1025, 77, as_it_is), "plain");
  CHECK_EQ(chosen(257, 257, [](ForwardParams& params) { params.split.batch_invariant = true; }),
           "plain");
  CHECK_EQ(chosen(257, 257, [](ForwardParams& params) { params.window = {300, 300}; }), "short");
  CHECK_EQ(chosen(577, 577, [](ForwardParams& params) { params.window.left = 20; }), "plain");
  shape.batch_size = 1;  // 64 tiles: fewer than SMs
  CHECK_EQ(chosen(577, 577, as_it_is), "plain");
}

TEST(tall_tiles_are_for_lengths_that_they_pad_no_further) {
  ForwardInstance narrow = sm90_instance("short", 64, 128, 1088, 0, 256);
  narrow.config.block_n = 64;
  ForwardInstance tall = sm90_instance("tall", 64, 256);
  tall.config.kind = ForwardKind::tall;
  tall.config.block_n = 64;
  const InstanceList<ForwardInstance> rows(
      {narrow, tall, sm90_instance("plain", 64, 192), sm90_instance("wide", 128)});
  AttentionShape shape = training;
  shape.batch_size = 32;
  shape.head_dim = shape.head_dim_v = 64;
  const auto chosen = [&](int seqlen_q, int seqlen_k, Window window = {}, bool invariant = false) {
    shape.seqlen_q = seqlen_q;
    shape.seqlen_k = seqlen_k;
    ForwardParams params = with_tensors(call<ForwardParams>(shape));
    params.window = window;
    params.split.batch_invariant = invariant;
    return std::string(plan_forward(params, h200, rows).instance->name);
  };
  for (const int seqlen : {448, 512, 640, 768, 961, 1024, 1280, 2048, 4096})
    CHECK_EQ(chosen(seqlen, seqlen), "tall");
  for (const int seqlen : {384, 576, 960, 1100, 4097, 16384})
    CHECK_EQ(chosen(seqlen, seqlen), "plain");
  // Of 577 tall tiles, too, pad much more.
  for (const int seqlen : {256, 257, 577, 769}) CHECK_EQ(chosen(seqlen, seqlen), "short");
  CHECK_EQ(chosen(512, 4096), "tall");
  CHECK_EQ(chosen(512, 4097), "plain");
  CHECK_EQ(chosen(1088, 1088, causal), "short");
  CHECK_EQ(chosen(2048, 2048, causal), "tall");
  CHECK_EQ(chosen(2048, 2048, {.left = 100, .right = 0}), "plain");
  CHECK_EQ(chosen(2048, 2048, {}, true), "plain");
  shape.head_dim = shape.head_dim_v = 128;
  CHECK_EQ(chosen(2048, 2048), "wide");

  shape.head_dim = shape.head_dim_v = 64;
  shape.num_heads_q = shape.num_heads_k = 11;
  for (const auto& [batch_size, row] : {std::pair{4, "plain"},  // a round of each
                                        {8, "plain"},           // two of each
                                        {12, "tall"},           // two, not three
                                        {24, "tall"}}) {
    shape.batch_size = batch_size;
    CHECK_EQ(chosen(512, 512), row);
  }
  shape.num_heads_q = shape.num_heads_k = 12;  // both 4 * 256 rows, 5 * 192
  shape.batch_size = 18;
  CHECK_EQ(chosen(440, 440), "tall");  // over 448 keys, 512
  shape.batch_size = 13;
  CHECK_EQ(chosen(600, 600), "plain");  // over 640
  shape.batch_size = 1;
  shape.num_heads_q = shape.num_heads_k = 25;
  CHECK_EQ(chosen(4096, 4096), "plain");  // 4 * 256 rows, 5 * 192
  shape.num_heads_q = shape.num_heads_k = 24;
  CHECK_EQ(chosen(4096, 4096), "tall");  // 3 * 256 rows, 4 * 192
}

TEST(low_last_tiles_of_short_steps_end_the_grid) {
  ForwardInstance narrow = sm90_instance("short", 64, 128, 1280, 0, 256);
  narrow.config.block_n = 64;
  narrow.config.ctas_per_sm = 2;
  const InstanceList<ForwardInstance> rows({narrow, sm90_instance("plain", 64, 192)});
  AttentionShape shape = training;
  shape.batch_size = 256;
  shape.num_heads_q = shape.num_heads_k = 12;
  shape.head_dim = shape.head_dim_v = 64;
  const auto last_heads = [&](int tokens, const char* row) {
    shape.seqlen_q = shape.seqlen_k = tokens;
    const ForwardPlan result = plan_forward(with_tensors(call<ForwardParams>(shape)), h200, rows);
    CHECK_EQ(std::string(result.instance->name), row);
    return result.schedule.least_last_heads;
  };
  CHECK_EQ(last_heads(197, "short"), 144);  // 72 tiles are left for the last round
  CHECK_EQ(last_heads(250, "short"), 1);    // hardly lower than the others
  CHECK_EQ(last_heads(65, "short"), 1);     // one tile a head
  CHECK_EQ(last_heads(512, "plain"), 1);
  shape.batch_size = 264;  // no tile is left
  CHECK_EQ(last_heads(197, "short"), 1);
}

TEST(a_section_holds_the_heads_whose_keys_and_values_fill_half_of_l2) {
  // K and V of a head: 2 * 4096 * 128 * 2 bytes = 2 MiB; half of L2 is 25 MiB: 12 heads, and 16
  // divide 64.
  CHECK_EQ(plan(training).schedule.heads_per_section, 16);
  AttentionShape shape = training;
  shape.batch_size = 1;
  shape.num_heads_q = shape.num_heads_k = 67;  // no divisor: five sections of 12, one of 7
  CHECK_EQ(plan(shape).schedule.heads_per_section, 12);
  shape = training;
  shape.seqlen_k = 512;  // 256 KiB a head: all 64 fit
  CHECK_EQ(plan(shape).schedule.heads_per_section, 64);
  shape.seqlen_k = 65'536;  // 32 MiB a head: none fits
  CHECK_EQ(plan(shape).schedule.heads_per_section, 1);
  shape.seqlen_k = 0;
  CHECK_EQ(plan(shape).schedule.heads_per_section, 64);
}

TEST(a_section_of_unequal_tiles_is_large_enough_to_even_them_out) {
  // 8 tiles for each of 132 SMs are 33 heads of 32 tiles; all 64 are the next divisor.
  CHECK_EQ(plan(training, causal).schedule.heads_per_section, 64);
  AttentionShape shape = training;
  shape.seqlen_q = shape.seqlen_k = 65'536;                     // 512 tiles a head
  CHECK_EQ(plan(shape, causal).schedule.heads_per_section, 4);  // 3 would do
  shape.num_heads_k = 4;
  CHECK_EQ(plan(shape, causal).schedule.heads_per_section, 4);
}

TEST(query_heads_of_one_key_head_stay_in_one_section) {
  AttentionShape shape = training;
  shape.num_heads_k = 4;
  shape.seqlen_k = 16'384;  // 8 MiB a key head: 3 fit, 4 divide 16, each read by 4 query heads
  CHECK_EQ(plan(shape).schedule.heads_per_section, 16);
  shape.seqlen_k = 65'536;
  CHECK_EQ(plan(shape).schedule.heads_per_section, 4);
}

TEST(empty_calls_have_an_empty_grid_and_a_valid_section) {
  for (int AttentionShape::* size : {&AttentionShape::batch_size, &AttentionShape::seqlen_q}) {
    AttentionShape shape = training;
    shape.*size = 0;
    const TileSchedule schedule = plan(shape, causal).schedule;
    CHECK_EQ(schedule.grid_size(), 0);
    CHECK(schedule.heads_per_section >= 1);
  }
  AttentionShape no_keys = training;
  no_keys.seqlen_k = 0;
  CHECK_EQ(plan(no_keys, causal).schedule.grid_size(), 64 * 32);
}

TEST(the_grid_ends_at_the_largest_that_cuda_takes) {
  AttentionShape shape = training;
  shape.seqlen_q = 1;
  shape.num_heads_q = shape.num_heads_k = 32'767;
  shape.batch_size = 65'538;  // * 32,767 = 2^31 - 2
  CHECK_EQ(plan(shape).schedule.grid_size(), std::int64_t{2'147'483'646});
  shape.batch_size = 65'539;
  CHECK_ERROR(plan(shape),
              "batch_size * heads * tiles must be at most 2147483647, got 65539 * 32767 * 1");
  shape.batch_size = 40'000;
  shape.seqlen_q = 256;
  CHECK_ERROR(plan(shape), "40000 * 32767 * 2");
  shape.batch_size = shape.num_heads_q = shape.num_heads_k = 2'147'483'647;
  shape.seqlen_q = max_seqlen;
  CHECK_ERROR(plan(shape), "must be at most 2147483647");
}

TEST(a_call_no_kernel_can_compute_is_refused_by_name) {
  const auto with = [](auto change) {
    auto params = call<ForwardParams>(training);
    change(params);
    return plan_forward(params, h200, forward_table());
  };
  CHECK_ERROR(with([](auto& p) { p.shape.batch_size = -1; }), "batch_size must be from 0");
  CHECK_ERROR(with([](auto& p) { p.shape.seqlen_q = -5; }),
              "seqlen_q must be from 0 to 1000000000, got -5");
  CHECK_ERROR(with([](auto& p) { p.shape.seqlen_k = max_seqlen + 1; }), "seqlen_k");
  CHECK_ERROR(with([](auto& p) { p.shape.num_heads_q = 0; }), "num_heads_q must be from 1");
  CHECK_ERROR(with([](auto& p) { p.shape.num_heads_k = 0; }), "num_heads_k must be from 1");
  CHECK_ERROR(with([](auto& p) { p.shape.num_heads_k = 5; }),
              "num_heads_k must divide num_heads_q (16), got 5");
  CHECK_ERROR(with([](auto& p) { p.shape.head_dim = p.shape.head_dim_v = 59; }),
              "no compiled decode kernel covers dtype bf16, head_dim 59");
  CHECK_ERROR(with([](auto& p) { p.shape.head_dim = p.shape.head_dim_v = 0; }),
              "head_dim must be from 1");
  CHECK_ERROR(with([](auto& p) { p.shape.head_dim = p.shape.head_dim_v = 136; }), "head_dim 136");
  CHECK_ERROR(with([](auto& p) { p.score.softmax_scale = std::nanf(""); }),
              "softmax_scale must be finite");
  CHECK_ERROR(with([](auto& p) { p.score.softmax_scale = INFINITY; }), "got inf");
  CHECK_ERROR(with([](auto& p) { p.sequences.cu_seqlens_k = &some_int; }),
              "cu_seqlens_q must be given where cu_seqlens_k is");
}

// The kernels of Hopper GPUs

namespace {

ForwardPlan sm90_plan(const ForwardParams& params, const DeviceInfo& device = h200) {
  return plan_forward(params, device, sm90_forward_table());
}

// The row that serves the training call, or this one, on tensors of its own, after `change`.
template <class Change>
std::string sm90_chosen(Change change, const AttentionShape& shape = training, Window window = {}) {
  auto params = with_tensors(call<ForwardParams>(shape, window));
  change(params);
  return sm90_plan(params).instance->name;
}

constexpr auto nothing = [](ForwardParams&) {};

}  // namespace

TEST(a_cta_an_sm_walks_the_tiles_of_sm90_kernels) {
  const auto params = with_tensors(call<ForwardParams>(training));
  const ForwardPlan hopper = sm90_plan(params);
  CHECK_EQ(std::string(hopper.instance->name), "sm90_hd128");
  CHECK_EQ(hopper.num_ctas, 132);
  CHECK_EQ(hopper.grid, 132);
  CHECK_EQ(hopper.schedule.grid_size(), 64 * 32);  // tiles, however many CTAs there are
  CHECK_EQ(hopper.num_splits, 1);
  CHECK_EQ(hopper.workspace_bytes, std::size_t{0});
  const ForwardPlan ampere = sm90_plan(params, a100);
  CHECK_EQ(std::string(ampere.instance->name), "hd128");
  CHECK_EQ(ampere.num_ctas, 0);
  CHECK_EQ(ampere.grid, 64 * 32);
  const ForwardPlan same_gpu = plan_forward(params, h200, complete_forward_table());
  CHECK_EQ(std::string(same_gpu.instance->name), "hd128");
  CHECK_EQ(same_gpu.num_ctas, 0);

  AttentionShape small = training;
  small.batch_size = small.num_heads_q = small.num_heads_k = 1;
  small.seqlen_q = 40;
  const ForwardPlan one_tile = sm90_plan(with_tensors(call<ForwardParams>(small)));
  CHECK_EQ(std::string(one_tile.instance->name), "sm90_hd128");
  CHECK_EQ(one_tile.schedule.grid_size(), 1);
  CHECK_EQ(one_tile.grid, 1);
}

TEST(sm90_kernels_take_scales_that_are_not_negative) {
  for (const float scale : {1.0f, 1e-44f, 1e38f, 0.0f, -0.0f})
    CHECK_EQ(sm90_chosen([=](auto& p) { p.score.softmax_scale = scale; }), "sm90_hd128");
  for (const float scale : {-1.0f, -1e-44f, -1e38f})
    CHECK_EQ(sm90_chosen([=](auto& p) { p.score.softmax_scale = scale; }), "hd128");
}

TEST(sm90_kernels_take_tensors_that_tma_can_move) {
  AttentionShape single = training;
  single.batch_size = 1;
  single.num_heads_q = single.num_heads_k = 1;
  single.seqlen_q = 40;
  single.seqlen_k = 1;
  constexpr std::int64_t too_far = std::int64_t{1} << 39;  // elements: 2^40 bytes
  for (TensorView ForwardParams::* view :
       {&ForwardParams::q, &ForwardParams::k, &ForwardParams::v, &ForwardParams::out}) {
    for (std::int64_t TensorView::* stride :
         {&TensorView::batch_stride, &TensorView::row_stride, &TensorView::head_stride}) {
      // Expanded, and further apart than a descriptor can say.
      for (const std::int64_t value : {std::int64_t{0}, too_far})
        CHECK_EQ(sm90_chosen([=](auto& p) { p.*view.*stride = value; }), "hd128");
      CHECK_EQ(sm90_chosen([=](auto& p) { p.*view.*stride = too_far - 8; }), "sm90_hd128");
    }
    // With one element along a dimension its stride is nobody's.
    CHECK_EQ(sm90_chosen([=](auto& p) { (p.*view).batch_stride = 0; }, single), "sm90_hd128");
    CHECK_EQ(sm90_chosen([=](auto& p) { (p.*view).head_stride = 0; }, single), "sm90_hd128");
  }
  CHECK_EQ(sm90_chosen([](auto& p) { p.k.row_stride = p.v.row_stride = 0; }, single), "sm90_hd128");
}

TEST(only_keys_that_are_packed_or_cached_count_their_own_batch_entries) {
  AttentionShape shape = training;
  shape.batch_size = 1;
  const auto expanded_keys = [](auto& p) { p.k.batch_stride = p.v.batch_stride = 0; };
  CHECK_EQ(sm90_chosen(expanded_keys, shape), "sm90_hd128");
  const auto of_a_cache = [&](auto& p) {
    expanded_keys(p);
    p.sequences.kv_batch_idx = &some_int;
    p.sequences.num_kv_batches = 5;
  };
  CHECK_EQ(sm90_chosen(of_a_cache, shape), "hd128");
  const auto packed = [&](auto& p) {
    p.sequences.cu_seqlens_q = p.sequences.cu_seqlens_k = &some_int;
    p.q.batch_stride = p.out.batch_stride = 0;
    expanded_keys(p);
  };
  CHECK_EQ(sm90_chosen(packed), "sm90_hd128");
  const auto packed_queries = [](auto& p) {
    p.sequences.cu_seqlens_q = &some_int;
    p.q.batch_stride = p.out.batch_stride = 0;
  };
  CHECK_EQ(sm90_chosen(packed_queries), "sm90_hd128");
}

TEST(features_choose_among_sm90_kernels_and_fall_back) {
  CHECK_EQ(sm90_chosen([](auto& p) { p.score.softcap = 20.0f; }), "sm90_hd128_dropout");
  CHECK_EQ(sm90_chosen([](auto& p) { p.score.alibi_slopes = &some_float; }), "sm90_hd128_dropout");
  CHECK_EQ(sm90_chosen([](auto& p) { p.dropout.threshold = 1; }), "sm90_hd128_dropout");
  const auto paged = [](int page_size, std::int64_t page_stride = 1 << 20) {
    return [=](auto& p) {
      p.paged = {.block_table = &some_int,
                 .table_stride = 8,
                 .max_pages = 8,
                 .page_size = page_size,
                 .num_pages = 9};
      p.k.batch_stride = p.v.batch_stride = page_stride;
    };
  };
  for (const int page_size : {8, 16, 24, 256, 1000})
    CHECK_EQ(sm90_chosen(paged(page_size)), "sm90_hd128_cache");
  for (const int page_size : {1, 7, 12, 100})
    CHECK_EQ(sm90_chosen(paged(page_size)), "hd128_cache");
  // What TMA steps along is pages, not sequences.
  CHECK_EQ(sm90_chosen(paged(16, 0)), "hd128_cache");
  const auto padded = [&](auto& p) {
    paged(16)(p);
    p.sequences.leftpad_k = &some_int;
  };
  CHECK_EQ(sm90_chosen(padded), "hd128_cache");
  AttentionShape few = training;
  few.seqlen_q = 16;
  CHECK_EQ(sm90_chosen(nothing, few), "hd128_decode");
  few.seqlen_q = 17;
  CHECK_EQ(sm90_chosen(nothing, few), "sm90_hd128");
}

TEST(tree_masks_run_rows_that_can_split_keys) {
  const auto tree = [](auto& p) { p.window.has_tree = true; };
  AttentionShape shape = training;
  CHECK_EQ(sm90_chosen(tree, shape), "sm90_hd128_cache");
  shape.seqlen_q = 1;
  CHECK_EQ(sm90_chosen(tree, shape), "hd128_decode");
  shape.seqlen_q = 16;
  shape.head_dim = shape.head_dim_v = 96;
  CHECK_EQ(sm90_plan(with_tensors(call<ForwardParams>(shape, {.has_tree = true}))).num_splits, 1);
}

TEST(few_tiles_over_a_cache_share_its_keys) {
  AttentionShape shape = training;
  shape.batch_size = 1;
  shape.seqlen_q = 200;
  shape.seqlen_k = 1 << 15;
  const auto planned = [&](int num_splits, bool batch_invariant = false, int page_size = 0,
                           Window window = {}, float* max_logits = nullptr) {
    auto params = with_tensors(call<ForwardParams>(shape, window));
    params.max_logits = max_logits;
    params.sequences.seqused_k = &some_int;
    params.split = {.num_splits = num_splits, .batch_invariant = batch_invariant};
    if (page_size > 0) {
      params.paged = {.block_table = &some_int,
                      .table_stride = shape.seqlen_k / page_size,
                      .max_pages = shape.seqlen_k / page_size,
                      .page_size = page_size,
                      .num_pages = 7};
    }
    return sm90_plan(params);
  };
  const auto row = [](const ForwardPlan& plan) { return std::string(plan.instance->name); };
  const std::int64_t tiles = 2 * shape.num_heads_q;
  CHECK(tiles * 2 <= 132);
  for (const int page_size : {0, 64}) {
    const ForwardPlan plan = planned(0, false, page_size);
    CHECK_EQ(row(plan), "sm90_hd128_cache");
    CHECK_EQ(plan.schedule.grid_size(), tiles);
    CHECK(plan.num_splits * tiles * 10 >= 132 * 9);
    CHECK(plan.num_splits * tiles <= 4 * 132);
    CHECK(plan.workspace_bytes >= sizeof(float) * 200 * shape.num_heads_q * 129 * plan.num_splits);
    CHECK_EQ(planned(7, false, page_size).num_splits, 7);
    for (const ForwardPlan& whole : {planned(1, false, page_size), planned(0, true, page_size)}) {
      CHECK_EQ(whole.num_splits, 1);
      CHECK_EQ(whole.workspace_bytes, std::size_t{0});
      CHECK_EQ(row(whole), page_size > 0 ? "sm90_hd128_cache" : "sm90_hd128");
    }
  }
  // Rows that can split do not know the largest scores.
  float number = 0.0f;
  CHECK_EQ(row(planned(7, false, 0, {}, &number)), "sm90_hd128");
  CHECK_ERROR(planned(7, false, 64, {}, &number), "max_logits must be null where sm90_hd128_cache");
  CHECK_EQ(planned(100000).num_splits, shape.seqlen_k / planned(0).instance->config.block_n);
  // Keys of a tile that are too few to share.
  CHECK_EQ(row(planned(0, false, 0, {.left = 4000, .right = 0})), "sm90_hd128_cache");
  CHECK_EQ(row(planned(0, false, 0, {.left = 400, .right = 0})), "sm90_hd128");
  const int block_n = planned(7).instance->config.block_n;
  CHECK_EQ(planned(100, false, 64, {.left = 400, .right = 100}).num_splits,
           (400 + 100 + 128 + block_n - 1) / block_n);
  // Tiles enough to fill the device, however many splits are asked for.
  shape.batch_size = 8;
  for (const int num_splits : {0, 3}) {
    CHECK_EQ(row(planned(num_splits)), "sm90_hd128");
    CHECK_EQ(planned(num_splits, false, 64).num_splits, 1);
    CHECK_EQ(planned(num_splits, false, 64).workspace_bytes, std::size_t{0});
  }
  shape.batch_size = 1;
  shape.seqlen_k = 1000;
  CHECK_EQ(row(planned(0)), "sm90_hd128");
}

TEST(tiles_are_low_where_that_needs_no_more_rounds) {
  AttentionShape shape = training;
  shape.batch_size = 1;
  shape.num_heads_q = shape.num_heads_k = 32;
  shape.head_dim = shape.head_dim_v = 64;
  shape.seqlen_k = 1 << 15;
  const auto chosen = [&](int seqlen_q, auto change) {
    shape.seqlen_q = seqlen_q;
    auto params = with_tensors(call<ForwardParams>(shape));
    params.split.num_splits = 1;
    change(params);
    const ForwardPlan plan = sm90_plan(params);
    CHECK_EQ(plan.workspace_bytes == 0, !plan.table.used());
    CHECK_EQ(plan.num_splits, 1);
    return std::string(plan.instance->name);
  };
  // 3 and 4 tiles of 32 heads on 132 SMs; 3 and 5, which are two rounds; 8 and 11, two and three.
  CHECK_EQ(chosen(512, nothing), "sm90_hd64_cache");
  CHECK_EQ(chosen(513, nothing), "sm90_hd64");
  const auto any_splits = [](auto& p) { p.split.num_splits = 0; };
  CHECK_EQ(chosen(384, any_splits), "sm90_hd64_cache");  // 96 tiles, which leave 36 SMs idle
  CHECK_EQ(chosen(1400, nothing), "sm90_hd64");
  CHECK_EQ(chosen(512, [](auto& p) { p.split.batch_invariant = true; }), "sm90_hd64");
  CHECK_EQ(chosen(512, [](auto& p) { p.sequences.cu_seqlens_q = &some_int; }), "sm90_hd64");
  shape.seqlen_k = 1000;  // too few to matter
  CHECK_EQ(chosen(512, nothing), "sm90_hd64");
  shape.seqlen_k = 1024;
  shape.num_heads_q = shape.num_heads_k = 48;  // two rounds of either
  CHECK_EQ(chosen(600, nothing), "sm90_hd64_cache");
  shape.head_dim = shape.head_dim_v = 128;
  CHECK_EQ(chosen(600, nothing), "sm90_hd128");
}

TEST(tiles_of_unequal_length_are_drawn_where_there_are_more_than_ctas) {
  AttentionShape shape = training;
  shape.head_dim = shape.head_dim_v = 64;
  const auto planned = [&](Window window) {
    const ForwardPlan result = sm90_plan(with_tensors(call<ForwardParams>(shape, window)));
    CHECK_EQ(std::string(result.instance->name), "sm90_hd64");
    CHECK_EQ(result.workspace_bytes > 0, result.tickets.exists());
    return result;
  };
  const Window left{.left = 1000, .right = Window::unbounded};
  const Window both{.left = 1000, .right = 1000};
  // 22 tiles a head: six of 64 heads are a round of 132 CTAs.
  for (const Window& window : {causal, left, both}) {
    CHECK(planned(window).tickets.exists());
    CHECK_EQ(planned(window).schedule.heads_per_section, 6);
    CHECK_EQ(planned(window).schedule.least_last_heads, 12);
  }
  CHECK(!planned({}).tickets.exists());
  CHECK_EQ(planned({}).schedule.heads_per_section, 1);
  CHECK_EQ(planned({}).schedule.least_last_heads, 1);
  shape.batch_size = 1;
  shape.num_heads_q = shape.num_heads_k = 6;  // 132 tiles
  for (const Window& window : {causal, left, both}) CHECK(!planned(window).tickets.exists());
}

TEST(short_causal_calls_have_a_row_of_their_own) {
  AttentionShape shape = training;
  shape.head_dim = shape.head_dim_v = 64;
  const auto chosen = [&](int seqlen, Window window) {
    shape.seqlen_q = shape.seqlen_k = seqlen;
    return sm90_chosen(nothing, shape, window);
  };
  shape.seqlen_q = 1000;  // of which most see thousands of keys
  shape.seqlen_k = 4096;
  CHECK_EQ(sm90_chosen(nothing, shape, causal), "sm90_hd64");
  CHECK_EQ(chosen(1280, causal), "sm90_hd64_short");
  CHECK_EQ(chosen(1281, causal), "sm90_hd64");
  CHECK_EQ(chosen(1280, {}), "sm90_hd64");
  CHECK_EQ(chosen(1280, {.left = 100, .right = Window::unbounded}), "sm90_hd64");
  CHECK_EQ(chosen(1280, {.left = 100, .right = 5}), "sm90_hd64_short");
  CHECK_EQ(chosen(1280, {.left = Window::unbounded, .right = 1279}), "sm90_hd64");  // hides nothing
}

TEST(of_packed_sequences_the_bound_and_the_average_say_which_are_short) {
  AttentionShape shape = training;
  shape.head_dim = shape.head_dim_v = 64;
  const auto chosen = [&](int total, int max_seqlen_q, Window window = causal) {
    shape.seqlen_q = shape.seqlen_k = total;
    auto params = with_tensors(packed_call<ForwardParams>(shape, window));
    params.sequences.max_seqlen_q = max_seqlen_q;
    const ForwardPlan result = sm90_plan(params);
    CHECK_EQ(result.num_ctas, 132);
    CHECK_EQ(result.table.tile_rows, result.instance->config.block_m);
    return std::string(result.instance->name);
  };
  CHECK_EQ(chosen(10'000, 1280), "sm90_hd64_short");
  CHECK_EQ(chosen(10'000, 1281), "sm90_hd64");
  CHECK_EQ(chosen(10'000, 0), "sm90_hd64");
  CHECK_EQ(chosen(1280, 0), "sm90_hd64_short");
  CHECK_EQ(chosen(10'000, 1280, {}), "sm90_hd64");
  // 4 sequences of 320 on average may have one of 1,280, and a long one among short ones is rare.
  shape.batch_size = 4;
  CHECK_EQ(chosen(4 * 320, 4 * 320), "sm90_hd64_short");
  shape.batch_size = 100;
  CHECK_EQ(chosen(100 * 320, 4000), "sm90_hd64_short");
  CHECK_EQ(chosen(100 * 321, 4000), "sm90_hd64");
  // Where bits must not depend on it, no length chooses the row.
  shape.seqlen_q = shape.seqlen_k = 1000;
  auto invariant = with_tensors(call<ForwardParams>(shape, causal));
  CHECK_EQ(std::string(sm90_plan(invariant).instance->name), "sm90_hd64_short");
  invariant.split.batch_invariant = true;
  CHECK_EQ(std::string(sm90_plan(invariant).instance->name), "sm90_hd64");
  // As many keys as queries are expected of each, or more.
  shape.seqlen_q = 100 * 300;
  shape.seqlen_k = 100 * 330;
  const auto params = with_tensors(packed_call<ForwardParams>(shape, causal));
  CHECK_EQ(std::string(sm90_plan(params).instance->name), "sm90_hd64");
}
