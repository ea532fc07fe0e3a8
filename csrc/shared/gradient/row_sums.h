// fp32 sums that lie row by row, and that many CTAs add accumulators of mma.sync products to.
#pragma once

#include "shared/fragments.h"

namespace flash_attn_cuda {

// Four neighbouring numbers, at 16 bytes.
CUTE_DEVICE void add_four(float* sums, float4 const& x) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};"
               :
               : "l"(__cvta_generic_to_global(sums)), "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w)
               : "memory");
#else
  atomicAdd(sums, x.x);
  atomicAdd(sums + 1, x.y);
  atomicAdd(sums + 2, x.z);
  atomicAdd(sums + 3, x.w);
#endif
}

// Adds the accumulator of a tile of (kRows, kColumns). row_at(row): where a row's sums begin, or
// null. Two lanes that have pairs of columns of the same two rows take four columns of one each.
template <int kRows, int kColumns, class Accumulator, class Mma, class RowAt>
CUTE_DEVICE void add_rows(Accumulator const& accumulator, Mma const& mma, int thread,
                          RowAt row_at) {
  using namespace cute;
  asm volatile("" : "+r"(thread));  // places are not kept from one addition to the next
  auto values = rows_cols_view(accumulator);
  auto tile = make_identity_tensor(Shape<Int<kRows>, Int<kColumns>>{});
  auto coords = rows_cols_view(accumulator_share(mma, tile, thread));
  const bool is_odd = thread % 2 != 0;
  CUTE_UNROLL
  for (int i = 0; i < size<0>(values); i += 2) {
    float* row = row_at(is_odd ? get<0>(coords(i + 1, 0)) : get<0>(coords(i, 0)));
    CUTE_UNROLL
    for (int j = 0; j < size<1>(values); j += 2) {
      const float2 first{values(i, j), values(i, j + 1)};
      const float2 second{values(i + 1, j), values(i + 1, j + 1)};
      const float2 sent = is_odd ? first : second;
      const float2 got{__shfl_xor_sync(0xffffffffu, sent.x, 1),
                       __shfl_xor_sync(0xffffffffu, sent.y, 1)};
      const float4 sum = is_odd ? float4{got.x, got.y, second.x, second.y}
                                : float4{first.x, first.y, got.x, got.y};
      const int column = get<1>(coords(i, j)) - (is_odd ? 2 : 0);
      if (row != nullptr) add_four(row + column, sum);
    }
  }
}

}  // namespace flash_attn_cuda
