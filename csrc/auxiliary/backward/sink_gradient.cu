// The gradient of a sink: the sum over its head's queries of exp(sink - lse) * -softmax_d, as the
// sink has the weight exp(sink - lse) in every row and no value. backward_preprocess has both of
// every row and leaves the sums of its blocks; here those of a head become one, where the main
// kernel does not do it (sm90/backward/kernel.h). A fixed order, so the same bits every run.
#include "auxiliary/auxiliary.h"
#include "shared/block_sum.h"
#include "shared/kernel_order.h"
#include "shared/launch.h"

namespace flash_attn_cuda {
namespace {

constexpr int threads = 256;
constexpr int loads = 8;  // of a thread at a time

struct SinkGradientArguments {
  const float* shares;  // (heads, shares_per_head)
  int shares_per_head;
  float* dsink;
};

// One head.
__global__ void __launch_bounds__(threads)
    sum_sink_gradient_kernel(const __grid_constant__ SinkGradientArguments args) {
  follow_earlier_kernels();
  const int head = static_cast<int>(blockIdx.x);
  const float* shares = args.shares + std::int64_t{head} * args.shares_per_head;
  float sum = 0.0f;
  for (std::int64_t first = threadIdx.x; first < args.shares_per_head; first += loads * threads) {
    float loaded[loads];
    for (int i = 0; i < loads; ++i) {
      const std::int64_t index = first + i * threads;
      loaded[i] = index < args.shares_per_head ? shares[index] : 0.0f;
    }
    for (const float share : loaded) sum += share;
  }
  sum = block_sum<threads>(sum);
  if (threadIdx.x == 0) args.dsink[head] = sum;
}

}  // namespace

void sum_sink_gradient(const BackwardPlan& plan, const BackwardParams& params, Stream stream) {
  if (params.dsink == nullptr) return;
  const SinkGradientArguments arguments{.shares = plan.sink_shares.in(params.workspace),
                                        .shares_per_head = plan.sink_shares_per_head,
                                        .dsink = params.dsink};
  launch_early<&sum_sink_gradient_kernel>(params.shape.num_heads_q, threads, 0, stream, arguments);
}

}  // namespace flash_attn_cuda
