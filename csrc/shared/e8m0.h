// Scales that are bytes of e8m0 (Open Compute Project, "OCP Microscaling Formats", 2023, section
// 5.4.1): 2^(byte - 127), and NaN for 255.
#pragma once

#include <bit>
#include <cstdint>

#include "shared/host_device.h"

namespace flash_attn_cuda {

FAC_HOST_DEVICE constexpr float number_of_scale(std::uint8_t byte) {
  const bool has_half = byte == 0 || byte == 255;  // 2^-127 is subnormal
  return std::bit_cast<float>(std::uint32_t{byte} << 23 | (has_half ? 1u << 22 : 0u));
}

// The byte of the least such number that is not below x, a normal and positive one.
FAC_HOST_DEVICE constexpr std::uint8_t next_e8m0(float x) {
  return static_cast<std::uint8_t>((std::bit_cast<std::uint32_t>(x) + 0x7f'ffff) >> 23);
}

}  // namespace flash_attn_cuda
