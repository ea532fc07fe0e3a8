// What the host hands to kernels for the way from scores to powers of two.
#pragma once

#include <cfloat>
#include <cmath>

namespace flash_attn_cuda {

inline constexpr float log2e = 1.44269504088896f;

// From here on neighbouring numbers of fp32 are 2 apart, and P = exp(score - lse) is not known to
// within a factor of e^2; further out it would come to infinity, and to NaN times a gradient of 0.
inline constexpr float largest_lse = 16'777'216.0f;  // 2^24

// Kernels that want it take a negative scale's sign elsewhere. A zero would turn the -inf of a
// hidden score into NaN; the smallest number leaves exp2(0) = 1.
inline float positive_scale(float scale_log2) { return std::fmax(std::fabs(scale_log2), FLT_MIN); }

}  // namespace flash_attn_cuda
