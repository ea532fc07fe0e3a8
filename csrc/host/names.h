// The words for enumerators, as kernel_table/ and the build record spell them.
#pragma once

#include <string>
#include <utility>

#include "flash_attn/api.h"
#include "flash_attn/config.h"

namespace flash_attn_cuda {

constexpr const char* name_of(Dtype dtype) {
  switch (dtype) {
    case Dtype::fp16:
      return "fp16";
    case Dtype::bf16:
      return "bf16";
    case Dtype::e4m3:
      return "e4m3";
  }
  return "";
}

constexpr const char* name_of(MaskKind mask) {
  return mask == MaskKind::full ? "full" : "windowed";
}

constexpr const char* name_of(ForwardKind kind) {
  switch (kind) {
    case ForwardKind::tiles:
    case ForwardKind::tall:
      return "forward";
    case ForwardKind::decode:
      return "decode";
    case ForwardKind::latent:
      return "latent";
  }
  return "";
}

constexpr const char* name_of(DqPath path) {
  switch (path) {
    case DqPath::converted:
      return "converted";
    case DqPath::finished:
      return "finished";
    case DqPath::ordered:
      return "ordered";
    case DqPath::direct:
      return "direct";
  }
  return "";
}

// "softcap, dropout", or "none".
inline std::string names_of(FeatureSet features) {
  constexpr std::pair<FeatureSet, const char*> known[] = {
#define FEATURE(name, bit) {feature::name, #name},
#include "flash_attn/feature_list.h"
#undef FEATURE
  };
  std::string names;
  for (const auto& [bit, name] : known) {
    if ((features & bit) == 0) continue;
    if (!names.empty()) names += ", ";
    names += name;
  }
  return names.empty() ? "none" : names;
}

}  // namespace flash_attn_cuda
