#include <algorithm>

#include "host/error.h"
#include "host/normalize_window.h"
#include "host/plan.h"
#include "host/plan_steps.h"
#include "host/select_instance.h"

namespace flash_attn_cuda {
namespace {

// The kernels around the main one give a query row up to 32 threads, in blocks of 256.
constexpr std::int64_t max_query_rows = max_grid * 8;

// Also keeps every size below within 64 bits.
void check_query_rows(const AttentionShape& shape, int seqlen_q_rounded) {
  const std::int64_t batch_heads = std::max<std::int64_t>(1, shape.batch_size) * shape.num_heads_q;
  if (batch_heads > max_query_rows / std::max(1, seqlen_q_rounded)) {
    throw_error("batch_size * num_heads_q * seqlen_q (rounded up to 128) must be at most ",
                max_query_rows, ", got ", shape.batch_size, " * ", shape.num_heads_q, " * ",
                seqlen_q_rounded);
  }
}

// One CTA has an SM to itself, and a section of two tiles for each evens out a causal grid; larger
// ones lose more in L2 than they gain.
constexpr int tiles_per_sm = 2;

// How many CTAs share the query heads of one key head. As few as give every SM two CTAs: each split
// costs an fp32 partial of dK and dV, and all partials together stay within the size of the fp32 dQ
// that the call needs anyway.
int choose_dkdv_splits(const AttentionShape& shape, int key_tiles, const DeviceInfo& device) {
  const std::int64_t ctas = std::int64_t{key_tiles} * shape.batch_size * shape.num_heads_k;
  const std::int64_t wanted = 2 * std::int64_t{device.num_sms};
  if (ctas == 0) return 1;

  const std::int64_t group = shape.num_heads_q / shape.num_heads_k;
  const std::int64_t affordable = group * shape.seqlen_q / (2 * std::int64_t{shape.seqlen_k});
  const std::int64_t largest = std::min(group, affordable);
  std::int64_t splits = 1;
  for (std::int64_t candidate = 2; candidate <= largest && ctas * splits < wanted; ++candidate) {
    if (group % candidate == 0) splits = candidate;
  }
  return static_cast<int>(splits);
}

// Buffers of floats behind each other.
class WorkspaceLayout {
 public:
  std::size_t add(std::int64_t floats) {
    constexpr std::size_t alignment = 256;
    const std::size_t offset = end_;
    end_ +=
        (static_cast<std::size_t>(floats) * sizeof(float) + alignment - 1) / alignment * alignment;
    return offset;
  }
  std::size_t bytes() const { return end_; }

 private:
  std::size_t end_ = 0;
};

}  // namespace

BackwardPlan plan_backward(const BackwardParams& params, const DeviceInfo& device,
                           std::span<const BackwardInstance* const> instances) {
  const AttentionShape& shape = params.shape;
  check_call(shape, params.softmax_scale);
  const int seqlen_q_rounded = round_up_seqlen(shape.seqlen_q);
  check_query_rows(shape, seqlen_q_rounded);

  const Window window = normalize_window(params.window, shape);
  const BackwardInstance& instance =
      select_instance(instances,
                      {.dtype = params.dtype,
                       .mask = window.is_full() ? MaskKind::full : MaskKind::windowed,
                       .head_dim = shape.head_dim},
                      device);
  const BackwardConfig& config = instance.config;

  const int key_tiles = ceil_div(shape.seqlen_k, config.block_n);
  const int splits = choose_dkdv_splits(shape, key_tiles, device);
  const std::int64_t bytes_per_query = 2 * sizeof(std::uint16_t) * shape.head_dim +  // Q and dO
                                       sizeof(float) * config.head_dim;  // the sum of dQ
  const std::int64_t group = shape.num_heads_q / shape.num_heads_k;
  BackwardPlan plan{
      .instance = &instance,
      .schedule = make_schedule(
          {.num_tiles = key_tiles,
           .batch_size = shape.batch_size,
           .num_heads = shape.num_heads_k * splits,
           .heads_per_group = splits,
           .bytes_per_group = group * shape.seqlen_q * bytes_per_query,
           .min_tiles = window.is_full() ? 0 : tiles_per_sm * std::int64_t{device.num_sms},
           // A right bound hides most queries from the last keys, so the long tiles come first as
           // they are; a left bound alone does the opposite.
           .longest_first = window.left != Window::unbounded && window.right == Window::unbounded},
          device),
      .seqlen_q_rounded = seqlen_q_rounded,
      .dkdv_splits = splits};

  WorkspaceLayout workspace;
  const std::int64_t query_heads = std::int64_t{shape.batch_size} * shape.num_heads_q;
  const std::int64_t accum_rows =
      std::int64_t{ceil_div(shape.seqlen_q, config.block_m)} * config.block_m;
  plan.lse_log2_offset = workspace.add(query_heads * seqlen_q_rounded);
  plan.dq_accum_offset = workspace.add(query_heads * accum_rows * config.head_dim);
  if (splits > 1) {
    const std::int64_t partial = std::int64_t{splits} * shape.batch_size * shape.num_heads_k *
                                 shape.seqlen_k * config.head_dim;
    plan.dk_partial_offset = workspace.add(partial);
    plan.dv_partial_offset = workspace.add(partial);
  }
  plan.workspace_bytes = workspace.bytes();
  return plan;
}

BackwardPlan plan_backward(const BackwardParams& params, const DeviceInfo& device) {
  return plan_backward(params, device, backward_instances());
}

}  // namespace flash_attn_cuda
