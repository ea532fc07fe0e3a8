// Sums the fp32 dK and dV partials of CTAs that shared one key head's query heads, or rounds the
// one sum that CTAs added to. A fixed order, so the same bits every run.
#include "auxiliary/auxiliary.h"
#include "auxiliary/vector_types.h"
#include "flash_attn/instance.h"
#include "shared/kernel_order.h"
#include "shared/launch.h"

namespace flash_attn_cuda {
namespace {

constexpr int threads = 256;
constexpr int vector_floats = 4;  // a thread's

struct ReduceArguments {
  AttentionShape shape;
  TensorView gradients[2];
  const float* partials[2];  // (splits, key_rows, num_heads_k, columns)
  int columns[2];            // the instance's
  int head_dims[2];          // the gradients', not more
  std::int64_t key_rows;     // over all sequences
  int splits;
  bool fp32_results;
  bool accumulate;
};

__device__ void add(float4& sum, float4 const& x) {
  sum.x += x.x;
  sum.y += x.y;
  sum.z += x.z;
  sum.w += x.w;
}

template <class Element>
__global__ void __launch_bounds__(threads)
    reduce_kernel(const __grid_constant__ ReduceArguments args) {
  follow_earlier_kernels();
  const AttentionShape& shape = args.shape;
  const std::int64_t rows = args.key_rows * shape.num_heads_k;
  const std::int64_t index = std::int64_t(blockIdx.x) * threads + threadIdx.x;
  const std::int64_t first_of_dv = rows * (args.columns[0] / vector_floats);
  const int which = index >= first_of_dv;
  const int columns = args.columns[which];
  const int vectors_per_row = columns / vector_floats;
  const std::int64_t vector = index - which * first_of_dv;
  const std::int64_t row = vector / vectors_per_row;
  const int column = static_cast<int>(vector - row * vectors_per_row) * vector_floats;
  if (row >= rows || column >= args.head_dims[which]) return;

  const auto* source =
      reinterpret_cast<const float4*>(args.partials[which] + row * columns + column);
  const std::int64_t split_vectors = rows * vectors_per_row;  // of one split's partials
  float4 sum = {};
#pragma unroll 8
  for (int split = 0; split < args.splits; ++split) add(sum, source[split * split_vectors]);
  const TensorView& view = args.gradients[which];
  const std::int64_t batch_key = row / shape.num_heads_k;
  const std::int64_t head = row - batch_key * shape.num_heads_k;
  const std::int64_t batch = batch_key / shape.seqlen_k;
  const std::int64_t key = batch_key - batch * shape.seqlen_k;
  const std::int64_t target =
      batch * view.batch_stride + key * view.row_stride + head * view.head_stride + column;
  if (args.fp32_results) {
    auto* result = reinterpret_cast<float4*>(static_cast<float*>(view.data) + target);
    if (args.accumulate) add(sum, *result);
    *result = sum;
    return;
  }
  Vector<Element> result;
  result.set_pair(0, {sum.x, sum.y});
  result.set_pair(1, {sum.z, sum.w});
  *reinterpret_cast<uint2*>(static_cast<Element*>(view.data) + target) =
      *reinterpret_cast<const uint2*>(&result);
}

}  // namespace

void reduce_dkv(const BackwardPlan& plan, const BackwardParams& params, Stream stream) {
  if (!plan.leaves_key_sums()) return;
  const AttentionShape& shape = params.shape;
  const BackwardConfig& config = plan.instance->config;
  const ReduceArguments arguments{
      .shape = shape,
      .gradients = {params.dk, params.dv},
      .partials = {plan.dk_partial.in(params.workspace), plan.dv_partial.in(params.workspace)},
      .columns = {config.head_dim, config.head_dim_v},
      .head_dims = {shape.head_dim, shape.head_dim_v},
      .key_rows = key_rows(params),
      .splits = plan.dkdv_splits,
      .fp32_results = params.fp32_results,
      .accumulate = params.accumulate};
  const std::int64_t vectors = arguments.key_rows * shape.num_heads_k *
                               ((config.head_dim + config.head_dim_v) / vector_floats);
  dispatch_dtype(params.dtype, [&](auto element) {
    launch_early<&reduce_kernel<decltype(element)>>((vectors + threads - 1) / threads, threads, 0,
                                                    stream, arguments);
  });
}

}  // namespace flash_attn_cuda
