// Host side of the sm80 decode kernels: from a plan to a launch.
#pragma once

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>

#include "flash_attn/instance.h"
#include "shared/launch.h"
#include "sm80/decode/kernel.h"

namespace flash_attn_cuda::sm80 {

// Whether 16-byte copies can read or write the tensor's rows.
inline bool has_vector_rows(const TensorView& view) {
  constexpr std::int64_t elements = 8;
  return reinterpret_cast<std::uintptr_t>(view.data) % 16 == 0 &&
         view.batch_stride % elements == 0 && view.row_stride % elements == 0 &&
         view.head_stride % elements == 0;
}

inline int resident_ctas(std::size_t smem_bytes) {
  constexpr std::size_t reserved = 1024;  // shared memory that the system takes of every block
  int device = 0;
  check_cuda(cudaGetDevice(&device), "current device");
  const DeviceInfo& info = device_info(device);
  const std::size_t ctas_per_sm = (info.smem_per_block + reserved) / (smem_bytes + reserved);
  return info.num_sms * static_cast<int>(ctas_per_sm);
}

// Whether sequences may need different numbers of splits: because their lengths may differ, or
// because splits have a length of their own and the capacity says nothing.
inline bool lengths_decide(const ForwardPlan& plan, const ForwardParams& params) {
  return plan.num_splits > 1 && has_lengths_on_device(params.sequences) &&
         (params.shape.batch_size > 1 || plan.keys_per_split > 0);
}

template <class Tag>
void launch_decode(const ForwardPlan& plan, const ForwardParams& params, Stream stream) {
  using Traits = DecodeTraits<Tag>;
  constexpr float log2e = 1.44269504088896f;
  constexpr std::size_t smem_bytes = sizeof(typename Traits::SharedStorage);
  const AttentionShape& shape = params.shape;
  char* workspace = static_cast<char*>(params.workspace);
  const bool scales_scores = modifies_scores(params.score);
  const float scale = params.score.softmax_scale;
  const std::int64_t ctas_per_split = plan.schedule.grid_size();
  const bool decide = lengths_decide(plan, params);
  const std::int64_t resident = resident_ctas(smem_bytes);
  const DecodeArguments arguments{
      .params = params,
      .schedule = plan.schedule,
      .table = SequenceTable::at(workspace, shape.batch_size, plan.table),
      .group = Divider::by(shape.num_heads_q / shape.num_heads_k),
      // A zero would turn the -inf of a hidden score into NaN; this one leaves exp2(0) = 1.
      .scale_log2 = scales_scores ? log2e : std::fmax(std::fabs(scale) * log2e, FLT_MIN),
      .negate_q = !scales_scores && scale < 0.0f,
      .scales_scores = scales_scores,
      .has_vector_rows = shape.head_dim % 8 == 0 && shape.head_dim_v % 8 == 0 &&
                         has_vector_rows(params.q) && has_vector_rows(params.k) &&
                         has_vector_rows(params.v) && has_vector_rows(params.out),
      .lengths_decide = decide,
      .num_splits = plan.num_splits,
      .ctas_per_split = static_cast<int>(ctas_per_split),
      .keys_per_split = plan.keys_per_split,
      .resident_ctas = static_cast<int>(resident),
      .out_partial = reinterpret_cast<float*>(workspace + plan.out_partial_offset),
      .lse_partial = reinterpret_cast<float*>(workspace + plan.lse_partial_offset),
      .arrivals = reinterpret_cast<unsigned long long*>(workspace + plan.arrivals_offset),
      .tickets = reinterpret_cast<unsigned long long*>(workspace + plan.arrivals_offset) +
                 query_rows(params) * shape.num_heads_q,
      .call_mark = mark_of_next_call()};
  // Where lengths decide, a CTA for every item that there can be, or as many as fit, which draw.
  std::int64_t grid = ctas_per_split * plan.num_splits;
  if (decide) grid = std::min(grid, resident);
  launch_early<&decode_kernel<Tag>>(grid, Traits::threads, smem_bytes, stream, arguments);
}

template <class Tag>
constexpr ForwardInstance make_decode_instance(const char* name) {
  return {.name = name,
          .config = Tag::config,
          .smem_bytes = static_cast<int>(sizeof(typename DecodeTraits<Tag>::SharedStorage)),
          .launch = &launch_decode<Tag>};
}

}  // namespace flash_attn_cuda::sm80
