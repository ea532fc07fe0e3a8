// The vocabulary of the instance table: what a compiled kernel was built for. Plain C++, included
// by every layer.
#pragma once

#include <cstdint>

namespace flash_attn_cuda {

enum class Dtype : std::uint8_t { fp16, bf16 };

// full: every key below seqlen_k is visible. windowed: causal and sliding windows, two bounds per
// query row.
enum class MaskKind : std::uint8_t { full, windowed };

// Run-time features beyond the mask. A row of the table lists what it supports; a request lists
// what it needs.
using FeatureSet = std::uint32_t;

enum class KernelFamily : std::uint8_t { sm80, sm90 };

// One row of build_tools/kernel_table.py for one dtype. Kernels read it as a constexpr, planning
// reads it from the registry.
struct ForwardConfig {
  KernelFamily family;
  Dtype dtype;
  MaskKind mask;
  int head_dim;  // the bucket: serves every head dim up to this one
  int block_m;   // queries per tile
  int block_n;   // keys per step
  int num_warps;
  FeatureSet features;
};

struct BackwardConfig {
  KernelFamily family;
  Dtype dtype;
  MaskKind mask;
  int head_dim;
  int block_m;  // queries per step
  int block_n;  // keys per tile
  int num_warps;
  // Warps along the first mode of each product; the others lie along its second mode.
  int warps_m_scores;  // S and dP (block_m x block_n): warps along queries
  int warps_n_dkdv;    // dK and dV (block_n x head_dim): warps along keys
  int warps_m_dq;      // dQ (block_m x head_dim): warps along queries
  int stages_q;        // shared-memory buffers for Q
  int stages_do;       // shared-memory buffers for dO
  FeatureSet features;
};

}  // namespace flash_attn_cuda
