// Numbers of 16 bits divided by one scale and rounded to e4m3, without a division of each.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "shared/e4m3.h"
#include "shared/host_device.h"

namespace flash_attn_cuda {

// Multiplies by the scale's reciprocal, which is the sum of two numbers of fp32. What it rounds to
// e4m3 is bit for bit what fp32's quotient rounds to, if fp16 or bf16 holds the dividend.
//
// For e4m3 only how a quotient compares with the boundaries between codes matters. Those have five
// significant bits, the dividend 11 and the scale 24. fp32's quotient and the product compare alike
// unless the number of fp32 next to a boundary, at which quotients begin to round to the boundary,
// lies between the exact quotient and the exact product. With dividend X, scale S, and that number
// T = M 2^20 + 1 or - 1, M from 16 to 31, all integers: X 2^k - T S is below 2^10 only if S is
// N 2^20 + d, where |d| < 2^10 and M d +- N is a multiple of 2^16, hence 0. N is from 8 to 16. So M
// and N are 16 and d is -1: that is the quotient of a power of two, just above T. All other
// quotients are at least 2^-39 from T, relatively. The product is off by at most 2^-43, and for
// that one scale it is not too small.
class E4m3Quotient {
 public:
  // Of what is made, is_exact says whether the above holds of the scale.
  FAC_HOST_DEVICE static E4m3Quotient by(float scale) {
    constexpr float low = 0x1p-64f, high = 0x1p64f;  // far from where fp32 loses bits
    constexpr float excess = 1.f + 0x1p-21f;         // more than two roundings take away
    // Of a power of two nothing is missing, but infinity times 0 were NaN.
    constexpr float least_missing = 0x1p-60f;
    E4m3Quotient result;
    const float magnitude = std::fabs(scale);
    result.is_exact = magnitude >= low && magnitude <= high;
    // Both parts have the sign of the scale, so that the sum of two zeros has the quotient's.
    result.reciprocal_ = toward_zero_reciprocal(scale);
    const float missing = std::fma(-result.reciprocal_, scale, 1.f);
    result.rest_ = result.reciprocal_ * (std::fmax(missing, least_missing) * excess);
    return result;
  }

  FAC_HOST_DEVICE float of(float x) const { return std::fma(x, reciprocal_, x * rest_); }

  bool is_exact = false;

 private:
  float reciprocal_ = 0.f;
  float rest_ = 0.f;

  FAC_HOST_DEVICE static float toward_zero_reciprocal(float x) {
#if defined(__CUDA_ARCH__)
    return __frcp_rz(x);
#else
    const float nearest = 1.f / x;
    const bool is_beyond = std::fma(nearest, x, -1.f) > 0.f;
    return is_beyond ? std::bit_cast<float>(std::bit_cast<std::uint32_t>(nearest) - 1) : nearest;
#endif
  }
};

}  // namespace flash_attn_cuda
