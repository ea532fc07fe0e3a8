#include <cuda_runtime_api.h>

#include "auxiliary/auxiliary.h"
#include "flash_attn/instance.h"
#include "shared/launch.h"

namespace flash_attn_cuda {
namespace {

CombineParams combine_params(const ForwardPlan& plan, const ForwardParams& params) {
  const AttentionShape& shape = params.shape;
  return {.out_dtype = params.dtype,
          .out_fp32 = params.fp32_results,
          .num_splits = plan.num_splits,
          .head_dim = shape.head_dim_v,
          .num_heads = shape.num_heads_q,
          .rows = query_rows(params),
          .out_partial = plan.out_partial.in(params.workspace),
          .lse_partial = plan.lse_partial.in(params.workspace),
          .out_rounding = params.out_rounding,
          .out = params.out.data,
          .out_batch_stride = params.out.batch_stride,
          .out_row_stride = params.out.row_stride,
          .out_head_stride = params.out.head_stride,
          .rows_per_batch = shape.seqlen_q,
          .lse = params.lse};
}

}  // namespace

void run_forward(const ForwardPlan& plan, const ForwardParams& given, Stream stream) {
  ForwardParams params = given;
  params.window = plan.window;
  const bool draws = (plan.instance->config.features & feature::dropout) != 0;
  if (params.dropout.rng_state != nullptr && (plan.grid == 0 || !draws)) {
    // Nothing is dropped, but a backward may ask for the state.
    check_cuda(cudaMemsetAsync(params.dropout.rng_state, 0, 2 * sizeof(std::int64_t), stream),
               "zero rng_state");
  }
  if (plan.grid == 0) return;
  make_sequence_table(plan.table,
                      {.sequences = params.sequences,
                       .shape = params.shape,
                       .is_paged = params.paged.block_table != nullptr,
                       .tiles_of_keys = false,
                       .drops = params.dropout.threshold > 0,
                       .most_queries = params.tree.columns,
                       .errors = params.errors,
                       .workspace = params.workspace},
                      stream);
  plan.instance->launch(plan, params, stream);
  // Those of decode and latent kernels are theirs to combine.
  const ForwardKind kind = plan.instance->config.kind;
  if (plan.num_splits > 1 && kind != ForwardKind::decode && kind != ForwardKind::latent)
    run_combine(combine_params(plan, params), stream);
}

}  // namespace flash_attn_cuda
