// run_forward and run_backward with launches that only note that they happened.
#include <cstring>
#include <string>

#include "auxiliary/auxiliary.h"
#include "check.h"
#include "fixtures.h"
#include "host/plan.h"
#include "no_driver.h"

using namespace host_tests;

namespace {

// What the steps of one run were given.
struct Record {
  std::string steps;
  std::vector<Window> windows;
  SequenceTableRequest table_request;
  CombineParams combine;
};

cudaError_t memset_status = cudaSuccess;

Record& record() {
  static Record made;
  return made;
}

void note(const char* step, const Window& window) {
  record().steps += std::string(step) + " ";
  record().windows.push_back(window);
}

constexpr AttentionShape shape = sizes(2, 64, 64, 8, 1, 64);

ForwardInstance noting(ForwardInstance instance) {
  instance.launch = [](const ForwardPlan&, const ForwardParams& params, Stream) {
    note("main", params.window);
  };
  return instance;
}

BackwardInstance noting(BackwardInstance instance) {
  instance.launch = [](const BackwardPlan&, const BackwardParams& params, Stream) {
    note("main", params.window);
  };
  instance.convert_dq = [](const BackwardPlan&, const BackwardParams& params, Stream) {
    note("convert", params.window);
  };
  return instance;
}

const Record& run(const ForwardParams& params, int num_splits = 1) {
  static const InstanceList<ForwardInstance> table(
      {noting(forward_instance("plain", 64, MaskKind::windowed)),
       noting(features_instance("features", 64, training_features)),
       noting(features_instance("cache", 64, cache_features)),
       noting(decode_instance("decode", 64))});
  record() = {};
  ForwardParams changed = params;
  changed.split.num_splits = num_splits;
  run_forward(plan_forward(changed, h200, table), changed, nullptr);
  return record();
}

const Record& run(const BackwardParams& params) {
  static const InstanceList<BackwardInstance> table(
      {noting(backward_instance("b", 64, MaskKind::windowed))});
  record() = {};
  run_backward(plan_backward(params, h200, table), params, nullptr);
  return record();
}

constexpr int max_int = 2'147'483'647;

const PagedKvParams in_pages{
    .block_table = &some_int, .table_stride = 256, .max_pages = 256, .page_size = 16};

}  // namespace

namespace flash_attn_cuda {

std::span<const ForwardInstance* const> forward_instances() { return {}; }
std::span<const BackwardInstance* const> backward_instances() { return {}; }

void make_sequence_table(const SequenceTablePlan& plan, const SequenceTableRequest& request,
                         Stream) {
  if (!plan.used()) return;
  record().steps += "table ";
  record().table_request = request;
}

void backward_preprocess(const BackwardPlan&, const BackwardParams& params, Stream) {
  note("preprocess", params.window);
}

void reduce_dkv(const BackwardPlan&, const BackwardParams& params, Stream) {
  note("reduce", params.window);
}

void run_combine(const CombineParams& params, Stream) {
  record().steps += "combine ";
  record().combine = params;
}

}  // namespace flash_attn_cuda

extern "C" {

cudaError_t CUDARTAPI cudaMemsetAsync(void* data, int value, std::size_t bytes, cudaStream_t) {
  record().steps += "memset ";
  std::memset(data, value, bytes);
  return memset_status;
}

}  // extern "C"

TEST(forward_launches_with_a_window_that_cannot_overflow) {
  const Record& made = run(call<ForwardParams>(shape, {.left = max_int, .right = 3}));
  CHECK_EQ(made.steps, "main ");
  CHECK_EQ(made.windows.front().left, Window::unbounded);
  CHECK_EQ(made.windows.front().right, 3);
}

TEST(a_packed_forward_makes_its_table_first) {
  auto params = packed_call<ForwardParams>(shape, causal);
  DeviceErrors errors{};
  params.errors = &errors;
  char workspace = 0;
  params.workspace = &workspace;
  const Record& made = run(params);
  CHECK_EQ(made.steps, "table main ");
  CHECK_EQ(made.table_request.sequences.cu_seqlens_q, &some_int);
  CHECK_EQ(made.table_request.shape.batch_size, 2);
  CHECK_EQ(made.table_request.errors, &errors);
  CHECK_EQ(made.table_request.workspace, static_cast<void*>(&workspace));
  CHECK(!made.table_request.tiles_of_keys);
  CHECK(!made.table_request.is_paged);
  params.shape.seqlen_q = 1;
  params.paged = {.block_table = &some_int, .table_stride = 4, .max_pages = 4, .page_size = 16};
  CHECK_EQ(run(params).steps, "table main ");
  CHECK(record().table_request.is_paged);
}

