// device_info against a CUDA runtime of two made-up devices, whose count fails the first time.
#include <atomic>
#include <cstdlib>
#include <thread>

#include "check.h"
#include "two_devices.h"

using namespace flash_attn_cuda;
using namespace two_devices;

TEST(a_failure_is_reported_and_not_remembered) {
  setenv("FLASH_ATTN_CUDA_SMEM_LIMIT", "", 1);  // as if it were not set
  CHECK_ERROR(device_info(0), "device count: made-up failure");
  CHECK_EQ(errors_taken.load(), 1);  // nobody who goes on finds it
  CHECK_EQ(device_info(0).compute_capability, 90);
  CHECK_EQ(errors_taken.load(), 1);
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
