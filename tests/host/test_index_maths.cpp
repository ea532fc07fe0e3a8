// normalize_window, tile_coord and block_range against their definitions, pair by pair.
#include <algorithm>
#include <set>
#include <tuple>
#include <vector>

#include "check.h"
#include "fixtures.h"
#include "host/normalize_window.h"
#include "host/plan_steps.h"
#include "shared/mask/block_range.h"
#include "shared/schedule/tile_work.h"
#include "shared/sequence/sequence.h"

using namespace host_tests;

namespace {

constexpr int max_int = 2'147'483'647;

// How many pairs of a tile and a block the definition of a window shows.
enum class Visible { none, some, all };

template <class Sees>
Visible visibility(int own_first, int own_last, int other_first, int other_last, Sees sees) {
  int seen = 0;
  for (int own = own_first; own <= own_last; ++own) {
    for (int other = other_first; other <= other_last; ++other) seen += sees(own, other);
  }
  const int pairs = (own_last - own_first + 1) * (other_last - other_first + 1);
  return seen == 0 ? Visible::none : seen == pairs ? Visible::all : Visible::some;
}

// Every block of every tile: one outside the range shows nothing, one inside the interior hides
// nothing and is whole; the range is no longer than it has to be.
template <class Sees>
void check_ranges(const Band& band, int own_length, int other_length, int own_tile, int block,
                  Sees sees) {
  const int blocks = ceil_div(other_length, block);
  for (int first = 0; first < own_length; first += own_tile) {
    const int last = std::min(first + own_tile, own_length) - 1;
    const BlockRange range = block_range(band, first, last, other_length, block);
    CHECK(range.begin >= 0 && range.end <= blocks);
    CHECK(range.begin <= range.interior_begin && range.interior_begin <= range.interior_end);
    CHECK(range.interior_end <= range.end);
    for (int index = 0; index < blocks; ++index) {
      const int other_first = index * block;
      const int other_last = std::min(other_first + block, other_length) - 1;
      const Visible visible = visibility(first, last, other_first, other_last, sees);
      const bool is_inside = index >= range.begin && index < range.end;
      const bool is_whole = other_first + block <= other_length;
      CHECK(is_inside || visible == Visible::none);
      if (is_inside && (index == range.begin || index + 1 == range.end)) {
        CHECK(visible != Visible::none);
      }
      CHECK_EQ(range.is_interior(index), is_inside && is_whole && visible == Visible::all);
    }
  }
}

// Parts of a tile, of which the last may have no queries: they have a block each, theirs hold all
// that they see, and interior ones nothing hidden.
template <class Sees>
void check_parts(const Band& band, int own_length, int other_length, int own_tile, int parts,
                 int block, Sees sees) {
  const int own_part = own_tile / parts;
  for (int tile = 0; tile < own_length; tile += own_tile) {
    const int tile_last = std::min(tile + own_tile, own_length) - 1;
    const BlockRange whole = block_range(band, tile, tile_last, other_length, block);
    if (whole.empty()) continue;
    for (int first = tile; first < tile + own_tile; first += own_part) {
      const int last = std::min(first + own_part, own_length) - 1;
      const BlockRange own = own_range(band, first, last, other_length, block, whole);
      CHECK(own.begin >= whole.begin && own.begin < own.end && own.end <= whole.end);
      for (int index = whole.begin; index < whole.end; ++index) {
        const int other_first = index * block;
        const int other_last = std::min(other_first + block, other_length) - 1;
        const Visible visible =
            first > last ? Visible::none : visibility(first, last, other_first, other_last, sees);
        const bool is_inside = index >= own.begin && index < own.end;
        const bool is_whole = other_first + block <= other_length;
        CHECK(is_inside || visible == Visible::none);
        if (is_inside && own.end - own.begin > 1 && (index == own.begin || index + 1 == own.end))
          CHECK(visible != Visible::none);
        if (is_inside) CHECK_EQ(own.is_interior(index), is_whole && visible == Visible::all);
      }
    }
  }
}

TileSchedule schedule_of(int tiles, int batch, int heads, int per_section, bool longest_first) {
  return {.num_tiles = tiles,
          .num_heads = heads,
          .num_batch_heads = batch * heads,
          .heads_per_section = per_section,
          .longest_first = longest_first};
}

}  // namespace

