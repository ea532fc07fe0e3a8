// What the host hands to a backward kernel.
#pragma once

#include <cuda.h>

#include "shared/gradient/backward_arguments.h"

namespace flash_attn_cuda::sm90 {

struct BackwardKernelArguments {
  CUtensorMap q_map;
  CUtensorMap k_map;
  CUtensorMap v_map;
  CUtensorMap dout_map;
  CUtensorMap dk_map;
  CUtensorMap dv_map;
  CUtensorMap bias_map;   // of a kernel for biases
  CUtensorMap dbias_map;  // of the bias's gradient, where it is wanted and no sum
  BackwardArguments call;
  std::int64_t num_tiles;    // of all key heads and sequences
  std::int64_t num_tickets;  // tiles, or more, where tiles have parts
};

// Query heads that a key tile is of.
CUTE_HOST_DEVICE int heads_per_tile(BackwardArguments const& call) {
  return call.params.shape.heads_per_key_head() / call.dkdv_splits;
}

}  // namespace flash_attn_cuda::sm90
