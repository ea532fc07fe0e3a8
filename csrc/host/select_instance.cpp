#include "host/select_instance.h"

#include <algorithm>
#include <string>

#include "host/error.h"
#include "host/names.h"

namespace flash_attn_cuda {
namespace {

bool runs_on(KernelFamily family, int compute_capability, bool suits_sm90) {
  switch (family) {
    case KernelFamily::sm80:
      return compute_capability >= 80;
    case KernelFamily::sm90:
      return compute_capability == 90 && suits_sm90;  // wgmma exists on no other
  }
  return false;
}

// Whether a call is long enough for a row.
template <class Config>
bool has_enough_keys(const Config& config, const KernelRequest& request) {
  const bool is_full = request.mask == MaskKind::full;
  return request.keys_per_query >= (is_full ? config.least_keys_full : config.least_keys_windowed);
}

bool serves(const ForwardConfig& config, const KernelRequest& request) {
  const bool serves_any = config.most_causal_seqlen == 0 && config.most_full_seqlen == 0;
  const int most = request.is_causal ? config.most_causal_seqlen : config.most_full_seqlen;
  return config.kind == request.kind && config.block_m >= request.latent_rows &&
         (serves_any || (most > 0 && request.seqlen <= most)) && has_enough_keys(config, request);
}
bool serves(const BackwardConfig& config, const KernelRequest& request) {
  return has_enough_keys(config, request);
}

// Whether each TMA box (sm90/isa/copy.h) has a column that exists. Kernels for wide heads load no
// other boxes (sm90/wide/tile_columns.h).
template <class Config>
bool fills_boxes(const Config& config, int bucket, int head_dim) {
  if (config.is_wide) return true;
  const int columns = bucket % 64 == 0 ? 64 : 32;
  return bucket - head_dim < columns;
}

// A forward does without the values of whole boxes (sm90/forward/producer.h), unless it has
// tangents or its scores are sums over values; a backward's dP is a sum over them.
bool has_values(const ForwardConfig& config, const KernelRequest& request) {
  return (!has_tangents(config.features) && config.kind != ForwardKind::latent) ||
         fills_boxes(config, config.head_dim_v, request.head_dim_v);
}
bool has_values(const BackwardConfig& config, const KernelRequest& request) {
  return fills_boxes(config, config.head_dim_v, request.head_dim_v);
}

// What only rows of sm90 tell apart: those with lists walk nothing else, those with a bias always
// load one, those for a cache are for pages, splits or e4m3, and all must find what they load.
template <class Config>
bool suits(const Config& config, const KernelRequest& request) {
  if (config.family != KernelFamily::sm90) return true;
  const FeatureSet needed = config.features & (feature::block_sparse | feature::bias);
  const FeatureSet of_a_cache = config.features & (feature::paged_kv | feature::split_kv);
  // Heads that a warpgroup can hold are for other kernels, of whichever family.
  const bool suits_width =
      !config.is_wide || std::max(request.head_dim, request.head_dim_v) > config.head_dim / 2;
  return suits_width && (request.features & needed) == needed &&
         (of_a_cache == 0 || (request.features & (of_a_cache | feature::e4m3_kv)) != 0) &&
         fills_boxes(config, config.head_dim, request.head_dim) && has_values(config, request);
}

template <class Instance>
bool covers(const Instance& instance, const KernelRequest& request, const DeviceInfo& device) {
  const auto& config = instance.config;
  return serves(config, request) && config.dtype == request.dtype &&
         config.head_dim >= request.head_dim && config.head_dim_v >= request.head_dim_v &&
         (config.mask == MaskKind::windowed || request.mask == MaskKind::full) &&
         (config.features & request.features) == request.features &&
         has_tangents(config.features) == has_tangents(request.features) &&
         reads_e4m3(config.features) == reads_e4m3(request.features) &&
         multiplies_e4m3(config.features) == multiplies_e4m3(request.features) &&
         has_latent(config.features) == has_latent(request.features) &&
         lists_blocks(config.features) == lists_blocks(request.features) &&
         suits(config, request) && (!request.fp32_results || can_write_fp32(config.features)) &&
         runs_on(config.family, device.compute_capability, request.suits_sm90) &&
         instance.smem_bytes <= device.smem_per_block;
}

template <class Instance>
[[noreturn]] void throw_no_instance(const char* pass, std::span<const Instance* const> instances,
                                    const KernelRequest& request, const DeviceInfo& device) {
  std::string names;
  for (const Instance* instance : instances) {
    if (!names.empty()) names += ", ";
    names += instance->name;
  }
  if (names.empty()) names = "none";
  const int capability = device.compute_capability;
  std::string head_dims = std::to_string(request.head_dim);
  if (request.head_dim_v != request.head_dim)
    head_dims += ", head_dim_v " + std::to_string(request.head_dim_v);
  throw_error("no compiled ", pass, " kernel covers dtype ", name_of(request.dtype), ", head_dim ",
              head_dims, ", ", name_of(request.mask), " mask, features ",
              names_of(request.features), request.fp32_results ? ", fp32 results" : "",
              " on a device of compute capability ", capability / 10, ".", capability % 10,
              " with ", device.smem_per_block,
              " bytes of shared memory per block; a build with FLASH_ATTN_CUDA_ARCHS=80;90 and no "
              "FLASH_ATTN_CUDA_ROWS has all kernels; compiled: ",
              names);
}

template <class Instance>
const Instance* first_that_covers(std::span<const Instance* const> instances,
                                  const KernelRequest& request, const DeviceInfo& device) {
  for (const Instance* instance : instances) {
    if (covers(*instance, request, device)) return instance;
  }
  return nullptr;
}

}  // namespace

const ForwardInstance* find_instance(std::span<const ForwardInstance* const> instances,
                                     const KernelRequest& request, const DeviceInfo& device) {
  return first_that_covers(instances, request, device);
}

const ForwardInstance& select_instance(std::span<const ForwardInstance* const> instances,
                                       const KernelRequest& request, const DeviceInfo& device) {
  const ForwardInstance* instance = first_that_covers(instances, request, device);
  if (instance == nullptr) {
    throw_no_instance(name_of(request.kind), instances, request, device);
  }
  return *instance;
}

const BackwardInstance& select_instance(std::span<const BackwardInstance* const> instances,
                                        const KernelRequest& request, const DeviceInfo& device) {
  const BackwardInstance* instance = first_that_covers(instances, request, device);
  if (instance == nullptr) throw_no_instance("backward", instances, request, device);
  return *instance;
}

}  // namespace flash_attn_cuda
