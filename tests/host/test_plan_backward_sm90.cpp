// What backward passes plan on Hopper GPUs: tiles, CTAs, the way that dQ takes, and which row.
#include "check.h"
#include "plan_table.h"
#include "planning.h"

using namespace host_tests;

namespace {

constexpr PlannedCall plans[] = {
    // A CTA an SM draws the tiles, however many those are.
    {"4 4096 4096 16 16 128 causal", "row=sm90_hd128 ctas=132 grid=132 tiles=2048"},
    {"4 4096 4096 16 16 128 causal ordered", "row=sm90_hd128 ctas=132 grid=132 tiles=2048"},
    {"4 4096 4096 16 16 128 causal a100", "row=hd128 ctas=0 grid=2048"},
    {"4 4096 4096 16 16 128 causal ordered a100", "row=hd128 ctas=0 grid=2048"},
    {"4 4096 4096 16 16 128 causal negative_scale", "row=hd128 ctas=0"},
    {"4 4096 4096 16 16 128 causal ordered negative_scale", "row=hd128 ctas=0"},
    {"4 4096 4096 16 16 128 sms=114", "ctas=114"},
    {"4 4096 4096 16 16 64", "row=sm90_hd64 key_tiles=32 q_tiles=128"},
    {"4 4096 4096 16 16 128", "row=sm90_hd128 key_tiles=32 q_tiles=256"},
    {"4 4096 4096 16 16 256", "row=sm90_hd256 key_tiles=32 q_tiles=256"},

    // Two CTAs draw a tile of wide heads: whole pairs, one at least.
    {"4 4096 4096 16 16 256 causal", "ctas=132 tiles=2048"},
    {"4 4096 4096 16 16 256 causal sms=131", "ctas=130 grid=130"},
    {"4 4096 4096 16 16 256 causal sms=1", "ctas=2"},
    // Three quarters of a tile for each pair are five heads of ten tiles, two for each pair, in
    // turns, 14; so many that 64 heads come out even.
    {"4 1280 1280 16 16 256 causal", "section=8"},
    {"4 1280 1280 16 16 256 causal ordered", "section=16"},
    {"132 129 129 1 1 256 causal", "sweeps=no"},  // of what single CTAs would sweep
    // Splits of the query heads fill the device twice, CTAs, not tiles: 8 * 8 * 2 * 4 > 264.
    {"1 2048 1024 64 8 256 causal", "splits=4"},

    // A causal mask splits groups of many heads.
    {"160 4096 4096 64 2 128 causal", "splits=8"},  // of four heads, 512 columns
    {"160 4096 4096 32 2 128 causal", "splits=4"},
    {"160 4096 4096 16 2 128 causal", "splits=2"},
    {"160 4096 4096 8 2 128 causal", "splits=1"},
    {"160 4096 4096 32 2 64 causal", "splits=2"},    // of eight heads
    {"160 8192 8192 64 2 128 causal", "splits=16"},  // long ones of 256 columns
    {"160 512 512 64 2 128 causal", "splits=4"},     // short ones of 4,096 rows
    {"160 128 128 64 2 128 causal", "splits=1"},
    {"160 4096 4096 24 2 128 causal", "splits=3"},
    {"160 4096 4096 14 2 128 causal", "splits=1"},  // a divisor of the group, or none
    // A split's heads are a section of their own: those of eight would not stay in L2.
    {"160 16384 16384 64 2 128 causal", "section=1"},
    {"160 4096 4096 64 2 128", "splits=1"},
    {"160 4096 4096 64 2 128 left=512 right=0", "splits=1"},
    {"160 4096 4096 64 2 128 causal ordered", "splits=1"},
    {"160 4096 16384 64 2 128 causal", "splits=4"},  // partials within the size of the sum of dQ

    // dQ is summed where a sequence may have two key tiles, and finished beside the products where
    // queries see many keys.
    {"4 4096 1 16 16 128", "dq=direct additions=no"},
    {"4 4096 128 16 16 128", "dq=direct additions=no"},
    {"4 4096 129 16 16 128", "dq=converted additions=no"},
    {"4 4096 256 16 16 128", "dq=converted additions=no"},
    {"4 4096 512 16 16 128", "dq=finished additions=yes"},
    {"4 4096 4096 16 16 128", "dq=finished additions=yes"},
    {"4 4096 4096 16 16 128 a100", "dq=converted additions=no"},
    {"4 4096 128 16 16 128 a100", "dq=converted additions=no"},
    {"4 1 1024 16 16 128", "dq=finished"},
    {"4 512 512 16 16 128 causal", "dq=converted"},
    {"4 1024 1024 16 16 128 causal", "dq=finished"},
    {"4 64 1024 16 16 128 causal", "dq=finished"},  // the last queries
    {"4 4096 4096 16 16 128 left=300 right=0", "dq=converted"},
    {"4 4096 4096 16 16 128 left=2000 right=0", "dq=finished"},
    {"4 4096 640 16 16 64", "dq=converted"},
    {"4 4096 1024 16 16 64", "dq=finished"},
    {"4 8192 8192 16 16 64 causal", "dq=converted"},
    {"4 4096 4096 16 16 256", "dq=converted"},
    {"4 2000 2000 16 16 128 causal packed", "dq=converted"},
    {"4 4000 4000 16 16 128 causal packed", "dq=finished"},
    // A fixed order stores the first part and needs no other kernel; sm80 kernels add to zeros.
    {"4 100 100 16 16 128 causal ordered", "dq=direct turns=no"},
    {"4 600 600 16 16 128 causal ordered", "dq=ordered turns=yes"},
    {"4 4096 4096 16 16 128 causal ordered", "dq=ordered turns=yes"},
    {"4 100 100 16 16 128 causal ordered negative_scale", "dq=converted turns=yes additions=yes"},
    {"4 4096 4096 16 16 128 causal ordered negative_scale", "dq=converted turns=yes additions=yes"},
    // A kernel that follows has a warp for every strip of 16 rows, or as many as fit: what is left
    // is for the device to know. Of sm80 it has a CTA for each query tile.
    {"4 4096 256 16 16 64", "dq=converted convert=4096"},
    {"4 4096 4096 16 16 64", "dq=finished convert=2112"},
    {"4 4096 128 16 16 64", "dq=direct convert=0"},
    {"4 4096 4096 16 16 64 a100", "convert=4096"},

    // The last tiles of an even grid have parts where they leave CTAs idle.
    {"1 16384 16384 16 16 128", "parts=3 first_shared=1980 shared=68 turns=no sweeps=no"},
    {"1 2048 2048 16 16 128", "parts=1"},  // two rounds but for eight
    {"1 512 512 33 33 128", "parts=1"},    // one
    {"1 8192 8192 1 1 128", "parts=2 first_shared=0 shared=64"},
    {"1 512 512 1 1 128", "parts=4 first_shared=0 shared=4"},
    {"1 16384 16384 32 32 64", "parts=8 first_shared=4092 shared=4"},  // 31 rounds and four
    {"1 16384 16384 16 16 256", "parts=1"},
    {"1 16384 16384 16 16 128 causal", "parts=1"},
    {"1 16384 16384 16 16 128 ordered", "parts=1"},
    {"1 16384 16384 16 16 128 softcap", "parts=1"},
    {"1 16384 16384 16 16 128 negative_scale", "parts=1"},
    // Long tiles of lists have some.
    {"1 4032 4096 16 16 128 lists", "parts=1"},  // 63 steps of 64 queries
    {"1 4033 4096 16 16 128 lists", "parts=2 first_shared=0 shared=16"},
    {"1 8192 8192 16 16 128 lists", "parts=4 first_shared=0 shared=16"},
    {"1 65536 65536 16 16 128 lists", "parts=4 first_shared=0 shared=128"},
    {"1 8192 8192 16 16 128 lists a100", "parts=1"},
    {"1 1024 4096 16 4 128 lists", "parts=2 first_shared=0 shared=4"},  // of four heads
    {"1 4096 268435456 16 16 128 lists", "parts=1"},  // more tiles than rows to count them
    {"4 4096 4096 16 16 128 lists packed", "parts=1"},

    // A CTA sweeps a head where heads fill the device and data fit L2 or are few tiles.
    {"132 512 512 1 1 64 causal", "sweeps=yes dq=ordered turns=no additions=no section=1 ctas=132"},
    {"119 512 512 1 1 64 causal", "sweeps=yes ctas=119"},  // 0.9 of 132
    {"118 512 512 1 1 64 causal", "sweeps=no"},            // too few
    {"133 512 512 1 1 64 causal", "sweeps=no"},            // one more than a round
    {"238 512 512 1 1 64 causal", "sweeps=yes ctas=132"},  // 0.9 of two rounds
    {"132 129 129 1 1 64 causal", "sweeps=yes"},           // two key tiles
    {"132 128 128 1 1 64 causal", "sweeps=no"},            // nothing to sum
    {"132 560 560 1 1 64 causal", "sweeps=yes"},           // 560 * 512 bytes of 132: 36 MiB of 50
    {"132 640 640 1 1 64 causal", "sweeps=no"},            // 41 MiB
    {"132 256 256 1 1 128 causal", "sweeps=yes"},          // twice the bytes a query
    {"132 290 290 1 1 128", "sweeps=yes"},
    {"132 291 291 1 1 128", "sweeps=no"},
    {"132 512 512 1 1 128 causal", "sweeps=yes"},  // four key tiles
    {"132 513 513 1 1 128 causal", "sweeps=no"},
    {"33 260 130 8 1 64", "splits=4 sweeps=yes ctas=132"},  // some of the query heads of a key head
    // None sweeps what may be uneven or has another kernel.
    {"1 512 512 132 132 64", "sweeps=yes"},
    {"1 512 512 132 132 64 softcap", "sweeps=yes"},
    {"1 512 1024 132 132 64", "sweeps=yes"},
    {"1 512 1025 132 132 64", "sweeps=no"},
    {"1 512 512 132 132 64 negative_scale", "sweeps=no"},
    {"1 512 512 132 132 64 ordered", "sweeps=no"},
    {"1 512 512 132 132 64 used_q", "sweeps=no"},
    {"1 512 512 132 132 64 used_k", "sweeps=no"},
    {"1 512 512 132 132 64 leftpad", "sweeps=no"},
    {"1 512 512 132 132 64 packed", "sweeps=no"},
    {"1 512 512 132 132 64 lists", "sweeps=no"},

    // Short packed sequences are swept where none is long beside a CTA's work: 3/4 of 50 MiB over
    // 132 CTAs of 512 or 1,024 bytes a row: 581, 290; or 2 or 4 tiles of 128 keys. A third of a
    // CTA's work: their average of 256 * sqrt(batch_size * heads / (3 * 132)).
    {"128 32768 32768 32 32 64 causal", "swept_rows=0"},
    {"128 32768 32768 32 32 64 causal packed", "swept_rows=581 sweeps=no dq=converted"},
    {"128 32768 32768 32 32 64 packed", "swept_rows=581 sweeps=no dq=converted"},
    {"128 32768 32768 16 16 128 causal packed", "swept_rows=512"},
    {"128 32768 32768 16 16 128 packed", "swept_rows=290"},
    {"128 32768 32768 64 16 64 causal packed", "swept_rows=512"},  // 145 would fit L2
    {"128 32768 32768 64 16 64 packed", "swept_rows=256"},
    {"64 16384 16384 16 16 64 causal packed", "swept_rows=411"},
    {"64 16384 16384 16 16 64 packed", "swept_rows=411"},
    {"7 1792 1792 16 16 64 causal packed", "swept_rows=136"},
    {"6 1536 1536 16 16 64 causal packed", "swept_rows=0"},       // 126: no more than a tile
    {"128 32768 32768 16 16 192 causal packed", "swept_rows=0"},  // pairs of CTAs
    {"128 32768 32768 32 32 64 packed softcap", "swept_rows=581"},
    {"128 32768 32768 32 32 64 packed used_k", "swept_rows=581"},
    {"128 32768 32768 32 32 64 packed ordered", "swept_rows=0"},
    {"128 32768 32768 32 32 64 packed lists", "swept_rows=0"},
    {"128 32768 32768 32 32 64 packed negative_scale", "swept_rows=0"},
    {"128 32768 0 32 32 64 packed", "swept_rows=0"},
    {"0 32768 32768 32 32 64 packed", "swept_rows=0"},
    {"7 4200 4200 8 8 128 packed", "dq=finished swept_rows=225"},  // others have sums

    // Sections keep to an eighth of L2, 6.25 MiB: one head of 4 MiB, six of 1 MiB, of which 8
    // divide 64.
    {"4 4096 4096 16 16 128", "section=1"},
    {"4 1024 1024 16 16 128", "section=8"},
    // A quarter: 3 heads, and 4 divide 64. 3 of 4 tiles for each of 132 SMs are 4 heads of 32 too.
    {"4 4096 4096 16 16 128 causal", "section=4"},
    // Where key tiles wait for one another, 2 tiles for each of 132 SMs are 9 heads of 32; 16
    // divide 64.
    {"4 4096 4096 16 16 128 ordered", "section=16"},
    {"4 8192 8192 16 16 128 ordered", "section=8"},
    // 8 tiles of a head at a time are 16 heads, or more of few tiles.
    {"4 4096 4096 16 16 128 causal ordered", "section=16"},
    {"4 8192 8192 16 16 128 causal ordered", "section=16"},
    {"4 1024 1024 16 16 128 causal ordered", "section=64"},  // 33 would do
    // Lists make tiles unequal.
    {"4 65536 4096 16 16 128 bias", "section=1"},
    {"4 65536 4096 16 16 128 lists", "section=2"},
    {"4 65536 4096 16 16 128 lists bias", "section=16"},
};

}  // namespace