TEST(decode_kernels_combine_their_splits) {
  AttentionShape decode = shape;
  decode.seqlen_q = 3;
  decode.seqlen_k = 4096;
  CHECK_EQ(run(call<ForwardParams>(decode), 4).steps, "main ");
  CHECK_EQ(run(packed_call<ForwardParams>(decode), 4).steps, "table main ");
}

TEST(splits_are_combined_into_the_calls_own_outputs) {
  AttentionShape prefill = shape;
  prefill.seqlen_q = 30;
  prefill.seqlen_k = 4096;
  auto params = call<ForwardParams>(prefill);
  params.dtype = Dtype::bf16;
  alignas(16) static char out[16];
  static float lse[1];
  static char workspace[1];
  params.out = {.data = out, .batch_stride = 8 * 64 * 32, .row_stride = 8 * 64, .head_stride = 64};
  params.lse = {.data = lse, .batch_stride = 240, .head_stride = 30};
  params.workspace = workspace;
  CHECK_EQ(run(params).steps, "main ");
  params.paged = in_pages;
  const Record& made = run(params, 4);
  CHECK_EQ(made.steps, "main combine ");
  const CombineParams& combine = made.combine;
  CHECK_EQ(combine.num_splits, 4);
  CHECK_EQ(combine.out_dtype, Dtype::bf16);
  CHECK(!combine.out_fp32);
  CHECK_EQ(combine.head_dim, 64);
  CHECK_EQ(combine.num_heads, 8);
  CHECK_EQ(combine.rows, std::int64_t{60});
  CHECK_EQ(combine.rows_per_batch, std::int64_t{30});
  CHECK_EQ(combine.out, static_cast<void*>(out));
  CHECK_EQ(combine.out_batch_stride, std::int64_t{8 * 64 * 32});
  CHECK_EQ(combine.out_row_stride, std::int64_t{8 * 64});
  CHECK_EQ(combine.out_head_stride, std::int64_t{64});
  CHECK_EQ(combine.lse.data, &lse[0]);
  CHECK_EQ(combine.lse.batch_stride, std::int64_t{240});
  CHECK_EQ(combine.lse.head_stride, std::int64_t{30});
  const auto offset_of = [](const float* data) {
    return reinterpret_cast<const char*>(data) - workspace;
  };
  CHECK_EQ(offset_of(combine.out_partial), 0);
  CHECK_EQ(offset_of(combine.lse_partial), 4 * 60 * 8 * 64 * 4);
}

TEST(packed_splits_are_rows_of_one_batch_entry) {
  AttentionShape prefill = shape;
  prefill.seqlen_q = 60;  // in all
  prefill.seqlen_k = 4096;
  auto params = packed_call<ForwardParams>(prefill);
  params.paged = in_pages;
  const Record& made = run(params, 4);
  CHECK_EQ(made.steps, "table main combine ");
  CHECK_EQ(made.combine.rows, std::int64_t{60});
  CHECK_EQ(made.combine.rows_per_batch, std::int64_t{60});
}

TEST(the_state_of_random_numbers_is_zeroed_where_no_kernel_writes_it) {
  std::int64_t rng_state[2] = {-1, -1};
  auto params = call<ForwardParams>(shape);
  params.dropout.rng_state = rng_state;
  params.dropout.threshold = 1;
  CHECK_EQ(run(params).steps, "main ");
  CHECK_EQ(rng_state[0], std::int64_t{-1});
  params.dropout.threshold = 0;
  CHECK_EQ(run(params).steps, "memset main ");
  CHECK_EQ(rng_state[0], std::int64_t{0});
  CHECK_EQ(rng_state[1], std::int64_t{0});
}

TEST(without_queries_only_the_state_of_random_numbers_is_written) {
  AttentionShape empty = shape;
  empty.seqlen_q = 0;
  auto params = call<ForwardParams>(empty);
  CHECK_EQ(run(params).steps, "");
  std::int64_t rng_state[2] = {-1, -1};
  params.dropout.rng_state = rng_state;
  params.dropout.threshold = 1;
  CHECK_EQ(run(params).steps, "memset ");
  CHECK_EQ(rng_state[0], std::int64_t{0});
  CHECK_EQ(rng_state[1], std::int64_t{0});
  memset_status = cudaErrorInvalidValue;
  CHECK_ERROR(run(params), "zero rng_state: made-up failure");
  memset_status = cudaSuccess;
  CHECK_EQ(run(packed_call<ForwardParams>(empty)).steps, "");
}

