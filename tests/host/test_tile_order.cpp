// The order in which tiles are worked on, each of them once: those of lists, whatever the lists
// hold, and those of CTAs that stay and go through a grid, in rounds, forth and back, or by
// drawing, none of which has much more work than the others.
#include <algorithm>
#include <limits>
#include <numeric>
#include <queue>
#include <random>
#include <set>
#include <vector>

#include "check.h"
#include "fixtures.h"
#include "host/plan_steps.h"
#include "shared/mask/block_lists.h"
#include "shared/schedule/tile_parts.h"
#include "shared/schedule/tile_work.h"

using namespace host_tests;

namespace {

// Lists of `order.size()` tiles without visits.
std::vector<int> ordered_rows(const std::vector<int>& order) {
  std::vector<int> rows;
  for (const int tile : order) rows.insert(rows.end(), {0, tile});
  return rows;
}

ForwardParams params_of(const std::vector<int>& rows) {
  ForwardParams params;
  params.sparsity.lists = {.data = rows.data(),
                           .batch_stride = 0,
                           .head_stride = 0,
                           .tiles = static_cast<int>(rows.size() / 2),
                           .others = 0};
  return params;
}

// That every tile of a length is worked on, those of the lists' first rows first.
template <int kTile>
void check_order(int seqlen, std::mt19937& random) {
  std::vector<int> order(ceil_div(seqlen, list_tile));
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), random);
  const std::vector<int> rows = ordered_rows(order);
  ForwardParams params = params_of(rows);
  params.shape.seqlen_q = params.shape.seqlen_k = seqlen;
  const int tiles = ceil_div(seqlen, kTile);
  std::set<int> seen;
  for (int rank = 0; rank < tiles; ++rank) {
    const int tile = ranked_tile<kTile>(params, {}, 0, 0, rank);
    CHECK(tile >= 0 && tile < tiles);
    seen.insert(tile);
    if (rank * kTile % list_tile == 0)
      CHECK_EQ(tile * kTile / list_tile, order[rank * kTile / list_tile]);
  }
  CHECK_EQ(static_cast<int>(seen.size()), tiles);
}

}  // namespace

TEST(every_tile_is_worked_on_once_the_longest_lists_first) {
  std::mt19937 random(4);
  for (int round = 0; round < 20; ++round) {
    for (const int seqlen :
         {1, 32, 33, 64, 65, 96, 128, 129, 150, 192, 193, 256, 257, 640, 700, 1000}) {
      check_order<128>(seqlen, random);
      check_order<64>(seqlen, random);
      check_order<32>(seqlen, random);
    }
  }
}

TEST(sequences_and_heads_have_orders_of_their_own) {
  const std::vector<int> rows = ordered_rows({0, 1, 1, 0, 1, 0, 0, 1});  // (2, 2, 2)
  ForwardParams params = params_of(rows);
  params.shape.seqlen_q = params.shape.seqlen_k = 2 * list_tile;
  params.sparsity.lists.tiles = 2;
  params.sparsity.lists.head_stride = 2 * 2;
  params.sparsity.lists.batch_stride = 2 * 2 * 2;
  for (int sequence = 0; sequence < 2; ++sequence) {
    for (int head = 0; head < 2; ++head) {
      for (int rank = 0; rank < 2; ++rank) {
        const bool is_reversed = sequence != head;
        CHECK_EQ(ranked_tile<128>(params, {}, sequence, head, rank), is_reversed ? 1 - rank : rank);
      }
    }
  }
}

TEST(elsewhere_the_grid_is_the_order) {
  const std::vector<int> rows = ordered_rows({2, 1, 0});
  const auto check_rank = [](const ForwardParams& params, const SequenceTable& table, int rank) {
    CHECK_EQ(ranked_tile<128>(params, table, 0, 0, rank), rank);
    CHECK_EQ(ranked_tile<64>(params, table, 0, 0, rank), rank);
  };
  ForwardParams params = params_of(rows);
  params.shape.seqlen_q = params.shape.seqlen_k = 3 * list_tile;
  CHECK_EQ(ranked_tile<128>(params, {}, 0, 0, 0), 2);
  const int counts[2] = {3, 0};
  check_rank(params, {.counts = counts}, 0);  // a packed call's table
  check_rank(params, {}, 6);                  // beyond the lists
  check_rank(params, {}, 1'000'000);
  for (const Window window : {causal, Window{.left = 5, .right = Window::unbounded}}) {
    params.window = window;
    check_rank(params, {}, 0);
  }
  check_rank(ForwardParams{}, {}, 2);  // without lists
}

TEST(an_order_of_anything_names_tiles_of_the_lists) {
  constexpr int tiles = 4;
  for (const int value :
       {std::numeric_limits<int>::min(), -1, 0, 3, 4, 1 << 30, std::numeric_limits<int>::max()}) {
    const std::vector<int> rows = ordered_rows(std::vector<int>(tiles, value));
    ForwardParams params = params_of(rows);
    params.shape.seqlen_q = params.shape.seqlen_k = tiles * list_tile;
    for (int rank = 0; rank < tiles; ++rank) {
      const int tile = ranked_tile<128>(params, {}, 0, 0, rank);
      CHECK(tile >= 0 && tile < tiles);
    }
    for (int rank = 0; rank < 2 * tiles; ++rank) {
      const int tile = ranked_tile<64>(params, {}, 0, 0, rank);
      CHECK(tile >= 0 && tile < 2 * tiles);
    }
    for (int rank = 0; rank < 4 * tiles; ++rank) {
      const int tile = ranked_tile<32>(params, {}, 0, 0, rank);
      CHECK(tile >= 0 && tile < 4 * tiles);
    }
  }
}

