#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdlib>
#include <vector>

#include "host/error.h"
#include "shared/launch.h"

namespace flash_attn_cuda {
namespace {

// Plan as if the GPU had no more than the environment says, so that a large one runs, and tests,
// the instances meant for others: FLASH_ATTN_CUDA_SMEM_LIMIT, bytes of shared memory of a block,
// and FLASH_ATTN_CUDA_CAPABILITY_LIMIT, 80 for the kernels of every GPU.
int limited(int available, const char* variable) {
  const char* limit = std::getenv(variable);
  const bool is_set = limit != nullptr && *limit != '\0';
  return is_set ? std::min(available, std::atoi(limit)) : available;
}

DeviceInfo query_device(int device) {
  const auto attribute = [device](cudaDeviceAttr which) {
    int value = 0;
    check_cuda(cudaDeviceGetAttribute(&value, which, device), "device attribute");
    return value;
  };
  const int capability = 10 * attribute(cudaDevAttrComputeCapabilityMajor) +
                         attribute(cudaDevAttrComputeCapabilityMinor);
  return {.compute_capability = limited(capability, "FLASH_ATTN_CUDA_CAPABILITY_LIMIT"),
          .num_sms = attribute(cudaDevAttrMultiProcessorCount),
          .smem_per_block = limited(attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin),
                                    "FLASH_ATTN_CUDA_SMEM_LIMIT"),
          .l2_bytes = attribute(cudaDevAttrL2CacheSize)};
}

// Attributes need no context on the device, so asking all of them costs microseconds and touches
// nothing.
std::vector<DeviceInfo> query_devices() {
  int count = 0;
  check_cuda(cudaGetDeviceCount(&count), "device count");
  std::vector<DeviceInfo> devices;
  for (int device = 0; device < count; ++device) devices.push_back(query_device(device));
  return devices;
}

}  // namespace

const DeviceInfo& device_info(int device) {
  // Filled by the first thread that comes while others wait; asked for again if that threw.
  static const std::vector<DeviceInfo> devices = query_devices();
  if (device < 0 || device >= static_cast<int>(devices.size())) {
    throw_error("device must be from 0 to ", static_cast<int>(devices.size()) - 1, ", got ",
                device);
  }
  return devices[static_cast<std::size_t>(device)];
}

}  // namespace flash_attn_cuda
