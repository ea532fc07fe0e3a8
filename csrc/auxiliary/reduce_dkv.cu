// Sums the fp32 dK and dV partials of CTAs that shared one key head's query heads. A fixed order,
// so the same bits every run.
#include "auxiliary/auxiliary.h"
#include "auxiliary/vector_types.h"
#include "flash_attn/instance.h"
#include "shared/launch.h"

namespace flash_attn_cuda {
namespace {

constexpr int threads = 256;

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

template <class Element>
__global__ void __launch_bounds__(threads)
    reduce_kernel(const __grid_constant__ ReduceArguments args) {
  const AttentionShape& shape = args.shape;
  const std::int64_t rows = args.key_rows * shape.num_heads_k;
  const std::int64_t index = std::int64_t(blockIdx.x) * threads + threadIdx.x;
  const std::int64_t first_of_dv = rows * (args.columns[0] / vector_elements);
  const int which = index >= first_of_dv;
  const int columns = args.columns[which];
  const int vectors_per_row = columns / vector_elements;
  const std::int64_t vector = index - which * first_of_dv;
  const std::int64_t row = vector / vectors_per_row;
  const int column = static_cast<int>(vector - row * vectors_per_row) * vector_elements;
  if (row >= rows || column >= args.head_dims[which]) return;

  float sum[vector_elements] = {};
  for (int split = 0; split < args.splits; ++split) {
    const float* source = args.partials[which] + (split * rows + row) * columns + column;
    for (int i = 0; i < vector_elements; ++i) sum[i] += source[i];
  }
  const TensorView& view = args.gradients[which];
  const std::int64_t batch_key = row / shape.num_heads_k;
  const std::int64_t head = row - batch_key * shape.num_heads_k;
  const std::int64_t batch = batch_key / shape.seqlen_k;
  const std::int64_t key = batch_key - batch * shape.seqlen_k;
  const std::int64_t target =
      batch * view.batch_stride + key * view.row_stride + head * view.head_stride + column;
  if (args.fp32_results) {
    auto* halves = reinterpret_cast<float4*>(static_cast<float*>(view.data) + target);
    for (int half = 0; half < 2; ++half) {
      const float4 before = args.accumulate ? halves[half] : float4{};
      const float* after = sum + 4 * half;
      halves[half] = {before.x + after[0], before.y + after[1], before.z + after[2],
                      before.w + after[3]};
    }
    return;
  }
  Vector<Element> result;
  for (int i = 0; i < vector_elements / 2; ++i) result.set_pair(i, {sum[2 * i], sum[2 * i + 1]});
  *reinterpret_cast<Vector<Element>*>(static_cast<Element*>(view.data) + target) = result;
}

}  // namespace

void reduce_dkv(const BackwardPlan& plan, const BackwardParams& params, Stream stream) {
  if (plan.dkdv_splits == 1) return;
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
                               ((config.head_dim + config.head_dim_v) / vector_elements);
  dispatch_dtype(params.dtype, [&](auto element) {
    launch_kernel<&reduce_kernel<decltype(element)>>((vectors + threads - 1) / threads, threads, 0,
                                                     stream, arguments);
  });
}

}  // namespace flash_attn_cuda
