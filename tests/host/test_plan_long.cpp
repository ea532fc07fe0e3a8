// Rows for calls whose queries see many keys: which calls they get, and what their plans are.
#include <string>

#include "check.h"
#include "fixtures.h"
#include "host/plan.h"
#include "no_driver.h"

using namespace host_tests;

// Stand in for the generated registry, which nothing here asks.
std::span<const ForwardInstance* const> flash_attn_cuda::forward_instances() { return {}; }
std::span<const BackwardInstance* const> flash_attn_cuda::backward_instances() { return {}; }

namespace {

AttentionShape square(int seqlen, int heads) { return sizes(1, seqlen, seqlen, heads, heads, 128); }

// The name of the row that a forward plans.
template <class Change>
std::string forward_row(const AttentionShape& shape, const Window& window, Change change) {
  ForwardInstance high = sm90_instance("long", 128, 192);
  high.config.least_keys_full = 8000;
  high.config.least_keys_windowed = 6000;
  const InstanceList<ForwardInstance> table(
      {high, sm90_instance("usual", 128),
       sm90_instance("cache", 128, 128, 0, feature::paged_kv | feature::split_kv)});
  auto params = with_tensors(call<ForwardParams>(shape, window));
  change(params);
  return plan_forward(params, h200, table).instance->name;
}

}  // namespace

TEST(high_tiles_are_for_queries_that_see_many_keys) {
  const auto row = [](const AttentionShape& shape, const Window& window = {}) {
    return forward_row(shape, window, [](auto&) {});
  };
  CHECK_EQ(row(square(7999, 16)), "usual");
  CHECK_EQ(row(square(8000, 16)), "long");
  CHECK_EQ(row(square(11'900, 16), causal), "usual");
  CHECK_EQ(row(square(12'100, 16), causal), "long");
  CHECK_EQ(row(square(32'768, 16), {.left = 5000, .right = 0}), "usual");
  CHECK_EQ(row(square(32'768, 16), {.left = 7000, .right = 0}), "long");
  const auto with_batch_invariance = [](auto& params) { params.split.batch_invariant = true; };
  CHECK_EQ(forward_row(square(32'768, 16), {}, with_batch_invariance), "usual");
}

TEST(high_tiles_save_a_round_of_the_device_or_are_not_taken) {
  AttentionShape shape = square(16'384, 140);
  shape.seqlen_q = 190;  // 140 tiles are two rounds of 132, 280 lower ones three
  CHECK_EQ(forward_row(shape, {}, [](auto&) {}), "long");
  shape.num_heads_q = shape.num_heads_k = 130;  // one, and two
  CHECK_EQ(forward_row(shape, {}, [](auto&) {}), "long");
  shape.seqlen_q = 120;  // one either way
  CHECK_EQ(forward_row(shape, {}, [](auto&) {}), "usual");
}

TEST(of_packed_sequences_the_average_counts) {
  AttentionShape shape = square(64'000, 16);
  const auto pack = [](auto& params) {
    params.sequences.cu_seqlens_q = params.sequences.cu_seqlens_k = &some_int;
  };
  shape.batch_size = 8;
  CHECK_EQ(forward_row(shape, {}, pack), "long");
  shape.batch_size = 9;
  CHECK_EQ(forward_row(shape, {}, pack), "usual");
}

TEST(two_ctas_draw_a_tile_of_long_sequences) {
  BackwardInstance pair = sm90_backward_instance("pair", 128);
  pair.config.ctas_per_tile = 2;
  pair.config.block_n = 256;
  pair.config.least_keys_full = 1000;
  pair.config.least_keys_windowed = 2000;
  const InstanceList<BackwardInstance> table({pair, sm90_backward_instance("single", 128)});
  const auto with = [&](int seqlen, const Window& window, auto change) {
    auto params = with_tensors(call<BackwardParams>(square(seqlen, 16), window));
    change(params);
    return plan_backward(params, h200, table);
  };
  const auto plan = [&](int seqlen, const Window& window = {}) {
    return with(seqlen, window, [](auto&) {});
  };
  const auto is_pair = [](const BackwardPlan& planned) {
    return std::string(planned.instance->name) == "pair";
  };
  CHECK(!is_pair(plan(999)) && is_pair(plan(1000)));
  // Under a causal mask a query sees half the keys, on average.
  CHECK(!is_pair(plan(3900, causal)) && is_pair(plan(4000, causal)));
  const Window of_1500{.left = 1499, .right = 0};
  CHECK(!is_pair(plan(16'384, of_1500)));
  const Window of_2500{.left = 2499, .right = 0};
  CHECK(is_pair(plan(16'384, of_2500)));
  const BackwardPlan ordered = with(16'384, {}, [](auto& p) { p.deterministic = true; });
  CHECK(is_pair(ordered) && ordered.takes_turns);
  CHECK_EQ(ordered.shared_tiles.count, 0);  // whose order would depend on the number of heads
  // 1024 tiles are 15 rounds of 66 and 34, whose parts have counters for both CTAs.
  const BackwardPlan even = plan(16'384);
  CHECK_EQ(even.num_ctas, 132);
  CHECK_EQ(even.schedule.grid_size(), 16 * 64);
  CHECK_EQ(even.shared_tiles.count, 34);
  CHECK(even.shared_tiles.parts > 1);
  CHECK_EQ(even.part_counters.count, 4 * even.shared_tiles.places());
  CHECK(even.dq_path == DqPath::finished && !even.sweeps);
}