TEST(every_block_id_names_one_tile_of_one_head) {
  for (const bool longest_first : {false, true}) {
    for (int tiles = 1; tiles <= 5; ++tiles) {
      for (int per_section = 1; per_section <= 7; ++per_section) {
        const TileSchedule schedule =
            schedule_of(tiles, 2, 3, std::min(per_section, 6), longest_first);
        std::set<std::tuple<int, int, int>> seen;
        for (int block = 0; block < schedule.grid_size(); ++block) {
          const TileCoord coord = tile_coord(schedule, block);
          CHECK(coord.tile >= 0 && coord.tile < tiles);
          CHECK(coord.head >= 0 && coord.head < 3);
          CHECK(coord.batch >= 0 && coord.batch < 2);
          seen.insert({coord.tile, coord.head, coord.batch});
        }
        CHECK_EQ(static_cast<std::int64_t>(seen.size()), schedule.grid_size());
      }
    }
  }
}

TEST(a_section_ends_before_the_next_begins_and_inside_it_tiles_come_in_order) {
  const TileSchedule schedule = schedule_of(4, 2, 3, 4, true);  // sections of heads 0..3 and 4..5
  int last_tile = 3;
  for (int block = 0; block < 24; ++block) {
    const TileCoord coord = tile_coord(schedule, block);
    const int batch_head = coord.batch * 3 + coord.head;
    CHECK_EQ(batch_head < 4, block < 16);
    if (block == 16) last_tile = 3;
    CHECK(coord.tile <= last_tile);
    last_tile = coord.tile;
  }
}

