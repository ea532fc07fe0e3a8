// What rounding takes from an accumulator of O -> global memory, where it is wanted.
#pragma once

#include <cute/tensor.hpp>

#include "shared/out_rounding.h"

namespace flash_attn_cuda {

// Each lane of a quad has two bytes of four groups of eight columns, in pairs of groups; lane l
// gets the eight bytes of group l.
CUTE_DEVICE uint2 group_of_lane(unsigned lane, std::uint32_t first_groups,
                                std::uint32_t last_groups) {
  constexpr std::uint32_t all_lanes = 0xffffffffu;
  constexpr unsigned low_halves = 0x5410, high_halves = 0x7632;
  const bool is_odd = lane % 2 != 0;
  const bool is_upper = lane % 4 >= 2;
  const std::uint32_t kept = is_upper ? last_groups : first_groups;
  const std::uint32_t received =
      __shfl_xor_sync(all_lanes, is_upper ? first_groups : last_groups, 2);
  const std::uint32_t of_lower = is_upper ? received : kept;
  const std::uint32_t of_upper = is_upper ? kept : received;
  const std::uint32_t own = __byte_perm(of_lower, of_upper, is_odd ? high_halves : low_halves);
  const std::uint32_t other = __shfl_xor_sync(
      all_lanes, __byte_perm(of_lower, of_upper, is_odd ? low_halves : high_halves), 1);
  const std::uint32_t of_even = is_odd ? other : own;
  const std::uint32_t of_odd = is_odd ? own : other;
  return {__byte_perm(of_even, of_odd, low_halves), __byte_perm(of_even, of_odd, high_halves)};
}

// output: a thread's (rows, columns), pairs of neighbouring columns of groups of eight. target: row
// 0, column 0; row_at(i): row i's, of which `rows` exist. columns: that exist, a multiple of eight.
// All lanes of a warp call it.
template <Dtype kDtype, class Output, class RowAt>
CUTE_DEVICE void write_rounding(std::int8_t* target, std::int64_t row_stride, Output const& output,
                                int rows, int columns, RowAt row_at) {
  using namespace cute;
  // So that the compiler does not keep what it makes of it from tile to tile.
  unsigned lane = threadIdx.x % 32;
  asm volatile("" : "+r"(lane));
  const int first_column = lane % 4 * 8;
  CUTE_UNROLL
  for (int first = 0; first < size<1>(output); first += 8) {
    // A branch every 64 columns: without it ptxas overlaps the shuffles of all, which spills.
    if (first % 16 == 0 && 4 * first >= columns) break;
    CUTE_UNROLL
    for (int i = 0; i < size<0>(output); ++i) {
      const auto of_groups = [&](int column) {
        const auto of_pair = [&](int c) {
          return OutRounding<kDtype>::of({output(i, c), output(i, c + 1)});
        };
        return of_pair(column) | std::uint32_t{of_pair(column + 2)} << 16;
      };
      const uint2 bytes = group_of_lane(lane, of_groups(first), of_groups(first + 4));
      const int row = row_at(i);
      const int column = 4 * first + first_column;
      if (row < rows && column < columns)
        *reinterpret_cast<uint2*>(target + row * row_stride + column) = bytes;
    }
  }
}

}  // namespace flash_attn_cuda
