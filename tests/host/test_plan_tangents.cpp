// Plans of derivatives in a direction: of the forward's results, and of the gradients of those.
#include <vector>

#include "check.h"
#include "planning.h"
#include "workspaces.h"

using namespace host_tests;

namespace {

// A derivative of the training call, or of this one, on tensors of its own.
template <class Params>
Params derivative(const AttentionShape& shape = training, Window window = {}) {
  return with_tangents(with_tensors(call<Params>(shape, window)));
}

// The row that serves it after `change`.
template <class Params, class Change>
std::string chosen_of_derivative(Change change, const AttentionShape& shape = training,
                                 Window window = {}, const DeviceInfo& device = h200) {
  const auto with = [=](Params& params) { params = with_tangents(params); };
  return chosen<Params>(both(with, change), shape, window, device);
}

AttentionShape with_head_dim(AttentionShape shape, int head_dim) {
  shape.head_dim = shape.head_dim_v = head_dim;
  return shape;
}

// What a call comes with that its scores are not plain of.
template <class Params>
void check_modified(const std::string& row) {
  CHECK_EQ(chosen_of_derivative<Params>(softcap), row);
  CHECK_EQ(chosen_of_derivative<Params>(alibi), row);
  CHECK_EQ(chosen_of_derivative<Params>(dropout), row);
  CHECK_EQ(chosen_of_derivative<Params>(negative_scale), row);
  CHECK_EQ(chosen_of_derivative<Params>(lists), row);
  CHECK_EQ(chosen_of_derivative<Params>(bias), row);
  CHECK_EQ(chosen_of_derivative<Params>([](auto& p) {
             bias(p);
             p.tangents.bias = p.score.bias;
           }),
           row);
}

}  // namespace

// Of a forward

TEST(what_a_forwards_derivative_comes_with_chooses_the_row) {
  CHECK_EQ(chosen_of_derivative<ForwardParams>([](auto& p) { p.tangents = {}; }), "sm90_hd128");
  for (const Window& window : {Window{}, causal, Window{.left = 100, .right = 100}}) {
    CHECK_EQ(chosen_of_derivative<ForwardParams>(nothing, training, window), "sm90_hd128_tangent");
    CHECK_EQ(chosen_of_derivative<ForwardParams>(nothing, with_head_dim(training, 64), window),
             "sm90_hd64_tangent");
    CHECK_EQ(chosen_of_derivative<ForwardParams>(nothing, with_head_dim(training, 192), window),
             "hd512_tangent");
    CHECK_EQ(chosen_of_derivative<ForwardParams>(nothing, training, window, a100), "hd128_tangent");
  }
  check_modified<ForwardParams>("hd128_tangent");
  // Every kernel has these.
  CHECK_EQ(chosen_of_derivative<ForwardParams>([](auto& p) {
             p.score.sink = &some_float;
             p.tangents.sink = &some_float;
           }),
           "sm90_hd128_tangent");
  CHECK_EQ(chosen_of_derivative<ForwardParams>(used_lengths), "sm90_hd128_tangent");
}

TEST(sm90_kernels_load_the_tangents_of_all_three) {
  for (TensorView TangentParams::* view :
       {&TangentParams::q, &TangentParams::k, &TangentParams::v}) {
    const auto with = [=](auto change) {
      return chosen_of_derivative<ForwardParams>([=](auto& p) { change(p.tangents.*view); });
    };
    CHECK_EQ(with([](auto& v) { v.data = nullptr; }), "hd128_tangent");  // zero
    CHECK_EQ(with([](auto& v) { v.data = static_cast<char*>(v.data) + 8; }), "hd128_tangent");
    CHECK_EQ(with([](auto& v) { v.data = static_cast<char*>(v.data) + 16; }), "sm90_hd128_tangent");
    for (std::int64_t TensorView::* stride :
         {&TensorView::batch_stride, &TensorView::row_stride, &TensorView::head_stride}) {
      CHECK_EQ(with([=](auto& v) { v.*stride = 0; }), "hd128_tangent");  // expanded
      CHECK_EQ(with([=](auto& v) { v.*stride += 4; }), "hd128_tangent");
      CHECK_EQ(with([=](auto& v) { v.*stride += 8; }), "sm90_hd128_tangent");
    }
  }
  // Nor do they without the tensors themselves.
  for (TensorView ForwardParams::* view : {&ForwardParams::q, &ForwardParams::k, &ForwardParams::v})
    CHECK_EQ(chosen_of_derivative<ForwardParams>([=](auto& p) { (p.*view).row_stride = 0; }),
             "hd128_tangent");
}

