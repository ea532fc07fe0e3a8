// wgmma products of shared-memory tiles, 64 rows a warpgroup.
#pragma once

#include <cute/algorithm/gemm.hpp>
#include <cute/arch/mma_sm90.hpp>
#include <cute/atom/mma_atom.hpp>
#include <cute/tensor.hpp>
#include <type_traits>

#include "flash_attn/config.h"
#include "shared/fragments.h"

namespace flash_attn_cuda::sm90 {

using namespace cute;

template <Dtype kDtype>
using ElementOf = std::conditional_t<kDtype == Dtype::bf16, cutlass::bfloat16_t, cutlass::half_t>;

// (64, kK) x (kN, kK), both in shared memory, both with k innermost.
template <class Element, int kN, int kK>
using SharedMma = decltype(make_tiled_mma(
    GMMA::ss_op_selector<Element, Element, float, Shape<_64, Int<kN>, Int<kK>>>()));

// (64, kK) in registers x (kN, kK) in shared memory with n innermost; of 8 bits, of which wgmma
// takes no other, with k innermost.
template <class Element, int kN, int kK>
using RegisterMma = decltype(make_tiled_mma(
    GMMA::rs_op_selector<Element, Element, float, Shape<_64, Int<kN>, Int<kK>>, GMMA::Major::K,
                         sizeof(Element) == 1 ? GMMA::Major::K : GMMA::Major::MN>()));

// (64, kK) in registers x (kN, kK) in shared memory, both with k innermost.
template <class Element, int kN, int kK>
using HeldMma = decltype(make_tiled_mma(
    GMMA::rs_op_selector<Element, Element, float, Shape<_64, Int<kN>, Int<kK>>, GMMA::Major::K,
                         GMMA::Major::K>()));

// (64, kK) x (kN, kK), both in shared memory with k outermost.
template <class Element, int kN, int kK>
using TransposedMma = decltype(make_tiled_mma(
    GMMA::ss_op_selector<Element, Element, float, Shape<_64, Int<kN>, Int<kK>>, GMMA::Major::MN,
                         GMMA::Major::MN>()));

// (64, kK) with k innermost x (kN, kK) with n innermost, both in shared memory.
template <class Element, int kN, int kK>
using RowsMma = decltype(make_tiled_mma(
    GMMA::ss_op_selector<Element, Element, float, Shape<_64, Int<kN>, Int<kK>>, GMMA::Major::K,
                         GMMA::Major::MN>()));

// Columns of one of its instructions. CuTe makes a product of the widest ones that it knows, and
// without CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED it does not know all: 80 columns become five of 16.
// Translation units that need it define it (build_tools/generate/kernel_units.py).
template <class Mma>
inline constexpr int instruction_columns = size<1>(typename Mma::AtomShape_MNK{});

template <class Fragment>
inline constexpr bool lies_in_registers =
    !std::is_same_v<typename Fragment::engine_type::iterator, GMMA::DescriptorIterator>;

// An operand in shared memory with addresses that the compiler makes anew here instead of keeping
// them in registers from one step to the next.
template <class Fragment>
CUTE_DEVICE auto with_new_addresses(Fragment const& fragment) {
  auto first = fragment.data();
  asm volatile("" : "+r"(first.desc_.reg32_[0]));
  return make_tensor(first, fragment.layout());
}

// A tile (64, k) of shared memory as a left operand in registers.
template <class Mma, class Tile>
CUTE_DEVICE auto make_held(Mma const& mma, Tile const& tile) {
  return mma.get_thread_slice(0).partition_fragment_A(tile);
}
template <class Mma, class Tile, class Fragment>
CUTE_DEVICE void read_held(Mma const& mma, Tile const& tile, Fragment& fragment, int thread) {
  using Element = typename Fragment::value_type;
  auto copy = make_tiled_copy_A(Copy_Atom<SM75_U32x4_LDSM_N, Element>{}, mma);
  auto share = copy.get_thread_slice(thread);
  cute::copy(copy, share.partition_S(tile), share.retile_D(fragment));
}

// Starts accumulator = A B^T, or += where `add`; a, b: (atom, atoms, k), or (atom, k) of one atom.
// Until wait_products the accumulator, and A where it lies in registers, must be left alone.
template <class Mma, class A, class B, class Accumulator>
CUTE_DEVICE void start_product(Mma& mma, A&& a, B const& b, Accumulator& accumulator, bool add) {
  constexpr int k_mode = decltype(rank(a))::value - 1;
  constexpr int steps = decltype(size<k_mode>(a))::value;
  warpgroup_fence_operand(accumulator);
  if constexpr (lies_in_registers<std::remove_cvref_t<A>>) warpgroup_fence_operand(a);
  warpgroup_arrive();
  mma.accumulate_ = add ? GMMA::ScaleOut::One : GMMA::ScaleOut::Zero;
  CUTE_UNROLL
  for (int k = 0; k < steps; ++k) {
    if constexpr (k_mode == 2) {
      cute::gemm(mma, a(_, _, k), b(_, _, k), accumulator);
    } else {
      cute::gemm(mma, a(_, k), b(_, k), accumulator(_, 0, 0));
    }
    mma.accumulate_ = GMMA::ScaleOut::One;
  }
  warpgroup_commit_batch();
}

// Waits until all but the last kLeft products have ended; `accumulator` is that of one which has.
template <int kLeft, class Accumulator>
CUTE_DEVICE void wait_products(Accumulator& accumulator) {
  warpgroup_wait<kLeft>();
  warpgroup_fence_operand(accumulator);
}

}  // namespace flash_attn_cuda::sm90
