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
  static constexpr int head_dim_v = config.head_dim_v;
  static constexpr int num_warps = config.num_warps;
  static constexpr int threads = num_warps * 32;
  // A group of warps shares a slice of the keys of wide heads: each warp has some of its columns.
  static constexpr int num_groups = warps_with_own_keys(config);
  static constexpr int warps_per_group = num_warps / num_groups;
  static constexpr int key_columns = head_dim / warps_per_group;      // of q and K, a warp's
  static constexpr int value_columns = head_dim_v / warps_per_group;  // of V and O, and of qv
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

  // Scores are q k^T + qv v^T. V is an operand of S as well as of O.
  static constexpr bool is_latent = has_latent(config.features);
  static constexpr bool lists_blocks = flash_attn_cuda::lists_blocks(config.features);
  static constexpr bool has_bias = (config.features & feature::bias) != 0;
  static constexpr bool has_lists = is_latent || lists_blocks;  // if the call has
  static constexpr int query_columns = key_columns + (is_latent ? value_columns : 0);

  // V and O are multiplied some columns at a time, to keep few fragments of V alive.
  static constexpr int piece = key_columns % 64 == 0 ? 64 : 32;
  static constexpr int pieces = value_columns / piece;
  using KeyLayout = TileLayout<slice, key_columns>;
  using PieceLayout = TileLayout<slice, piece>;  // V is one such tile after the other
  using ValueLayout =
      decltype(tile_to_shape(SwizzleAtom<piece>{}, Shape<Int<slice>, Int<value_columns>>{}));

  using CachedTile = E4m3Tile<slice, is_e4m3 ? value_columns : 64>;

  // A slice of K and one of V make a stage. Scales of their tokens lie apart.
  static constexpr int key_elements = slice * key_columns;
  static constexpr int stage_elements = key_elements + slice * value_columns;
  static constexpr int stages = own.stages_kv;

  // O of one warp on its way to the others, in its own stages. The padding spreads the rows over
  // the banks.
  static constexpr int output_pitch = value_columns + 8;

  struct SharedStorage {
    alignas(128) Cached pipelines[num_warps][stages * stage_elements];
    alignas(16) float scales[is_e4m3 ? num_warps : 1][is_e4m3 ? stages * 2 * slice : 1];
    RowState rows[num_warps][block_m];
    TotalWork totals[num_warps];
    int item_sums[num_warps];
    FoundSequence found;
    bool is_last;
    int next_item;
    int sequence_of_list;
    alignas(16)
        std::uint32_t queries[shares_queries ? block_m * query_columns * warps_per_group / 2 : 1];
    float query_units[is_e4m3 && shares_queries ? warps_per_group : 1];
    // What each warp of a group adds to S, of two slices alternately.
    alignas(16) float scores[warps_per_group > 1 ? 2 * num_warps * block_m * slice : 1];
  };

  static_assert(block_m == 16, "one m16 atom");
  static_assert(slice % 16 == 0 && slice <= 32, "a lane looks up one key of a slice");
  static_assert(key_columns % 32 == 0);
  static_assert(value_columns % key_columns == 0, "a slice of K lies as columns of V do");
  static_assert(warps_per_group <= 2 && num_warps % warps_per_group == 0);
  static_assert(stages >= 2, "one fills while the other is read");
  static_assert(is_latent || head_dim_v == head_dim,
                "narrower values are columns that do not exist");
  static_assert(!lists_blocks || (!is_latent && !is_e4m3));
  static_assert(!is_latent || (shares_queries && !is_e4m3), "registers hold no qv beside O");
  static_assert(block_m * output_pitch * sizeof(float) <= stages * stage_elements * sizeof(Cached),
                "O of a warp fits its stages");
};

}  // namespace flash_attn_cuda::sm80
