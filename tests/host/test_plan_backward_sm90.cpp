// What backward passes plan on Hopper GPUs: tiles, CTAs, the way that dQ takes, and which row.
#include <algorithm>

#include "check.h"
#include "planning.h"

using namespace host_tests;

TEST(a_cta_an_sm_draws_the_tiles_of_sm90_kernels) {
  for (const bool deterministic : {false, true}) {
    auto params = with_tensors(call<BackwardParams>(training, causal));
    params.deterministic = deterministic;
    const BackwardPlan hopper = plan(params);
    CHECK_EQ(std::string(hopper.instance->name), "sm90_hd128");
    CHECK_EQ(hopper.num_ctas, 132);
    CHECK_EQ(hopper.grid, 132);
    CHECK_EQ(hopper.schedule.grid_size(), 64 * 32);  // tiles, however many CTAs there are
    const BackwardPlan ampere = plan(params, a100);
    CHECK_EQ(std::string(ampere.instance->name), "hd128");
    CHECK_EQ(ampere.num_ctas, 0);
    CHECK_EQ(ampere.grid, 64 * 32);
    params.score.softmax_scale = -1.0f;
    const BackwardPlan same_gpu = plan(params);
    CHECK_EQ(std::string(same_gpu.instance->name), "hd128");
    CHECK_EQ(same_gpu.num_ctas, 0);
  }
  DeviceInfo smaller = h200;
  smaller.num_sms = 114;
  CHECK_EQ(plan(with_tensors(call<BackwardParams>(training)), smaller).num_ctas, 114);
}

// What a call of wide heads gets, by the SMs of its GPU.
TEST(two_ctas_draw_a_tile_of_wide_heads) {
  AttentionShape shape = training;
  shape.head_dim = shape.head_dim_v = 256;
  const auto planned = [&](int num_sms, const Window& window = causal, bool deterministic = false) {
    DeviceInfo device = h200;
    device.num_sms = num_sms;
    auto params = with_tensors(call<BackwardParams>(shape, window));
    params.deterministic = deterministic;
    return plan(params, device);
  };
  CHECK_EQ(planned(132).instance->config.ctas_per_tile, 2);
  CHECK_EQ(planned(132).num_ctas, 132);
  CHECK_EQ(planned(131).num_ctas, 130);  // whole pairs
  CHECK_EQ(planned(1).num_ctas, 2);      // or one
  CHECK_EQ(planned(131).grid, 130);
  CHECK_EQ(planned(132).schedule.grid_size(), 64 * 32);  // tiles, not CTAs
  // Three quarters of a tile for each pair are five heads of ten tiles, two for each pair, in
  // turns, 14; so many that 64 heads come out even.
  shape.seqlen_q = shape.seqlen_k = 1280;
  CHECK_EQ(planned(132).schedule.heads_per_section, 8);
  CHECK_EQ(planned(132, causal, true).schedule.heads_per_section, 16);
  // No sweeps of what single CTAs would sweep.
  shape.seqlen_q = shape.seqlen_k = 129;
  shape.batch_size = 132;
  shape.num_heads_q = shape.num_heads_k = 1;
  CHECK(!planned(132).sweeps);
  BackwardInstance single = sm90_backward_instance("single", 256);
  single.config.ctas_per_tile = 1;
  const InstanceList<BackwardInstance> table({single});
  CHECK(plan_backward(with_tensors(call<BackwardParams>(shape, causal)), h200, table).sweeps);
  // Splits of the query heads fill the device twice, CTAs, not tiles.
  shape = sizes(1, 2048, 1024, 64, 8, 256);
  CHECK_EQ(planned(132).dkdv_splits, 4);  // 8 tiles * 8 heads * 2 CTAs * 4 > 264
}

