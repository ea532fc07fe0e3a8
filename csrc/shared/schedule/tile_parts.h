// Key tiles of a backward that several CTAs share, each of them some of the tile's steps. Pure
// index logic.
#pragma once

#include "flash_attn/api.h"
#include "shared/host_device.h"
#include "shared/mask/block_range.h"

namespace flash_attn_cuda {

// What a ticket stands for. Parts of one tile have neighbouring tickets, and places for their sums.
struct TilePart {
  int position;  // in the order in which tiles are taken
  int part;
  int first_place;  // of the tile's parts
  bool is_one_of_several;

  FAC_HOST_DEVICE static constexpr TilePart of(const SharedTiles& shared, int ticket) {
    const int place = ticket - shared.first;
    const int places = shared.count * shared.parts;
    if (place < 0 || place >= places) {
      const int passed = place < 0 ? 0 : places - shared.count;
      return {.position = ticket - passed, .part = 0, .first_place = 0, .is_one_of_several = false};
    }
    const int tile = place / shared.parts;
    return {.position = shared.first + tile,
            .part = place - tile * shared.parts,
            .first_place = tile * shared.parts,
            .is_one_of_several = shared.parts > 1};
  }
};

// With lists a part has at least so many steps.
inline constexpr int least_part_steps = 32;

// Into how many parts, none of them shorter than `least_steps`, a tile is cut; further tickets of
// it are void.
FAC_HOST_DEVICE constexpr int parts_of_steps(int steps, int least_steps, int most_parts) {
  return detail::clamp(steps / least_steps, 1, most_parts);
}
FAC_HOST_DEVICE constexpr int first_step_of_part(int steps, int part, int parts) {
  return static_cast<int>(std::int64_t{steps} * part / parts);
}
// What a part counts; all of a tile's parts together count `most_parts`.
FAC_HOST_DEVICE constexpr int share_of_part(int part, int parts, int most_parts) {
  return part + 1 < parts ? 1 : most_parts - parts + 1;
}

}  // namespace flash_attn_cuda
