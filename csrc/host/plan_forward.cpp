#include "host/normalize_window.h"
#include "host/plan.h"
#include "host/plan_steps.h"
#include "host/select_instance.h"

namespace flash_attn_cuda {

ForwardPlan plan_forward(const ForwardParams& params, const DeviceInfo& device,
                         std::span<const ForwardInstance* const> instances) {
  const AttentionShape& shape = params.shape;
  check_call(shape, params.softmax_scale);
  const Window window = normalize_window(params.window, shape);
  const ForwardInstance& instance =
      select_instance(instances,
                      {.dtype = params.dtype,
                       .mask = window.is_full() ? MaskKind::full : MaskKind::windowed,
                       .head_dim = shape.head_dim},
                      device);

  constexpr std::int64_t bytes_per_key = 2 * sizeof(std::uint16_t);  // K and V, per column
  const TileSchedule schedule = make_schedule(
      {.num_tiles = ceil_div(shape.seqlen_q, instance.config.block_m),
       .batch_size = shape.batch_size,
       .num_heads = shape.num_heads_q,
       .heads_per_group = shape.num_heads_q / shape.num_heads_k,
       .bytes_per_group = bytes_per_key * shape.seqlen_k * shape.head_dim,
       // A right bound hides most keys from the first queries, so the last tiles are the long ones.
       .longest_first = window.right != Window::unbounded},
      device);
  return {.instance = &instance, .schedule = schedule};
}

ForwardPlan plan_forward(const ForwardParams& params, const DeviceInfo& device) {
  return plan_forward(params, device, forward_instances());
}

}  // namespace flash_attn_cuda
