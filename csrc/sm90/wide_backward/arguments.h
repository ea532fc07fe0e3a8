// What the host hands to a backward kernel for wide heads.
#pragma once

#include <cuda.h>

#include "shared/gradient/backward_arguments.h"

namespace flash_attn_cuda::sm90 {

// A tensor in boxes of a slot's rows, of all of a tile's and of those that one product multiplies.
struct TensorMaps {
  CUtensorMap tile;
  CUtensorMap rows;
};

struct WideBackwardArguments {
  TensorMaps q, k, dout;
  CUtensorMap v;
  BackwardArguments call;
  int key_tiles;    // of all key heads and sequences
  int query_tiles;  // of all query heads and sequences
};

}  // namespace flash_attn_cuda::sm90
