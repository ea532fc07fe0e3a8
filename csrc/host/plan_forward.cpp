#include "host/normalize_window.h"
#include "host/plan.h"
#include "host/plan_steps.h"
#include "host/select_instance.h"

namespace flash_attn_cuda {

namespace {

// Two CTAs share an SM, and four tiles for each even out a causal grid: on an H200 at seqlen 4096
// and head_dim 128, sections of 4, 16 and 64 heads gave 333, 360 and 367 TFLOP/s.
constexpr int tiles_per_sm = 8;

}  // namespace

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
       .min_tiles = window.is_full() ? 0 : tiles_per_sm * std::int64_t{device.num_sms},
       // A right bound hides most keys from the first queries, so the last tiles are the long ones.
       .longest_first = window.right != Window::unbounded},
      device);
  return {.instance = &instance, .schedule = schedule};
}

ForwardPlan plan_forward(const ForwardParams& params, const DeviceInfo& device) {
  return plan_forward(params, device, forward_instances());
}

}  // namespace flash_attn_cuda