TEST(plans_of_calls) {
  check_plans<BackwardParams>(plans, [](const auto& params, const auto& device) {
    return plan_backward(params, device, sm90_backward_table());
  });
}

TEST(single_ctas_sweep_wide_heads) {
  BackwardInstance single = sm90_backward_instance("single", 256);
  single.config.ctas_per_tile = 1;
  const InstanceList<BackwardInstance> table({single});
  const auto params = with_tensors(call<BackwardParams>(sizes(132, 129, 129, 1, 1, 256), causal));
  CHECK(plan_backward(params, h200, table).sweeps);
}

// A CTA that sweeps has the sums of a tile's heads, and no more; beside swept sequences of a packed
// call longer ones have theirs.
TEST(sums_of_sweeps) {
  const auto floats = [](const AttentionShape& shape, bool is_packed = false) {
    auto params = with_tensors(call<BackwardParams>(shape));
    if (is_packed) params.sequences.cu_seqlens_q = params.sequences.cu_seqlens_k = &some_int;
    const BackwardPlan result = plan(params);
    CHECK_EQ(result.sweeps, !is_packed);
    CHECK_EQ(result.tickets.offset - result.dq_accum.offset, result.dq_accum.count * sizeof(float));
    return result.dq_accum.count;
  };
  CHECK_EQ(floats(sizes(132, 512, 512, 1, 1, 64)), 132 * 512 * 64);
  CHECK_EQ(floats(sizes(119, 290, 290, 1, 1, 64)), 119 * 384 * 64);
  CHECK_EQ(floats(sizes(132, 290, 290, 1, 1, 128)), 132 * 320 * 128);
  CHECK_EQ(floats(sizes(33, 260, 130, 8, 1, 64)), 132 * 2 * 384 * 64);
  CHECK(floats(sizes(128, 32'768, 32'768, 32, 32, 64), true) >= 32 * 32'768 * 64);
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
