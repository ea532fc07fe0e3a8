// Block id -> (tile, head, batch): the device half of TileSchedule (flash_attn/api.h). Pure index
// logic.
#pragma once

#include <cstdint>

#include "flash_attn/api.h"
#include "shared/host_device.h"

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

}  // namespace flash_attn_cuda
