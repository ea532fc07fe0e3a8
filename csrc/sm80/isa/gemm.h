// mma.sync m16n8k16 products of shared-memory tiles.
#pragma once

#include <cute/arch/copy_sm75.hpp>
#include <cute/arch/copy_sm90.hpp>
#include <cute/atom/copy_atom.hpp>
#include <cute/atom/mma_atom.hpp>
#include <cute/tensor.hpp>
#include <type_traits>

#include "flash_attn/config.h"
#include "shared/fragments.h"

namespace flash_attn_cuda::sm80 {

using namespace cute;

template <Dtype kDtype>
using ElementOf = std::conditional_t<kDtype == Dtype::bf16, cutlass::bfloat16_t, cutlass::half_t>;

template <class Element>
using MmaAtom =
    MMA_Atom<std::conditional_t<std::is_same_v<Element, cutlass::bfloat16_t>,
                                SM80_16x8x16_F32BF16BF16F32_TN, SM80_16x8x16_F32F16F16F32_TN>>;

// Warps in a grid of kWarpsM x kWarpsN. Sixteen neighbouring columns a warp: one ldmatrix.x4 brings
// two k16n8 B atoms, and two lanes hold whole blocks of dropout decisions
// (shared/dropout/dropout.h).
template <class Element, int kWarpsM, int kWarpsN>
using WarpGridMma = TiledMMA<
    MmaAtom<Element>, Layout<Shape<Int<kWarpsM>, Int<kWarpsN>, _1>>,
    Tile<Int<16 * kWarpsM>, Layout<Shape<_8, Int<kWarpsN>, _2>, Stride<_1, _16, _8>>, _16>>;

template <class Element>
using LoadMatrix = Copy_Atom<SM75_U32x4_LDSM_N, Element>;
template <class Element>
using LoadMatrixTransposed = Copy_Atom<SM75_U16x8_LDSM_T, Element>;

// Fragment -> shared memory: four 8x8 matrices an instruction where there is one, else 4-byte
// stores.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
template <class Element>
using StoreMatrix = Copy_Atom<SM90_U32x4_STSM_N, Element>;
#else
template <class Element>
using StoreMatrix = Copy_Atom<AutoVectorizingCopyWithAssumedAlignment<32>, Element>;
#endif

// One operand of a product: its fragment, and how a thread fills it from shared memory one k16 step
// at a time.
template <class TiledCopy, class Source, class Fragment>
struct SmemOperand {
  TiledCopy copy;
  Source source;      // (copy, atoms, k)
  Fragment fragment;  // (mma, atoms, k)

