// A compiled kernel as the host sees it: its name, its row of the table, and how to launch it.
#pragma once

#include "flash_attn/api.h"

namespace flash_attn_cuda {

struct ForwardInstance {
  const char* name;  // the tag type a profiler shows: fwd_sm80_bf16_hd128_windowed
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
  // The main kernel writes dq of a sequence with one key tile without a sum, and can do the rest as
  // the plan's DqPath says. Queries that see no key are left to the preprocess.
  bool writes_dq = false;
};

}  // namespace flash_attn_cuda
