// Everything a decode kernel derives from its row of the kernel table (kernel_table/).
#pragma once

#include "sm80/decode/e4m3.h"
#include "sm80/isa/copy.h"
#include "sm80/isa/gemm.h"

namespace flash_attn_cuda::sm80 {

// What one warp knows of a row of the tile, as it lies in shared memory: see OnlineSoftmax.
struct alignas(16) RowState {
  float max;
  float offset;
  float sum;
  bool shifts;
};

// What the tiles of a call hold together, in steps of a CTA.
struct TotalWork {
  float steps;
  float tiles;
  float longest;
};

// Where an item of the list that lengths make belongs.
struct FoundSequence {
  int sequence;
  int item;  // of the sequence's
  int splits;
};

template <class Tag>
struct DecodeTraits {
  static constexpr ForwardConfig config = Tag::config;
  static constexpr Sm80DecodeConfig own = Tag::own;
  static constexpr int block_m = config.block_m;
  static constexpr int slice = config.block_n;  // keys that a warp takes at a time
  static constexpr int head_dim = config.head_dim;
  static constexpr int num_warps = config.num_warps;
  static constexpr int threads = num_warps * 32;
  // A group of warps shares a slice of the keys of wide heads: each warp has some of its columns.
  static constexpr int columns_per_warp =
      config.columns_per_warp == 0 ? head_dim : config.columns_per_warp;
  static constexpr int warps_per_group = head_dim / columns_per_warp;
  static constexpr int num_groups = num_warps / warps_per_group;
  static constexpr int ctas_per_sm = config.ctas_per_sm < 2 ? 2 : config.ctas_per_sm;
  static constexpr int step = num_groups * slice;  // keys that the CTA takes at a time
  static constexpr int least_steps = 2;            // worth a split

  using Element = ElementOf<config.dtype>;
  static constexpr bool is_e4m3 = reads_e4m3(config.features);
  using Cached = std::conditional_t<is_e4m3, std::uint8_t, Element>;  // of keys and values
  // Of the products. fp16 takes one conversion of e4m3, bf16 four.
  using Factor = std::conditional_t<is_e4m3, cutlass::half_t, Element>;
  // Warps split the keys: every one holds all rows of the tile.
  using Mma = WarpGridMma<Factor, 1, 1>;
  static constexpr int rows_per_thread = 2;

  // Where fragments of Q and O would not fit the registers, Q waits in shared memory.
  static constexpr bool shares_queries = own.shares_queries;

  // V and O are multiplied some columns at a time, to keep few fragments of V alive.
  static constexpr int piece = columns_per_warp % 64 == 0 ? 64 : 32;
  static constexpr int pieces = columns_per_warp / piece;
  using KeyLayout = TileLayout<slice, columns_per_warp>;
  using ValueLayout = TileLayout<slice, piece>;  // V is one such tile after the other

  using CachedTile = E4m3Tile<slice, is_e4m3 ? columns_per_warp : 64>;

  // A slice of K and one of V make a stage. Scales of their tokens lie apart.
  static constexpr int stage_elements = 2 * slice * columns_per_warp;
  static constexpr int stages = own.stages_kv;

  // O of one warp on its way to the others, in its own stages. The padding spreads the rows over
  // the banks.
  static constexpr int output_pitch = columns_per_warp + 8;

  struct SharedStorage {
    alignas(128) Cached pipelines[num_warps][stages * stage_elements];
    alignas(16) float scales[is_e4m3 ? num_warps : 1][is_e4m3 ? stages * 2 * slice : 1];
    RowState rows[num_warps][block_m];
    TotalWork totals[num_warps];
    int item_sums[num_warps];
    FoundSequence found;
    bool is_last;
    int next_item;
    alignas(16) std::uint32_t queries[shares_queries ? block_m * head_dim / 2 : 1];
    float query_units[is_e4m3 && shares_queries ? warps_per_group : 1];
    // What each warp of a group adds to S, of two slices alternately.
    alignas(16) float scores[warps_per_group > 1 ? 2 * num_warps * block_m * slice : 1];
  };

  static_assert(block_m == 16, "one m16 atom");
  static_assert(slice % 16 == 0 && slice <= 32, "a lane looks up one key of a slice");
  static_assert(head_dim % 32 == 0);
  static_assert(warps_per_group <= 2 && num_warps % warps_per_group == 0);
  static_assert(stages >= 2, "one fills while the other is read");
  static_assert(config.head_dim_v == head_dim, "narrower values are columns that do not exist");
  static_assert(block_m * output_pitch * sizeof(float) <= stages * stage_elements * sizeof(Cached),
                "O of a warp fits its stages");
};

}  // namespace flash_attn_cuda::sm80