// Splits of a group of heads, and heads of a section, under a causal mask.
TEST(a_causal_mask_splits_groups_of_many_heads) {
  struct Chosen {
    int splits;
    int heads_per_section;
  };
  const auto chosen = [](int group, int seqlen, int head_dim, auto change) {
    const AttentionShape shape = sizes(160, seqlen, seqlen, 2 * group, 2, head_dim);
    auto params = with_tensors(call<BackwardParams>(shape, causal));
    change(params);
    const BackwardPlan result = plan(params);
    return Chosen{result.dkdv_splits, result.schedule.heads_per_section};
  };
  const auto splits = [&](int group, int seqlen, int head_dim, auto change) {
    return chosen(group, seqlen, head_dim, change).splits;
  };
  CHECK_EQ(splits(32, 4096, 128, nothing), 8);  // of four heads, 512 columns
  CHECK_EQ(splits(16, 4096, 128, nothing), 4);
  CHECK_EQ(splits(8, 4096, 128, nothing), 2);
  CHECK_EQ(splits(4, 4096, 128, nothing), 1);
  CHECK_EQ(splits(16, 4096, 64, nothing), 2);    // of eight heads
  CHECK_EQ(splits(32, 8192, 128, nothing), 16);  // long ones of 256 columns
  CHECK_EQ(splits(32, 512, 128, nothing), 4);    // short ones of 4,096 rows
  CHECK_EQ(splits(32, 128, 128, nothing), 1);
  CHECK_EQ(splits(12, 4096, 128, nothing), 3);
  CHECK_EQ(splits(7, 4096, 128, nothing), 1);  // a divisor of the group, or none
  // A split's heads are a section of their own: those of eight would not stay in L2.
  CHECK_EQ(chosen(32, 16'384, 128, nothing).heads_per_section, 1);
  const auto full = [](BackwardParams& params) { params.window = {}; };
  CHECK_EQ(splits(32, 4096, 128, full), 1);
  CHECK_EQ(splits(32, 4096, 128, [](BackwardParams& p) { p.window.left = 512; }), 1);
  CHECK_EQ(splits(32, 4096, 128, ordered), 1);
  // Partials stay within the size of the sum of dQ.
  CHECK_EQ(splits(32, 4096, 128, [](BackwardParams& p) { p.shape.seqlen_k *= 4; }), 4);
}

TEST(tiles_are_those_of_the_sm90_row) {
  AttentionShape shape = training;
  const auto tiles_of = [&](int head_dim) {
    shape.head_dim = shape.head_dim_v = head_dim;
    const BackwardPlan result = plan(with_tensors(call<BackwardParams>(shape)));
    CHECK_EQ(result.instance->config.family, KernelFamily::sm90);
    return std::pair{result.schedule.num_tiles, result.q_tiles};
  };
  CHECK(tiles_of(64) == (std::pair{4096 / 128, 4 * 4096 / 128}));
  CHECK(tiles_of(128) == (std::pair{4096 / 128, 4 * 4096 / 64}));
  CHECK(tiles_of(256) == (std::pair{4096 / 128, 4 * 4096 / 64}));
}

TEST(sm90_kernels_take_scales_that_are_not_negative) {
  for (const float scale : {1.0f, 1e-44f, 1e38f, 0.0f, -0.0f})
    CHECK_EQ(chosen<BackwardParams>([=](auto& p) { p.score.softmax_scale = scale; }), "sm90_hd128");
  for (const float scale : {-1.0f, -1e-44f, -1e38f})
    CHECK_EQ(chosen<BackwardParams>([=](auto& p) { p.score.softmax_scale = scale; }), "hd128");
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
        CHECK_EQ(chosen<BackwardParams>([=](auto& p) { p.*view.*stride = value; }), "hd128");
      CHECK_EQ(chosen<BackwardParams>([=](auto& p) { p.*view.*stride = too_far - 8; }),
               "sm90_hd128");
    }
    for (const int bytes : {2, 8}) {
      const auto shifted = [=](auto& p) {
        (p.*view).data = static_cast<char*>((p.*view).data) + bytes;
      };
      CHECK_EQ(chosen<BackwardParams>(shifted), "hd128");
    }
    // With one element along a dimension its stride is nobody's.
    CHECK_EQ(chosen<BackwardParams>([=](auto& p) { (p.*view).batch_stride = 0; }, single),
             "sm90_hd128");
    CHECK_EQ(chosen<BackwardParams>([=](auto& p) { (p.*view).head_stride = 0; }, single),
             "sm90_hd128");
  }
}

