// Block-sparse attention: which blocks a tile visits, as BlockLists and the window together have
// it. Pure index logic. A list counts in tiles of 128; kernels whose blocks are smaller visit each
// entry in several steps, of which the list's positions count all.
#pragma once

#include "flash_attn/params.h"
#include "shared/host_device.h"
#include "shared/mask/block_range.h"
#include "shared/sequence/sequence.h"

namespace flash_attn_cuda {

inline constexpr int list_tile = 128;
inline constexpr int list_piece = 64;

enum class PieceState : unsigned { hidden = 0, visible = 1, by_bits = 2 };

// The pieces of an entry, of which each half of its queries and each half of its keys has two.
struct Pieces {
  unsigned states;

  FAC_HOST_DEVICE constexpr PieceState at(int query_half, int key_half) const {
    return static_cast<PieceState>(states >> (2 * (2 * query_half + key_half)) & 3);
  }
  // Whether no pair of a block of the tile is hidden.
  template <int kQueries, int kKeys>
  FAC_HOST_DEVICE constexpr bool show_all(int query_begin, int key_begin) const {
    static_assert(list_tile % kQueries == 0 && list_tile % kKeys == 0);
    constexpr unsigned visible = 0b01;
    constexpr unsigned of_keys = kKeys == list_tile ? visible | visible << 2 : visible;
    constexpr unsigned all = kQueries == list_tile ? of_keys | of_keys << 4 : of_keys;
    constexpr unsigned mask = all | all << 1;
    const int query_half = query_begin / list_piece % 2;
    const int key_half = key_begin / list_piece % 2;
    return (states >> (2 * (2 * query_half + key_half)) & mask) == all;
  }
};

struct Visit {
  int block;
  Pieces pieces;
};

// What one tile visits, in blocks of kBlock.
template <int kBlock>
struct BlockList {
  static_assert(kBlock == list_tile || list_piece % kBlock == 0,
                "a block lies in one piece, or is two");
  static constexpr int blocks_per_entry = list_tile / kBlock;

  const int* entries;
  int begin;  // the positions whose blocks the window does not exclude
  int end;
  int first_block;  // what a block of the list may be
  int last_block;

  FAC_HOST_DEVICE constexpr bool empty() const { return begin >= end; }

  FAC_HOST_DEVICE constexpr Visit at(int position) const {
    const int entry = entries[position / blocks_per_entry];
    const int block = (entry >> 8) * blocks_per_entry + position % blocks_per_entry;
    return {.block = detail::clamp(block, first_block, last_block),
            .pieces = {static_cast<unsigned>(entry) & 0xff}};
  }

  // The list of `tile`, a tile of 128, where it meets `range`.
  FAC_HOST_DEVICE static constexpr BlockList of(const BlockLists& lists, int sequence, int head,
                                                int tile, const BlockRange& range) {
    BlockList list{.entries = nullptr, .begin = 0, .end = 0, .first_block = 0, .last_block = 0};
    const int limit = lists.others * blocks_per_entry;
    const int range_end = range.end < limit ? range.end : limit;
    if (tile >= lists.tiles || range.begin >= range_end) return list;
    const int* row = lists.row(sequence, head, tile);
    list.entries = row + 2;
    list.first_block = range.begin;
    list.last_block = range_end - 1;
    const int count = detail::clamp(row[0], 0, lists.others) * blocks_per_entry;
    // Which of its positions have blocks of the range; of most calls all.
    list.end = count;
    const bool has_all = range.begin == 0 && range_end == limit;
#if defined(__CUDA_ARCH__)
#pragma unroll 1
#endif
    for (int side = 0; side < 2 && !has_all; ++side) {
      int position = list.begin;
      for (int last = count; position < last;) {
        const int middle = position + (last - position) / 2;
        if (block_at(row, middle) < (side == 0 ? range.begin : range_end)) {
          position = middle + 1;
        } else {
          last = middle;
        }
      }
      (side == 0 ? list.begin : list.end) = position;
    }
    return list;
  }

