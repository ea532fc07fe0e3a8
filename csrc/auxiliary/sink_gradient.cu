// The gradient of a sink: the sum over its head's queries of exp(sink - lse) * -softmax_d, as the
// sink has the weight exp(sink - lse) in every row and no value. A fixed order, so the same bits
// every run.
#include <bit>
#include <cmath>

#include "flash_attn/api.h"
#include "shared/launch.h"

namespace flash_attn_cuda {
namespace {

constexpr int threads = 1024;

struct SinkGradientArguments {
  SinkGradientParams params;
  int batch_lanes;  // of the threads, a power of two; the others lie along a sequence's queries
};

// One head.
__global__ void __launch_bounds__(threads)
    sink_gradient_kernel(const __grid_constant__ SinkGradientArguments args) {
  constexpr float log2e = 1.44269504088896f;
  const SinkGradientParams& params = args.params;
  const int head = static_cast<int>(blockIdx.x);
  const int row_lanes = threads / args.batch_lanes;
  const int first_row = static_cast<int>(threadIdx.x) % row_lanes;
  const float sink = params.sink[head];
  float sum = 0.0f;
  for (int batch = static_cast<int>(threadIdx.x) / row_lanes; batch < params.batch_size;
       batch += args.batch_lanes) {
    const float* lse =
        params.lse.data + batch * params.lse.batch_stride + head * params.lse.head_stride;
    const float* softmax_d = params.softmax_d.data + batch * params.softmax_d.batch_stride +
                             head * params.softmax_d.head_stride;
#pragma unroll 8
    for (int row = first_row; row < params.rows; row += row_lanes) {
      // A row of no query has -inf.
      const float weight = lse[row] == -INFINITY ? 0.0f : exp2f((sink - lse[row]) * log2e);
      sum -= weight == 0.0f ? 0.0f : weight * softmax_d[row];
    }
  }

  constexpr int lanes = 32;
  __shared__ float sums[threads / lanes];
  const auto sum_lanes = [](float x) {
    for (int distance = lanes / 2; distance > 0; distance /= 2)
      x += __shfl_xor_sync(0xffffffffu, x, distance);
    return x;
  };
  sum = sum_lanes(sum);
  if (threadIdx.x % lanes == 0) sums[threadIdx.x / lanes] = sum;
  __syncthreads();
  if (threadIdx.x >= lanes) return;
  sum = sum_lanes(sums[threadIdx.x]);
  if (threadIdx.x == 0) params.dsink[head] = sum;
}

}  // namespace

void run_sink_gradient(const SinkGradientParams& params, Stream stream) {
  constexpr int most_batch_lanes = 64;  // which leave a warp 16 rows
  const auto batches = static_cast<unsigned>(params.batch_size < 1 ? 1 : params.batch_size);
  const auto wanted = static_cast<int>(std::bit_ceil(batches));
  const SinkGradientArguments arguments{
      .params = params, .batch_lanes = wanted < most_batch_lanes ? wanted : most_batch_lanes};
  launch_kernel<&sink_gradient_kernel>(params.num_heads, threads, 0, stream, arguments);
}

}  // namespace flash_attn_cuda
