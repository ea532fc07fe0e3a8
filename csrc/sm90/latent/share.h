// Which blocks of keys a CTA takes (TileSharing, flash_attn/api.h). Lengths may be in device memory,
// and then the host knows neither how much there is to do nor how long a tile is. So a warp of
// every CTA adds up what all tiles have, and finds its share.
#pragma once

#include <cstdint>

#include "sm90/latent/arguments.h"
#include "sm90/latent/traits.h"

namespace flash_attn_cuda::sm90 {

// How a tile is divided: `count` times `blocks` of them from `first` on; the last has what is left.
struct TileDivision {
  int first;
  int blocks;
  int count;
};

// What is known of a tile.
struct LatentTile {
  TileWork work;
  BlockRange range;
  TileDivision division;
};

template <class Traits>
CUTE_DEVICE TileDivision divide_tile(LatentArguments const& args, LatentTile const& tile) {
  const int blocks = tile.range.end - tile.range.begin;
  if (args.sharing == TileSharing::even) return {tile.range.begin, 1, max(blocks, 1)};
  if (args.sharing == TileSharing::whole) return {tile.range.begin, blocks, 1};
  // Counted from the first key, whatever is visible, so that a window changes no bits of what both
  // sides see.
  if (args.keys_per_part > 0) {
    const int each = args.keys_per_part / Traits::block_n;
    const int all = (tile.work.sequence.seqlen_k + args.keys_per_part - 1) / args.keys_per_part;
    return {0, each, max(1, min(all, args.most_parts))};
  }
  const int each = max((blocks + args.most_parts - 1) / args.most_parts, 1);
  return {tile.range.begin, each, max((blocks + each - 1) / each, 1)};
}

// The tiles of a call, of all heads, in the order in which CTAs share them out.
template <class Traits>
struct LatentTiles {
  LatentArguments const& args;
  TileSchedule schedule;
  int count;

  CUTE_DEVICE static LatentTiles of(LatentArguments const& args) {
    const TileSchedule schedule = existing_tiles(args.schedule, args.table);
    return {args, schedule, static_cast<int>(schedule.grid_size())};
  }

  CUTE_DEVICE LatentTile operator[](int index) const {
    LatentTile tile;
    find_work(schedule, args.table, args.params, index, tile.work);
    Sequence const& sequence = tile.work.sequence;
    const int first = latent_row<Traits>(args.group, tile.work, 0).query;
    const int last = latent_row<Traits>(args.group, tile.work, Traits::block_m - 1).query;
    tile.range = block_range(band_from_queries(args.params.window, sequence.shift), first,
                             min(last, sequence.seqlen_q - 1), sequence.seqlen_k, Traits::block_n);
    tile.division = divide_tile<Traits>(args, tile);
    return tile;
  }
};

// A division that is short where numbers are, as they are nearly always.
CUTE_DEVICE std::int64_t quotient(std::int64_t dividend, std::int64_t divisor) {
  const bool is_short = ((dividend | divisor) >> 32) == 0;
  return is_short ? static_cast<std::uint32_t>(dividend) / static_cast<std::uint32_t>(divisor)
                  : dividend / divisor;
}

// The places that all tiles have, one after the other, shared out to CTAs: `more` of them have one
// more than `each`.
struct CtaShare {
  std::int64_t each;
  std::int64_t more;

  CUTE_DEVICE static CtaShare of(std::int64_t total, int ctas) {
    const std::int64_t each = quotient(total, ctas);
    return {each, total - each * ctas};
  }
  CUTE_DEVICE std::int64_t begin(int cta) const {
    return each * cta + min(more, std::int64_t(cta));
  }
  CUTE_DEVICE int cta_of(std::int64_t place) const {
    const std::int64_t of_larger = more * (each + 1);
    return static_cast<int>(place < of_larger ? quotient(place, each + 1)
                                              : more + quotient(place - of_larger, each));
  }
};

// The item of parts [first, first + count) of a tile.
CUTE_DEVICE LatentItem item_of_parts(LatentTile const& tile, int first, int count, int part) {
  TileDivision const& division = tile.division;
  LatentItem item{.work = tile.work, .range = tile.range, .part = part, .is_first = first == 0};
  const bool has_last = first + count == division.count;
  item.range.begin = max(tile.range.begin, division.first + first * division.blocks);
  if (!has_last)
    item.range.end = min(tile.range.end, division.first + (first + count) * division.blocks);
  return item;
}

// Calls give(item) for each of this CTA's, by one warp.
template <class Traits, class Give>
CUTE_DEVICE void share_tiles(LatentArguments const& args, Give give) {
  const auto tiles = LatentTiles<Traits>::of(args);
  const int lane = threadIdx.x % 32;
  const int cta = blockIdx.x;
  if (args.sharing == TileSharing::whole) {
    for (int i = cta; i < tiles.count; i += gridDim.x)
      give(item_of_parts(tiles[i], 0, 1, whole_tile));
    return;
  }
  const auto parts_at = [&](int i) { return i < tiles.count ? tiles[i].division.count : 0; };
  std::int64_t total = 0;
  CUTE_NO_UNROLL
  for (int i = lane; i < tiles.count; i += 32) total += parts_at(i);
  CUTE_UNROLL
  for (int step = 16; step > 0; step /= 2) total += __shfl_xor_sync(0xffffffffu, total, step);
  // A block alone is not worth a part.
  const bool is_even = args.sharing == TileSharing::even;
  const std::int64_t useful = is_even ? (total + 1) / 2 : total;
  const int ctas = static_cast<int>(min(std::int64_t(gridDim.x), useful));
  if (cta >= ctas) return;
  const CtaShare share = CtaShare::of(total, ctas);

  std::int64_t place = share.begin(cta);
  const std::int64_t end = share.begin(cta + 1);
  std::int64_t first = 0;  // place of the tile's first part
  int index = 0;
  CUTE_NO_UNROLL
  for (;; index += 32) {
    const int own = parts_at(index + lane);
    std::int64_t last = own;  // place after this lane's, from `first` on
    CUTE_UNROLL
    for (int step = 1; step < 32; step *= 2) {
      const std::int64_t other = __shfl_up_sync(0xffffffffu, last, step);
      if (lane >= step) last += other;
    }
    const unsigned holds = __ballot_sync(0xffffffffu, first + last > place);
    const int found = holds == 0 ? 31 : __ffs(holds) - 1;
    first += __shfl_sync(0xffffffffu, holds == 0 ? last : last - own, found);
    if (holds == 0) continue;
    index += found;
    break;
  }
  CUTE_NO_UNROLL
  for (; place < end; ++index) {
    const LatentTile tile = tiles[index];
    const int count = tile.division.count;
    const int skipped = static_cast<int>(place - first);
    const int taken = static_cast<int>(min(std::int64_t(count) - skipped, end - place));
    // Where the parts of the tile lie, for who joins them.
    PartsOfTile parts{index * args.most_parts, count};
    if (is_even) parts = {cta + index, share.cta_of(first + count - 1) - cta + 1};
    if (skipped == 0 && lane == 0) args.parts_of_tiles[index] = parts;
    if (is_even) {
      const bool is_whole = taken == count;
      give(item_of_parts(tile, skipped, taken, is_whole ? whole_tile : cta + index));
    } else {
      CUTE_NO_UNROLL
      for (int i = skipped; i < skipped + taken; ++i)
        give(item_of_parts(tile, i, 1, count == 1 ? whole_tile : parts.first + i));
    }
    first += count;
    place += taken;
  }
}

}  // namespace flash_attn_cuda::sm90