  // The block at a position of `row`, a row of the lists.
  FAC_HOST_DEVICE static constexpr int block_at(const int* row, int position) {
    return (row[2 + position / blocks_per_entry] >> 8) * blocks_per_entry +
           position % blocks_per_entry;
  }
};

// The blocks of a tile, by position, in a kernel for block-sparse masks, which a call without lists
// can run as well.
template <int kBlock>
struct SparseVisits {
  BlockList<kBlock> list;
  BlockRange window;  // the blocks that the window leaves

  // `range`: those blocks before the call, positions after it.
  FAC_HOST_DEVICE constexpr void find(const BlockLists& lists, int sequence, int head, int tile,
                                      BlockRange& range) {
    if (lists.data == nullptr) return;
    list = BlockList<kBlock>::of(lists, sequence, head, tile, range);
    window = range;
    range.begin = list.begin;
    range.end = list.end;
  }

  // Before the first position it returns any block.
  FAC_HOST_DEVICE constexpr Visit at(bool has_lists, int position, const BlockRange& range) const {
    if (!has_lists) return {.block = position, .pieces = {}};
    return list.at(position > range.begin ? position : range.begin);
  }
  FAC_HOST_DEVICE constexpr bool is_interior(bool has_lists, int block,
                                             const BlockRange& range) const {
    return has_lists ? window.is_interior(block) : range.is_interior(block);
  }
};

// The blocks of a tile, by position, in other kernels.
struct AllVisits {
  FAC_HOST_DEVICE constexpr void find(const BlockLists&, int, int, int, BlockRange&) {}
  FAC_HOST_DEVICE constexpr Visit at(bool, int position, const BlockRange&) const {
    return {.block = position, .pieces = {}};
  }
  FAC_HOST_DEVICE constexpr bool is_interior(bool, int block, const BlockRange& range) const {
    return range.is_interior(block);
  }
};

// The steps of a key tile: the query blocks that it visits for each of the query heads that share
// its key head, whose lists may differ.
template <int kBlock>
struct HeadVisits {
  const BlockLists& lists;
  int sequence;
  int tile;  // of 128 keys
  BlockRange range;
  int end_head;

  struct Step {
    int head;
    int position;
    int end;  // positions of this head's list
    Visit visit;
  };

  FAC_HOST_DEVICE constexpr int count(int first_head) const {
    int steps = 0;
    for (int head = first_head; head < end_head; ++head) {
      const BlockList<kBlock> list = list_of(head);
      steps += list.end - list.begin;
    }
    return steps;
  }

  // Whether it visits a block of the range for a head.
  FAC_HOST_DEVICE constexpr bool has(int head, int block) const {
    const BlockRange one{
        .begin = block, .end = block + 1, .interior_begin = block, .interior_end = block};
    return !BlockList<kBlock>::of(lists, sequence, head, tile, one).empty();
  }

  // The step after the first `skipped` ones; any step, if there are no more.
  FAC_HOST_DEVICE constexpr Step first(int first_head, int skipped = 0) const {
    return first_from(first_head, skipped);
  }

  // The next step; any step, if there are no more.
  FAC_HOST_DEVICE constexpr Step next(Step step) const {
    if (step.position + 1 == step.end) return first_from(step.head + 1);
    ++step.position;
    step.visit = list_row(step.head).at(step.position);
    return step;
  }