TEST(the_largest_grid_stays_within_int) {
  const TileSchedule schedule = schedule_of(1, 65'538, 32'767, 65'538 * 32'767, false);
  const TileCoord coord = tile_coord(schedule, static_cast<int>(schedule.grid_size() - 1));
  CHECK_EQ(coord.batch, 65'537);
  CHECK_EQ(coord.head, 32'766);
}

namespace {

// Every tile and block size of a call whose queries are `shift` keys further on.
void check_window(const Window& window, int shift, int seqlen_q, int seqlen_k) {
  const auto query_sees_key = [&](int query, int key) {
    const int diagonal = query + shift;
    return (window.left < 0 || key >= diagonal - window.left) &&
           (window.right < 0 || key <= diagonal + window.right);
  };
  const auto key_is_seen_by = [&](int key, int query) { return query_sees_key(query, key); };
  const Band from_queries = band_from_queries(window, shift);
  for (const auto& [tile, parts, block] :
       {std::tuple{4, 2, 2}, {4, 2, 1}, {6, 3, 4}, {6, 3, 1}, {6, 2, 2}}) {
    check_parts(from_queries, seqlen_q, seqlen_k, tile, parts, block, query_sees_key);
  }
  for (const auto& [tile, block] : {std::pair{4, 2}, {2, 4}, {4, 4}, {3, 5}}) {
    check_ranges(from_queries, seqlen_q, seqlen_k, tile, block, query_sees_key);
    check_ranges(band_from_keys(window, shift), seqlen_k, seqlen_q, tile, block, key_is_seen_by);
  }
}

}  // namespace

TEST(ranges_hold_what_is_visible_from_either_side) {
  const int bounds[] = {Window::unbounded, 0, 1, 3, 4, 9};
  static const int origin[4] = {};
  for (const int seqlen_q : {1, 3, 8, 13}) {
    for (const int seqlen_k : {1, 4, 7, 14}) {
      const AttentionShape shape = sizes(1, seqlen_q, seqlen_k, 1, 1, 64);
      for (const int left : bounds) {
        for (const int right : bounds) {
          const Window given{.left = left, .right = right};
          check_window(normalize_window(given, shape), seqlen_k - seqlen_q, seqlen_q, seqlen_k);
          const Window of_parts = normalize_window(given, shape, {.origin = origin});
          for (int shift = -26; shift <= 26; shift += 4)
            check_window(of_parts, shift, seqlen_q, seqlen_k);
        }
      }
    }
  }
}

TEST(a_tile_visits_every_block_of_its_range_once) {
  for (int begin = 0; begin < 4; ++begin) {
    for (int end = begin + 1; end < 9; ++end) {
      const BlockRange range{
          .begin = begin, .end = end, .interior_begin = begin, .interior_end = begin};
      for (int first = -2; first < 11; ++first) {
        const VisitOrder order = VisitOrder::from(range, first);
        const int held = std::clamp(first, begin, end - 1);
        std::vector<int> expected;
        for (int block = held; block >= begin; --block) expected.push_back(block);
        for (int block = held + 1; block < end; ++block) expected.push_back(block);
        std::vector<int> visited;
        for (int position = end - 1; position >= begin; --position)
          visited.push_back(order.block_at(position));
        CHECK(visited == expected);
      }
      for (int position = begin; position < end; ++position)
        CHECK_EQ(VisitOrder::downwards(range).block_at(position), position);
    }
  }
}

TEST(without_keys_the_range_is_empty) {
  const Band full = band_from_queries({}, -10);
  CHECK(block_range(full, 0, 9, 0, 64).empty());
}

TEST(the_longest_sequences_do_not_overflow) {
  const AttentionShape shape = sizes(1, max_seqlen, max_seqlen, 1, 1, 64);
  for (const int bound : {0, max_seqlen - 2, max_seqlen}) {
    for (const auto& [seqlen_q, seqlen_k] :
         {std::pair{max_seqlen, max_seqlen}, {1, max_seqlen}, {max_seqlen, 1}}) {
      AttentionShape lengths = shape;
      lengths.seqlen_q = seqlen_q;
      lengths.seqlen_k = seqlen_k;
      const Window window = normalize_window({.left = bound, .right = bound}, lengths);
      const BlockRange keys = block_range(band_from_queries(window, seqlen_k - seqlen_q),
                                          seqlen_q - 1, seqlen_q - 1, seqlen_k, 64);
      CHECK_EQ(keys.end, ceil_div(seqlen_k, 64));  // the last query sees the last key
      const BlockRange queries = block_range(band_from_keys(window, seqlen_k - seqlen_q),
                                             seqlen_k - 1, seqlen_k - 1, seqlen_q, 64);
      CHECK_EQ(queries.end, ceil_div(seqlen_q, 64));
    }
  }
}

TEST(no_shift_makes_positions_overflow) {
  const int longest = max_seqlen_with_origin;
  static const int origin[4] = {};
  const AttentionShape shape = sizes(1, longest, longest, 1, 1, 64);
  for (const int bound : {0, 1, most_bound_with_origin, most_bound_with_origin + 1, max_int}) {
    const Window window =
        normalize_window({.left = bound, .right = bound}, shape, {.origin = origin});
    CHECK_EQ(window.is_full(), bound > most_bound_with_origin);
    for (const int shift : {-most_shift, -longest, 0, longest, most_shift}) {
      for (const Band band : {band_from_queries(window, shift), band_from_keys(window, shift)}) {
        for (const int first : {0, longest - 64}) {
          const BlockRange range = block_range(band, first, first + 63, longest, 64);
          CHECK(range.begin >= 0 && range.end <= longest / 64);
          CHECK_EQ(range.empty(),
                   !window.is_full() &&
                       (shift == most_shift || shift == -most_shift || range.begin >= range.end));
        }
      }
    }
  }
}

// Windows

namespace {

AttentionShape lengths(int seqlen_q, int seqlen_k) {
  return sizes(1, seqlen_q, seqlen_k, 1, 1, 64);
}

bool is_visible(const Window& window, const AttentionShape& shape, int query, int key) {
  const std::int64_t diagonal = std::int64_t{query} + shape.seqlen_k - shape.seqlen_q;
  return (window.left < 0 || key >= diagonal - window.left) &&
         (window.right < 0 || key <= diagonal + window.right);
}

bool hides_nothing(const Window& window, const AttentionShape& shape) {
  for (int query = 0; query < shape.seqlen_q; ++query) {
    for (int key = 0; key < shape.seqlen_k; ++key) {
      if (!is_visible(window, shape, query, key)) return false;
    }
  }
  return true;
}

}  // namespace

TEST(keeps_every_visible_pair_and_calls_full_exactly_what_hides_nothing) {
  const int bounds[] = {-7, -1, 0, 1, 2, 3, 4, 5, 6, 7, 100, max_int};
  for (int seqlen_q = 0; seqlen_q <= 6; ++seqlen_q) {
    for (int seqlen_k = 0; seqlen_k <= 6; ++seqlen_k) {
      const AttentionShape shape = lengths(seqlen_q, seqlen_k);
      for (const int left : bounds) {
        for (const int right : bounds) {
          const Window given{.left = left, .right = right};
          const Window normal = normalize_window(given, shape);
          CHECK_EQ(normal.is_full(), hides_nothing(given, shape));
          for (int query = 0; query < seqlen_q; ++query) {
            for (int key = 0; key < seqlen_k; ++key) {
              CHECK_EQ(is_visible(normal, shape, query, key), is_visible(given, shape, query, key));
            }
          }
        }
      }
    }
  }
}

TEST(bounds_left_over_are_smaller_than_a_sequence) {
  const AttentionShape shape = lengths(1000, 3000);
  CHECK(normalize_window({.left = max_int, .right = max_int}, shape).is_full());
  CHECK_EQ(normalize_window({.left = 2998, .right = -1}, shape).left, 2998);
  CHECK_EQ(normalize_window({.left = 2999, .right = -1}, shape).left, Window::unbounded);
  CHECK_EQ(normalize_window({.left = -1, .right = 998}, shape).right, 998);
  CHECK_EQ(normalize_window({.left = -1, .right = 999}, shape).right, Window::unbounded);
}

TEST(under_a_tree_mask_blocks_of_own_keys_are_no_interior) {
  constexpr int block = 4;
  const AttentionShape shape = lengths(20, 40);  // of packed sequences
  for (const int seqlen_q : {1, 3, 8, 20}) {
    for (const int seqlen_k : {0, 1, 7, 8, 14, 40}) {
      for (const int left : {Window::unbounded, 0, 3, 9}) {
        const Window window = normalize_window({.left = left, .has_tree = true}, shape);
        CHECK(!window.is_full());
        const int shift = seqlen_k - seqlen_q;
        for (int first = 0; first < seqlen_q; first += 3) {
          const int last = std::min(first + 3, seqlen_q) - 1;
          const BlockRange range =
              block_range(band_from_queries(window, shift), first, last, seqlen_k, block);
          const BlockRange without =
              block_range(band_from_queries({.left = left}, shift), first, last, seqlen_k, block);
          CHECK_EQ(range.begin, without.begin);
          CHECK_EQ(range.end, without.end);
          for (int index = range.begin; index < range.end; ++index) {
            const bool has_own_keys = (index + 1) * block > shift;
            CHECK_EQ(range.is_interior(index), without.is_interior(index) && !has_own_keys);
          }
        }
      }
    }
  }
}

TEST(causal_with_one_query_is_full) {
  CHECK(normalize_window(causal, lengths(1, 4096)).is_full());
  CHECK(!normalize_window(causal, lengths(2, 1)).is_full());
}