TEST(tensors_of_the_kernels_around_the_main_one_lie_anyhow) {
  for (TensorView BackwardParams::* view : {&BackwardParams::out, &BackwardParams::dq}) {
    CHECK_EQ(chosen<BackwardParams>([=](auto& p) { (p.*view).row_stride = std::int64_t{1} << 39; }),
             "sm90_hd128");
  }
  CHECK_EQ(chosen<BackwardParams>([](auto& p) { p.out.head_stride = 0; }), "sm90_hd128");
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
  const BackwardPlan packed = plan(params);
  CHECK_EQ(std::string(packed.instance->name), "sm90_hd128");
  CHECK_EQ(packed.num_ctas, 132);
  CHECK_EQ(packed.table.tile_rows, 128);
  CHECK_EQ(packed.table.q_tile_rows, 64);
  params.sequences = {};
  CHECK_EQ(std::string(plan(params).instance->name), "hd128");
}

TEST(a_kernel_that_writes_dq_sums_it_where_a_sequence_may_have_two_key_tiles) {
  AttentionShape shape = training;
  for (const auto& [seqlen_k, sums] :
       {std::pair{1, false}, {128, false}, {129, true}, {4096, true}}) {
    shape.seqlen_k = seqlen_k;
    const auto params = with_tensors(call<BackwardParams>(shape));
    const BackwardPlan result = plan(params);
    CHECK(result.instance->writes_dq);
    CHECK_EQ(result.instance->config.block_n, 128);
    CHECK_EQ(result.dq_path != DqPath::direct, sums);
    const BackwardPlan of_sm80 = plan_backward(call<BackwardParams>(shape), h200, backward_table());
    CHECK(of_sm80.dq_path == DqPath::converted);
  }
}

