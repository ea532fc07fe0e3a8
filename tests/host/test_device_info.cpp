// device_info against a CUDA runtime of two made-up devices, whose count fails the first time.
#include <cuda_runtime_api.h>

#include <atomic>
#include <thread>

#include "check.h"

using namespace flash_attn_cuda;

namespace {
std::atomic<int> count_queries = 0;
std::atomic<int> attribute_queries = 0;
}  // namespace

extern "C" {

cudaError_t CUDARTAPI cudaGetDeviceCount(int* count) {
  *count = 2;
  return count_queries++ == 0 ? cudaErrorInitializationError : cudaSuccess;
}

cudaError_t CUDARTAPI cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  ++attribute_queries;
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor:
      *value = device == 0 ? 9 : 8;
      break;
    case cudaDevAttrComputeCapabilityMinor:
      *value = device == 0 ? 0 : 6;
      break;
    case cudaDevAttrMultiProcessorCount:
      *value = device == 0 ? 132 : 84;
      break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = device == 0 ? 232'448 : 101'376;
      break;
    case cudaDevAttrL2CacheSize:
      *value = device == 0 ? 50 << 20 : 6 << 20;
      break;
    default:
      return cudaErrorInvalidValue;
  }
  return cudaSuccess;
}

const char* CUDARTAPI cudaGetErrorString(cudaError_t) { return "made-up failure"; }

}  // extern "C"

TEST(a_failure_is_reported_and_not_remembered) {
  CHECK_ERROR(device_info(0), "device count: made-up failure");
  CHECK_EQ(device_info(0).compute_capability, 90);
}

TEST(each_device_has_its_own_attributes) {
  CHECK_EQ(device_info(0).num_sms, 132);
  CHECK_EQ(device_info(0).smem_per_block, 232'448);
  CHECK_EQ(device_info(0).l2_bytes, std::int64_t{50 << 20});
  CHECK_EQ(device_info(1).compute_capability, 86);
  CHECK_EQ(device_info(1).num_sms, 84);
}

TEST(an_unknown_device_is_refused) {
  CHECK_ERROR(device_info(2), "device must be from 0 to 1, got 2");
  CHECK_ERROR(device_info(-1), "got -1");
}

TEST(the_runtime_is_asked_once_whatever_the_number_of_threads) {
  const int before = attribute_queries;
  std::vector<std::thread> threads;
  std::atomic<int> wrong = 0;
  for (int i = 0; i < 8; ++i) {
    threads.emplace_back([&] {
      for (int call = 0; call < 1000; ++call) wrong += device_info(call % 2).num_sms < 84;
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK_EQ(wrong.load(), 0);
  CHECK_EQ(attribute_queries.load(), before);
  CHECK_EQ(count_queries.load(), 2);
}
