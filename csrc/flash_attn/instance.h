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
  void (*launch)(const BackwardPlan&, const BackwardParams&, Stream);  // the main kernel
  // The sums of dQ -> dq; null where the main kernel does that as well.
  void (*convert_dq)(const BackwardPlan&, const BackwardParams&, Stream);

  bool finishes_dq() const { return convert_dq == nullptr; }
};

}  // namespace flash_attn_cuda
