// Which blocks tiles visit, against the lists' definition in flash_attn/params.h, and what contents
// that are not lists make of it.
#include "shared/mask/block_lists.h"

#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <limits>
#include <random>
#include <vector>

#include "check.h"
#include "fixtures.h"
#include "host/normalize_window.h"
#include "host/plan_steps.h"

using namespace host_tests;

namespace {

// Made-up lists and the visits they stand for.
struct Listing {
  int batches;  // 1: those of every sequence
  int heads;
  int tiles;
  int others;
  std::vector<unsigned> pieces;  // (batches, heads, tiles, others), 0: not visited
  std::vector<int> data;

  Listing(int batches, int heads, int tiles, int others, std::mt19937& random)
      : batches(batches), heads(heads), tiles(tiles), others(others) {
    const unsigned sparsity = random() % 4;
    for (int row = 0; row < batches * heads * tiles; ++row) {
      std::vector<int> entries;
      for (int other = 0; other < others; ++other) {
        pieces.push_back(random() % 4 < sparsity ? 0 : 1 + random() % 255);
        if (pieces.back() != 0) entries.push_back(other * 256 + static_cast<int>(pieces.back()));
      }
      data.push_back(static_cast<int>(entries.size()));
      data.push_back(0);  // the order, which is for ranked_tile
      entries.resize(others);
      data.insert(data.end(), entries.begin(), entries.end());
    }
  }

  BlockLists lists() const {
    const std::int64_t head = std::int64_t{tiles} * (2 + others);
    return {.data = data.data(),
            .batch_stride = batches == 1 ? 0 : heads * head,
            .head_stride = heads == 1 ? 0 : head,
            .tiles = tiles,
            .others = others};
  }

  // Of a tile, or of one beyond the lists.
  unsigned visit(int sequence, int head, int tile, int other) const {
    if (tile >= tiles || other >= others) return 0;
    const int list = (batches == 1 ? 0 : sequence) * heads + (heads == 1 ? 0 : head);
    return pieces[(std::size_t(list) * tiles + tile) * others + other];
  }

