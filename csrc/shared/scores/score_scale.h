// What the host hands to kernels for the way from scores to powers of two.
#pragma once

#include <cfloat>
#include <cmath>

namespace flash_attn_cuda {

inline constexpr float log2e = 1.44269504088896f;

// Kernels that want it take a negative scale's sign elsewhere. A zero would turn the -inf of a
// hidden score into NaN; the smallest number leaves exp2(0) = 1.
inline float positive_scale(float scale_log2) { return std::fmax(std::fabs(scale_log2), FLT_MIN); }

}  // namespace flash_attn_cuda
