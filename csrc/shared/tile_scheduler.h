// Block id -> (tile, head, batch): the device half of TileSchedule (flash_attn/api.h). Pure index
// logic.
#pragma once

#include "flash_attn/api.h"
#include "shared/host_device.h"

namespace flash_attn_cuda {

struct TileCoord {
  int tile;
  int head;
  int batch;
};

FAC_HOST_DEVICE constexpr TileCoord tile_coord(const TileSchedule& schedule, int block_id) {
  const int blocks_per_section = schedule.num_tiles * schedule.heads_per_section;
  const int section = block_id / blocks_per_section;
  const int first_head = section * schedule.heads_per_section;
  const int heads_left = schedule.num_batch_heads - first_head;
  const int heads_here =
      heads_left < schedule.heads_per_section ? heads_left : schedule.heads_per_section;

  const int in_section = block_id - section * blocks_per_section;
  const int tile = in_section / heads_here;
  const int batch_head = first_head + in_section - tile * heads_here;
  const int batch = batch_head / schedule.num_heads;
  return {.tile = schedule.longest_first ? schedule.num_tiles - 1 - tile : tile,
          .head = batch_head - batch * schedule.num_heads,
          .batch = batch};
}

}  // namespace flash_attn_cuda
