// Plans of derivatives in a direction: of the forward's results, and of the gradients of those.
#include "check.h"
#include "plan_table.h"
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

constexpr PlannedCall jvps[] = {
    // What a derivative comes with chooses the row: sm90 rows have windows alone.
    {"4 4096 4096 16 16 64 tangents", "row=sm90_hd64_tangent"},
    {"4 4096 4096 16 16 64 tangents causal", "row=sm90_hd64_tangent"},
    {"4 4096 4096 16 16 128 tangents left=100 right=100", "row=sm90_hd128_tangent"},
    {"4 4096 4096 16 16 128 tangents used_q used_k", "row=sm90_hd128_tangent"},
    {"4 4096 4096 16 16 192 tangents", "row=hd512_tangent"},
    {"4 4096 4096 16 16 128 tangents softcap", "row=hd128_tangent"},
    {"4 4096 4096 16 16 128 tangents alibi", "row=hd128_tangent"},
    {"4 4096 4096 16 16 128 tangents dropout", "row=hd128_tangent"},
    {"4 4096 4096 16 16 128 tangents negative_scale", "row=hd128_tangent"},
    {"4 4096 4096 16 16 128 tangents lists", "row=hd128_tangent"},
    {"4 4096 4096 16 16 128 tangents bias", "row=hd128_tangent"},
    // A CTA a tile writes tangents, in order, without a counter.
    {"4 4096 4096 16 16 128 tangents", "row=sm90_hd128_tangent grid=2048 order=grid workspace=0"},
    {"4 4096 4096 16 16 128 tangents causal", "grid=2048 order=longest workspace=0"},
    {"4 4096 4096 16 16 128 tangents a100", "row=hd128_tangent grid=4096 order=grid workspace=0"},
    {"4 4096 4096 16 16 128 tangents causal a100", "grid=4096 order=longest workspace=0"},
    {"4 0 4096 16 16 128 tangents", "grid=0"},
    // Of wide heads several CTAs have columns of O.
    {"4 4096 4096 16 16 136 tangents", "row=hd512_tangent grid=8192"},
    {"4 4096 4096 16 16 256 tangents", "row=hd512_tangent grid=8192"},
    {"4 4096 4096 16 16 264 tangents", "row=hd512_tangent grid=16384"},
    {"4 4096 4096 16 16 512 tangents", "row=hd512_tangent grid=16384"},
    // Few queries over many keys neither decode nor split.
    {"1 1 32768 16 16 128 tangents used_k splits=0",
     "row=sm90_hd128_tangent splits=1 keys_per_split=0 lengths_decide=no grid=16 workspace=0"},
    {"1 16 32768 16 16 128 tangents used_k splits=7", "row=sm90_hd128_tangent splits=1 grid=16"},
    {"1 200 32768 16 16 128 tangents used_k splits=7 batch_invariant",
     "row=sm90_hd128_tangent splits=1 keys_per_split=0 lengths_decide=no grid=32 workspace=0"},
    {"1 1 32768 16 16 128 tangents used_k splits=7 batch_invariant a100",
     "row=hd128_tangent splits=1 keys_per_split=0 lengths_decide=no grid=16 workspace=0"},
    {"1 200 32768 16 16 128 tangents used_k splits=0 a100", "row=hd128_tangent splits=1 grid=64"},
};

constexpr PlannedCall hvps[] = {
    {"4 4096 4096 16 16 8 tangents", "row=hd128_tangent"},
    {"4 4096 4096 16 16 8 tangents causal a100", "row=hd128_tangent"},
    {"4 4096 4096 16 16 128 tangents", "row=hd128_tangent"},
    {"4 4096 4096 16 16 128 tangents smem_kib=99", "row=hd128_tangent"},
    {"4 4096 4096 16 16 136 tangents a100", "row=hd256_tangent"},
    {"4 4096 4096 16 16 512 tangents causal", "row=hd512_tangent"},
    {"4 4096 4096 16 16 128 tangents softcap", "row=hd128_tangent"},
    {"4 4096 4096 16 16 128 tangents alibi", "row=hd128_tangent"},
    {"4 4096 4096 16 16 128 tangents negative_scale", "row=hd128_tangent"},
    // A CTA a key tile makes second gradients; of wide heads several have columns of each.
    {"4 4096 4096 16 16 128 tangents causal", "tiles=8192 grid=8192 ctas=0 convert=4096"},
    {"4 4096 4096 16 16 264 tangents", "row=hd512_tangent tiles=8192 grid=24576 convert=49152"},
    {"4 4096 4096 16 16 384 tangents", "row=hd512_tangent grid=24576 convert=49152"},
    {"4 4096 4096 16 16 512 tangents", "row=hd512_tangent grid=32768 convert=65536"},
    // It adds in a fixed order where it is asked to. What is added in turn is converted as any sum.
    {"4 4096 4096 16 16 128 tangents causal", "dq=converted turns=no additions=no"},
    {"4 4096 4096 16 16 128 tangents causal ordered", "dq=converted turns=yes additions=yes"},
    {"4 4096 4096 16 16 128 tangents causal lists", "row=hd128_tangent dq=converted turns=no"},
    {"4 4096 4096 16 16 128 tangents causal lists ordered", "row=hd128_tangent turns=yes"},
    {"4 4096 4096 16 16 128 tangents causal bias", "row=hd128_tangent dq=converted turns=no"},
    {"4 4096 4096 16 16 128 tangents causal bias ordered", "row=hd128_tangent turns=yes"},
    {"4 4096 4096 16 16 128 tangents causal dropout", "row=hd128_tangent dq=converted turns=no"},
    {"4 4096 4096 16 16 128 tangents causal dropout ordered", "row=hd128_tangent turns=yes"},
};

AttentionShape with_head_dim(AttentionShape shape, int head_dim) {
  shape.head_dim = shape.head_dim_v = head_dim;
  return shape;
}

// Of tensors that a bias and a sink have.
template <class Params>
void check_further_tangents(const std::string& of_bias, const std::string& of_sink) {
  const auto with_bias = [](auto& p) {
    bias(p);
    p.tangents.bias = p.score.bias;
  };
  const auto with_sink = [](auto& p) { p.score.sink = p.tangents.sink = &some_float; };
  CHECK_EQ(chosen_of_derivative<Params>(with_bias), of_bias);
  CHECK_EQ(chosen_of_derivative<Params>(with_sink), of_sink);
  CHECK_EQ(chosen_of_derivative<Params>([](auto& p) { p.tangents = {}; }), "sm90_hd128");
}

}  // namespace

TEST(plans_of_derivatives) {
  const auto planned = [](const auto& params, const DeviceInfo& device) {
    return plan(params, device);
  };
  check_plans<ForwardParams>(jvps, planned);
  check_plans<BackwardParams>(hvps, planned);
  check_further_tangents<ForwardParams>("hd128_tangent", "sm90_hd128_tangent");
  check_further_tangents<BackwardParams>("hd128_tangent", "hd128_tangent");
}

// Of a forward

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

TEST(tangents_of_a_second_backward_may_be_zero) {
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
