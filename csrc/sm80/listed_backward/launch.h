// Host side of the sm80 backward kernels for lists of blocks: from a plan to launches.
#pragma once

#include <bit>

#include "shared/launch.h"
#include "sm80/listed_backward/kernel.h"

namespace flash_attn_cuda::sm80 {

template <class Tag>
void launch_listed_backward(const BackwardPlan& plan, const BackwardParams& params, Stream stream) {
  using Traits = ListedBackwardTraits<Tag>;
  for (const Buffer<float>& sums : {plan.dk_partial, plan.dv_partial}) {
    if (sums.exists())
      check_cuda(cudaMemsetAsync(sums.in(params.workspace), 0, sums.count * sizeof(float), stream),
                 "zero sums of dK and dV");
  }
  ListedTurns turns;
  if (plan.listed_turns.exists()) {
    int* counters = plan.listed_turns.in(params.workspace);
    const std::int64_t count = plan.listed_turns.count;
    check_cuda(cudaMemsetAsync(counters, 0, count * sizeof(int), stream), "zero turns");
    const std::int64_t rows = query_rows(params);
    turns = {.of_queries = counters,
             .of_tiles = counters + rows * params.shape.num_heads_k,
             .tickets = counters + count - 1,
             .query_rows = static_cast<int>(rows)};
  }
  const auto heads = static_cast<unsigned>(params.shape.heads_per_key_head());
  const ListedArguments arguments{.of = backward_arguments(plan, params, /*can_modify=*/true),
                                  .turns = turns,
                                  .log2_heads = static_cast<int>(std::bit_width(heads - 1)),
                                  .tiles_per_block = params.listed.tiles_of_block(Traits::block_n),
                                  .entries_per_cta = plan.entries_per_cta};
  launch_kernel<&listed_backward_kernel<Tag>, Traits>(plan.grid, stream, arguments);
}

template <class Traits>
void launch_convert_rows(const BackwardPlan& plan, const BackwardParams& params, Stream stream) {
  launch_kernel<&convert_rows_kernel<Traits>>(plan.convert_grid, Traits::threads, 0, stream,
                                              convert_dq_arguments(plan, params));
}

template <class Tag>
constexpr BackwardInstance make_listed_backward_instance(const char* name) {
  using Traits = ListedBackwardTraits<Tag>;
  return make_instance<Traits>(name, &launch_listed_backward<Tag>, &launch_convert_rows<Traits>);
}

}  // namespace flash_attn_cuda::sm80
