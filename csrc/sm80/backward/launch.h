// Host side of the sm80 backward kernels: from a plan to launches.
#pragma once

#include "shared/launch.h"
#include "sm80/backward/convert_dq.h"
#include "sm80/backward/kernel.h"

namespace flash_attn_cuda::sm80 {

template <class Tag>
void launch_backward(const BackwardPlan& plan, const BackwardParams& params, Stream stream) {
  using Traits = BackwardTraits<Tag>;
  BackwardArguments arguments = backward_arguments(plan, params, !Traits::is_plain);
  const int columns = std::max(params.shape.head_dim, params.shape.head_dim_v);
  arguments.ctas_per_tile = (columns - 1) / Traits::columns_per_cta + 1;
  launch_kernel<&backward_kernel<Tag>>(plan.schedule.grid_size() * arguments.ctas_per_tile,
                                       Traits::threads, sizeof(typename Traits::SharedStorage),
                                       stream, arguments);
}

template <class Tag>
void launch_convert_dq(const BackwardPlan& plan, const BackwardParams& params, Stream stream) {
  using Traits = BackwardTraits<Tag>;
  ConvertDqArguments arguments = convert_dq_arguments(plan, params);
  arguments.ctas_per_tile = (params.shape.head_dim - 1) / Traits::columns_per_cta + 1;
  launch_kernel<&convert_dq_kernel<Tag>>(
      std::int64_t{plan.q_tiles} * params.shape.num_heads_q * arguments.ctas_per_tile,
      Traits::threads, Traits::block_m * Traits::columns_per_cta * sizeof(typename Traits::Element),
      stream, arguments);
}

template <class Tag>
constexpr BackwardInstance make_backward_instance(const char* name) {
  return {.name = name,
          .config = Tag::config,
          .smem_bytes = static_cast<int>(sizeof(typename BackwardTraits<Tag>::SharedStorage)),
          .launch = &launch_backward<Tag>,
          .convert_dq = &launch_convert_dq<Tag>};
}

}  // namespace flash_attn_cuda::sm80
