// What the files of this folder ask of the Traits of a forward kernel whose CTAs take tile after
// tile: those that derive from TileTraits, and ask more of themselves.
#pragma once

#include "shared/mask/block_lists.h"
#include "shared/mask/block_range.h"
#include "shared/online_softmax.h"
#include "shared/schedule/tile_work.h"
#include "shared/scores/score_modifiers.h"
#include "sm90/isa/barriers.h"
#include "sm90/isa/copy.h"
#include "sm90/isa/cta.h"
#include "sm90/isa/gemm.h"

namespace flash_attn_cuda::sm90 {

// A tile of work as its CTA's producer found it.
struct WorkItem {
  TileWork work;
  BlockRange range;  // the key blocks that it visits, or the positions of its list
  int split;         // of the tile's keys, in kernels that can split them
};

// A tile of work in a kernel for block-sparse masks.
template <int kBlockN>
struct SparseWorkItem : WorkItem {
  SparseVisits<kBlockN> visits;
};

// What the producer tells the consumers of a block of a list.
struct alignas(16) VisitedKeys {
  int block;
  Pieces pieces;
  unsigned hides_from;  // bit w: the list or the window hides some pair of warpgroup w
  bool is_in_window;    // the window hides no pair

  CUTE_DEVICE bool shows_all(int warpgroup) const { return (hides_from >> warpgroup & 1) == 0; }
};

// Beside these they ask for ScoresMma, the product that makes S of a warpgroup, and for a
// SharedStorage with work, work_ring and tile_wanted, and what the row's effects read (effects.h).
template <class Tag>
struct TileTraits {
  static constexpr ForwardConfig config = Tag::config;
  static constexpr auto own = Tag::own;
  static constexpr int block_m = config.block_m;
  static constexpr int block_n = config.block_n;  // keys of a warpgroup's scores
  static constexpr int head_dim = config.head_dim;
  static constexpr int head_dim_v = config.head_dim_v;
  static constexpr int consumers = config.num_warps / 4;  // warpgroups that multiply
  static constexpr int consumer_warps = config.num_warps;
  static constexpr int rows_per_thread = 2;
  static constexpr int work_stages = 2;  // the tile in hand and the next
  static constexpr int producer_registers = own.producer_registers;
  static constexpr int consumer_registers = own.consumer_registers;

  // What the row has.
  static constexpr bool has(FeatureSet features) { return (config.features & features) != 0; }
  static constexpr bool has_score_modifiers = has(modifier_features);
  static constexpr bool has_bias = has(feature::bias);
  static constexpr bool has_dropout = has(feature::dropout);
  static constexpr bool is_sparse = has(feature::block_sparse);
  static constexpr bool is_paged = has(feature::paged_kv);
  static constexpr bool can_split = has(feature::split_kv);
  static constexpr bool is_e4m3 = reads_e4m3(config.features);
  static constexpr bool converts_e4m3 =
      is_e4m3 && !flash_attn_cuda::multiplies_e4m3(config.features);
  static constexpr bool multiplies_e4m3 = flash_attn_cuda::multiplies_e4m3(config.features);
  static constexpr bool writes_fp32 = can_write_fp32(config.features);
  static constexpr bool keeps_rounding = can_keep_rounding(config.features);
  // What a row's scores have in common under ALiBi goes to the softmax
  // (shared/scores/score_chain.h); with dropout there are no registers for it, and calls
  // without ALiBi would pay as well.
  static constexpr bool has_row_bias = has(feature::alibi) && !has_dropout;

  // Two CTAs on an SM look at all scores (forward/two_ctas.h).
  using KnownMaximum =
      std::conditional_t<config.ctas_per_sm == 2, MaximumOfScores, MaximumOfSums<rows_per_thread>>;
  using Softmax =
      OnlineSoftmax<rows_per_thread,
                    std::conditional_t<can_write_max_logits(config), KnownMaximum, NoMaximum>,
                    std::conditional_t<multiplies_e4m3, RangeOfE4m3, RangeOf16Bits>>;

  // What a kernel that does it says anew.
  static constexpr bool leaves_curve = false;  // a curve, to the softmax
  static constexpr bool draws_ahead = false;   // dropout's decisions, by warps of their own

  // What is multiplied. Beside Q of 16 bits e4m3 becomes fp16, which its numbers need one
  // instruction a pair for; Q as well (e4m3_units.h).
  using Stored = ElementOf<config.dtype>;
  using Element = std::conditional_t<multiplies_e4m3, cutlass::float_e4m3_t,
                                     std::conditional_t<is_e4m3, cutlass::half_t, Stored>>;
};

}  // namespace flash_attn_cuda::sm90
