// dQ = scale * the fp32 sums that backward_kernel left, strip by strip, where that kernel has not
// done it itself (finish.h).
#pragma once

#include "shared/kernel_order.h"
#include "sm90/backward/finish.h"

namespace flash_attn_cuda::sm90 {

// The strip that a warp takes as number `place`: those that the main kernel did not take, from the
// last one on, which it added to last and L2 still has, then those that its warps gave back. -1
// where there is none.
CUTE_DEVICE int strip_at(ConvertDqArguments const& args, unsigned strips, unsigned undrawn,
                         unsigned place) {
  if (place < undrawn) return static_cast<int>(strips - 1 - place);
  const unsigned index = (place - undrawn) / strips_at_once;
  const int given_back = args.given_back[index];
  const int strip = given_back + static_cast<int>((place - undrawn) % strips_at_once);
  const bool exists = given_back >= 0 && strip / strips_at_once == given_back / strips_at_once;
  return exists ? strip : -1;
}

template <class Tag>
__global__ void __launch_bounds__(convert_dq_threads)
    convert_dq_kernel(const __grid_constant__ ConvertDqArguments args) {
  using Traits = BackwardTraits<Tag>;
  constexpr unsigned warps = convert_dq_threads / 32;

  wait_for_earlier_kernels();
  const auto strips = Strip::count<Traits>(args);
  const unsigned drawn = args.strips_drawn == nullptr ? 0 : min(*args.strips_drawn, strips);
  const unsigned places = strips - drawn + args.num_given_back * strips_at_once;
  for (unsigned place = blockIdx.x * warps + threadIdx.x / 32; place < places;
       place += gridDim.x * warps) {
    const int index = strip_at(args, strips, strips - drawn, place);
    if (index < 0) continue;
    const Strip strip = Strip::of<Traits>(args, index);
    QueryTile work;
    if (!find_query_tile(args.table, args.params, args.q_tiles_per_sequence, strip.tile, work))
      continue;
    if constexpr (Traits::writes_dq) {
      if (adders_of_sum<Traits>(args, work).empty()) continue;
    }
    write_strip<Traits, Traits::head_dim % 64 == 0 ? 2 : 3>(args, args.dq_accum, args.factor, strip,
                                                            work);
  }
}

}  // namespace flash_attn_cuda::sm90