  CUTE_DEVICE void load(int k) { load(k, k); }
  // Step `k` of the source, in the registers of step `place`.
  CUTE_DEVICE void load(int k, int place) {
    auto target = retiled(copy, fragment);
    cute::copy(copy, source(_, _, k), target(_, _, place));
  }
  // The operand of a tile with the same layout that lies so many elements behind its own. To make
  // one from a tile takes the compiler longer.
  CUTE_DEVICE SmemOperand behind(std::ptrdiff_t elements) const {
    return {copy, make_tensor(source.data() + elements, source.layout()), fragment};
  }
};

// The fragment is asked of CuTe's code and not of its types: docs/architecture.md.
template <class Atom, class Mma, class SmemTensor>
CUTE_DEVICE auto operand_a(Atom, Mma const& mma, SmemTensor const& smem, int thread) {
  using Copy = decltype(make_tiled_copy_A(Atom{}, mma));
  Copy copy;
  auto source = source_share(copy, smem, thread);
  auto fragment = mma.get_thread_slice(thread).partition_fragment_A(without_swizzle(smem));
  return SmemOperand<decltype(copy), decltype(source), decltype(fragment)>{copy, source, fragment};
}

template <class Atom, class Mma, class SmemTensor>
CUTE_DEVICE auto operand_b(Atom, Mma const& mma, SmemTensor const& smem, int thread) {
  using Copy = decltype(make_tiled_copy_B(Atom{}, mma));
  Copy copy;
  auto source = source_share(copy, smem, thread);
  auto fragment = mma.get_thread_slice(thread).partition_fragment_B(without_swizzle(smem));
  return SmemOperand<decltype(copy), decltype(source), decltype(fragment)>{copy, source, fragment};
}

// accumulator += A B^T. The fragments of step k + 1 load while step k multiplies.
template <class Mma, class Accumulator, class A, class B>
CUTE_DEVICE void gemm(Mma const& mma, Accumulator& accumulator, A& a, B& b) {
  constexpr int steps = decltype(size<2>(a.fragment))::value;
  a.load(0);
  b.load(0);
  CUTE_UNROLL
  for (int k = 0; k < steps; ++k) {
    if (k + 1 < steps) {
      a.load(k + 1);
      b.load(k + 1);
    }
    cute::gemm(mma, a.fragment(_, _, k), b.fragment(_, _, k), accumulator);
  }
}

// gemm() of wide operands, in a loop over 64 columns that ends with those that exist.
template <class Mma, class Accumulator, class A, class B>
CUTE_DEVICE void gemm_columns(Mma const& mma, Accumulator& accumulator, A& a, B& b, int columns) {
  constexpr int all_steps = decltype(size<2>(a.fragment))::value;
  constexpr int steps = 4;  // of 16 columns, in a round of the loop
  a.load(0);
  b.load(0);
  CUTE_NO_UNROLL
  for (int first = 0; 16 * first < columns; first += steps) {
    CUTE_UNROLL
    for (int k = 0; k < steps; ++k) {
      const int next = k + 1 < steps ? first + k + 1 : min(first + steps, all_steps - 1);
      a.load(next, (k + 1) % steps);
      b.load(next, (k + 1) % steps);
      cute::gemm(mma, a.fragment(_, _, k), b.fragment(_, _, k), accumulator);
    }
  }
}

// gemm() or gemm_columns().
template <bool kWide, class Mma, class Accumulator, class A, class B>
CUTE_DEVICE void gemm_rows(Mma const& mma, Accumulator& accumulator, A& a, B& b, int columns) {
  if constexpr (kWide) {
    gemm_columns(mma, accumulator, a, b, columns);
  } else {
    gemm(mma, accumulator, a, b);
  }
}

// gemm() and gemm_rows() of tiles in shared memory, which AtomA and AtomB load.
template <class AtomA, class AtomB, class Mma, class Accumulator, class TileA, class TileB>
CUTE_DEVICE void gemm_tiles(Mma const& mma, Accumulator& accumulator, TileA const& tile_a,
                            TileB const& tile_b, int thread) {
  auto a = operand_a(AtomA{}, mma, tile_a, thread);
  auto b = operand_b(AtomB{}, mma, tile_b, thread);
  gemm(mma, accumulator, a, b);
}
template <class Atom, bool kWide, class Mma, class Accumulator, class TileA, class TileB>
CUTE_DEVICE void gemm_tile_rows(Mma const& mma, Accumulator& accumulator, TileA const& tile_a,
                                TileB const& tile_b, int columns, int thread) {
  auto a = operand_a(Atom{}, mma, tile_a, thread);
  auto b = operand_b(Atom{}, mma, tile_b, thread);
  gemm_rows<kWide>(mma, accumulator, a, b, columns);
}

// gemm() with A already in registers.
template <class Mma, class Accumulator, class FragmentA, class B>
CUTE_DEVICE void gemm_registers_a(Mma const& mma, Accumulator& accumulator, FragmentA const& a,
                                  B& b) {
  constexpr int steps = decltype(size<2>(a))::value;
  b.load(0);
  CUTE_UNROLL
  for (int k = 0; k < steps; ++k) {
    if (k + 1 < steps) b.load(k + 1);
    cute::gemm(mma, a(_, _, k), b.fragment(_, _, k), accumulator);
  }
}

}  // namespace flash_attn_cuda::sm80
