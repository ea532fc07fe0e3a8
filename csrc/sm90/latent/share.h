// Which blocks of keys a CTA takes (TileSharing, flash_attn/api.h). Lengths may be in device
// memory, and then the host knows neither how much there is to do nor how long a tile is. So a warp
// of every CTA adds up what all tiles have, and finds its share.
#pragma once

#include <cstdint>

#include "sm90/isa/cta_pair.h"
#include "sm90/latent/arguments.h"
#include "sm90/latent/traits.h"

namespace flash_attn_cuda::sm90 {

template <class Traits>
CUTE_DEVICE PackedRow latent_row(LatentArguments const& args, TileWork const& work, int row) {
  return padded_row(args.group, args.heads_per_key_head, work, Traits::block_m, row);
}

// Whether CTAs are in pairs. A pair takes two neighbouring tiles of one sequence and key head where
// a CTA alone takes one, and each CTA of it has one of them: both visit the same blocks.
template <class Traits>
CUTE_DEVICE bool is_pair(LatentArguments const& args) {
  return !Traits::is_swapped && args.in_pairs;
}

// How a tile is divided: `count` times `blocks` of them from `first` on; the last has what is left.
struct TileDivision {
  int first;
  int blocks;
  int count;
};

// Of every tile, also where its query does not attend: so nobody has to add up what tiles have.
template <class Traits>
CUTE_DEVICE int blocks_of_list(LatentArguments const& args) {
  return (args.params.keys_per_list + Traits::block_n - 1) / Traits::block_n;
}

// What is known of a tile. range: of a pair's, what one of both sees.
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
    const bool has_lists = has_key_lists(args.params);
    const int keys = has_lists ? args.params.keys_per_list : tile.work.sequence.seqlen_k;
    const int all = (keys + args.keys_per_part - 1) / args.keys_per_part;
    return {0, each, max(1, min(all, args.most_parts))};
  }
  const int each = max((blocks + args.most_parts - 1) / args.most_parts, 1);
  return {tile.range.begin, each, max((blocks + each - 1) / each, 1)};
}

// The tiles of a call, of all heads, in the order in which CTAs share them out.
template <class Traits>
struct LatentTiles {
  LatentArguments const& args;
  int count;

  CUTE_DEVICE static LatentTiles of(LatentArguments const& args) {
    int const* counts = args.table.counts;
    return {args,
            counts == nullptr ? args.most_tiles : counts[0] * static_cast<int>(args.heads.divisor)};
  }

  // This CTA's tile of pair `index`, counted as tiles are.
  CUTE_DEVICE int of_pair(int index) const {
    const int place = args.heads.quotient(index);
    return index + (place + rank_in_pair()) * static_cast<int>(args.heads.divisor);
  }

