// The vocabulary of the kernel table: what a compiled kernel was built for. Plain C++, included
// by every layer.
#pragma once

#include <cstdint>

namespace flash_attn_cuda {

enum class Dtype : std::uint8_t { fp16, bf16 };

// full: every key below seqlen_k is visible. windowed: causal and sliding windows, two bounds per
// query row.
enum class MaskKind : std::uint8_t { full, windowed };

// Run-time features beyond the mask. A row of the table lists what it supports; a request lists
// what it needs. Packed sequences and lengths in device memory need none: every row has them.
using FeatureSet = std::uint32_t;

namespace feature {
inline constexpr FeatureSet softcap = 1u << 0;
inline constexpr FeatureSet alibi = 1u << 1;
inline constexpr FeatureSet dropout = 1u << 2;
inline constexpr FeatureSet deterministic = 1u << 3;  // backward: dQ summed in a fixed order
inline constexpr FeatureSet paged_kv = 1u << 4;
inline constexpr FeatureSet split_kv = 1u << 5;      // a tile's keys shared by several CTAs
inline constexpr FeatureSet packed_gqa = 1u << 6;    // the query heads of a key head share a tile
inline constexpr FeatureSet block_sparse = 1u << 7;  // tiles visit what lists tell them to
inline constexpr FeatureSet bias = 1u << 8;          // a tensor is added to the scores
}  // namespace feature

// tiles: a CTA's warps share the queries of a tile. decode: they share the keys, for tiles of 16
// rows.
enum class ForwardKind : std::uint8_t { tiles, decode };

enum class KernelFamily : std::uint8_t { sm80, sm90 };

// One row of build_tools/kernel_table.py for one dtype. Kernels read it as a constexpr, planning
// reads it from the registry.
struct ForwardConfig {
  KernelFamily family;
  Dtype dtype;
  MaskKind mask;
  int head_dim;    // the bucket: serves every head dim up to this one
  int head_dim_v;  // the same of v and out; other than head_dim in rows of sm90 alone
  ForwardKind kind;
  int block_m;    // queries per tile; decode: rows, of queries and heads together
  int block_n;    // keys per step; decode: of one warp
  int num_warps;  // sm90: those that multiply; others load, and may draw dropout's decisions
  // The longest sequences, in queries or keys, that it is always chosen for, under a right bound
  // and without; for some that are longer a plan may (host/plan_forward.cpp). Both 0: any call.
  int most_causal_seqlen;
  int most_full_seqlen;
  FeatureSet features;
};

struct BackwardConfig {
  KernelFamily family;
  Dtype dtype;
  MaskKind mask;
  int head_dim;
  int head_dim_v;
  int block_m;    // queries per step
  int block_n;    // keys per tile
  int num_warps;  // sm90: those that hold dK and dV; eight more load and multiply dQ
  // sm90: 1, or 2 that share the keys of a tile and the columns of dQ, with a row's warps each.
  int ctas_per_tile = 1;
  // sm80: warps along the first mode of each product; the others lie along its second mode.
  int warps_m_scores;  // S and dP (block_m x block_n): warps along queries
  int warps_n_dkdv;    // dK and dV (block_n x head_dim): warps along keys
  int warps_m_dq;      // dQ (block_m x head_dim): warps along queries
  int stages_q;        // sm80: shared-memory buffers for Q
  int stages_do;       // sm80: shared-memory buffers for dO
  FeatureSet features;
};

}  // namespace flash_attn_cuda
