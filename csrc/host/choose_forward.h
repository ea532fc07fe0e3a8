// What a forward runs: which kernel, and how many CTAs share a tile's keys. The window of `params`
// is a normalised one (host/normalize_window.h).
#pragma once

#include "host/select_instance.h"

namespace flash_attn_cuda {

inline constexpr int reserved_smem = 1024;  // bytes that the system takes of every block

// Keys of a split whose bits must not depend on anything but the sequence.
inline constexpr int invariant_split_keys = 512;

// has_vectors: ForwardPlan::has_vector_rows. Only decode kernels copy element by element.
const ForwardInstance& choose_instance(const ForwardParams& params, const TensorExtents& extents,
                                       bool has_vectors, const DeviceInfo& device,
                                       std::span<const ForwardInstance* const> instances);

// Keys that a decode or latent kernel takes for a tile, at most.
int most_keys_of_decode(const ForwardParams& params);

// How many CTAs share the keys of each of `tiles`, those of all heads.
int choose_splits(const ForwardParams& params, const ForwardInstance& instance, std::int64_t tiles,
                  const DeviceInfo& device);

// Whether a kernel multiplies the numbers of a call with e4m3_products as they are. Other calls
// have q in 16 bits: those of few queries, which read keys as fast as memory gives them, those with
// scales of tokens or features that these kernels lack, and those of other devices.
bool has_e4m3_products(const ForwardParams& params, const DeviceInfo& device,
                       std::span<const ForwardInstance* const> instances);

}  // namespace flash_attn_cuda
