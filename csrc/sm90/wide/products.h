// The products of a warpgroup of a CTA for wide heads, whose right operands come through its ring.
#pragma once

#include "sm90/wide/ring_reader.h"
#include "sm90/wide/slots.h"

namespace flash_attn_cuda::sm90 {

template <class Traits>
struct WideProducts {
  using Slots = typename Traits::Slots;
  using Element = typename Slots::Element;

  typename Traits::SharedStorage& smem;
  int warpgroup;
  int thread;
  RingReader<Slots::count> reader{smem.rings[warpgroup]};
  typename Slots::ScoresMma scores_mma{};
  typename Slots::ResultMma result_mma{};

  CUTE_DEVICE auto make_scores() const {
    return AccumulatorOf<typename Slots::ScoresMma, Shape<_64, Int<Slots::block>>>{};
  }
  CUTE_DEVICE auto make_result() const {
    return AccumulatorOf<typename Slots::ResultMma, Shape<_64, Int<Slots::own_columns>>>{};
  }

  // One of the CTA's tiles times the block whose columns come next. Without a branch between the
  // products: at one ptxas waits for each of them (C7514).
  template <class Accumulator>
  CUTE_DEVICE void start_scores(Element* tile, Accumulator& scores) {
    auto sTile = smem_tile<typename Slots::TileLayout>(tile);
    auto sSlots = smem_tile<typename Slots::ColumnsLayout>(smem.slots[warpgroup]);
    auto a = a_fragment(scores_mma, sTile, thread);
    auto b = b_fragment(scores_mma, sSlots, thread);
    CUTE_UNROLL
    for (int i = 0; i < Slots::head_dim / Slots::columns; ++i) {
      const int slot = reader.wait();
      start_product(scores_mma, with_new_addresses(a(_, _, _, i)),
                    with_new_addresses(b(_, _, _, slot)), scores, i > 0);
      reader.go_on();
    }
  }

  // result += operand times the block whose rows come next. add: to what is in it.
  template <class Operand, class Accumulator>
  CUTE_DEVICE void start_result(Operand& operand, Accumulator& result, bool add) {
    constexpr int steps = Slots::rows / 16;
    auto sSlots = smem_tile<typename Slots::RowsLayout>(smem.slots[warpgroup]);
    auto b = b_fragment(result_mma, transposed(sSlots), thread);
    CUTE_UNROLL
    for (int i = 0; i < Slots::block / Slots::rows; ++i) {
      const int slot = reader.wait();
      auto part = operand_steps<steps>(operand, i * steps);
      start_product(result_mma, part, b(_, _, _, slot), result, add || i > 0);
      reader.go_on();
    }
  }
};

}  // namespace flash_attn_cuda::sm90