TEST(dq_is_finished_beside_the_products_where_queries_see_many_keys) {
  const auto finishes = [](int seqlen_q, int seqlen_k, const Window& window, int head_dim = 128) {
    AttentionShape shape = training;
    shape.seqlen_q = seqlen_q;
    shape.seqlen_k = seqlen_k;
    shape.head_dim = shape.head_dim_v = head_dim;
    const auto params = with_tensors(call<BackwardParams>(shape, window));
    const BackwardPlan result = plan(params);
    CHECK_EQ(result.instance->config.head_dim, head_dim);
    CHECK_EQ(result.additions.exists(), result.dq_path == DqPath::finished);
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
  const auto plan_packed = [&] { return plan(packed); };
  for (const auto& [total, wanted] : {std::pair{4 * 500, false}, {4 * 1000, true}}) {
    packed.shape.seqlen_q = packed.shape.seqlen_k = total;
    CHECK_EQ(plan_packed().dq_path == DqPath::finished, wanted);
  }
}

TEST(the_last_tiles_of_an_even_grid_have_parts_where_they_leave_ctas_idle) {
  const auto shared = [](int heads, int seqlen, auto change, int head_dim = 128) {
    const AttentionShape shape = sizes(1, seqlen, seqlen, heads, heads, head_dim);
    auto params = with_tensors(call<BackwardParams>(shape));
    change(params);
    const BackwardPlan result = plan(params);
    const SharedTiles& tiles = result.shared_tiles;
    if (tiles.parts > 1) {
      CHECK(result.sweeps == false && !result.takes_turns);
      CHECK_EQ(tiles.first + tiles.count, result.schedule.grid_size());
      CHECK_EQ(tiles.count, result.schedule.grid_size() % h200.num_sms);
      CHECK_EQ(result.part_counters.count, 2 * tiles.places());
    }
    return tiles.parts;
  };
  const auto as_it_is = nothing;
  CHECK_EQ(shared(16, 16'384, as_it_is), 3);  // 2048 tiles are 15 rounds of 132 and 68
  CHECK_EQ(shared(16, 2048, as_it_is), 1);    // 256 are two but for eight
  CHECK_EQ(shared(33, 512, as_it_is), 1);     // one
  CHECK_EQ(shared(1, 8192, as_it_is), 2);     // 64 tiles of 128 steps
  CHECK(shared(1, 512, as_it_is) > 1);
  CHECK_EQ(shared(32, 16'384, as_it_is, 64), 8);  // 4096: 31 and four
  CHECK_EQ(shared(16, 16'384, as_it_is, 256), 1);
  CHECK_EQ(shared(16, 16'384, [](auto& p) { p.window = causal; }), 1);
  CHECK_EQ(shared(16, 16'384, ordered), 1);
  CHECK_EQ(shared(16, 16'384, softcap), 1);
  CHECK_EQ(shared(16, 16'384, negative_scale), 1);
}

TEST(a_fixed_order_stores_the_first_part_of_dq_and_needs_no_other_kernel) {
  for (const int seqlen : {100, 600, 4096}) {
    AttentionShape shape = training;
    shape.seqlen_q = shape.seqlen_k = seqlen;
    auto params = with_tensors(call<BackwardParams>(shape, causal));
    params.deterministic = true;
    const BackwardPlan result = plan(params);
    const bool has_one_tile = seqlen <= result.instance->config.block_n;
    CHECK(result.dq_path == (has_one_tile ? DqPath::direct : DqPath::ordered));
    CHECK_EQ(result.takes_turns, !has_one_tile);

    params.score.softmax_scale = -1.0f;  // sm80 kernels add to zeros, and a kernel follows
    const BackwardPlan of_sm80 = plan(params);
    CHECK(of_sm80.instance->config.family == KernelFamily::sm80);
    CHECK(of_sm80.dq_path == DqPath::converted);
    CHECK(of_sm80.takes_turns && of_sm80.additions.exists());
  }
}

TEST(a_kernel_that_follows_has_a_warp_for_every_strip_or_as_many_as_fit) {
  AttentionShape shape = training;  // 64 heads of all sequences
  shape.head_dim = shape.head_dim_v = 64;
  const auto planned = [&](int seqlen_k) {
    shape.seqlen_k = seqlen_k;
    return plan(with_tensors(call<BackwardParams>(shape)));
  };
  CHECK(planned(256).dq_path == DqPath::converted);
  CHECK_EQ(planned(256).convert_grid, 64 * 4096 / 64);  // CTAs of four strips of 16 rows
  CHECK(planned(4096).dq_path == DqPath::finished);
  CHECK_EQ(planned(4096).convert_grid, 132 * 16);  // what is left is for the device to know
  CHECK(planned(128).dq_path == DqPath::direct);
  CHECK_EQ(planned(128).convert_grid, 0);
  CHECK_EQ(plan_backward(call<BackwardParams>(shape), h200, backward_table()).convert_grid,
           64 * 4096 / 64);  // sm80: a CTA for each query tile
}

TEST(a_cta_sweeps_a_head_where_heads_fill_the_device_and_data_fit_l2_or_are_few_tiles) {
  struct Expected {
    int batch_heads, seqlen, head_dim;
    bool sweeps;
    Window window = causal;
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
                                   {132, 290, 128, true, {}},
                                   {132, 291, 128, false, {}},
                                   {132, 512, 128, true},  // four key tiles
                                   {132, 513, 128, false}}) {
    const AttentionShape shape =
        sizes(expected.batch_heads, expected.seqlen, expected.seqlen, 1, 1, expected.head_dim);
    auto params = with_tensors(call<BackwardParams>(shape, expected.window));
    const BackwardPlan result = plan(params);
    CHECK_EQ(result.sweeps, expected.sweeps);
    if (!result.sweeps) continue;
    CHECK(result.dq_path == DqPath::ordered);
    CHECK(!result.takes_turns && !result.additions.exists());
    CHECK_EQ(result.schedule.heads_per_section, 1);
    CHECK_EQ(result.num_ctas, std::min(expected.batch_heads, h200.num_sms));
    // A CTA has the sums of a head, and no more.
    const BackwardConfig& config = result.instance->config;
    const int rows = (expected.seqlen + config.block_m - 1) / config.block_m * config.block_m;
    CHECK_EQ(result.tickets.offset - result.dq_accum.offset,
             sizeof(float) * result.num_ctas * rows * config.head_dim);
  }
}

TEST(no_cta_sweeps_what_may_be_uneven_or_has_another_kernel) {
  const AttentionShape shape = sizes(1, 512, 512, 132, 132, 64);
  const auto sweeps = [&](auto change) {
    auto params = with_tensors(call<BackwardParams>(shape));
    change(params);
    return plan(params).sweeps;
  };
  CHECK(sweeps(nothing));
  CHECK(sweeps(softcap));
  CHECK(sweeps([](BackwardParams& params) { params.shape.seqlen_k = 1024; }));
  CHECK(!sweeps([](BackwardParams& params) { params.shape.seqlen_k = 1025; }));
  CHECK(!sweeps(negative_scale));  // sm80
  CHECK(!sweeps(ordered));
  for (const auto lengths :
       {&SequenceParams::seqused_q, &SequenceParams::seqused_k, &SequenceParams::leftpad_k})
    CHECK(!sweeps([=](BackwardParams& params) { params.sequences.*lengths = &some_int; }));
  CHECK(!sweeps([](BackwardParams& params) {
    params.sequences.cu_seqlens_q = params.sequences.cu_seqlens_k = &some_int;
  }));
  CHECK(!sweeps(lists));
}

TEST(short_packed_sequences_are_swept_where_none_is_long_beside_a_ctas_work) {
  struct Expected {
    int batch_size, num_heads_q, num_heads_k, head_dim;
    Window window;
    int swept_rows;
  };
  constexpr int average = 256;
  // 3/4 of 50 MiB over 132 CTAs of 512 or 1,024 bytes a row: 581, 290; or 2 or 4 tiles of 128 keys.
  // A third of a CTA's work: average * sqrt(batch_size * heads / (3 * 132)).
  for (const Expected& expected : {Expected{128, 32, 32, 64, causal, 581},
                                   {128, 32, 32, 64, {}, 581},
                                   {128, 16, 16, 128, causal, 512},
                                   {128, 16, 16, 128, {}, 290},
                                   {128, 64, 16, 64, causal, 512},  // 145 would fit L2
                                   {128, 64, 16, 64, {}, 256},
                                   {64, 16, 16, 64, causal, 411},
                                   {64, 16, 16, 64, {}, 411},
                                   {7, 16, 16, 64, causal, 136},
                                   {6, 16, 16, 64, causal, 0},        // 126: no more than a tile
                                   {128, 16, 16, 192, causal, 0}}) {  // pairs of CTAs
    const int total = expected.batch_size * average;
    const AttentionShape shape = sizes(expected.batch_size, total, total, expected.num_heads_q,
                                       expected.num_heads_k, expected.head_dim);
    auto params = with_tensors(call<BackwardParams>(shape, expected.window));
    CHECK_EQ(plan(params).table.swept_rows, 0);
    params.sequences.cu_seqlens_q = params.sequences.cu_seqlens_k = &some_int;
    const BackwardPlan result = plan(params);
    CHECK_EQ(result.table.swept_rows, expected.swept_rows);
    CHECK(!result.sweeps && result.dq_path == DqPath::converted);
    // Longer sequences have sums.
    CHECK(result.tickets.offset - result.dq_accum.offset >=
          sizeof(float) * expected.num_heads_q * total * expected.head_dim);
  }
}

TEST(beside_swept_sequences_others_may_have_sums_that_warps_finish) {
  const AttentionShape shape = sizes(7, 4200, 4200, 8, 8, 128);
  auto params = with_tensors(call<BackwardParams>(shape));
  params.sequences.cu_seqlens_q = params.sequences.cu_seqlens_k = &some_int;
  const BackwardPlan result = plan(params);
  CHECK(result.dq_path == DqPath::finished);
  CHECK_EQ(result.table.swept_rows, 225);
}

TEST(packed_sequences_are_not_swept_in_a_fixed_order_or_by_other_kernels) {
  const AttentionShape shape = sizes(128, 32'768, 32'768, 32, 32, 64);
  const auto swept_rows = [&](auto change) {
    auto params = with_tensors(call<BackwardParams>(shape));
    params.sequences.cu_seqlens_q = params.sequences.cu_seqlens_k = &some_int;
    change(params);
    return plan(params).table.swept_rows;
  };
  CHECK_EQ(swept_rows(nothing), 581);
  CHECK_EQ(swept_rows(softcap), 581);
  CHECK_EQ(swept_rows([](BackwardParams& params) { params.sequences.seqused_k = &some_int; }), 581);
  CHECK_EQ(swept_rows(ordered), 0);
  CHECK_EQ(swept_rows(lists), 0);
  CHECK_EQ(swept_rows(negative_scale), 0);
  CHECK_EQ(swept_rows([](BackwardParams& params) { params.shape.seqlen_k = 0; }), 0);
  CHECK_EQ(swept_rows([](BackwardParams& params) { params.shape.batch_size = 0; }), 0);
}

TEST(a_sweep_may_be_of_some_of_the_query_heads_of_a_key_head) {
  const AttentionShape shape = sizes(33, 260, 130, 8, 1, 64);
  const BackwardPlan result = plan(with_tensors(call<BackwardParams>(shape)));
  CHECK_EQ(result.dkdv_splits, 4);
  CHECK(result.sweeps);
  CHECK_EQ(result.num_ctas, 132);
  CHECK_EQ(result.tickets.offset - result.dq_accum.offset, sizeof(float) * 132 * 2 * 384 * 64);
}

TEST(sections_of_sm90_keep_to_a_small_part_of_l2_unless_key_tiles_wait_for_one_another) {
  const auto section = [](const Window& window, bool deterministic, int seqlen = 4096) {
    AttentionShape shape = training;
    shape.seqlen_q = shape.seqlen_k = seqlen;
    auto params = with_tensors(call<BackwardParams>(shape, window));
    params.deterministic = deterministic;
    return plan(params).schedule.heads_per_section;
  };
  // An eighth of L2 is 6.25 MiB: one head of 4 MiB, six of 1 MiB, of which 8 divide 64.
  CHECK_EQ(section({}, false), 1);
  CHECK_EQ(section({}, false, 1024), 8);
  // A quarter: 3 heads, and 4 divide 64. 3 of 4 tiles for each of 132 SMs are 4 heads of 32 too.
  CHECK_EQ(section(causal, false), 4);
  // 2 tiles for each of 132 SMs are 9 heads of 32; 16 divide 64.
  CHECK_EQ(section({}, true), 16);
  CHECK_EQ(section({}, true, 8192), 8);
  // 8 tiles of a head at a time are 16 heads, or more of few tiles.
  CHECK_EQ(section(causal, true), 16);
  CHECK_EQ(section(causal, true, 8192), 16);
  CHECK_EQ(section(causal, true, 1024), 64);  // 33 would do
}
