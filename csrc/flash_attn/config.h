// The vocabulary of the kernel table: what a compiled kernel was built for. Plain C++, included
// by every layer.
#pragma once

#include <cstdint>

namespace flash_attn_cuda {

// e4m3: of tensors alone; rows are of what they write.
enum class Dtype : std::uint8_t { fp16, bf16, e4m3 };

constexpr int bytes_of(Dtype dtype) {
  switch (dtype) {
    case Dtype::fp16:
    case Dtype::bf16:
      return 2;
    case Dtype::e4m3:
      return 1;
  }
  return 0;
}

// What a thread loads or stores at once.
inline constexpr int vector_bytes = 16;
constexpr int elements_of_vector(Dtype dtype) { return vector_bytes / bytes_of(dtype); }

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

// Features whose kernels cannot write their results in fp32. Shards of a sequence, which want them,
// have no masks or biases, and kernels for those have no registers to spare, but those that decode;
// nor are their results differentiated in a direction. kernel_table/row.py reads it.
inline constexpr FeatureSet without_fp32_results =
    feature::block_sparse | feature::bias | feature::tangent | feature::latent | feature::key_lists;

constexpr bool can_write_fp32(FeatureSet features) {
  const bool decodes = (features & feature::packed_gqa) != 0;
  return (features & without_fp32_results & ~(decodes ? feature::bias : 0)) == 0;
}

// Whether a kernel writes derivatives in a direction (sm80/jvp/, sm80/hvp/), and so nothing else.
constexpr bool has_tangents(FeatureSet features) { return (features & feature::tangent) != 0; }

// Whether a kernel reads k and v of e4m3, and so no others.
constexpr bool reads_e4m3(FeatureSet features) { return (features & feature::e4m3_kv) != 0; }

// Whether a kernel multiplies numbers of e4m3, Q's too, and so no others.
constexpr bool multiplies_e4m3(FeatureSet features) {
  return (features & feature::e4m3_products) != 0;
}

// Whether a kernel's scores also have qv v^T, and so no others.
constexpr bool has_latent(FeatureSet features) { return (features & feature::latent) != 0; }

// Whether a kernel's queries have lists of blocks of keys each, and so no others. Latent kernels
// read lists as well, of keys.
constexpr bool lists_blocks(FeatureSet features) { return (features & feature::key_lists) != 0; }

// Whether a backward may follow a forward kernel, which then also writes what rounding takes from O
// (shared/out_rounding.h).
constexpr bool can_keep_rounding(FeatureSet features) {
  return !reads_e4m3(features) && !has_tangents(features) && !has_latent(features);
}

// tiles: a CTA's warps share the queries of a tile. tall: likewise, of more queries, for calls
// whose lengths they fill better (host/choose_forward.cpp). decode: they share the keys, for tiles
// of 16 rows. latent: of absorbed latent attention, for tiles of few rows.
enum class ForwardKind : std::uint8_t { tiles, tall, decode, latent };

enum class KernelFamily : std::uint8_t { sm80, sm90 };

// One row of kernel_table/ for one dtype: all that is decided for a kernel and not
// for a call. A row's tag type has two constants: `config`, what planning reads of every row of its
// pass and the registry holds, and `own`, what its kernel alone reads. Rows of some kernels give
// the fields that have a value here (kernel_table/row.py), the others keep it.
struct ForwardConfig {
  KernelFamily family;
  Dtype dtype;
  MaskKind mask;
  int head_dim;    // the bucket: serves every head dim up to this one
  int head_dim_v;  // the bucket of v and out; other than head_dim in rows of sm90 and latent ones
  ForwardKind kind;
  int block_m;    // queries per tile; decode, latent: rows, of queries and heads together
  int block_n;    // keys per step; decode: of one warp
  int num_warps;  // warps that multiply; sm90 has others, which load or draw dropout's decisions
  // CTAs that share an SM where they stay, 1 or 2. Of two, one multiplies while the other begins or
  // ends a tile, and neither has registers to overlap its own products and softmax. decode: that
  // keys are split for, up to 3.
  int ctas_per_sm = 1;
  // The longest sequences, in queries or keys, that it is always chosen for, under a right bound
  // and without; for some that are longer a plan may (host/choose_forward.cpp). Both 0: any call.
  int most_causal_seqlen;
  int most_full_seqlen;
  // Keys that a query sees, on average, in the calls that it is for, at least; without a window and
  // with one.
  int least_keys_full = 0;
  int least_keys_windowed = 0;
  int columns_per_cta = 0;   // sm80: of V and O, 0: all. Other CTAs have the others
  int columns_per_warp = 0;  // decode: of V and O, 0: all. Other warps have the others
  bool is_wide = false;      // a kernel of sm90/wide_forward/
  FeatureSet features;
};

// Whether a kernel's CTAs stay on their SM and take tile after tile.
constexpr bool stays_on_sm(const ForwardConfig& config) {
  return config.family == KernelFamily::sm90 && config.kind != ForwardKind::latent &&
         !has_tangents(config.features);
}

// CTAs that share the columns of a row's results.
constexpr int ctas_of_columns(int columns_per_cta, int columns) {
  return columns_per_cta == 0 ? 1 : (columns - 1) / columns_per_cta + 1;
}
// Warps of a decode kernel, or groups of them, that take keys of their own.
constexpr int warps_with_own_keys(const ForwardConfig& decode) {
  return decode.num_warps / ctas_of_columns(decode.columns_per_warp, decode.head_dim_v);
}

// Whether a kernel writes the largest score of each head (shared/max_logits.h). Those of calls
// over a cache have no registers for it.
constexpr bool can_write_max_logits(const ForwardConfig& config) {
  const bool is_of_caches = config.family == KernelFamily::sm90 &&
                            (config.features & (feature::paged_kv | feature::split_kv)) != 0;
  const bool has_tiles = config.kind == ForwardKind::tiles || config.kind == ForwardKind::tall;
  return has_tiles && !is_of_caches && can_keep_rounding(config.features);
}

struct Sm80ForwardConfig {
  bool keeps_pointers;  // pointers to K and V stay in registers between blocks
};

struct Sm80JvpConfig {};

struct Sm80DecodeConfig {
  int stages_kv;        // shared-memory buffers for the keys and values of a warp's steps
  bool shares_queries;  // Q waits in shared memory, which all warps read
};

struct Sm90ForwardConfig {
  int stages_q;   // shared-memory buffers for the queries of tiles
  int stages_kv;  // and for the keys and values of steps
  // What setmaxnreg leaves a thread of each warpgroup. drawing: of one that draws dropout's
  // decisions ahead; 0: there is none, and consumers draw for themselves.
  int producer_registers;
  int consumer_registers;
  int drawing_registers;
  bool drops_turns;               // where something is dropped consumers take no turns
  bool curves_in_softmax;         // the softmax applies a curve itself
  bool alternates_probabilities;  // registers for two P
};

struct Sm90WideForwardConfig {
  int stages_kv;  // slots of the rings that K and V come through
  int producer_registers;
  int consumer_registers;
};

struct Sm90LatentConfig {
  int stages_kv;  // pieces of 64 keys and 64 columns that the ring holds
  // As of Sm90ForwardConfig, where two warpgroups multiply.
  int producer_registers;
  int consumer_registers;
};

struct Sm90JvpConfig {
  int stages_kv;  // buffers for the keys and values of steps, and their tangents
  int producer_registers;
  int consumer_registers;
};

struct BackwardConfig {
  KernelFamily family;
  Dtype dtype;
  MaskKind mask;
  int head_dim;
  int head_dim_v;
  int block_m;    // queries per step
  int block_n;    // keys per tile
  int num_warps;  // warps that hold dK and dV; sm90 has eight more, which load and multiply dQ
  // 1, or 2 that share the keys of a tile and the columns of dQ, with a row's warps each.
  int ctas_per_tile = 1;
  bool shares_tiles = false;  // CTAs may share the steps of a key tile
  // Idle warps convert sums of dQ to dq (sm90/backward/finish.h), where a query sees so many keys,
  // in calls without a window and with one.
  bool finishes_dq = false;
  int finish_keys_full = 0;
  int finish_keys_windowed = 0;
  int least_keys_full = 0;  // as of ForwardConfig
  int least_keys_windowed = 0;
  int columns_per_cta = 0;  // sm80: of dK, dV and dQ, 0: all. Other CTAs have the others
  bool is_wide = false;     // a kernel of sm90/wide_backward/
  FeatureSet features;
};

struct Sm80BackwardConfig {
  // Warps along the first mode of each product; the others lie along its second mode.
  int warps_m_scores;  // S and dP (block_m x block_n): warps along queries
  int warps_n_dkdv;    // dK and dV (block_n x head_dim): warps along keys
  int warps_m_dq;      // dQ (block_m x head_dim): warps along queries
  int stages_q;        // shared-memory buffers for Q
  int stages_do;       // and for dO
};

struct Sm80HvpConfig {
  // As of Sm80BackwardConfig.
  int warps_m_scores;
  int warps_n_dkdv;
  int warps_m_dq;
};

struct Sm80ListedBackwardConfig {
  // As of Sm80BackwardConfig.
  int warps_m_scores;
  int warps_n_dkdv;
  int warps_m_dq;
};

struct Sm90BackwardConfig {
  int stages_q;
  int stages_do;
  int stages_kv;  // for the keys and values of tiles
  // What setmaxnreg leaves a thread of each warpgroup.
  int producer_registers;
  int key_registers;    // of the warpgroups that hold dK and dV
  int value_registers;  // of the one that holds dV alone, if other than key_registers; 0: as many
  int dq_registers;     // of the warpgroup that multiplies dQ
  int dq_columns;       // of dQ, multiplied at a time
  // One warpgroup holds dV, another dK of the same keys, instead of each both of its own
  // (sm90/backward/separate_keys.h, and not sm90/backward/keys.h).
  bool separate_keys;
  bool holds_keys;  // separate_keys: a tile's K lies in registers, as left operand of its S
  bool keeps_probabilities;  // P stays in registers for dV while dS is made
  bool rounds_differences;   // bf16: dP - D is rounded before P multiplies it
  bool stores_tiles;         // dK and dV leave through shared memory of their own
};

struct Sm90WideBackwardConfig {
  int stages_kv;  // slots of the rings that right operands come through
  int producer_registers;
  int key_registers;  // of the warpgroups that multiply
};

}  // namespace flash_attn_cuda