  // What a tile visits of a range of blocks.
  std::vector<Visit> visits(int sequence, int head, int tile, const BlockRange& range,
                            int block_size) const {
    std::vector<Visit> found;
    for (int block = range.begin; block < range.end; ++block) {
      const unsigned states = visit(sequence, head, tile, block * block_size / list_tile);
      if (states != 0) found.push_back({.block = block, .pieces = {states}});
    }
    return found;
  }
};

void check_visit(const Visit& actual, const Visit& expected) {
  CHECK_EQ(actual.block, expected.block);
  CHECK_EQ(actual.pieces.states, expected.pieces.states);
}

template <int kBlock>
void check_list(const Listing& listing, int sequence, int head, int tile, const BlockRange& range) {
  const auto list = BlockList<kBlock>::of(listing.lists(), sequence, head, tile, range);
  const auto expected = listing.visits(sequence, head, tile, range, kBlock);
  CHECK_EQ(list.end - list.begin, static_cast<int>(expected.size()));
  CHECK_EQ(list.empty(), expected.empty());
  if (list.end - list.begin != static_cast<int>(expected.size())) return;
  for (int i = 0; i < list.end - list.begin; ++i) check_visit(list.at(list.begin + i), expected[i]);

  SparseVisits<kBlock> visits{};
  BlockRange positions = range;
  visits.find(listing.lists(), sequence, head, tile, positions);
  CHECK_EQ(positions.begin, list.begin);
  CHECK_EQ(positions.end, list.end);
  for (int i = 0; i < list.end - list.begin; ++i) {
    const Visit visit = visits.at(true, list.begin + i, positions);
    check_visit(visit, expected[i]);
    CHECK_EQ(visits.is_interior(true, visit.block, positions), range.is_interior(visit.block));
  }
}

// Of a call without lists.
template <class Visits>
void check_all_visited(const BlockRange& range) {
  Visits visits{};
  BlockRange positions = range;
  visits.find(BlockLists{}, 0, 0, 0, positions);
  CHECK_EQ(positions.begin, range.begin);
  CHECK_EQ(positions.end, range.end);
  for (int block = range.begin; block < std::min(range.end, range.begin + 8); ++block) {
    CHECK_EQ(visits.at(false, block, positions).block, block);
    CHECK_EQ(visits.is_interior(false, block, positions), range.is_interior(block));
  }
}

// The steps of a key tile, head by head.
template <int kBlock>
void check_heads(const Listing& listing, int sequence, int tile, const BlockRange& range,
                 int first_head, int end_head) {
  const BlockLists lists = listing.lists();
  const HeadVisits<kBlock> visits{
      .lists = lists, .sequence = sequence, .tile = tile, .range = range, .end_head = end_head};
  int steps = 0;
  auto step = visits.first(first_head);
  for (int head = first_head; head < end_head; ++head) {
    for (const Visit& expected : listing.visits(sequence, head, tile, range, kBlock)) {
      CHECK_EQ(step.head, head);
      if (step.head != head) return;
      check_visit(step.visit, expected);
      const auto behind_others = visits.first(first_head, steps);
      CHECK_EQ(behind_others.head, head);
      CHECK_EQ(behind_others.position, step.position);
      CHECK_EQ(behind_others.end, step.end);
      check_visit(behind_others.visit, expected);
      step = visits.next(step);
      ++steps;
    }
  }
  CHECK_EQ(step.head, end_head);
  CHECK_EQ(visits.count(first_head), steps);
  CHECK_EQ(visits.first(first_head, steps).head, end_head);
}

struct Call {
  int seqlen_q;
  int seqlen_k;
  Window window;
};

Call random_call(std::mt19937& random) {
  const auto bound = [&] {
    constexpr int bounds[] = {Window::unbounded, Window::unbounded, 0, 1, 63, 64, 127, 300};
    return bounds[random() % std::size(bounds)];
  };
  const AttentionShape shape = sizes(1, 1 + static_cast<int>(random() % 800),
                                     1 + static_cast<int>(random() % 800), 1, 1, 64);
  return {.seqlen_q = shape.seqlen_q,
          .seqlen_k = shape.seqlen_k,
          .window = normalize_window({.left = bound(), .right = bound()}, shape)};
}

// Lists for sequences of this length, for longer ones, or for one that was said to be shorter.
int random_tiles(int seqlen, std::mt19937& random) {
  const int tiles = ceil_div(seqlen, list_tile);
  switch (random() % 4) {
    case 0:
      return tiles + static_cast<int>(random() % 3);
    case 1:
      return 1 + static_cast<int>(random() % tiles);
    default:
      return tiles;
  }
}

constexpr int sequences = 3;
constexpr int heads = 4;

Listing random_listing(int tiles, int others, std::mt19937& random) {
  return Listing(random() % 2 ? sequences : 1, random() % 2 ? heads : 1, tiles, others, random);
}

template <int kTile, int kBlock>
void check_forward(const Call& call, const Listing& listing) {
  const Band band = band_from_queries(call.window, call.seqlen_k - call.seqlen_q);
  for (int first = 0; first < call.seqlen_q; first += kTile) {
    const int last = std::min(first + kTile, call.seqlen_q) - 1;
    const BlockRange range = block_range(band, first, last, call.seqlen_k, kBlock);
    for (int sequence = 0; sequence < sequences; ++sequence) {
      for (int head = 0; head < heads; ++head)
        check_list<kBlock>(listing, sequence, head, first / list_tile, range);
    }
  }
}

template <int kTile, int kBlock>
void check_backward(const Call& call, const Listing& listing) {
  const Band band = band_from_keys(call.window, call.seqlen_k - call.seqlen_q);
  for (int first = 0; first < call.seqlen_k; first += kTile) {
    const int last = std::min(first + kTile, call.seqlen_k) - 1;
    const BlockRange range = block_range(band, first, last, call.seqlen_q, kBlock);
    for (int sequence = 0; sequence < sequences; ++sequence) {
      for (const int first_head : {0, 1, 2}) {
        for (const int end_head : {first_head + 1, heads})
          check_heads<kBlock>(listing, sequence, first / list_tile, range, first_head, end_head);
      }
    }
  }
}

// What a window may leave, also of blocks that the lists do not have.
constexpr BlockRange some_ranges[] = {
    {.begin = 0, .end = 0, .interior_begin = 0, .interior_end = 0},
    {.begin = 0, .end = 1, .interior_begin = 0, .interior_end = 1},
    {.begin = 0, .end = 4, .interior_begin = 0, .interior_end = 4},
    {.begin = 0, .end = 8, .interior_begin = 0, .interior_end = 8},
    {.begin = 1, .end = 3, .interior_begin = 1, .interior_end = 2},
    {.begin = 3, .end = 7, .interior_begin = 4, .interior_end = 6},
    {.begin = 5, .end = 1000, .interior_begin = 5, .interior_end = 1000},
    {.begin = 500, .end = 1000, .interior_begin = 500, .interior_end = 1000}};

TEST(without_lists_a_tile_visits_its_range) {
  for (const BlockRange& range : some_ranges) {
    check_all_visited<AllVisits>(range);
    check_all_visited<SparseVisits<64>>(range);
  }
}

// Rows of anything at all, and no element around them: what is computed below is computed while
// compiling, where a read outside an array is an error.
template <int kHeads, int kOthers>
struct Garbage {
  static constexpr int row_size = 2 + kOthers;
  std::array<int, kHeads * row_size> data{};
  std::uint32_t state;

