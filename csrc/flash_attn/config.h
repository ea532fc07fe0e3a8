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
#define FEATURE(name, bit) inline constexpr FeatureSet name = 1u << (bit);
#include "flash_attn/feature_list.h"
#undef FEATURE
}  // namespace feature

// Whether a kernel with these features can write its results in fp32. Parts of a sequence, which
// want them, have no masks or biases, and kernels for those have no registers to spare.
constexpr bool can_write_fp32(FeatureSet features) {
  return (features & (feature::block_sparse | feature::bias)) == 0;
}

// tiles: a CTA's warps share the queries of a tile. decode: they share the keys, for tiles of 16
// rows.
enum class ForwardKind : std::uint8_t { tiles, decode };

enum class KernelFamily : std::uint8_t { sm80, sm90 };

// One row of build_tools/kernel_table.py for one dtype: all that is decided for a kernel and not
// for a call. Kernels read it as a constexpr, planning reads it from the registry. A row gives the
// fields of its family and pass (build_tools/kernel_row.py); the others keep the values here.
struct ForwardConfig {
  KernelFamily family;
  Dtype dtype;
  MaskKind mask;
  int head_dim;    // the bucket: serves every head dim up to this one
  int head_dim_v;  // the same of v and out; other than head_dim in rows of sm90 alone
  ForwardKind kind;
  int block_m;        // queries per tile; decode: rows, of queries and heads together
  int block_n;        // keys per step; decode: of one warp
  int num_warps;      // sm90: those that multiply; others load, and may draw dropout's decisions
  int stages_q = 1;   // sm90: shared-memory buffers for the queries of tiles
  int stages_kv = 1;  // sm90 and decode: buffers for the keys and values of steps
  // sm90: CTAs that share an SM, 1 or 2. Of two, one multiplies while the other begins or ends a
  // tile, and neither has registers to overlap its own products and softmax.
  int ctas_per_sm = 1;
  // sm90: what setmaxnreg leaves a thread of each warpgroup. drawing: of one that draws dropout's
  // decisions ahead; 0: there is none, and consumers draw for themselves.
  int producer_registers = 0;
  int consumer_registers = 0;
  int drawing_registers = 0;
  bool drops_turns = false;       // sm90: where something is dropped consumers take no turns
  bool bends_in_softmax = false;  // sm90: the softmax bends scores itself
  bool alternates_probabilities = false;  // sm90: registers for two P
  bool keeps_pointers = false;  // sm80 tiles: pointers to K and V stay in registers between blocks
  int columns_per_cta = 0;      // sm80 tiles: of V and O, 0: all. Other CTAs have the others
  bool shares_queries = false;  // decode: Q waits in shared memory, which all warps read
  int columns_per_warp = 0;     // decode: of Q, K, V and O, 0: all. Other warps have the others
  // The longest sequences, in queries or keys, that it is always chosen for, under a right bound
  // and without; for some that are longer a plan may (host/plan_forward.cpp). Both 0: any call.
  int most_causal_seqlen;
  int most_full_seqlen;
  // sm90: keys that a query sees, on average, in the calls that it is for, at least; without a
  // window and with one.
  int least_keys_full = 0;
  int least_keys_windowed = 0;
  bool is_wide = false;  // sm90: a kernel of csrc/sm90/wide_forward/
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
  int warps_m_scores = 0;   // S and dP (block_m x block_n): warps along queries
  int warps_n_dkdv = 0;     // dK and dV (block_n x head_dim): warps along keys
  int warps_m_dq = 0;       // dQ (block_m x head_dim): warps along queries
  int columns_per_cta = 0;  // sm80: of dK, dV and dQ, 0: all. Other CTAs have the others
  int stages_q;             // shared-memory buffers for Q
  int stages_do;            // and for dO
  int stages_kv = 1;        // sm90: for the keys and values of tiles
  // sm90: what setmaxnreg leaves a thread of each warpgroup.
  int producer_registers = 0;
  int key_registers = 0;  // of those that hold dK and dV
  int dq_registers = 0;   // of the one that multiplies dQ
  int dq_columns = 0;     // sm90: of dQ, multiplied at a time
  // sm90: one warpgroup holds dV, another dK of the same keys, instead of each both of its own
  // (sm90/backward/separate_keys.h, and not sm90/backward/keys.h).
  bool separate_keys = false;
  bool is_wide = false;              // sm90: a kernel of csrc/sm90/wide_backward/
  bool keeps_probabilities = false;  // sm90: P stays in registers for dV while dS is made
  bool rounds_differences = false;   // sm90, bf16: dP - D is rounded before P multiplies it
  bool stores_tiles = false;         // sm90: dK and dV leave through shared memory of their own
  bool shares_tiles = false;         // sm90: CTAs may share the steps of a key tile
  // sm90: idle warps turn sums of dQ into dq (sm90/backward/finish.h), where a query sees so many
  // keys, in calls without a window and with one.
  bool finishes_dq = false;
  int finish_keys_full = 0;
  int finish_keys_windowed = 0;
  // sm90: as of ForwardConfig.
  int least_keys_full = 0;
  int least_keys_windowed = 0;
  FeatureSet features;
};

}  // namespace flash_attn_cuda
