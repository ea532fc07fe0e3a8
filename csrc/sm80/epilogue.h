// Accumulators on their way out: registers -> shared memory in the 16-bit type, from where
// TileWriter (sm80/isa/copy.h) takes whole rows; or, in fp32, straight to global memory.
#pragma once

#include "shared/fp32_results.h"
#include "shared/fragments.h"
#include "sm80/isa/copy.h"
#include "sm80/isa/gemm.h"

namespace flash_attn_cuda::sm80 {

template <class Element, class Accumulator, class Mma, class SmemTensor>
CUTE_DEVICE void fragment_to_shared(Accumulator const& accumulator, Mma const& mma,
                                    SmemTensor&& tile, int thread) {
  using Copy = decltype(make_tiled_copy_C(StoreMatrix<Element>{}, mma));
  auto fragment = convert_fragment<Element>(accumulator);
  cute::copy(StoreMatrix<Element>{}, retiled(Copy{}, fragment), target_share(Copy{}, tile, thread));
}

// Where a tile's rows lie in global memory in fp32.
struct Fp32Rows {
  float* first;  // row 0, column 0
  std::int64_t row_stride;
  int rows;                  // that exist
  int columns;               // that exist, an even number
  bool accumulates = false;  // added to what is there
};

// The accumulator of a tile of (kRows, kColumns) -> what exists of it.
template <int kRows, int kColumns, class Accumulator, class Mma>
CUTE_DEVICE void fragment_to_fp32_rows(Accumulator const& accumulator, Mma const& mma,
                                       Fp32Rows const& target, int thread) {
  auto values = rows_cols_view(accumulator);
  auto tile = make_identity_tensor(Shape<Int<kRows>, Int<kColumns>>{});
  auto coords = rows_cols_view(accumulator_share(mma, tile, thread));
  CUTE_UNROLL
  for (int i = 0; i < size<0>(values); ++i) {
    const int row = get<0>(coords(i, 0));
    if (row >= target.rows) continue;
    // Columns count from the thread's first, so that the others are constants away.
    const int first_column = get<1>(coords(i, 0));
    float* first = target.first + row * target.row_stride + first_column;
    const int columns = target.columns - first_column;
    CUTE_UNROLL
    for (int j = 0; j < size<1>(values); j += 2) {
      const int column = get<1>(coords(i, j)) - first_column;
      if (column < columns)
        write_pair(first + column, {values(i, j), values(i, j + 1)}, target.accumulates);
    }
  }
}

}  // namespace flash_attn_cuda::sm80