  constexpr int random() {
    state = state * 1'664'525u + 1'013'904'223u;
    return static_cast<int>(state ^ state >> 15);
  }
  constexpr explicit Garbage(std::uint32_t seed) : state(seed) {
    constexpr int extremes[] = {std::numeric_limits<int>::min(),
                                std::numeric_limits<int>::max(),
                                -1,
                                kOthers,
                                kOthers + 1,
                                1 << 30};
    for (int& value : data) {
      switch (random() & 3) {
        case 0:
          value = extremes[static_cast<unsigned>(random()) % std::size(extremes)];
          break;
        case 1:
          value = random() & 0xfff;  // tiles that could be, out of order
          break;
        default:
          value = random();
      }
    }
  }
  constexpr BlockLists lists() const {
    return {.data = data.data(),
            .batch_stride = 0,
            .head_stride = kHeads == 1 ? 0 : row_size,
            .tiles = 1,
            .others = kOthers};
  }
};

template <int kBlock>
constexpr bool is_within(int block, const BlockRange& range, const BlockLists& lists) {
  return block >= range.begin && block < range.end &&
         block < lists.others * BlockList<kBlock>::blocks_per_entry;
}

template <int kBlock, int kOthers>
constexpr bool list_stays_inside(std::uint32_t seed, const BlockRange& range) {
  const Garbage<1, kOthers> garbage(seed);
  const BlockLists lists = garbage.lists();
  const auto list = BlockList<kBlock>::of(lists, 0, 0, 0, range);
  if (list.begin < 0 || list.end > kOthers * BlockList<kBlock>::blocks_per_entry) return false;
  for (int position = list.begin; position < list.end; ++position) {
    if (!is_within<kBlock>(list.at(position).block, range, lists)) return false;
  }
  return BlockList<kBlock>::of(lists, 0, 0, 1, range).empty();
}

template <int kBlock, int kOthers>
constexpr bool heads_stay_inside(std::uint32_t seed, const BlockRange& range, int tile) {
  constexpr int end_head = 3;
  const Garbage<end_head, kOthers> garbage(seed);
  const BlockLists lists = garbage.lists();
  const HeadVisits<kBlock> visits{
      .lists = lists, .sequence = 0, .tile = tile, .range = range, .end_head = end_head};
  auto step = visits.first(0);
  for (int left = visits.count(0); left > 0; --left, step = visits.next(step)) {
    if (step.head < 0 || step.head >= end_head) return false;
    if (!is_within<kBlock>(step.visit.block, range, lists)) return false;
  }
  return step.head == end_head;
}

template <int kBlock, int kOthers>
constexpr bool all_stay_inside() {
  for (std::uint32_t seed = 0; seed < 40; ++seed) {
    for (const BlockRange& range : some_ranges) {
      if (!list_stays_inside<kBlock, kOthers>(seed, range)) return false;
      for (const int tile : {0, 1, 1'000'000}) {
        if (!heads_stay_inside<kBlock, kOthers>(seed, range, tile)) return false;
      }
    }
  }
  return true;
}

}  // namespace

// Lists

TEST(a_query_tile_visits_what_its_list_and_the_window_have) {
  std::mt19937 random(1);
  for (int round = 0; round < 300; ++round) {
    const Call call = random_call(random);
    const Listing listing = random_listing(random_tiles(call.seqlen_q, random),
                                           random_tiles(call.seqlen_k, random), random);
    check_forward<128, 128>(call, listing);
    check_forward<128, 64>(call, listing);
    check_forward<64, 64>(call, listing);
  }
}

