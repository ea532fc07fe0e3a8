// Results on their way from registers to global memory.
#pragma once

#include <cute/arch/copy_sm90.hpp>
#include <cute/atom/copy_atom.hpp>

#include "shared/fp32_results.h"
#include "shared/fragments.h"
#include "sm90/isa/copy.h"

namespace flash_attn_cuda::sm90 {

// The left operand of a product, kColumns in 16 bits, -> a tile of TileLayout<Element, kRows,
// kColumns>, kColumns a multiple of 64; each warp writes 16 rows, of a tile of 64 or of one of its
// own. What copy atoms do as well, at a tenth of their address arithmetic: a row of
// 128 bytes is eight chunks, chunk c of row r lies in place c ^ r % 8, and the lane's chunks of
// four stores differ in bits that the first leaves alone.
template <int kColumns, int kRows = 64, class Fragment>
CUTE_DEVICE void operand_to_shared(Fragment const& fragment, typename Fragment::value_type* tile) {
  static_assert(kColumns % 64 == 0 && sizeof(typename Fragment::value_type) == 2);
  static_assert(kRows == 64 || kRows == 16);
  const unsigned lane = threadIdx.x % 32;
  // Each lane has the address of one row of the four 8 x 8 matrices that a store writes: rows 0 and
  // 8 of chunk 0, then of chunk 1.
  const unsigned row = threadIdx.x % (2 * kRows) / 32 * 16 + lane % 16;
  const unsigned first = cast_smem_ptr_to_uint(tile) + row * 128 + ((lane / 16) ^ (row % 8)) * 16;
  auto registers = recast<std::uint32_t>(fragment);
  CUTE_UNROLL
  for (int i = 0; i < kColumns / 16; ++i) {
    const unsigned address = (first ^ (i % 4 * 32)) + i / 4 * (kRows * 128);
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
                 "r"(registers(4 * i)), "r"(registers(4 * i + 1)), "r"(registers(4 * i + 2)),
                 "r"(registers(4 * i + 3))
                 : "memory");
  }
}

// An accumulator of `mma`, in 16 bits -> a tile of TileLayout<Element, kRows, kColumns>; here too
// each warp writes 16 rows.
template <int kColumns, int kRows = 64, class Element, class Mma, class Accumulator>
CUTE_DEVICE void accumulator_to_shared([[maybe_unused]] Mma const& mma,
                                       Accumulator const& accumulator, Element* tile,
                                       [[maybe_unused]] int thread) {
  if constexpr (kColumns % 64 == 0) {
    FragmentLike<Element, decltype(a_operand_view(accumulator))> fragment;
    convert_into(a_operand_view(accumulator), fragment);
    operand_to_shared<kColumns, kRows>(fragment, tile);
  } else {
    static_assert(kRows == 64);
    using StoreMatrix = Copy_Atom<SM90_U32x4_STSM_N, Element>;
    using Copy = decltype(make_tiled_copy_C(StoreMatrix{}, mma));
    auto target = smem_tile<TileLayout<Element, 64, kColumns, 1>>(tile)(_, _, _0{});
    cute::copy(StoreMatrix{}, retiled(Copy{}, convert_fragment<Element>(accumulator)),
               target_share(Copy{}, target, thread));
  }
}

// Lane l of a quad holds pair l of four neighbouring groups of eight columns; afterwards it holds
// all four pairs of group l: 16 bytes in a row.
CUTE_DEVICE void transpose_quad(std::uint32_t (&pairs)[4], int lane) {
  // The lower lane of two gives j and keeps i, the upper one the reverse.
  auto exchange = [](std::uint32_t& i, std::uint32_t& j, bool upper, int distance) {
    const std::uint32_t received = __shfl_xor_sync(0xffffffffu, upper ? i : j, distance);
    i = upper ? received : i;
    j = upper ? j : received;
  };
  const bool odd = (lane & 1) != 0;
  exchange(pairs[0], pairs[1], odd, 1);
  exchange(pairs[2], pairs[3], odd, 1);
  const bool high = (lane & 2) != 0;
  exchange(pairs[0], pairs[2], high, 2);
  exchange(pairs[1], pairs[3], high, 2);
}

// Where a tile's rows lie in global memory. Element: of 16 bits, or float.
template <class Element>
struct RowTarget {
  Element* first;  // row 0, column 0
  std::int64_t row_stride;
  int rows;                  // that exist
  int columns;               // that exist, a multiple of eight
  bool accumulates = false;  // float alone: added to what is there
};

// This thread's (rows, columns) of an accumulator of 64 rows -> those rows of the target that
// exist.
template <class Element, class Rows>
CUTE_DEVICE void write_rows(Rows const& rows, RowTarget<Element> const& target, int thread) {
  constexpr int columns = 4 * decltype(size<1>(rows))::value;
  const int lane = thread % 32;
  CUTE_UNROLL
  for (int i = 0; i < size<0>(rows); ++i) {
    const int row = thread / 32 * 16 + lane / 4 + 8 * i;
    CUTE_UNROLL
    for (int column = 0; column < columns; column += 32) {
      std::uint32_t pairs[4];
      CUTE_UNROLL
      for (int group = 0; group < 4; ++group) {
        const int first = (column / 8 + group) * 2;
        cutlass::NumericArrayConverter<Element, float, 2> convert;
        const auto pair = convert({rows(i, first), rows(i, first + 1)});
        pairs[group] = reinterpret_cast<std::uint32_t const&>(pair);
      }
      transpose_quad(pairs, lane);
      const int first_column = column + 8 * (lane % 4);
      if (row < target.rows && first_column < target.columns) {
        *reinterpret_cast<uint4*>(target.first + row * target.row_stride + first_column) = {
            pairs[0], pairs[1], pairs[2], pairs[3]};
      }
    }
  }
}

// write_rows() in fp32: a quad's pairs are 32 bytes in a row as they are.
template <class Rows>
CUTE_DEVICE void write_rows(Rows const& rows, RowTarget<float> const& target, int thread) {
  const int lane = thread % 32;
  CUTE_UNROLL
  for (int i = 0; i < size<0>(rows); ++i) {
    const int row = thread / 32 * 16 + lane / 4 + 8 * i;
    if (row >= target.rows) continue;
    float* first = target.first + row * target.row_stride + lane % 4 * 2;
    CUTE_UNROLL
    for (int column = 0; column < size<1>(rows); column += 2) {
      if (4 * column >= target.columns) continue;  // a multiple of eight, as are these
      write_pair(first + 4 * column, {rows(i, column), rows(i, column + 1)}, target.accumulates);
    }
  }
}

}  // namespace flash_attn_cuda::sm90