  CUTE_DEVICE LatentTile operator[](int index) const {
    LatentTile tile;
    TileCoord coord{};
    const int of_head = args.heads.quotient(index);
    coord.head = index - of_head * static_cast<int>(args.heads.divisor);
    coord.tile = of_head;  // of packed sequences a place of the table's list
    if (args.table.counts == nullptr) {
      coord.batch = args.tiles.quotient(of_head);
      coord.tile -= coord.batch * static_cast<int>(args.tiles.divisor);
    }
    find_work(coord, args.table, args.params, tile.work);
    Sequence const& sequence = tile.work.sequence;
    int first_row = 0, last_row = Traits::block_m - 1;
    if (is_pair<Traits>(args)) {
      if (tile.work.tile % 2 == 0) {
        last_row += Traits::block_m;
      } else {
        first_row -= Traits::block_m;
      }
    }
    const int first = latent_row<Traits>(args, tile.work, first_row).query;
    const int last = latent_row<Traits>(args, tile.work, last_row).query;
    if (has_key_lists(args.params)) {
      const int blocks = blocks_of_list<Traits>(args);
      tile.range = {.begin = 0, .end = blocks, .interior_begin = 0, .interior_end = blocks};
    } else {
      tile.range =
          block_range(band_from_queries(args.params.window, sequence.shift), first,
                      min(last, sequence.seqlen_q - 1), sequence.seqlen_k, Traits::block_n);
    }
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

// Those of the call; a pair counts as one, and so do its tiles.
template <class Traits>
CUTE_DEVICE int all_ctas(LatentArguments const& args) {
  return static_cast<int>(gridDim.x) >> int(is_pair<Traits>(args));
}

// CTAs that take part. A block alone is not worth a part, and with a whole number of CTAs to a tile
// tiles of one length are cut where they end.
template <class Traits>
CUTE_DEVICE int ctas_that_share(LatentArguments const& args, int tiles, std::int64_t total) {
  const int all = all_ctas<Traits>(args);
  if (args.sharing == TileSharing::parts) return static_cast<int>(min(std::int64_t(all), total));
  const int to_a_tile = all / max(tiles, 1) * tiles;
  const int wanted = 10 * to_a_tile >= 9 * all ? to_a_tile : all;
  return static_cast<int>(min(std::int64_t(wanted), (total + 1) / 2));
}

// What one lane holds, in all of them.
template <class Words>
CUTE_DEVICE Words from_lane(Words const& own, int lane) {
  constexpr int count = sizeof(Words) / sizeof(int);
  struct Array {
    int words[count];
  } array = reinterpret_cast<Array const&>(own);
  CUTE_UNROLL
  for (int& word : array.words) word = __shfl_sync(0xffffffffu, word, lane);
  return reinterpret_cast<Words const&>(array);
}

// Calls give(item) for each of this CTA's, by one warp. It is the first that a CTA does, when no
// instruction is in a cache: one loop for the sum of all parts, for the tile where the CTA's begin
// and for the walk from there, and one call of everything.
template <class Traits, class Give>
CUTE_DEVICE void share_tiles(LatentArguments const& args, Give give) {
  enum { summing, seeking, walking } phase = summing;
  const auto tiles = LatentTiles<Traits>::of(args);
  const int lane = threadIdx.x % 32;
  const bool in_pair = is_pair<Traits>(args);
  const int cta = static_cast<int>(blockIdx.x) >> int(in_pair);
  const int num_tiles = tiles.count >> int(in_pair);
  const auto own_tile = [&](int index) { return in_pair ? tiles.of_pair(index) : index; };
  const bool is_whole = args.sharing == TileSharing::whole;
  const bool is_even = args.sharing == TileSharing::even;
  std::int64_t total = 0;
  std::int64_t first = 0;  // place of the tile's first part; before the walk, of the lanes' first
  std::int64_t place = 0;  // the next of this CTA's
  std::int64_t end = 0;
  CtaShare share{};
  const auto takes_part = [&] {
    const int ctas = ctas_that_share<Traits>(args, num_tiles, total);
    if (cta >= ctas) return false;
    share = CtaShare::of(total, ctas);
    place = share.begin(cta);
    end = share.begin(cta + 1);
    return true;
  };
  int index = is_whole ? cta : lane;
  if (is_whole) phase = walking;
  // With few heads calls are short.
  if (Traits::is_swapped && is_even && has_key_lists(args.params)) {
    const int blocks = blocks_of_list<Traits>(args);
    total = std::int64_t(num_tiles) * blocks;
    if (!takes_part()) return;
    index = static_cast<int>(quotient(place, blocks));
    first = std::int64_t(index) * blocks;
    phase = walking;
  }
  CUTE_NO_UNROLL
  while (true) {
    LatentTile tile{};
    if (index < num_tiles) tile = tiles[own_tile(index)];
    if (phase != walking) {
      std::int64_t last = tile.division.count;  // of this lane and those before it
      CUTE_UNROLL
      for (int step = 1; step < 32; step *= 2) {
        const std::int64_t other = __shfl_up_sync(0xffffffffu, last, step);
        if (lane >= step) last += other;
      }
      const std::int64_t of_all = __shfl_sync(0xffffffffu, last, 31);
      const int lanes_begin = index - lane;
      index += 32;
      if (phase == summing) {
        total += of_all;
        if (lanes_begin + 32 < num_tiles) continue;
        if (!takes_part()) return;
        phase = seeking;
        if (num_tiles > 32) {
          index = lane;
          continue;
        }
      }
      const unsigned holds = __ballot_sync(0xffffffffu, first + last > place);
      if (holds == 0) {
        first += of_all;
        continue;
      }
      const int found = __ffs(holds) - 1;
      first += __shfl_sync(0xffffffffu, last - tile.division.count, found);
      index = lanes_begin + found;
      phase = walking;
      // Beside two warpgroups there are no registers for a tile of every lane.
      if (!Traits::is_swapped) continue;
      tile = from_lane(tile, found);
    }
    const int count = tile.division.count;
    if (is_whole ? index >= num_tiles : place >= end) return;
    const int skipped = is_whole ? 0 : static_cast<int>(place - first);
    const int taken =
        is_whole ? 1 : static_cast<int>(min(std::int64_t(count) - skipped, end - place));
    const int own = own_tile(index);
    PartsOfTile parts{own * args.most_parts, count};
    // Of a pair's even shares the second tile's parts lie behind those of all first tiles.
    const int behind = in_pair ? rank_in_pair() * args.parts_of_pairs : 0;
    if (is_even) parts = {behind + cta + index, share.cta_of(first + count - 1) - cta + 1};
    // Where the parts of the tile lie, for who joins them.
    if (!is_whole && skipped == 0 && lane == 0) args.parts_of_tiles[own] = parts;
    const int at_once = is_even ? taken : 1;
    CUTE_NO_UNROLL
    for (int i = skipped; i < skipped + taken; i += at_once) {
      const int part = is_even ? behind + cta + index : parts.first + i;
      give(item_of_parts(tile, i, at_once, at_once == count ? whole_tile : part));
    }
    first += count;
    place += taken;
    index += is_whole ? all_ctas<Traits>(args) : 1;
  }
}

}  // namespace flash_attn_cuda::sm90