TEST(a_key_tile_takes_the_steps_of_one_head_after_the_other) {
  std::mt19937 random(2);
  for (int round = 0; round < 200; ++round) {
    const Call call = random_call(random);
    const Listing listing = random_listing(random_tiles(call.seqlen_k, random),
                                           random_tiles(call.seqlen_q, random), random);
    check_backward<128, 128>(call, listing);
    check_backward<128, 64>(call, listing);
    check_backward<64, 64>(call, listing);
  }
}

TEST(lists_of_no_keys_and_of_unseen_sequences_are_empty) {
  std::mt19937 random(3);
  const BlockRange range = some_ranges[3];
  const Listing no_others(1, 1, 2, 0, random);
  CHECK(BlockList<64>::of(no_others.lists(), 0, 0, 1, range).empty());
  const Listing listing(1, 1, 2, 4, random);
  CHECK(BlockList<64>::of(listing.lists(), 0, 0, 1, some_ranges[0]).empty());
  CHECK(BlockList<64>::of(listing.lists(), 0, 0, 2, range).empty());
  // The sequences of a packed call's gaps attend to nothing, and have no lists.
  const Band full = band_from_queries({}, 500);
  const BlockRange of_no_queries = block_range(full, 0, -1, 500, 64);
  CHECK(BlockList<64>::of(listing.lists(), 1'000'000, 7, 0, of_no_queries).empty());
}

TEST(lists_beyond_2_gib_are_found) {
  // Memory whose last page alone exists.
  constexpr std::int64_t batch_stride = std::int64_t{1} << 30;
  constexpr std::size_t page = 1 << 16;
  constexpr std::size_t end = 3 * batch_stride * sizeof(int);
  void* mapped =
      mmap(nullptr, end + page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  CHECK(mapped != MAP_FAILED);
  if (mapped == MAP_FAILED) return;
  CHECK_EQ(mprotect(static_cast<char*>(mapped) + end, page, PROT_READ | PROT_WRITE), 0);
  int* data = static_cast<int*>(mapped);
  const int row[] = {1, 0, 2 * 256 + 1, 0, 0};
  std::copy(std::begin(row), std::end(row), data + 3 * batch_stride + 7 * std::size(row));
  const BlockLists lists{
      .data = data, .batch_stride = batch_stride, .head_stride = 0, .tiles = 8, .others = 3};
  const auto list = BlockList<128>::of(lists, 3, 5, 7, some_ranges[2]);
  CHECK_EQ(list.end - list.begin, 1);
  CHECK_EQ(list.at(list.begin).block, 2);
  munmap(mapped, end + page);
}

TEST(anything_else_stays_inside_the_row_and_the_range) {
  static_assert(all_stay_inside<128, 1>());
  static_assert(all_stay_inside<128, 5>());
  static_assert(all_stay_inside<64, 1>());
  static_assert(all_stay_inside<64, 4>());
  static_assert(all_stay_inside<64, 0>());
}

// Pieces

TEST(pieces_show_a_block_that_has_visible_ones_alone) {
  const auto check = []<int kQueries, int kKeys>(unsigned states) {
    const Pieces pieces{states};
    for (int query = 0; query < 2 * list_tile; query += kQueries) {
      for (int key = 0; key < 2 * list_tile; key += kKeys) {
        bool all = true;
        for (int i = query; i < query + kQueries; i += list_piece) {
          for (int j = key; j < key + kKeys; j += list_piece) {
            const unsigned piece = 2 * (i / list_piece % 2) + j / list_piece % 2;
            const unsigned state = states >> 2 * piece & 3;
            CHECK_EQ(static_cast<unsigned>(pieces.at(i / list_piece % 2, j / list_piece % 2)),
                     state);
            all = all && state == static_cast<unsigned>(PieceState::visible);
          }
        }
        const bool shown = pieces.template show_all<kQueries, kKeys>(query, key);
        CHECK_EQ(shown, all);
      }
    }
  };
  for (unsigned states = 0; states < 256; ++states) {
    check.operator()<128, 128>(states);
    check.operator()<128, 64>(states);
    check.operator()<64, 128>(states);
    check.operator()<64, 64>(states);
  }
}
