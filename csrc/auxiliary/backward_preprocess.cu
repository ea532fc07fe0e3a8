// Before the backward's main kernel, one pass over O and dO (FlashAttention-2, Algorithm 2, line
// 4):
//   softmax_d = rowsum(dO * O) - dlse, so that dS = P * (dP - softmax_d) carries the gradient of
//   LSE as well; lse_log2 = lse * log2(e), +inf for rows without a key and rows past the end, so
//   that their P is exp2(-inf) = 0; zeros where the key tiles will add dQ.
// A row is read by the fewest lanes that cover it with 16 bytes each.
#include <cmath>

#include "auxiliary/auxiliary.h"
#include "auxiliary/vector_types.h"
#include "flash_attn/instance.h"
#include "shared/launch.h"

namespace flash_attn_cuda {
namespace {

constexpr int threads = 256;

struct PreprocessArguments {
  BackwardParams params;
  float* lse_log2;
  float* dq_accum;
  int seqlen_q_rounded;
  int accum_rows;     // query tiles * block_m
  int accum_columns;  // the instance's head_dim
  int lanes_per_row;  // a power of two, 1 to 32
};

template <class Element>
__global__ void __launch_bounds__(threads)
    preprocess_kernel(const __grid_constant__ PreprocessArguments args) {
  const BackwardParams& params = args.params;
  const AttentionShape& shape = params.shape;
  const std::int64_t global_row =
      (std::int64_t(blockIdx.x) * threads + threadIdx.x) / args.lanes_per_row;
  const int lane = threadIdx.x % args.lanes_per_row;
  const std::int64_t batch_head = global_row / args.seqlen_q_rounded;
  const int row = static_cast<int>(global_row - batch_head * args.seqlen_q_rounded);
  const std::int64_t batch = batch_head / shape.num_heads_q;
  const std::int64_t head = batch_head - batch * shape.num_heads_q;
  const bool row_exists = batch < shape.batch_size && row < shape.seqlen_q;

  float dot = 0.0f;
  const int column = lane * vector_elements;
  if (row_exists && column < shape.head_dim) {
    const auto load = [&](const TensorView& view) {
      return *reinterpret_cast<const Vector<Element>*>(
          static_cast<const Element*>(view.data) + batch * view.batch_stride +
          row * view.row_stride + head * view.head_stride + column);
    };
    const Vector<Element> out = load(params.out);
    const Vector<Element> dout = load(params.dout);
    for (int i = 0; i < vector_elements / 2; ++i) {
      dot += out.pair(i).x * dout.pair(i).x + out.pair(i).y * dout.pair(i).y;
    }
  }
  for (int step = args.lanes_per_row / 2; step > 0; step /= 2)
    dot += __shfl_xor_sync(0xffffffffu, dot, step);
  if (batch >= shape.batch_size) return;

  if (lane == 0) {
    constexpr float log2e = 1.44269504088896f;
    const std::int64_t index = batch_head * shape.seqlen_q + row;
    const float lse = row_exists ? params.lse[index] : -INFINITY;
    const float dlse = row_exists && params.dlse != nullptr ? params.dlse[index] : 0.0f;
    params.softmax_d[global_row] = lse == -INFINITY ? 0.0f : dot - dlse;
    args.lse_log2[global_row] = lse == -INFINITY ? INFINITY : lse * log2e;
  }
  if (row < args.accum_rows) {
    float4* accum = reinterpret_cast<float4*>(args.dq_accum + (batch_head * args.accum_rows + row) *
                                                                  args.accum_columns);
    for (int i = lane; i < args.accum_columns / 4; i += args.lanes_per_row)
      accum[i] = {0.0f, 0.0f, 0.0f, 0.0f};
  }
}

}  // namespace

void backward_preprocess(const BackwardPlan& plan, const BackwardParams& params, Stream stream) {
  const AttentionShape& shape = params.shape;
  const BackwardConfig& config = plan.instance->config;
  char* workspace = static_cast<char*>(params.workspace);
  int lanes = 1;
  while (lanes * vector_elements < shape.head_dim) lanes *= 2;
  const PreprocessArguments arguments{
      .params = params,
      .lse_log2 = reinterpret_cast<float*>(workspace + plan.lse_log2_offset),
      .dq_accum = reinterpret_cast<float*>(workspace + plan.dq_accum_offset),
      .seqlen_q_rounded = plan.seqlen_q_rounded,
      .accum_rows = (shape.seqlen_q + config.block_m - 1) / config.block_m * config.block_m,
      .accum_columns = config.head_dim,
      .lanes_per_row = lanes};
  const std::int64_t rows =
      std::int64_t(shape.batch_size) * shape.num_heads_q * plan.seqlen_q_rounded;
  const std::int64_t grid = (rows * lanes + threads - 1) / threads;
  dispatch_dtype(params.dtype, [&](auto element) {
    launch_kernel<&preprocess_kernel<decltype(element)>>(grid, threads, 0, stream, arguments);
  });
}

}  // namespace flash_attn_cuda
