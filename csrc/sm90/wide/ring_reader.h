// A warpgroup's way through a ring of buffers that it alone reads, by products.
#pragma once

#include "sm90/isa/barriers.h"
#include "sm90/isa/gemm.h"

namespace flash_attn_cuda::sm90 {

// A slot is given back when the product after it has started and its own has ended.
template <int kSlots>
struct RingReader {
  Ring<kSlots>& ring;
  PipelineState<kSlots> next{};
  PipelineState<kSlots> started{};
  bool is_pending = false;

  // The slot that comes next, once it is full.
  CUTE_DEVICE int wait() const {
    consumer_wait(ring, next);
    return next.stage;
  }

  // A product has been started that reads it.
  CUTE_DEVICE void go_on() {
    warpgroup_wait<1>();
    if (is_pending) consumer_release(ring, started);
    started = next;
    is_pending = true;
    next.advance();
  }

  // All products; `accumulator` is the last one's.
  template <class Accumulator>
  CUTE_DEVICE void finish(Accumulator& accumulator) {
    wait_products<0>(accumulator);
    if (is_pending) consumer_release(ring, started);
    is_pending = false;
  }
};

// The k-steps [first, first + kSteps) of a product's left operand in registers.
template <int kSteps, class Operand>
CUTE_DEVICE auto operand_steps(Operand& operand, int first) {
  return make_tensor(operand.data() + first * int(size<0>(operand)),
                     make_layout(make_shape(shape<0>(operand), _1{}, Int<kSteps>{}),
                                 make_stride(stride<0>(operand), _0{}, size<0>(operand))));
}

}  // namespace flash_attn_cuda::sm90
