// CTAs that stay and go through a grid, in rounds, forth and back, or by drawing: every tile once,
// and none of them with much more work than the others.
#include <algorithm>
#include <queue>
#include <set>
#include <vector>

#include "check.h"
#include "host/plan_steps.h"
#include "shared/schedule/tile_work.h"

using namespace flash_attn_cuda;

namespace {

TileSchedule drawn(int tiles, int heads, int group, int ctas) {
  TileSchedule schedule{
      .num_tiles = tiles, .num_heads = heads, .num_batch_heads = heads, .longest_first = true};
  take_rounds(schedule, group, ctas);
  return schedule;
}

// The tiles of a CTA that does not draw, as sm90/tile/finder.h finds them.
std::vector<TileCoord> walk(const TileSchedule& schedule, int cta, int ctas) {
  std::vector<TileCoord> tiles;
  for (int round = 0; std::int64_t{round} * ctas < schedule.grid_size(); ++round) {
    const int turn = round % 2 == 0 ? cta : ctas - 1 - cta;
    const int number = round * ctas + turn;
    if (number < schedule.grid_size()) tiles.push_back(tile_coord(schedule, number));
  }
  return tiles;
}

// Of the time of CTAs that draw, where a tile takes as many steps as it sees tiles of keys, and one
// more.
double busy(const TileSchedule& schedule, int ctas) {
  std::priority_queue<double, std::vector<double>, std::greater<>> ends(
      std::greater<>{}, std::vector<double>(static_cast<std::size_t>(ctas), 0.0));
  double sum = 0.0;
  for (int number = 0; number < schedule.grid_size(); ++number) {
    const double steps = tile_coord(schedule, number).tile + 2;
    const double end = ends.top() + steps;
    ends.pop();
    ends.push(end);
    sum += steps;
  }
  while (ends.size() > 1) ends.pop();
  return sum / ctas / ends.top();
}

}  // namespace

TEST(every_tile_is_drawn_once) {
  for (const int ctas : {3, 8}) {
    for (int tiles = 1; tiles <= 9; ++tiles) {
      for (int heads = 1; heads <= 30; ++heads) {
        for (const int group : {1, 2, 3}) {
          if (heads % group != 0) continue;
          const TileSchedule schedule = drawn(tiles, heads, group, ctas);
          std::set<std::pair<int, int>> seen;
          for (int number = 0; number < schedule.grid_size(); ++number) {
            const TileCoord coord = tile_coord(schedule, number);
            CHECK(coord.tile >= 0 && coord.tile < tiles);
            CHECK(coord.head >= 0 && coord.head < heads);
            CHECK(seen.insert({coord.tile, coord.head}).second);
          }
          CHECK_EQ(schedule.heads_per_section % group, 0);
        }
      }
    }
  }
}

TEST(sections_are_a_round_and_the_last_one_two) {
  const TileSchedule schedule = drawn(16, 128, 1, 132);
  CHECK_EQ(schedule.heads_per_section, 9);  // 144 tiles
  CHECK_EQ(schedule.least_last_heads, 17);  // 272
  CHECK_EQ(last_section(schedule), 12);     // 12 * 9 = 108 heads before, and 20 are left
  CHECK_EQ(tile_coord(schedule, 12 * 9 * 16).tile, 15);
  CHECK_EQ(tile_coord(schedule, 12 * 9 * 16 + 19).head, 127);
  CHECK_EQ(tile_coord(schedule, 12 * 9 * 16 + 20).tile, 14);
  // Heads that read the same keys stay together: 4 heads of 8 tiles, 5 times.
  CHECK_EQ(drawn(8, 256, 4, 132).heads_per_section, 20);
  CHECK_EQ(drawn(8, 256, 4, 132).least_last_heads, 36);
  // Fewer heads than that are one section.
  CHECK_EQ(last_section(drawn(16, 9, 1, 132)), 0);
  CHECK_EQ(last_section(drawn(16, 20, 1, 132)), 0);
  CHECK_EQ(drawn(4, 0, 1, 132).grid_size(), 0);
  CHECK_EQ(drawn(0, 4, 1, 132).grid_size(), 0);
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

TEST(ctas_that_draw_have_about_as_much_work_as_each_other) {
  double sum = 0.0;
  int grids = 0;
  for (const int tiles : {2, 3, 5, 7, 8, 12, 16, 21, 31, 32, 43, 64, 65, 96, 128, 200, 300}) {
    for (const int heads : {16, 32, 40, 64, 100, 128, 256, 512}) {
      const TileSchedule schedule = drawn(tiles, heads, 1, 132);
      const std::int64_t tiles_of_grid = schedule.grid_size();
      if (tiles_of_grid < 7 * 132 || tiles_of_grid > 20'000) continue;
      const double share = busy(schedule, 132);
      CHECK(share > 0.94);
      sum += share;
      ++grids;
    }
  }
  CHECK(grids > 50);
  CHECK(sum / grids > 0.98);
}
