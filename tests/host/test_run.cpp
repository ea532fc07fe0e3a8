// run_forward and run_backward with launches that only note that they happened.
#include <string>

#include "auxiliary/auxiliary.h"
#include "check.h"
#include "fixtures.h"

using namespace host_tests;

namespace {

struct Launch {
  std::string step;
  Window window;
};

std::vector<Launch>& launches() {
  static std::vector<Launch> all;
  return all;
}

template <class Plan, class Params>
void note(const char* step, const Plan&, const Params& params, Stream) {
  launches().push_back({step, params.window});
}

std::string steps() {
  std::string joined;
  for (const Launch& launch : launches()) joined += launch.step + " ";
  return joined;
}

constexpr AttentionShape shape{.batch_size = 1,
                               .seqlen_q = 64,
                               .seqlen_k = 64,
                               .num_heads_q = 8,
                               .num_heads_k = 1,
                               .head_dim = 64};
template <class Plan, class Instance>
Plan plan_of(const Instance& instance) {
  Plan plan;
  plan.instance = &instance;
  return plan;
}

constexpr int max_int = 2'147'483'647;

}  // namespace

namespace flash_attn_cuda {

void backward_preprocess(const BackwardPlan& plan, const BackwardParams& params, Stream stream) {
  note("preprocess", plan, params, stream);
}

void reduce_dkv(const BackwardPlan& plan, const BackwardParams& params, Stream stream) {
  note("reduce", plan, params, stream);
}

}  // namespace flash_attn_cuda

TEST(forward_launches_with_a_window_that_cannot_overflow) {
  ForwardInstance instance = forward_instance("f", 64, MaskKind::windowed);
  instance.launch = [](const ForwardPlan& plan, const ForwardParams& params, Stream stream) {
    note("main", plan, params, stream);
  };
  launches().clear();
  run_forward(plan_of<ForwardPlan>(instance),
              call<ForwardParams>(shape, {.left = max_int, .right = 3}), nullptr);
  CHECK_EQ(steps(), "main ");
  CHECK_EQ(launches().front().window.left, Window::unbounded);
  CHECK_EQ(launches().front().window.right, 3);
}

TEST(backward_runs_its_steps_in_order_and_reduces_only_splits) {
  BackwardInstance instance = backward_instance("b", 64, MaskKind::windowed);
  instance.launch = [](const BackwardPlan& plan, const BackwardParams& params, Stream stream) {
    note("main", plan, params, stream);
  };
  instance.convert_dq = [](const BackwardPlan& plan, const BackwardParams& params, Stream stream) {
    note("convert", plan, params, stream);
  };
  const auto params = call<BackwardParams>(shape, {.left = 7, .right = max_int});

  launches().clear();
  auto plan = plan_of<BackwardPlan>(instance);
  run_backward(plan, params, nullptr);
  CHECK_EQ(steps(), "preprocess main convert ");
  launches().clear();
  plan.dkdv_splits = 4;
  run_backward(plan, params, nullptr);
  CHECK_EQ(steps(), "preprocess main convert reduce ");
  for (const Launch& launch : launches()) {
    CHECK_EQ(launch.window.left, 7);
    CHECK_EQ(launch.window.right, Window::unbounded);
  }
}
