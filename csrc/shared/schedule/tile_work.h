// Block id -> the tile, the head and the sequence that a CTA of an attention kernel works on: the
// device half of TileSchedule (flash_attn/api.h). Pure index logic.
#pragma once

#include "shared/sequence/sequence.h"

namespace flash_attn_cuda {

struct TileCoord {
  int tile;
  int head;
  int batch;
};

FAC_HOST_DEVICE constexpr int last_section(const TileSchedule& schedule) {
  const int heads = schedule.num_batch_heads;
  const int per_section = schedule.heads_per_section;
  return heads <= per_section ? 0 : (heads - schedule.least_last_heads) / per_section;
}

FAC_HOST_DEVICE constexpr TileCoord tile_coord(const TileSchedule& schedule, int block_id) {
  const int blocks_per_section = schedule.num_tiles * schedule.heads_per_section;
  const int last = last_section(schedule);
  const int any_section = block_id / blocks_per_section;
  const int section = any_section < last ? any_section : last;
  const int first_head = section * schedule.heads_per_section;
  const int heads_here =
      section < last ? schedule.heads_per_section : schedule.num_batch_heads - first_head;

  const int in_section = block_id - section * blocks_per_section;
  const int tile = in_section / heads_here;
  const int batch_head = first_head + in_section - tile * heads_here;
  const int batch = batch_head / schedule.num_heads;
  return {.tile = schedule.longest_first ? schedule.num_tiles - 1 - tile : tile,
          .head = batch_head - batch * schedule.num_heads,
          .batch = batch};
}

struct TileWork {
  Sequence sequence;
  int tile;  // of the sequence
  int head;  // of the schedule's grid
};

inline constexpr int no_tile = -1;  // as TileWork::tile: nothing to do

// num_tiles is the host's upper bound; of a packed call there are counts[0] tiles.
FAC_HOST_DEVICE constexpr TileSchedule existing_tiles(TileSchedule schedule,
                                                      const SequenceTable& table) {
  if (table.counts != nullptr) schedule.num_tiles = table.counts[0];
  return schedule;
}

// What is at a place of the schedule. False beyond the end of a packed call's list: nothing to do.
template <class Params>
FAC_HOST_DEVICE bool find_work(const TileCoord& coord, const SequenceTable& table,
                               const Params& params, TileWork& work) {
  work.head = coord.head;
  if (table.counts == nullptr) {
    work.tile = coord.tile;
    work.sequence = read_sequence(params.sequences, params.shape, coord.batch, params.errors);
    return true;
  }
  if (coord.tile >= table.counts[0]) return false;
  const TileEntry entry = table.tiles[coord.tile];
  work.tile = entry.tile;
  work.sequence = table.sequences[entry.sequence];
  return true;
}

// What the block does. Those with nothing to do come after all others.
template <class Params>
FAC_HOST_DEVICE bool find_work(const TileSchedule& schedule, const SequenceTable& table,
                               const Params& params, int block_id, TileWork& work) {
  const TileSchedule existing = existing_tiles(schedule, table);
  if (block_id >= existing.grid_size()) return false;
  return find_work(tile_coord(existing, block_id), table, params, work);
}

// A tile's head among all of the schedule's.
FAC_HOST_DEVICE constexpr int schedule_head(const TileSchedule& schedule,
                                            const SequenceTable& table, const TileWork& work) {
  const int batch = table.counts != nullptr ? 0 : work.sequence.index;
  return batch * schedule.num_heads + work.head;
}

// A query tile of the kernels around the backward's main one, which take all tiles of a head in
// the order of Sequence::first_q_tile.
struct QueryTile {
  Sequence sequence;
  int tile;
};

template <class Params>
FAC_HOST_DEVICE bool find_query_tile(const SequenceTable& table, const Params& params,
                                     int tiles_per_sequence, int index, QueryTile& work) {
  if (table.counts == nullptr) {
    const int sequence = index / tiles_per_sequence;
    work.tile = index - sequence * tiles_per_sequence;
    work.sequence = read_sequence(params.sequences, params.shape, sequence, params.errors);
    return true;
  }
  if (index >= table.counts[1]) return false;
  const TileEntry entry = table.q_tiles[index];
  work.tile = entry.tile;
  work.sequence = table.sequences[entry.sequence];
  return true;
}

}  // namespace flash_attn_cuda
