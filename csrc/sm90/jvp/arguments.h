// What the host hands to a Hopper kernel of derivatives in a direction.
#pragma once

#include <cuda.h>

#include "flash_attn/api.h"
#include "shared/sequence/sequence.h"

namespace flash_attn_cuda::sm90 {

struct JvpArguments {
  CUtensorMap q_map, k_map, v_map;
  CUtensorMap tangent_q_map, tangent_k_map, tangent_v_map;
  ForwardParams params;
  TileSchedule schedule;
  SequenceTable table;
  float scale_log2;  // from a score to powers of two, positive: hidden scores are -inf
};

}  // namespace flash_attn_cuda::sm90
