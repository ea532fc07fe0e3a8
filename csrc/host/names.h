// The words for enumerators, as build_tools/kernel_table.py and the build record spell them.
#pragma once

#include "flash_attn/config.h"

namespace flash_attn_cuda {

constexpr const char* name_of(Dtype dtype) { return dtype == Dtype::fp16 ? "fp16" : "bf16"; }

constexpr const char* name_of(MaskKind mask) {
  return mask == MaskKind::full ? "full" : "windowed";
}

constexpr const char* name_of(KernelFamily family) {
  return family == KernelFamily::sm80 ? "sm80" : "sm90";
}

}  // namespace flash_attn_cuda