 private:
  FAC_HOST_DEVICE constexpr BlockList<kBlock> list_of(int head) const {
    return BlockList<kBlock>::of(lists, sequence, head, tile, range);
  }
  // The head's list without its positions, which cost a search.
  FAC_HOST_DEVICE constexpr BlockList<kBlock> list_row(int head) const {
    const int limit = lists.others * BlockList<kBlock>::blocks_per_entry;
    return {.entries = lists.row(sequence, head, tile) + 2,
            .begin = 0,
            .end = 0,
            .first_block = range.begin,
            .last_block = (range.end < limit ? range.end : limit) - 1};
  }
  FAC_HOST_DEVICE constexpr Step first_from(int head, int skipped = 0) const {
    for (; head < end_head; ++head) {
      const BlockList<kBlock> list = list_of(head);
      const int position = list.begin + skipped;
      if (position < list.end)
        return {.head = head, .position = position, .end = list.end, .visit = list.at(position)};
      skipped -= list.end - list.begin;
    }
    return {.head = end_head, .position = 0, .end = 0, .visit = {.block = 0, .pieces = {0}}};
  }
};

// Ranks of every head whose tiles may be long.
FAC_HOST_DEVICE constexpr int early_ranks(const TileSchedule& schedule) {
  return (schedule.num_tiles + 31) / 32;
}

// The block of the schedule that is the `position`'th to be worked on: its blocks, but those of the
// first ranks of every head before all others, because the longest tiles of a sparse mask can take
// as long as all that a CTA does otherwise, and would end a section late in the grid.
FAC_HOST_DEVICE constexpr int longest_first(const TileSchedule& schedule, int position) {
  const int ranks = early_ranks(schedule);
  const int early = ranks * schedule.num_batch_heads;
  const int section_size = schedule.num_tiles * schedule.heads_per_section;
  if (position < early) {
    const int rank = position / schedule.num_batch_heads;
    const int batch_head = position - rank * schedule.num_batch_heads;
    const int section = batch_head / schedule.heads_per_section;
    const int first_head = section * schedule.heads_per_section;
    const int heads_left = schedule.num_batch_heads - first_head;
    const int heads_here =
        heads_left < schedule.heads_per_section ? heads_left : schedule.heads_per_section;
    return section * section_size + rank * heads_here + batch_head - first_head;
  }
  const int late_size = (schedule.num_tiles - ranks) * schedule.heads_per_section;
  const int section = (position - early) / late_size;
  const int first_head = section * schedule.heads_per_section;
  const int heads_left = schedule.num_batch_heads - first_head;
  const int heads_here =
      heads_left < schedule.heads_per_section ? heads_left : schedule.heads_per_section;
  return section * section_size + ranks * heads_here + position - early - section * late_size;
}

// Ranks of every head whose tiles a backward takes in parts (shared/schedule/tile_parts.h): a tile
// that all queries see takes as long as all that a CTA does otherwise.
FAC_HOST_DEVICE constexpr int ranks_in_parts(const TileSchedule& schedule) {
  return (schedule.num_tiles + 63) / 64;
}

// The tile of kTile that is the `rank`'th to be worked on. The lists say it, the longest tiles
// first, where neither a window nor a packed call's table decides.
template <int kTile, class Params>
FAC_HOST_DEVICE constexpr int ranked_tile(const Params& params, const SequenceTable& table,
                                          int sequence, int head, int rank) {
  static_assert(list_tile % kTile == 0);
  constexpr int tiles_per_row = list_tile / kTile;
  const BlockLists& lists = params.sparsity.lists;
  const int row = rank / tiles_per_row;
  const int part = rank % tiles_per_row;
  if (lists.data == nullptr || table.counts != nullptr || !params.window.is_full() ||
      row >= lists.tiles)
    return rank;
  const auto row_in_order = [&](int row) {
    return detail::clamp(lists.row(sequence, head, row)[1], 0, lists.tiles - 1);
  };
  // If the length ends within the last row, the grid lacks that row's tiles but for the first,
  // wherever the row ranks: they change places with the last ranks.
  const int last_row = lists.tiles - 1;
  if (part > 0 && row == last_row) return rank;
  const int tile_row = row_in_order(row);
  const bool changes = part > 0 && tile_row == last_row;
  return (changes ? row_in_order(last_row) : tile_row) * tiles_per_row + part;
}

}  // namespace flash_attn_cuda
