// Devices and instance lists for planning tests.
#pragma once

#include <vector>

#include "flash_attn/instance.h"

namespace host_tests {

using namespace flash_attn_cuda;

inline constexpr DeviceInfo a100{
    .compute_capability = 80, .num_sms = 108, .smem_per_block = 163 * 1024, .l2_bytes = 40 << 20};
inline constexpr DeviceInfo rtx4090{
    .compute_capability = 89, .num_sms = 128, .smem_per_block = 99 * 1024, .l2_bytes = 72 << 20};
inline constexpr DeviceInfo h200{
    .compute_capability = 90, .num_sms = 132, .smem_per_block = 227 * 1024, .l2_bytes = 50 << 20};

inline ForwardInstance forward_instance(const char* name, int head_dim, MaskKind mask,
                                        KernelFamily family = KernelFamily::sm80,
                                        Dtype dtype = Dtype::bf16, int smem_bytes = 48 * 1024) {
  return {.name = name,
          .config = {.family = family,
                     .dtype = dtype,
                     .mask = mask,
                     .head_dim = head_dim,
                     .block_m = 128,
                     .block_n = 64,
                     .num_warps = 4,
                     .features = 0},
          .smem_bytes = smem_bytes,
          .launch = nullptr};
}

inline BackwardInstance backward_instance(const char* name, int head_dim, MaskKind mask,
                                          int block_m = 64, int block_n = 128) {
  return {.name = name,
          .config = {.family = KernelFamily::sm80,
                     .dtype = Dtype::bf16,
                     .mask = mask,
                     .head_dim = head_dim,
                     .block_m = block_m,
                     .block_n = block_n,
                     .num_warps = 8,
                     .warps_m_scores = 2,
                     .warps_n_dkdv = 4,
                     .warps_m_dq = 2,
                     .stages_q = 2,
                     .stages_do = 2,
                     .features = 0},
          .smem_bytes = 96 * 1024,
          .launch = nullptr,
          .convert_dq = nullptr};
}

// Instances and the list of pointers that selection takes.
template <class Instance>
class InstanceList {
 public:
  explicit InstanceList(std::vector<Instance> instances) : instances_(std::move(instances)) {
    for (const Instance& instance : instances_) pointers_.push_back(&instance);
  }
  operator std::span<const Instance* const>() const { return pointers_; }

 private:
  std::vector<Instance> instances_;
  std::vector<const Instance*> pointers_;
};

inline const InstanceList<ForwardInstance>& forward_table() {
  static const InstanceList<ForwardInstance> table({
      forward_instance("hd64_full", 64, MaskKind::full),
      forward_instance("hd64_windowed", 64, MaskKind::windowed),
      forward_instance("hd128_full", 128, MaskKind::full),
      forward_instance("hd128_windowed", 128, MaskKind::windowed),
  });
  return table;
}

inline const InstanceList<BackwardInstance>& backward_table() {
  static const InstanceList<BackwardInstance> table({
      backward_instance("hd32_full", 32, MaskKind::full),
      backward_instance("hd64_full", 64, MaskKind::full),
      backward_instance("hd64_windowed", 64, MaskKind::windowed),
      backward_instance("hd128_full", 128, MaskKind::full),
      backward_instance("hd128_windowed", 128, MaskKind::windowed),
  });
  return table;
}

inline constexpr Window causal{.left = Window::unbounded, .right = 0};

template <class Params>
Params call(const AttentionShape& shape, Window window = {}) {
  Params params;
  params.shape = shape;
  params.window = window;
  params.softmax_scale = 0.125f;
  return params;
}

}  // namespace host_tests
