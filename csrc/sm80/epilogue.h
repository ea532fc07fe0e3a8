// Accumulators on their way out: registers -> shared memory in the 16-bit type, from where
// TileWriter (copy.h) takes whole rows.
#pragma once

#include "shared/layout_views.h"
#include "sm80/copy.h"
#include "sm80/gemm.h"

namespace flash_attn_cuda::sm80 {

template <class Element, class Accumulator, class Mma, class SmemTensor>
CUTE_DEVICE void fragment_to_shared(Accumulator const& accumulator, Mma const& mma,
                                    SmemTensor&& tile, int thread) {
  auto copy = make_tiled_copy_C(StoreMatrix<Element>{}, mma).get_thread_slice(thread);
  auto fragment = convert_fragment<Element>(accumulator);
  cute::copy(StoreMatrix<Element>{}, copy.retile_S(fragment), copy.partition_D(tile));
}

}  // namespace flash_attn_cuda::sm80
