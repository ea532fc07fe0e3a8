// Everything a kernel of absorbed latent attention derives from its row of the kernel table
// (kernel_table/).
#pragma once

#include "shared/mask/block_range.h"
#include "shared/schedule/packed_rows.h"
#include "sm90/isa/barriers.h"
#include "sm90/isa/copy.h"
#include "sm90/isa/cta.h"
#include "sm90/isa/gemm.h"
#include "sm90/wide/partner.h"

namespace flash_attn_cuda::sm90 {

// Blocks of keys of one tile that a CTA takes.
struct LatentItem {
  TileWork work;     // head: of k
  BlockRange range;  // the interior is the tile's
  int part;          // where its results go; whole_tile: they are the tile's
  bool is_first;     // of the tile's parts: it has the sink
};
inline constexpr int whole_tile = -1;

template <class Tag>
struct LatentTraits {
  static constexpr ForwardConfig config = Tag::config;
  static constexpr Sm90LatentConfig own = Tag::own;
  static constexpr int block_m = config.block_m;  // rows: query heads of a key head, of queries
  static constexpr int block_n = config.block_n;
  static constexpr int head_dim_v = config.head_dim_v;
  // Warpgroups that multiply, which share the columns of O.
  static constexpr int consumers = config.num_warps / 4;
  // And that convert keys of e4m3.
  static constexpr bool is_e4m3 = reads_e4m3(config.features);
  static constexpr int converters = is_e4m3 ? 2 : 0;
  // Warps that put keys into the ring.
  static constexpr int loading_warps = is_e4m3 ? 4 * converters : 2;
  static constexpr int threads = warpgroup_threads * (1 + converters + consumers);
  static constexpr int launch_registers = launch_registers_of(threads);
  static constexpr int producer_registers = own.producer_registers;
  static constexpr int consumer_registers = own.consumer_registers;

  // A block of keys comes in pieces of 64 columns: the rotary ones, then the latent ones.
  static constexpr int piece_columns = 64;
  static constexpr int value_pieces = head_dim_v / piece_columns;
  static constexpr int pieces = 1 + value_pieces;
  static constexpr int own_values = value_pieces / consumers;  // pieces of O of a warpgroup
  static constexpr int stages = own.stages_kv;                 // pieces
  static constexpr int item_stages = 2;
  static constexpr int buffers_p = 2;

  // Of one warpgroup operands are swapped: keys are the rows of the products, and few rows of Q
  // their columns, of which wgmma takes as few as eight. S^T = K Q^T, O^T += V^T P^T. Two have 64
  // rows of Q, which are rows: with P in registers O += P V reads 64 bytes of shared memory a
  // cycle, where a swapped one of 64 columns reads all of the 128 that there are.
  static constexpr bool is_swapped = consumers == 1;
  using Element = ElementOf<config.dtype>;
  using ScoresMma = SharedMma<Element, is_swapped ? block_m : block_n, piece_columns>;
  using OutputMma = std::conditional_t<is_swapped, TransposedMma<Element, block_m, block_n>,
                                       RegisterMma<Element, own_values * piece_columns, block_n>>;
  using QueryLayout = TileLayout<Element, block_m, piece_columns, pieces>;
  using PieceLayout = TileLayout<Element, block_n, piece_columns, stages>;
  using PieceOffsets = decltype(as_position_independent_swizzle_layout(PieceLayout{}));
  // Rows innermost, in bricks of eight keys and eight rows.
  using ProbabilityLayout = decltype(tile_to_shape(
      GMMA::Layout_MN_INTER_Atom<Element>{}, Shape<Int<block_m>, Int<block_n>, Int<buffers_p>>{}));
  static constexpr int piece_elements = block_n * piece_columns;

  // What a thread holds of S^T: two keys of each of its columns, which are rows of Q.
  static constexpr int columns_per_thread = block_m / 4;

  // What converters copy of a block before they convert it, each thread its own.
  static constexpr int converter_threads = converters * warpgroup_threads;
  struct StagedBytes {
    uint4 rotary[2][converter_threads];
    uint4 latent[value_pieces][converter_threads];
    float scales[value_pieces / 4][converter_threads];
  };
  struct NoBytes {};

  // What the warps of a warpgroup tell each other, or two warpgroups.
  struct ToldByWarps {
    alignas(128) Element p[buffers_p * block_m * block_n];
    float row_parts[4][block_m];  // what each warp has of a row's maximum, or sum
  };
  struct ToldByWarpgroups {
    Told block;
    float sums[consumers][block_m];
  };

  struct SharedStorage {
    alignas(1024) Element pieces[stages * piece_elements];
    alignas(1024) Element q[block_m * piece_columns * LatentTraits::pieces];
    std::conditional_t<is_swapped, ToldByWarps, ToldByWarpgroups> told;
    alignas(16) std::conditional_t<is_e4m3, StagedBytes, NoBytes> staged;
    Ring<stages> ring;
    Ring<1> q_ring;
    Ring<item_stages> item_ring;
    LatentItem items[item_stages];
    unsigned seen[stages]
                 [block_n / 32];  // keys, a bit each, of the block whose first piece is there
  };

  static_assert(block_n == 64, "the rows of a product, or its columns");
  static_assert(is_swapped || (block_m == 64 && stages % pieces == 0),
                "a block's pieces lie in a row");
  static_assert(config.head_dim == piece_columns, "the rotary columns are a piece");
  static_assert(head_dim_v % (2 * consumers * piece_columns) == 0, "a warpgroup has pairs");
  static_assert(block_m % 16 == 0 && instruction_columns<ScoresMma> == block_m);
  static_assert(stages >= pieces, "a block is there as a whole when its P is made");
  static_assert(sizeof(SharedStorage) <= smem_limit_of(1));
};

}  // namespace flash_attn_cuda::sm90