TEST(first_ranks_of_every_head_come_before_the_sections) {
  for (const int tiles : {1, 2, 31, 33, 128}) {
    for (const int heads : {1, 5, 16}) {
      for (const int per_section : {1, 2, 3, 16}) {
        if (per_section > heads) continue;
        const TileSchedule schedule{.num_tiles = tiles,
                                    .num_heads = heads,
                                    .num_batch_heads = heads,
                                    .heads_per_section = per_section};
        const int early_ranks = (tiles + 31) / 32;
        std::set<int> blocks;
        for (int position = 0; position < tiles * heads; ++position) {
          const int block = longest_first(schedule, position);
          CHECK(block >= 0 && block < tiles * heads);
          blocks.insert(block);
          const bool is_early = tile_coord(schedule, block).tile < early_ranks;
          CHECK_EQ(is_early, position < early_ranks * heads);
        }
        CHECK_EQ(static_cast<int>(blocks.size()), tiles * heads);
      }
    }
  }
}

TEST(tickets_are_the_parts_of_shared_tiles_and_all_other_tiles) {
  for (const int tiles : {1, 2, 63, 200}) {
    for (const int first : {0, 1, tiles / 2, tiles - 1}) {
      for (const int count : {1, tiles / 3, tiles - first}) {
        for (int parts = 1; parts <= 8; ++parts) {
          if (first + count > tiles) continue;
          const SharedTiles shared{.first = first, .count = count, .parts = parts};
          std::set<std::pair<int, int>> seen;
          std::set<int> places;
          const std::int64_t tickets = tiles + shared.more_tickets();
          for (int ticket = 0; ticket < tickets; ++ticket) {
            const TilePart part = TilePart::of(shared, ticket);
            CHECK(part.position >= 0 && part.position < tiles);
            const bool is_shared = part.position >= first && part.position < first + count;
            CHECK_EQ(part.is_one_of_several, parts > 1 && is_shared);
            CHECK(part.part >= 0 && part.part < (part.is_one_of_several ? parts : 1));
            if (part.is_one_of_several) {
              CHECK_EQ(TilePart::of(shared, ticket - part.part).position, part.position);
              const int place = part.first_place + part.part;
              CHECK(place >= 0 && place < shared.places());
              CHECK(places.insert(place).second);
            }
            seen.insert({part.position, part.part});
          }
          CHECK_EQ(static_cast<std::int64_t>(seen.size()), tickets);
        }
      }
    }
  }
}

TEST(parts_of_first_ranks_are_those_of_the_longest_tiles) {
  for (const int tiles : {1, 2, 63, 65, 128}) {
    for (const int heads : {1, 5, 16}) {
      const TileSchedule schedule{
          .num_tiles = tiles, .num_heads = heads, .num_batch_heads = heads, .heads_per_section = 1};
      const SharedTiles shared{.first = 0, .count = ranks_in_parts(schedule) * heads, .parts = 4};
      for (int ticket = 0; ticket < tiles * heads + shared.more_tickets(); ++ticket) {
        const TilePart part = TilePart::of(shared, ticket);
        const int rank = tile_coord(schedule, longest_first(schedule, part.position)).tile;
        CHECK_EQ(part.is_one_of_several, rank < (tiles + 63) / 64);
      }
    }
  }
}

TEST(parts_of_a_tile_have_all_of_its_steps_and_none_twice) {
  for (const int steps : {0, 1, 31, 32, 63, 64, 65, 127, 256, 1 << 24}) {
    for (const int least : {1, 5, 32, 300}) {
      const int parts = parts_of_steps(steps, least, 4);
      CHECK(parts >= 1 && parts <= 4);
      CHECK(parts == 1 || steps / parts >= least);
      CHECK_EQ(first_step_of_part(steps, 0, parts), 0);
      CHECK_EQ(first_step_of_part(steps, parts, parts), steps);
      for (int part = 0; part < parts; ++part) {
        const int count =
            first_step_of_part(steps, part + 1, parts) - first_step_of_part(steps, part, parts);
        CHECK(count >= (steps == 0 ? 0 : 1));
      }
      int shares = 0;
      for (int part = 0; part < parts; ++part) shares += share_of_part(part, parts, 4);
      CHECK_EQ(shares, 4);
    }
  }
  CHECK_EQ(parts_of_steps(256, 32, 4), 4);
  CHECK_EQ(parts_of_steps(256, 32, 2), 2);
  CHECK_EQ(parts_of_steps(256, 128, 4), 2);
  CHECK_EQ(parts_of_steps(63, 32, 4), 1);
  CHECK_EQ(parts_of_steps(3, 1, 8), 3);
}

// Rounds

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
