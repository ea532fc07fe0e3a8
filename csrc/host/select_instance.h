// Which compiled kernel serves a call.
#pragma once

#include <span>

#include "flash_attn/instance.h"

namespace flash_attn_cuda {

// What a call needs of a kernel.
struct KernelRequest {
  Dtype dtype;
  MaskKind mask;
  int head_dim;
  int head_dim_v;
  ForwardKind kind = ForwardKind::tiles;  // of a forward
  FeatureSet features = 0;
  int seqlen = 0;          // queries or keys of a sequence, of a forward
  int latent_rows = 0;     // of a latent one: queries and heads of a sequence, or more than a tile
  int keys_per_query = 0;  // that one sees on average
  bool is_causal = false;  // a right bound makes tiles uneven
  bool fp32_results = false;
  bool suits_sm90 = false;  // sm90 kernels can read the tensors, and scale is not negative
};

// The first instance, in the order given, that has the dtype, buckets at least as wide as head_dim
// and head_dim_v, a mask that covers the requested one (windowed covers full), every feature, and a
// family and shared memory that the device can run on these tensors. Throws Error with the request
// and the names of what there is when none does.
const ForwardInstance& select_instance(std::span<const ForwardInstance* const> instances,
                                       const KernelRequest& request, const DeviceInfo& device);
// select_instance(), or null where that throws.
const ForwardInstance* find_instance(std::span<const ForwardInstance* const> instances,
                                     const KernelRequest& request, const DeviceInfo& device);

const BackwardInstance& select_instance(std::span<const BackwardInstance* const> instances,
                                        const KernelRequest& request, const DeviceInfo& device);

}  // namespace flash_attn_cuda