TEST(a_cta_a_tile_writes_tangents) {
  for (const Window& window : {Window{}, causal}) {
    const auto params = derivative<ForwardParams>(training, window);
    for (const DeviceInfo& device : {h200, a100}) {
      const ForwardPlan jvp = plan(params, device);
      const bool is_sm90 = device.compute_capability == 90;
      CHECK_EQ(std::string(jvp.instance->name), is_sm90 ? "sm90_hd128_tangent" : "hd128_tangent");
      CHECK_EQ(jvp.schedule.grid_size(), 64 * 4096 / jvp.instance->config.block_m);
      CHECK_EQ(jvp.grid, jvp.schedule.grid_size());
      CHECK_EQ(jvp.schedule.longest_first, !window.is_full());
      CHECK_EQ(jvp.schedule.least_last_heads, 1);
      CHECK_EQ(jvp.num_splits, 1);
      CHECK(!jvp.tickets.exists());
      CHECK_EQ(jvp.workspace_bytes, std::size_t{0});
    }
  }
  // Of wide heads several have columns of O.
  for (const auto& [head_dim, ctas] : {std::pair{136, 1}, {256, 1}, {264, 2}, {512, 2}}) {
    const ForwardPlan wide = plan(derivative<ForwardParams>(with_head_dim(training, head_dim)));
    CHECK_EQ(std::string(wide.instance->name), "hd512_tangent");
    CHECK_EQ(wide.grid, ctas * wide.schedule.grid_size());
  }
  AttentionShape empty = training;
  empty.seqlen_q = 0;
  CHECK_EQ(plan(derivative<ForwardParams>(empty)).grid, 0);
}

TEST(few_queries_over_many_keys_neither_decode_nor_split) {
  AttentionShape shape = training;
  shape.batch_size = 1;
  shape.seqlen_k = 1 << 15;
  for (const int seqlen_q : {1, 16, 200}) {
    shape.seqlen_q = seqlen_q;
    for (const int num_splits : {0, 1, 7}) {
      for (const bool batch_invariant : {false, true}) {
        for (const DeviceInfo& device : {h200, a100}) {
          auto params = derivative<ForwardParams>(shape);
          params.sequences.seqused_k = &some_int;
          params.split = {.num_splits = num_splits, .batch_invariant = batch_invariant};
          const ForwardPlan jvp = plan(params, device);
          CHECK_EQ(std::string(jvp.instance->name),
                   device.compute_capability == 90 ? "sm90_hd128_tangent" : "hd128_tangent");
          CHECK(jvp.instance->config.kind == ForwardKind::tiles);
          CHECK_EQ(jvp.num_splits, 1);
          CHECK_EQ(jvp.keys_per_split, 0);
          CHECK(!jvp.lengths_decide);
          CHECK_EQ(jvp.grid, 16 * ((seqlen_q - 1) / jvp.instance->config.block_m + 1));
          CHECK_EQ(jvp.workspace_bytes, std::size_t{0});
        }
      }
    }
  }
}

TEST(the_derivative_of_a_packed_forward_has_its_table_and_nothing_else) {
  for (const DeviceInfo& device : {h200, a100}) {
    const ForwardPlan jvp =
        plan(with_tangents(with_tensors(packed_call<ForwardParams>(training, causal))), device);
    CHECK_EQ(std::string(jvp.instance->name),
             device.compute_capability == 90 ? "sm90_hd128_tangent" : "hd128_tangent");
    CHECK_EQ(jvp.table.tile_rows, jvp.instance->config.block_m);
    CHECK_EQ(jvp.table.rows_per_query, 1);
    CHECK_EQ(jvp.grid, std::int64_t{jvp.table.tiles.count} * 16);
    check_workspace({bytes_of_table(jvp.table)}, jvp.workspace_bytes);
  }
}

TEST(what_no_derivative_of_a_forward_has_is_refused) {
  const auto paged = [](auto& p) {
    p.paged = {.block_table = &some_int,
               .table_stride = 8,
               .max_pages = 8,
               .page_size = 64,
               .num_pages = 9};
  };
  CHECK_ERROR(chosen_of_derivative<ForwardParams>(paged), "features paged_kv, tangent on");
  // Only decode rows read such tensors.
  CHECK_ERROR(chosen_of_derivative<ForwardParams>([](auto& p) { p.q.row_stride += 1; }),
              "no compiled decode kernel");
  const auto fp32_results = [](auto& p) { p.fp32_results = true; };
  CHECK_ERROR(chosen_of_derivative<ForwardParams>(fp32_results, training, {}, a100),
              "features tangent, fp32 results on");
  CHECK_ERROR(
      chosen_of_derivative<ForwardParams>(nothing, with_head_dim(training, 192), {}, rtx4090),
      "no compiled forward kernel");
}

// Of a backward

