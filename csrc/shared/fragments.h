// Which elements of a tile are a thread's, CuTe's partitions, and views of what it holds of a
// product.
//
// A layout is its type. CuTe's functions that make one of another are calls of hundreds of small
// functions each, and where such a call stands in code all of them are compiled, inlined and thrown
// away. In decltype they cost their types alone, and what runs is what depends on the thread.
#pragma once

#include <cutlass/numeric_conversion.h>

#include <cstdint>
#include <cute/atom/copy_atom.hpp>
#include <cute/atom/mma_atom.hpp>
#include <cute/tensor.hpp>
#include <utility>

namespace flash_attn_cuda {

template <class Tensor>
using LayoutOf = typename cute::remove_cvref_t<Tensor>::layout_type;

// What a thread holds of an accumulator of Shape, (rows, columns).
template <class Mma, class Shape>
using AccumulatorOf = decltype(cute::partition_fragment_C(Mma{}, Shape{}));

// A fragment of Element, laid out as `Fragment` is.
template <class Element, class Fragment>
using FragmentLike = decltype(cute::make_tensor_like<Element>(
    std::declval<cute::remove_cvref_t<Fragment> const&>()));

// What ThrCopy's partition_S, partition_D and retile_ return.
template <class Copy, class Tensor>
CUTE_DEVICE auto source_share(Copy const&, Tensor const& tile, int thread) {
  using namespace cute;
  using Shares = decltype(Copy::tidfrg_S(LayoutOf<Tensor>{}));  // (thread, value, rest)
  return make_tensor(tile.data(), Shares{})(thread, _, repeat<Tensor::rank>(_));
}
template <class Copy, class Tensor>
CUTE_DEVICE auto target_share(Copy const&, Tensor const& tile, int thread) {
  using namespace cute;
  using Shares = decltype(Copy::tidfrg_D(LayoutOf<Tensor>{}));
  return make_tensor(tile.data(), Shares{})(thread, _, repeat<Tensor::rank>(_));
}
template <class Copy, class Fragment>
CUTE_DEVICE auto retiled(Copy const&, Fragment&& fragment) {
  using Retiled = decltype(Copy::retile(LayoutOf<Fragment>{}));
  return cute::make_tensor(fragment.data(), Retiled{});
}

// (v, m, n, k) of a thread among those of a product.
template <class Mma>
CUTE_DEVICE auto place_of_thread(Mma const& mma, int thread) {
  return decltype(mma.get_thr_layout_vmnk()){}.get_flat_coord(thread);
}

// What ThrMMA's partition_A, _B and _C return.
template <class Mma, class Tensor>
CUTE_DEVICE auto a_share(Mma const& mma, Tensor const& tile, int thread) {
  using namespace cute;
  using Shares = decltype(mma.thrfrg_A(LayoutOf<Tensor>{}));  // ((v, (m, k)), (value, rest))
  const auto place = place_of_thread(mma, thread);
  const auto share = make_coord(get<0>(place), make_coord(get<1>(place), get<3>(place)));
  return make_tensor(tile.data(), Shares{})(share, make_coord(_, repeat<Tensor::rank>(_)));
}
template <class Mma, class Tensor>
CUTE_DEVICE auto b_share(Mma const& mma, Tensor const& tile, int thread) {
  using namespace cute;
  using Shares = decltype(mma.thrfrg_B(LayoutOf<Tensor>{}));
  const auto place = place_of_thread(mma, thread);
  const auto share = make_coord(get<0>(place), make_coord(get<2>(place), get<3>(place)));
  return make_tensor(tile.data(), Shares{})(share, make_coord(_, repeat<Tensor::rank>(_)));
}
template <class Mma, class Tensor>
CUTE_DEVICE auto accumulator_share(Mma const& mma, Tensor const& tile, int thread) {
  using namespace cute;
  using Shares = decltype(mma.thrfrg_C(LayoutOf<Tensor>{}));
  const auto place = place_of_thread(mma, thread);
  const auto share = make_coord(get<0>(place), make_coord(get<1>(place), get<2>(place)));
  return make_tensor(tile.data(), Shares{})(share, make_coord(_, repeat<Tensor::rank>(_)));
}

// What its partition_fragment_A and _B return.
template <class Mma, class Tensor>
CUTE_DEVICE auto a_fragment(Mma const& mma, Tensor const& tile, int thread) {
  return Mma::make_fragment_A(a_share(mma, tile, thread));
}
template <class Mma, class Tensor>
CUTE_DEVICE auto b_fragment(Mma const& mma, Tensor const& tile, int thread) {
  return Mma::make_fragment_B(b_share(mma, tile, thread));
}

// Views of accumulator fragments. Of an mma.sync m16n8 atom a thread holds (row, row + 8) x
// (column, column + 1); of a wgmma m64nN atom the same in each of its N / 8 groups of eight
// columns.

// ((2, 2), atoms_m, atoms_n) or ((2, 2, N / 8), atoms_m, atoms_n) -> (rows of this thread, columns
// of this thread)
template <class Layout>
CUTE_HOST_DEVICE constexpr auto rows_cols_layout(Layout const& accumulator) {
  using namespace cute;
  if constexpr (decltype(rank<0>(accumulator))::value == 3) {
    return make_layout(
        make_layout(get<0, 1>(accumulator), get<1>(accumulator)),
        make_layout(get<0, 0>(accumulator), get<0, 2>(accumulator), get<2>(accumulator)));
  } else {
    auto split =
        logical_divide(accumulator, Shape<_2>{});  // ((2, 2), atoms_m, atoms_n), columns innermost
    return make_layout(make_layout(get<0, 1>(split), get<1>(split)),
                       make_layout(get<0, 0>(split), get<2>(split)));
  }
}

template <class Tensor>
CUTE_HOST_DEVICE constexpr auto rows_cols_view(Tensor&& accumulator) {
  using View = decltype(rows_cols_layout(accumulator.layout()));
  return cute::make_tensor(accumulator.data(), View{});
}

// An accumulator is already the A operand of the next product: two n8 atoms, or two groups of eight
// columns of a wgmma atom, make one k16 step.
template <class Layout>
CUTE_HOST_DEVICE constexpr auto a_operand_layout(Layout const& accumulator) {
  using namespace cute;
  if constexpr (decltype(rank<0>(accumulator))::value == 3) {
    auto groups = logical_divide(get<0, 2>(accumulator), _2{});  // (2, N / 16)
    return make_layout(make_layout(get<0, 0>(accumulator), get<0, 1>(accumulator), get<0>(groups)),
                       get<1>(accumulator), make_layout(get<1>(groups), get<2>(accumulator)));
  } else {
    auto pairs =
        logical_divide(accumulator, Shape<Underscore, Underscore, _2>{});  // (4, m, (2, n / 2))
    return make_layout(make_layout(get<0>(pairs), get<2, 0>(pairs)), get<1>(pairs),
                       get<2, 1>(pairs));
  }
}

template <class Tensor>
CUTE_HOST_DEVICE constexpr auto a_operand_view(Tensor&& accumulator) {
  using View = decltype(a_operand_layout(accumulator.layout()));
  return cute::make_tensor(accumulator.data(), View{});
}

// fp32 fragment -> a fragment of Element with the same layout.
template <class Element, class Tensor>
CUTE_DEVICE auto convert_fragment(Tensor const& source) {
  using namespace cute;
  constexpr int count = decltype(size(source))::value;
  FragmentLike<Element, Tensor> result;
  auto converted = cutlass::NumericArrayConverter<Element, float, count>::convert(
      *reinterpret_cast<const cutlass::Array<float, count>*>(source.data()));
  *reinterpret_cast<cutlass::Array<Element, count>*>(result.data()) = converted;
  return result;
}

// convert_fragment() into registers that exist already, two elements at a time: element by element,
// the compiler takes pairs apart and puts them together again.
template <class Source, class Target>
CUTE_DEVICE void convert_into(Source const& source, Target& target) {
  using namespace cute;
  cutlass::NumericArrayConverter<typename Target::value_type, float, 2> convert;
  auto pairs = recast<std::uint32_t>(target);
  CUTE_UNROLL
  for (int i = 0; i < size(pairs); ++i) {
    const auto pair = convert({source(2 * i), source(2 * i + 1)});
    pairs(i) = reinterpret_cast<std::uint32_t const&>(pair);
  }
}

}  // namespace flash_attn_cuda
