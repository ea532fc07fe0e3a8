// device_info where the environment says that GPUs are smaller than they are.
#include <cstdlib>

#include "check.h"
#include "two_devices.h"

using namespace flash_attn_cuda;

TEST(limits_of_the_environment_lower_what_devices_have) {
  setenv("FLASH_ATTN_CUDA_CAPABILITY_LIMIT", "80", 1);
  setenv("FLASH_ATTN_CUDA_SMEM_LIMIT", "166912", 1);
  CHECK_ERROR(device_info(0), "device count: made-up failure");
  CHECK_EQ(device_info(0).compute_capability, 80);
  CHECK_EQ(device_info(1).compute_capability, 80);
  CHECK_EQ(device_info(0).smem_per_block, 166'912);
  CHECK_EQ(device_info(1).smem_per_block, 101'376);  // never more than there is
}

TEST(nothing_else_is_limited) {
  CHECK_EQ(device_info(0).num_sms, 132);
  CHECK_EQ(device_info(0).l2_bytes, std::int64_t{50 << 20});
  CHECK_EQ(device_info(1).num_sms, 84);
}

TEST(limits_are_read_once) {
  unsetenv("FLASH_ATTN_CUDA_CAPABILITY_LIMIT");
  setenv("FLASH_ATTN_CUDA_SMEM_LIMIT", "1000", 1);
  CHECK_EQ(device_info(0).compute_capability, 80);
  CHECK_EQ(device_info(0).smem_per_block, 166'912);
}
