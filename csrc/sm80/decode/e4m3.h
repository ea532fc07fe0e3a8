// Keys and values of e4m3 in a decode kernel: where they lie in shared memory, and how they become
// fragments.
//
// A product does not ask in which order its operands' common mode runs, nor V's columns among
// themselves. So a lane takes 16 neighbouring bytes of a key at a time, for four steps of 16
// columns, and Q is loaded in that order; and ldmatrix transposes pairs of V's columns, whose even
// and odd ones then make an atom each.
#pragma once

#include <cute/arch/copy_sm75.hpp>

#include "shared/e4m3_pairs.h"
#include "shared/e4m3_units.h"
#include "shared/schedule/tile_work.h"
#include "sm80/isa/copy.h"
#include "sm80/isa/gemm.h"

namespace flash_attn_cuda::sm80 {

// A slice of keys, or of values: rows of kColumns bytes, whose chunks of 16 bytes are swizzled over
// eight rows. Two neighbouring rows use all banks where a lane reads a chunk (keys), and eight do
// where one chunk is read of each (values).
template <int kRows, int kColumns>
struct E4m3Tile {
  static constexpr int chunk = 16;
  static constexpr int atom_columns = kColumns < 128 ? kColumns : 128;

  CUTE_DEVICE static int swizzle(int row) {
    const int high = row >> 1 & 3;
    return (kColumns < 128 ? high : (row & 1) << 2 | high) * chunk;
  }
  CUTE_DEVICE static int offset(int row, int column) {
    return row * kColumns + (column ^ swizzle(row));
  }
  // To another row of the same place in its eight, and to another atom of columns.
  CUTE_DEVICE static constexpr int distance(int rows, int columns) {
    return rows * kColumns + columns;
  }
  static_assert(kColumns % 64 == 0, "four steps are 64 columns");
};

// Column that a step of S = Q K^T has where steps of neighbouring columns have `column`.
CUTE_DEVICE int e4m3_query_column(int column) {
  const int step = column / 16;
  const int lane = column % 8 / 2;
  return step / 4 * 64 + lane * 16 + step % 4 * 4 + column % 16 / 8 * 2 + column % 2;
}

// The B operand of S: atoms of eight keys, steps of 16 columns.
template <int kKeys, int kColumns>
struct E4m3Keys {
  using Element = cutlass::half_t;
  using Tile = E4m3Tile<kKeys, kColumns>;
  static constexpr int atoms = kKeys / 8;
  static constexpr int steps = kColumns / 16;

  const std::uint8_t* tile;
  int lane;
  decltype(make_tensor<Element>(Layout<Shape<_4, Int<atoms>, Int<steps>>>{})) fragment;
  uint4 chunks[atoms];

  CUTE_DEVICE void load(int k) {
    auto* pairs = reinterpret_cast<std::uint32_t*>(fragment.data()) + 2 * atoms * k;
    CUTE_UNROLL
    for (int atom = 0; atom < atoms; ++atom) {
      if (k % 4 == 0) {
        const int offset = Tile::offset(8 * atom + lane / 4, 16 * k + lane % 4 * 16);
        chunks[atom] = *reinterpret_cast<const uint4*>(tile + offset);
      }
      const std::uint32_t words[4] = {chunks[atom].x, chunks[atom].y, chunks[atom].z,
                                      chunks[atom].w};
      const std::uint32_t word = words[k % 4];
      pairs[2 * atom] = pair_of_e4m3<Element>(static_cast<std::uint16_t>(word));
      pairs[2 * atom + 1] = pair_of_e4m3<Element>(static_cast<std::uint16_t>(word >> 16));
    }
  }
};

// The B operand of O += P V for kPiece columns of V from `column` on: atoms of eight columns, the
// even or the odd ones of 16, and steps of 16 keys.
template <int kKeys, int kColumns, int kPiece>
struct E4m3Values {
  using Element = cutlass::half_t;
  using Tile = E4m3Tile<kKeys, kColumns>;
  static constexpr int atoms = kPiece / 8;
  static constexpr int steps = kKeys / 16;

  const std::uint8_t* tile;
  int column;
  int lane;
  decltype(make_tensor<Element>(Layout<Shape<_4, Int<atoms>, Int<steps>>>{})) fragment;

  CUTE_DEVICE void load(int k) {
    auto* pairs = reinterpret_cast<std::uint32_t*>(fragment.data()) + 2 * atoms * k;
    const int row = 16 * k + lane % 16;
    CUTE_UNROLL
    for (int first = 0; first < kPiece; first += 32) {
      // Matrices of keys 0 to 7 and 8 to 15, of 16 columns and of the next.
      std::uint32_t words[4];
      const int offset = Tile::offset(row, column + first + lane / 16 * 16);
      SM75_U16x8_LDSM_T::copy(*reinterpret_cast<const uint128_t*>(tile + offset), words[0],
                              words[1], words[2], words[3]);
      CUTE_UNROLL
      for (int i = 0; i < 4; ++i) {
        // Two keys of an even column, then of the odd one beside it.
        const std::uint32_t columns = __byte_perm(words[i], 0, 0x3120);
        std::uint32_t* even = pairs + 2 * (first / 8 + i / 2 * 2) + i % 2;
        even[0] = pair_of_e4m3<Element>(static_cast<std::uint16_t>(columns));
        even[2] = pair_of_e4m3<Element>(static_cast<std::uint16_t>(columns >> 16));
      }
    }
  }
};

// A thread's four columns of a pair of atoms, which are neighbours, of one row of O times a factor.
template <class Output>
CUTE_DEVICE float4 e4m3_columns(Output const& output, int row, int pair, float factor) {
  const int col = 4 * pair;
  return {output(row, col) * factor, output(row, col + 2) * factor, output(row, col + 1) * factor,
          output(row, col + 3) * factor};
}

}  // namespace flash_attn_cuda::sm80
