// Which elements of a tile are a thread's: CuTe's partitions, with layouts worked out as types.
//
// A layout is its type. CuTe's functions that turn one into another are calls of hundreds of small
// functions each, and where such a call stands in code all of them are compiled, inlined and thrown
// away. In decltype they cost their types alone, and what runs is what depends on the thread.
#pragma once

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

}  // namespace flash_attn_cuda