TEST(what_a_second_backward_comes_with_chooses_the_row) {
  CHECK_EQ(chosen_of_derivative<BackwardParams>([](auto& p) { p.tangents = {}; }), "sm90_hd128");
  for (const Window& window : {Window{}, causal}) {
    for (const DeviceInfo& device : {h200, a100, rtx4090}) {
      CHECK_EQ(
          chosen_of_derivative<BackwardParams>(nothing, with_head_dim(training, 8), window, device),
          "hd128_tangent");
      CHECK_EQ(chosen_of_derivative<BackwardParams>(nothing, training, window, device),
               "hd128_tangent");
    }
    CHECK_EQ(
        chosen_of_derivative<BackwardParams>(nothing, with_head_dim(training, 136), window, a100),
        "hd256_tangent");
    CHECK_EQ(chosen_of_derivative<BackwardParams>(nothing, with_head_dim(training, 512), window),
             "hd512_tangent");
  }
  check_modified<BackwardParams>("hd128_tangent");
  for (TensorView TangentParams::* view : {&TangentParams::q, &TangentParams::k, &TangentParams::v})
    CHECK_EQ(chosen_of_derivative<BackwardParams>([=](auto& p) { p.tangents.*view = {}; }),
             "hd128_tangent");
  CHECK_ERROR(chosen_of_derivative<BackwardParams>([](auto& p) { p.fp32_results = true; }),
              "features tangent, fp32 results on");
  CHECK_ERROR(chosen_of_derivative<BackwardParams>(nothing, with_head_dim(training, 512), {}, a100),
              "no compiled backward kernel");
}

TEST(workspace_buffers_of_a_second_backward_do_not_overlap) {
  for (const int head_dim : {24, 128, 256}) {
    for (const int seqlen : {1, 65, 1001}) {
      for (const int num_heads_k : {1, 9}) {
        const AttentionShape shape = sizes(3, seqlen, seqlen, 9, num_heads_k, head_dim);
        for (auto params :
             {call<BackwardParams>(shape, causal), packed_call<BackwardParams>(shape, causal)}) {
          params = with_tangents(with_tensors(params));
          for (const bool deterministic : {false, true}) {
            params.deterministic = deterministic;
            for (const DeviceInfo& device : {h200, a100}) {
              const BackwardPlan hvp = plan(params, device);
              CHECK((hvp.instance->config.features & feature::tangent) != 0);
              CHECK(hvp.dq_path == DqPath::converted && hvp.shared_tiles.parts == 1);
              check_backward_workspace(hvp, params);
            }
          }
        }
      }
    }
  }
}

TEST(tangents_add_two_numbers_a_query_row_and_nothing_else) {
  // Rows of one tile, for calls with tangents and without.
  BackwardInstance plain = hvp_instance("plain", 128);
  plain.config.features = feature::deterministic;
  const InstanceList<BackwardInstance> rows({plain, hvp_instance("tangent", 128)});
  for (const bool deterministic : {false, true}) {
    auto params = derivative<BackwardParams>(training, causal);
    params.deterministic = deterministic;
    const BackwardPlan with = plan_backward(params, h200, rows);
    params.tangents = {};
    const BackwardPlan without = plan_backward(params, h200, rows);
    CHECK_EQ(std::string(with.instance->name), "tangent");
    CHECK_EQ(std::string(without.instance->name), "plain");
    CHECK(!without.tangent_lse.exists() && !without.tangent_dot.exists());
    CHECK(without.tangent_lse.in(&params) == nullptr && without.tangent_dot.in(&params) == nullptr);
    CHECK_EQ(with.workspace_bytes - without.workspace_bytes,
             2 * sizeof(float) * training.batch_size * training.num_heads_q * training.seqlen_q);
    CHECK_EQ(with.grid, without.grid);
    CHECK_EQ(with.schedule.heads_per_section, without.schedule.heads_per_section);
    CHECK_EQ(with.takes_turns, without.takes_turns);
  }
  // Nor has any other kernel's plan room for them.
  const BackwardPlan sm90 = plan(with_tensors(call<BackwardParams>(training)));
  CHECK_EQ(std::string(sm90.instance->name), "sm90_hd128");
  CHECK(!sm90.tangent_lse.exists() && !sm90.tangent_dot.exists());
}

TEST(a_second_backward_adds_in_a_fixed_order_where_it_is_asked_to) {
  for (const auto& change :
       std::vector<void (*)(BackwardParams&)>{nothing, [](BackwardParams& p) { lists(p); },
                                              [](BackwardParams& p) { bias(p); }, dropout}) {
    auto params = derivative<BackwardParams>(training, causal);
    change(params);
    const BackwardPlan any = plan(params);
    CHECK(!any.takes_turns && !any.additions.exists());
    params.deterministic = true;
    const BackwardPlan ordered = plan(params);
    CHECK_EQ(ordered.instance, any.instance);
    CHECK(ordered.takes_turns);
    // What is added in turn is converted as any other sum.
    CHECK(ordered.dq_path == DqPath::converted && any.dq_path == DqPath::converted);
    CHECK_EQ(ordered.additions.count, std::int64_t{16} * ordered.q_tiles);
  }
}