TEST(backward_runs_its_steps_in_order_and_reduces_only_splits) {
  const Window window{.left = 7, .right = max_int};
  AttentionShape single = shape;
  single.num_heads_k = 8;
  CHECK_EQ(run(call<BackwardParams>(single, window)).steps, "preprocess main convert ");
  const Record& made = run(call<BackwardParams>(shape, window));
  CHECK_EQ(made.steps, "preprocess main convert reduce ");
  for (const Window& seen : made.windows) {
    CHECK_EQ(seen.left, 7);
    CHECK_EQ(seen.right, Window::unbounded);
  }
}

TEST(dq_is_converted_unless_the_main_kernel_has_written_it) {
  const InstanceList<BackwardInstance> table({noting(sm90_backward_instance("sm90", 64))});
  const auto steps = [&](int seqlen_k, bool deterministic = false) {
    AttentionShape wanted = shape;
    wanted.num_heads_k = wanted.num_heads_q;
    wanted.seqlen_k = seqlen_k;
    auto params = with_tensors(call<BackwardParams>(wanted));
    params.deterministic = deterministic;
    record() = {};
    run_backward(plan_backward(params, h200, table), params, nullptr);
    return record().steps;
  };
  CHECK_EQ(steps(128), "preprocess main ");  // one key tile
  CHECK_EQ(steps(256), "preprocess main convert ");
  CHECK_EQ(steps(1024), "preprocess main convert ");  // what is left of it
  CHECK_EQ(steps(1024, true), "preprocess main ");    // in order
}

TEST(a_sinks_gradient_takes_no_launch) {
  static float dsink;
  auto params = call<BackwardParams>(shape);
  params.score.sink = &some_float;
  params.dsink = &dsink;
  CHECK_EQ(run(params).steps, "preprocess main convert reduce ");
}

TEST(a_packed_backward_makes_its_table_first) {
  auto params = packed_call<BackwardParams>(shape, causal);
  DeviceErrors errors{};
  params.errors = &errors;
  const Record& made = run(params);
  CHECK_EQ(made.steps, "table preprocess main convert reduce ");
  CHECK(made.table_request.tiles_of_keys);
  CHECK(!made.table_request.is_paged);
  CHECK_EQ(made.table_request.errors, &errors);
}

TEST(every_step_of_an_empty_backward_still_runs) {
  // Each launches nothing where its own grid is empty; the others write their zeros.
  AttentionShape empty = shape;
  empty.num_heads_k = 8;
  empty.seqlen_q = 0;
  CHECK_EQ(run(call<BackwardParams>(empty)).steps, "preprocess main convert ");
  empty.seqlen_q = 64;
  empty.seqlen_k = 0;
  CHECK_EQ(run(call<BackwardParams>(empty)).steps, "preprocess main convert ");
}

TEST(derivatives_in_a_direction_run_the_steps_of_their_pass) {
  const InstanceList<ForwardInstance> jvps({noting(jvp_instance("jvp", 128))});
  const auto steps_of_jvp = [&](const ForwardParams& given) {
    const ForwardParams params = with_tangents(given);
    record() = {};
    run_forward(plan_forward(params, h200, jvps), params, nullptr);
    return record().steps;
  };
  auto forward = with_tensors(call<ForwardParams>(shape));
  forward.split.num_splits = 4;
  CHECK_EQ(steps_of_jvp(forward), "main ");
  forward.sequences.cu_seqlens_q = forward.sequences.cu_seqlens_k = &some_int;
  CHECK_EQ(steps_of_jvp(forward), "table main ");

  const InstanceList<BackwardInstance> hvps({noting(hvp_instance("hvp", 128))});
  const auto steps_of_hvp = [&](const BackwardParams& given) {
    const BackwardParams params = with_tangents(given);
    record() = {};
    run_backward(plan_backward(params, h200, hvps), params, nullptr);
    return record().steps;
  };
  auto backward = with_tensors(call<BackwardParams>(shape));
  CHECK_EQ(steps_of_hvp(backward), "preprocess main convert reduce ");
  backward.shape.num_heads_k = backward.shape.num_heads_q;
  backward.deterministic = true;
  CHECK_EQ(steps_of_hvp(backward), "preprocess main convert ");
}
