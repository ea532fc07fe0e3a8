// Everything a backward kernel for lists of blocks derives from its row of the kernel table
// (kernel_table/).
#pragma once

#include "shared/sequence/listed_queries.h"
#include "sm80/backward/tile_traits.h"

namespace flash_attn_cuda::sm80 {

// Entries of a block's queries that a CTA walks one after the other.
struct ListedRun {
  ListedBlock block;
  int place;      // of it
  int part;       // which of the block's tiles
  int key_begin;  // of the tile's keys
  int key_end;    // of the block's keys that are there
  int begin;      // of the entries
  int end;
};

template <class Tag>
struct ListedBackwardTraits : KeyTileTraits<Tag> {
  using Base = KeyTileTraits<Tag>;
  using Base::block_m, Base::block_n, Base::head_dim, Base::threads;
  using typename Base::Element;

  static constexpr int ctas_per_sm = 2;  // one multiplies while the other waits for its loads
  using RowsLoader = RowLoader<Element, block_m, head_dim, threads>;
  // dQ is multiplied some columns at a time, which lie together in a tile.
  static constexpr int dq_columns = 64;
  using SomeKeysLayout = TileLayout<block_n, dq_columns>;
  static_assert(head_dim % dq_columns == 0);

  struct SharedStorage {
    alignas(128) Element k[block_n * head_dim];
    alignas(128) Element v[block_n * head_dim];
    alignas(128) Element q[block_m * head_dim];
    alignas(128) Element dout[block_m * head_dim];
    alignas(128) Element p[block_m * block_n];
    alignas(128) Element ds[block_m * block_n];
    alignas(16) float lse_log2[block_m];
    alignas(16) float softmax_d[block_m];
    int queries[2][block_m];  // of a step and the one after it, by their place in the sequence;
                              // negative: none
    ListedRun run;
    int ticket;
  };

  static_assert(!Base::shares_columns, "a CTA has all columns");
  static_assert(threads >= 2 * block_m, "a thread has a number of a row");
};

}  // namespace flash_attn_cuda::sm80
