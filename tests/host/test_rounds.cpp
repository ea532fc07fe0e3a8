// CTAs that stay and go through a grid in rounds, forth and back: every tile once, and none of them
// with much more work than the others.
#include <algorithm>
#include <numeric>
#include <set>
#include <vector>

#include "check.h"
#include "host/plan_steps.h"
#include "shared/tile_scheduler.h"

using namespace flash_attn_cuda;

namespace {

TileSchedule causal_grid(int tiles, int heads) {
  return {.num_tiles = tiles, .num_heads = heads, .num_batch_heads = heads, .longest_first = true};
}

TileSchedule in_rounds(int tiles, int heads, int group, int ctas, bool is_even = false) {
  TileSchedule schedule = causal_grid(tiles, heads);
  fit_rounds(schedule, group, ctas, is_even);
  return schedule;
}

// The tiles of a CTA, as forward_producer.h finds them.
std::vector<TileCoord> walk(const TileSchedule& schedule, int cta, int ctas) {
  std::vector<TileCoord> tiles;
  const std::int64_t places = count_places(schedule);
  for (int round = 0; std::int64_t{round} * ctas < places; ++round) {
    const int turn = round % 2 == 0 ? cta : ctas - 1 - cta;
    const int place = round * ctas + turn;
    if (place >= places) continue;
    const int id = block_at(schedule, place);
    if (id >= 0) tiles.push_back(tile_coord(schedule, id));
  }
  return tiles;
}

// Of the CTAs' time, where a tile takes as many steps as it sees tiles of keys, and one more.
double busy(const TileSchedule& schedule, int ctas) {
  double longest = 0.0, sum = 0.0;
  for (int cta = 0; cta < ctas; ++cta) {
    double steps = 0.0;
    for (const TileCoord& coord : walk(schedule, cta, ctas)) steps += coord.tile + 2;
    longest = std::max(longest, steps);
    sum += steps;
  }
  return sum / ctas / longest;
}

}  // namespace

TEST(every_tile_has_one_place) {
  for (const int ctas : {3, 8}) {
    for (int tiles = 1; tiles <= 9; ++tiles) {
      for (int heads = 1; heads <= 30; ++heads) {
        for (const int group : {1, 2, 3}) {
          if (heads % group != 0) continue;
          for (const bool is_even : {false, true}) {
            const TileSchedule schedule = in_rounds(tiles, heads, group, ctas, is_even);
            std::set<std::pair<int, int>> seen;
            for (int cta = 0; cta < ctas; ++cta) {
              for (const TileCoord& coord : walk(schedule, cta, ctas)) {
                CHECK(coord.tile >= 0 && coord.tile < tiles);
                CHECK(coord.head >= 0 && coord.head < heads);
                CHECK(seen.insert({coord.tile, coord.head}).second);
              }
            }
            CHECK_EQ(static_cast<std::int64_t>(seen.size()), schedule.grid_size());
            if (schedule.heads_per_section < heads) CHECK_EQ(schedule.heads_per_section % group, 0);
          }
        }
      }
    }
  }
}

TEST(places_without_tiles_end_a_section_and_the_last_section_takes_the_rest) {
  TileSchedule schedule = causal_grid(3, 7);  // sections of two heads and, at last, of three
  schedule.heads_per_section = 2;
  schedule.places_per_section = 8;
  CHECK_EQ(count_places(schedule), 8 + 8 + 9);
  std::vector<int> blocks;
  for (int place = 0; place < 25; ++place) blocks.push_back(block_at(schedule, place));
  const std::vector<int> expected{0,  1,  2,  3,  4,  5,  -1, -1, 6,  7,  8,  9, 10,
                                  11, -1, -1, 12, 13, 14, 15, 16, 17, 18, 19, 20};
  CHECK(blocks == expected);
  CHECK_EQ(tile_coord(schedule, 11).head, 3);
  CHECK_EQ(tile_coord(schedule, 12).tile, 2);
  CHECK_EQ(tile_coord(schedule, 14).head, 6);
  CHECK_EQ(tile_coord(schedule, 20).tile, 0);

  // Sections of as many places as tiles: the last one is the smaller one.
  schedule.places_per_section = 0;
  CHECK_EQ(count_places(schedule), 21);
  CHECK_EQ(block_at(schedule, 20), 20);
  CHECK_EQ(tile_coord(schedule, 18).head, 6);
  CHECK_EQ(tile_coord(schedule, 19).tile, 1);
}

