// A compiled kernel as the host sees it: its name, its row of the table, and how to launch it.
#pragma once

#include "flash_attn/api.h"

namespace flash_attn_cuda {

struct ForwardInstance {
  const char* name;  // the tag type a profiler shows: fwd_sm80_bf16_hd128_full
  ForwardConfig config;
  int smem_bytes;
  void (*launch)(const ForwardPlan&, const ForwardParams&, Stream);
};

struct BackwardInstance {
  const char* name;
  BackwardConfig config;
  int smem_bytes;
  void (*launch)(const BackwardPlan&, const BackwardParams&, Stream);      // the main kernel
  void (*convert_dq)(const BackwardPlan&, const BackwardParams&, Stream);  // the sums of dQ -> dq
  // Where a sequence has one key tile, the main kernel writes dq without a sum; where the plan says
  // so, it also does what convert_dq would. Queries that see no key are left to the preprocess.
  bool writes_dq = false;
};

}  // namespace flash_attn_cuda