TEST(tiles_of_equal_length_go_head_by_head) {
  for (const int group : {1, 4}) {
    const TileSchedule schedule = in_rounds(5, 100, group, 132, true);
    CHECK_EQ(schedule.heads_per_section, group);
    CHECK_EQ(schedule.places_per_section, 0);
  }
}

TEST(low_tiles_of_the_last_heads_end_a_grid) {
  // 3,072 heads of two tiles on 264 CTAs: 23 rounds, and 72 tiles are left.
  TileSchedule schedule{.num_tiles = 2, .num_heads = 12, .num_batch_heads = 3072};
  end_with_low_tiles(schedule, 1, 264, 143);
  CHECK_EQ(schedule.least_last_heads, 1);  // more than may be
  end_with_low_tiles(schedule, 1, 264, 144);
  CHECK_EQ(schedule.least_last_heads, 144);
  std::set<std::pair<int, int>> seen;
  for (int cta = 0; cta < 264; ++cta) {
    const auto tiles = walk(schedule, cta, 264);
    for (const TileCoord& coord : tiles)
      CHECK(seen.insert({coord.tile, coord.batch * 12 + coord.head}).second);
    const auto low = std::count_if(tiles.begin(), tiles.end(), [](auto& c) { return c.tile == 1; });
    CHECK_EQ(static_cast<int>(tiles.size()), cta < 264 - 72 ? 23 : 24);
    if (tiles.size() == 24) CHECK_EQ(low, 13);
    if (tiles.size() == 23) CHECK(low == 11 || low == 12);
  }
  CHECK_EQ(static_cast<std::int64_t>(seen.size()), schedule.grid_size());

  const auto last_heads = [](int tiles, int heads, int group) {
    TileSchedule grid{.num_tiles = tiles, .num_heads = heads, .num_batch_heads = heads};
    end_with_low_tiles(grid, group, 264, 1000);
    return grid.least_last_heads;
  };
  CHECK_EQ(last_heads(2, 3072, 5), 145);  // whole groups of heads
  CHECK_EQ(last_heads(3, 100, 1), 72);
  CHECK_EQ(last_heads(3, 50, 1), 1);   // more than there are
  CHECK_EQ(last_heads(2, 264, 1), 1);  // rounds are whole
}

TEST(few_rounds_are_one_section) {
  CHECK_EQ(in_rounds(16, 57, 1, 132).heads_per_section, 57);  // 6.9 rounds
  CHECK_EQ(in_rounds(16, 57, 1, 132).places_per_section, 0);
  CHECK_EQ(in_rounds(4, 0, 1, 132).grid_size(), 0);
  CHECK_EQ(in_rounds(0, 4, 1, 132).grid_size(), 0);
}

TEST(an_order_that_comes_back_needs_no_sections) {
  // 4 and 8 tiles divide two rounds of 132, 16 four of them.
  for (const auto& [tiles, heads] : {std::pair{4, 512}, {8, 256}, {16, 128}}) {
    const TileSchedule schedule = in_rounds(tiles, heads, 1, 132);
    CHECK_EQ(schedule.heads_per_section, 1);
    CHECK_EQ(schedule.places_per_section, 0);
    CHECK(busy(schedule, 132) > 0.95);
  }
  // Heads that read the same keys follow one another: 4 heads of 8 tiles divide 8 rounds.
  CHECK_EQ(in_rounds(8, 1024, 4, 132).heads_per_section, 4);
  CHECK_EQ(in_rounds(8, 256, 4, 132).heads_per_section, 16);
  // 31 would take 62 rounds: 4 heads are 124 of 132 tiles, 17 are 527 of 528.
  const TileSchedule schedule = in_rounds(31, 128, 1, 132);
  CHECK_EQ(schedule.heads_per_section, 17);
  CHECK_EQ(schedule.places_per_section, 4 * 132);
}

TEST(ctas_have_about_as_much_work_as_each_other) {
  double sum = 0.0;
  int grids = 0;
  for (const int tiles : {2, 3, 5, 7, 8, 12, 16, 21, 31, 32, 43, 64, 65, 96, 128, 200, 300}) {
    for (const int heads : {16, 32, 40, 64, 100, 128, 256, 512}) {
      const TileSchedule schedule = in_rounds(tiles, heads, 1, 132);
      const std::int64_t tiles_of_grid = schedule.grid_size();
      if (tiles_of_grid < 7 * 132 || tiles_of_grid > 20'000) continue;
      const double share = busy(schedule, 132);
      CHECK(share > 0.87);
      sum += share;
      ++grids;
    }
  }
  CHECK(grids > 50);
  CHECK(sum / grids > 0.97);
}
