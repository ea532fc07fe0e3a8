// Where a sequence's rows and keys lie, against the definitions of flash_attn/params.h: lengths
// from device memory with everything that can be wrong about them, tiles of work, and pages.
#include "shared/sequence/sequence.h"

#include <algorithm>
#include <array>
#include <iterator>
#include <numeric>
#include <random>
#include <set>
#include <tuple>

#include "check.h"
#include "fixtures.h"
#include "shared/schedule/tile_work.h"
#include "shared/sequence/key_list.h"
#include "shared/sequence/listed_queries.h"
#include "shared/sequence/paged_kv.h"

using namespace host_tests;

namespace {

constexpr AttentionShape shape_of_4 = sizes(4, 10, 100, 6, 2, 64);

bool operator==(const DeviceErrors& a, const DeviceErrors& b) {
  return std::tie(a.check, a.index, a.value, a.limit) ==
         std::tie(b.check, b.index, b.value, b.limit);
}

DeviceErrors error(DeviceCheck check, int index, int value, int limit) {
  return {static_cast<int>(check), index, value, limit};
}

// read_sequence and what it reported.
struct Reading {
  Sequence sequence;
  DeviceErrors errors{};
};

Reading read(const SequenceParams& params, int index, const AttentionShape& shape = shape_of_4) {
  Reading reading;
  reading.sequence = read_sequence(params, shape, index, &reading.errors);
  const Sequence unreported = read_sequence(params, shape, index, nullptr);
  CHECK_EQ(unreported.seqlen_k, reading.sequence.seqlen_k);
  return reading;
}

}  // namespace

// Lengths

TEST(without_lengths_a_sequence_is_what_the_shape_says) {
  for (int index = 0; index < 4; ++index) {
    const auto [sequence, errors] = read({}, index);
    CHECK_EQ(sequence.index, index);
    CHECK_EQ(sequence.batch_q, index);
    CHECK_EQ(sequence.batch_k, index);
    CHECK_EQ(sequence.row_q, 0);
    CHECK_EQ(sequence.row_k, 0);
    CHECK_EQ(sequence.seqlen_q, 10);
    CHECK_EQ(sequence.rows_q, 10);
    CHECK_EQ(sequence.seqlen_k, 100);
    CHECK_EQ(sequence.rows_k, 100);
    CHECK_EQ(sequence.shift, 90);
    CHECK_EQ(sequence.stream, index * shape_of_4.num_heads_q);
    CHECK_EQ(sequence.first_q, 0);
    CHECK_EQ(sequence.first_k, 0);
    CHECK_EQ(errors.check, 0);
  }
}

TEST(an_origin_is_clamped_and_places_that_are_no_multiples_are_reported) {
  constexpr int min_int = -2'147'483'647 - 1, max_int = 2'147'483'647;
  const int origin[] = {7, 32, 48, -5, -3, 17, -16, min_int, 0, max_int, 0, max_int};
  const auto read_part = [&](int index, bool drops) {
    Reading reading{.sequence = sequence_of_shape(shape_of_4, index)};
    read_origin(origin, drops, index, &reading.errors, reading.sequence);
    return reading;
  };
  for (const bool drops : {false, true}) {
    const auto [sequence, errors] = read_part(0, drops);
    CHECK_EQ(sequence.stream, 7);
    CHECK_EQ(sequence.first_q, drops ? 32 : 0);
    CHECK_EQ(sequence.first_k, drops ? 48 : 0);
    CHECK_EQ(sequence.shift, -5);
    CHECK_EQ(sequence.seqlen_q, 10);
    CHECK_EQ(errors.check, 0);
  }
  const auto [wrong, errors] = read_part(1, true);
  CHECK_EQ(wrong.stream, -3);
  CHECK_EQ(wrong.first_q, 16);
  CHECK_EQ(wrong.first_k, 0);
  CHECK_EQ(wrong.shift, -most_shift);
  CHECK(errors == error(DeviceCheck::origin, 1, 17, origin_step));
  CHECK_EQ(read_part(1, false).errors.check, 0);
  CHECK_EQ(read_part(2, true).sequence.first_q, most_first);
  CHECK_EQ(read_part(2, true).sequence.shift, most_shift);
}

TEST(used_lengths_shorten_what_attends_and_nothing_else) {
  const int seqused_q[] = {0, 3, 10, 10}, seqused_k[] = {100, 0, 7, 100};
  const SequenceParams params{.seqused_q = seqused_q, .seqused_k = seqused_k};
  for (int index = 0; index < 4; ++index) {
    const auto [sequence, errors] = read(params, index);
    CHECK_EQ(sequence.seqlen_q, seqused_q[index]);
    CHECK_EQ(sequence.seqlen_k, seqused_k[index]);
    CHECK_EQ(sequence.rows_q, 10);
    CHECK_EQ(sequence.rows_k, 100);
    CHECK_EQ(errors.check, 0);
  }
}

TEST(left_padding_lies_before_the_first_key_and_counts_as_used) {
  const int seqused_k[] = {60, 60, 60, 60}, leftpad_k[] = {0, 20, 60, 59};
  const SequenceParams params{.seqused_k = seqused_k, .leftpad_k = leftpad_k};
  for (int index = 0; index < 4; ++index) {
    const auto [sequence, errors] = read(params, index);
    CHECK_EQ(sequence.row_k, leftpad_k[index]);
    CHECK_EQ(sequence.seqlen_k, 60 - leftpad_k[index]);
    CHECK_EQ(sequence.rows_k, 100 - leftpad_k[index]);
    CHECK_EQ(errors.check, 0);
  }
}

TEST(appended_keys_are_there) {
  const int seqused_k[] = {0, 60, 95, 100};
  SequenceParams params{.seqused_k = seqused_k, .seqlen_k_new = 5};
  CHECK_EQ(read(params, 0).sequence.seqlen_k, 5);
  CHECK_EQ(read(params, 1).sequence.seqlen_k, 65);
  CHECK_EQ(read(params, 2).sequence.seqlen_k, 100);
  CHECK_EQ(read(params, 2).errors.check, 0);
  CHECK_EQ(read(params, 3).sequence.seqlen_k, 100);
  CHECK(read(params, 3).errors == error(DeviceCheck::append_capacity, 3, 100, 100));
  const int cu_seqlens_k_new[] = {0, 4, 4, 9, 8};
  params = {.seqused_k = seqused_k, .cu_seqlens_k_new = cu_seqlens_k_new};
  CHECK_EQ(read(params, 0).sequence.seqlen_k, 4);
  CHECK_EQ(read(params, 1).sequence.seqlen_k, 60);
  CHECK_EQ(read(params, 2).sequence.seqlen_k, 100);
  CHECK_EQ(read(params, 3).sequence.seqlen_k, 100);  // fewer than none are none
}

TEST(a_sequence_may_read_another_batch_entry) {
  const int kv_batch_idx[] = {6, 0, 7, -1};
  SequenceParams params{.kv_batch_idx = kv_batch_idx, .num_kv_batches = 7};
  CHECK_EQ(read(params, 0).sequence.batch_k, 6);
  CHECK_EQ(read(params, 0).sequence.batch_q, 0);
  CHECK_EQ(read(params, 0).sequence.index, 0);
  CHECK_EQ(read(params, 1).sequence.batch_k, 0);
  CHECK_EQ(read(params, 1).sequence.seqlen_k, 100);
  for (const int index : {2, 3}) {  // no such entry, no keys, and an entry that exists
    const auto [sequence, errors] = read(params, index);
    CHECK_EQ(sequence.seqlen_k, 0);
    CHECK_EQ(sequence.batch_k, 0);
    CHECK(errors == error(DeviceCheck::cache_batch_idx, index, kv_batch_idx[index], 6));
  }
  params.num_kv_batches = 0;  // as many as sequences
  CHECK(read(params, 0).errors == error(DeviceCheck::cache_batch_idx, 0, 6, 3));
}

TEST(values_out_of_range_are_clamped_and_the_first_is_reported) {
  constexpr int least = -2'147'483'647 - 1, most = 2'147'483'647;
  std::mt19937 random(7);
  const auto value = [&](int limit) {
    const int edges[] = {least, -1, 0, 1, limit - 1, limit, limit + 1, most};
    return random() % 2 ? edges[random() % 8] : static_cast<int>(random() % (limit + 1));
  };
  const auto clamped = [](std::int64_t x, std::int64_t limit) {
    return static_cast<int>(std::max<std::int64_t>(0, std::min(x, limit)));
  };
  for (int round = 0; round < 50'000; ++round) {
    const int used_q = value(10), used_k = value(100), pad = value(100), batch = value(8);
    const SequenceParams params{.seqused_q = &used_q,
                                .seqused_k = &used_k,
                                .leftpad_k = &pad,
                                .kv_batch_idx = &batch,
                                .seqlen_k_new = static_cast<int>(random() % 20),
                                .num_kv_batches = 8};
    const auto [sequence, errors] = read(params, 0);

    std::vector<DeviceErrors> wrong;
    if (used_q < 0 || used_q > 10) wrong.push_back(error(DeviceCheck::seqused_q, 0, used_q, 10));
    if (used_k < 0 || used_k > 100) wrong.push_back(error(DeviceCheck::seqused_k, 0, used_k, 100));
    const int before = clamped(used_k, 100);
    if (before + params.seqlen_k_new > 100)
      wrong.push_back(error(DeviceCheck::append_capacity, 0, before, 100));
    const int used = clamped(before + params.seqlen_k_new, 100);
    if (pad < 0 || pad > used) wrong.push_back(error(DeviceCheck::leftpad_k, 0, pad, used));
    const bool is_entry = batch >= 0 && batch < 8;
    if (!is_entry) wrong.push_back(error(DeviceCheck::cache_batch_idx, 0, batch, 7));

    CHECK_EQ(errors.check != 0, !wrong.empty());
    if (!wrong.empty()) CHECK(errors == wrong.front());
    CHECK_EQ(sequence.seqlen_q, clamped(used_q, 10));
    CHECK_EQ(sequence.row_k, clamped(pad, used));
    CHECK_EQ(sequence.seqlen_k, is_entry ? used - clamped(pad, used) : 0);
    CHECK_EQ(sequence.batch_k, is_entry ? batch : 0);
    CHECK(sequence.row_k + sequence.seqlen_k <= 100);
    CHECK_EQ(sequence.row_k + sequence.rows_k, 100);
  }
}

TEST(a_record_keeps_the_first_error) {
  DeviceErrors errors{};
  report(&errors, DeviceCheck::block_table, 1, 2, 3);
  report(&errors, DeviceCheck::leftpad_k, 4, 5, 6);
  CHECK(errors == error(DeviceCheck::block_table, 1, 2, 3));
  report(nullptr, DeviceCheck::leftpad_k, 4, 5, 6);
}

// Tiles

TEST(dense_work_covers_every_tile_of_every_head) {
  const int seqused_k[] = {1, 2, 3, 4};
  auto params = call<ForwardParams>(shape_of_4);
  params.sequences.seqused_k = seqused_k;
  const TileSchedule schedule{
      .num_tiles = 3, .num_heads = 6, .num_batch_heads = 24, .heads_per_section = 4};
  std::set<std::tuple<int, int, int>> seen;
  for (int block = 0; block < schedule.grid_size(); ++block) {
    TileWork work;
    CHECK(find_work(schedule, SequenceTable{}, params, block, work));
    CHECK_EQ(work.sequence.seqlen_k, seqused_k[work.sequence.index]);
    seen.insert({work.sequence.index, work.head, work.tile});
  }
  CHECK_EQ(seen.size(), std::size_t{4 * 6 * 3});
  std::set<std::pair<int, int>> query_tiles;
  for (int index = 0; index < 4 * 3; ++index) {
    QueryTile work;
    CHECK(find_query_tile(SequenceTable{}, params, 3, index, work));
    CHECK_EQ(work.sequence.index * 3 + work.tile, index);
    query_tiles.insert({work.sequence.index, work.tile});
  }
  CHECK_EQ(query_tiles.size(), std::size_t{12});
}

TEST(packed_work_is_what_the_lists_say_and_ends_with_them) {
  std::vector<Sequence> sequences(3);
  for (int index = 0; index < 3; ++index) sequences[index].index = index;
  const TileEntry tiles[] = {{2, 0}, {2, 1}, {0, 0}};
  const TileEntry q_tiles[] = {{0, 0}, {2, 0}};
  const int counts[] = {3, 2};
  const SequenceTable table{
      .counts = counts, .sequences = sequences.data(), .tiles = tiles, .q_tiles = q_tiles};
  const TileSchedule schedule{
      .num_tiles = 5, .num_heads = 3, .num_batch_heads = 3, .heads_per_section = 2};
  const auto params = call<ForwardParams>(shape_of_4);
  std::set<std::pair<int, int>> found;  // entries and heads
  for (int block = 0; block < schedule.grid_size(); ++block) {
    TileWork work;
    CHECK_EQ(find_work(schedule, table, params, block, work), block < 3 * 3);
    if (block >= 3 * 3) continue;
    const auto* entry =
        std::find_if(std::begin(tiles), std::end(tiles), [&](const TileEntry& tile) {
          return tile.sequence == work.sequence.index && tile.tile == work.tile;
        });
    CHECK(entry != std::end(tiles));
    found.insert({static_cast<int>(entry - tiles), work.head});
    // Sections of two heads and of one, each of which ends with the list.
    CHECK_EQ(work.head < 2, block < 3 * 2);
  }
  CHECK_EQ(found.size(), std::size_t{3 * 3});
  QueryTile work;
  CHECK(find_query_tile(table, params, 0, 1, work));
  CHECK_EQ(work.sequence.index, 2);
  CHECK(!find_query_tile(table, params, 0, 2, work));
}

TEST(an_empty_list_has_no_packed_work) {
  const int counts[] = {0, 0};
  const TileSchedule schedule{
      .num_tiles = 5, .num_heads = 3, .num_batch_heads = 3, .heads_per_section = 2};
  const auto params = call<ForwardParams>(shape_of_4);
  for (int block = 0; block < schedule.grid_size(); ++block) {
    TileWork work;
    CHECK(!find_work(schedule, SequenceTable{.counts = counts}, params, block, work));
  }
}

// Pages

TEST(a_divider_divides) {
  constexpr int most = 2'147'483'647;
  std::mt19937 random(8);
  const auto check = [](int dividend, int divisor) {
    const Divider divider = Divider::by(divisor);
    CHECK_EQ(divider.quotient(dividend), dividend / divisor);
    CHECK_EQ(divider.remainder(dividend), dividend % divisor);
  };
  for (int divisor = 1; divisor <= 300; ++divisor) {
    for (int dividend = 0; dividend <= 2000; ++dividend) check(dividend, divisor);
  }
  for (int round = 0; round < 200'000; ++round) {
    const int divisor = 1 + static_cast<int>((random() >> random() % 31) % most);
    const int dividend = static_cast<int>((random() >> random() % 31) & most);
    check(dividend, divisor);
    check(most, divisor);
    const int multiple = dividend / divisor * divisor;  // where a quotient could be one off
    check(multiple, divisor);
    if (multiple > 0) check(multiple - 1, divisor);
  }
  check(most, most);
  check(most - 1, most);
}

TEST(rows_of_a_dense_cache_follow_each_other) {
  Sequence sequence{};
  sequence.batch_k = 3;
  sequence.row_k = 5;
  const KeyRows rows = KeyRows::of({}, sequence);
  CHECK(!rows.is_paged());
  const TensorView view{.batch_stride = 1'000'000'000'000, .row_stride = 640, .head_stride = 64};
  const KeyPlace place = rows.find(7, nullptr);
  CHECK(place.exists());
  CHECK_EQ(place.batch, 3);
  CHECK_EQ(place.row, 12);
  CHECK_EQ(place.offset(view, 2), std::int64_t{3'000'000'000'000 + 12 * 640 + 2 * 64});
}

TEST(rows_of_a_paged_cache_are_where_the_table_says) {
  std::mt19937 random(9);
  for (int round = 0; round < 300; ++round) {
    const int page_size = 1 + static_cast<int>(random() % 40);
    const int max_pages = 1 + static_cast<int>(random() % 20);
    const int num_pages = 1 + static_cast<int>(random() % 50);
    const int stride = max_pages + static_cast<int>(random() % 3);
    std::vector<int> table(std::size_t(4) * stride);
    for (int& page : table) page = static_cast<int>(random() % (num_pages + 2)) - 1;
    const PagedKvParams paged{.block_table = table.data(),
                              .table_stride = stride,
                              .max_pages = max_pages,
                              .page_size = page_size,
                              .num_pages = num_pages};
    Sequence sequence{};
    sequence.batch_k = static_cast<int>(random() % 4);
    sequence.row_k = static_cast<int>(random() % page_size);
    const KeyRows rows = KeyRows::of(paged, sequence);
    CHECK(rows.is_paged());
    const TensorView view{.batch_stride = 1 << 20, .row_stride = 128, .head_stride = 64};
    for (int key = 0; key < page_size * max_pages; ++key) {
      const int row = sequence.row_k + key;
      DeviceErrors errors{};
      const KeyPlace place = rows.find(key, &errors);
      const bool is_within = row / page_size < max_pages;
      const int page = is_within ? table[sequence.batch_k * stride + row / page_size] : -1;
      const bool exists = page >= 0 && page < num_pages;
      CHECK_EQ(place.exists(), exists);
      CHECK_EQ(rows.has(key), exists);
      if (exists) {
        CHECK_EQ(errors.check, 0);
        CHECK_EQ(place.batch, page);
        CHECK_EQ(place.row, row % page_size);
        const auto offset = std::int64_t{page} * (1 << 20) + row % page_size * 128 + 64;
        CHECK_EQ(place.offset(view, 1), offset);
      } else {
        CHECK(errors == error(DeviceCheck::block_table, sequence.batch_k, page, num_pages - 1));
      }
    }
  }
}

TEST(boxes_of_a_tile_lie_in_one_page_each) {
  std::mt19937 random(10);
  const int table[] = {3, 0, -2, 6, 2, 9, 1, 5};
  for (const int page_size : {8, 24, 64, 128, 1000}) {
    const PagedKvParams paged{.block_table = table,
                              .table_stride = 8,
                              .max_pages = 8,
                              .page_size = page_size,
                              .num_pages = 7};
    const KeyRows rows = KeyRows::of(paged, Sequence{});
    for (const int tile_rows : {64, 128}) {
      const int box_rows = std::gcd(page_size, tile_rows);
      for (int round = 0; round < 50; ++round) {
        const int seqlen_k = 1 + static_cast<int>(random() % (8 * page_size));
        const int tile = static_cast<int>(random() % (1 + (seqlen_k - 1) / tile_rows));
        for (int index = 0; index < tile_rows / box_rows; ++index) {
          const int key = tile * tile_rows + index * box_rows;
          DeviceErrors errors{};
          const PageBox box = find_box(rows, index, box_rows, tile * tile_rows, seqlen_k, &errors);
          const bool has_keys = key < seqlen_k;
          const int first = has_keys ? key : seqlen_k - 1;
          const int page = table[first / page_size];
          CHECK_EQ(box.rows, has_keys ? std::min(box_rows, seqlen_k - key) : 1);
          CHECK_EQ(box.place.exists(), page >= 0 && page < 7);
          CHECK_EQ(errors.check != 0, !box.place.exists());
          if (!box.place.exists()) continue;
          CHECK_EQ(box.place.batch, page);
          CHECK_EQ(box.place.row, first % page_size);
          CHECK(box.place.row + box.rows <= page_size);
        }
      }
    }
  }
}

TEST(a_key_that_is_nowhere_has_no_address) {
  const int table[] = {1, -4};
  const PagedKvParams paged{
      .block_table = table, .table_stride = 2, .max_pages = 2, .page_size = 2, .num_pages = 2};
  const KeyRows rows = KeyRows::of(paged, Sequence{});
  short pool[2 * 2 * 8] = {};
  const TensorView view{.data = pool, .batch_stride = 16, .row_stride = 8, .head_stride = 8};
  CHECK_EQ(rows.row<short>(view, 0, 1, nullptr) - pool, std::ptrdiff_t{16 + 8});
  CHECK(rows.row<short>(view, 0, 2, nullptr) == nullptr);
  CHECK(rows.row<short>(view, 0, 4, nullptr) == nullptr);  // beyond the table
}

// Lists of keys

TEST(a_list_is_that_of_a_query_and_a_head_and_hides_what_the_query_does_not_see) {
  constexpr int min_int = -2'147'483'647 - 1, max_int = 2'147'483'647;
  const int entries[4 * 10 * 2 * 3] = {};
  ForwardParams params;
  params.window = {.left = 20, .right = 0};
  params.key_lists = {
      .data = const_cast<int*>(entries), .batch_stride = 60, .row_stride = 6, .head_stride = 3};
  Sequence sequence = sequence_of_shape(shape_of_4, 2);
  sequence.row_q = 1;
  sequence.seqlen_q = 9;
  CHECK(KeyList::of(params, sequence, 4, 1).entries == nullptr);
  params.keys_per_list = 3;
  const KeyList list = KeyList::of(params, sequence, 4, 1);
  CHECK_EQ(list.entries - entries, 2 * 60 + 5 * 6 + 3);
  CHECK_EQ(list.count, 3);
  CHECK_EQ(KeyList::of(params, sequence, 9, 1).count, 0);
  // Query 4 stands at key 94.
  for (const int entry : {min_int, -1, 0, 73, 74, 94, 95, 99, 100, max_int}) {
    DeviceErrors errors{};
    CHECK_EQ(list.key_of(entry, &errors), entry >= 74 && entry <= 94 ? entry : KeyList::none);
    CHECK(errors == (entry < 100 ? DeviceErrors{} : error(DeviceCheck::key_lists, 2, entry, 99)));
  }
}

TEST(an_entry_of_a_list_of_blocks_is_a_block_of_the_sequences_keys) {
  constexpr int min_int = -2'147'483'647 - 1, max_int = 2'147'483'647;
  const ListedBlocks blocks = ListedBlocks::of(16);
  KeyList list;
  list.seqlen_k = 70;
  for (const int place : {0, 15, 16, 37, 159}) {
    CHECK_EQ(blocks.entry_of(place), place / 16);
    for (const int entry : {min_int, -2, -1, 0, 4, 5, 1 << 28, max_int}) {
      const int key = entry * std::int64_t{16} + place % 16;
      const bool is_block = entry >= 0 && entry < 5;
      CHECK_EQ(blocks.key_at(list, entry, place), is_block ? key : KeyList::none);
      if (is_block) continue;
      DeviceErrors errors{};
      blocks.tell(list, entry, 3, &errors);
      const bool is_none = entry == -1;
      CHECK(errors == (is_none ? DeviceErrors{} : error(DeviceCheck::key_lists, 3, entry, 4)));
    }
  }
  CHECK_EQ(ListedBlocks::of(1).key_at(list, 69, 5), 69);
  list.seqlen_k = 0;
  CHECK_EQ(blocks.key_at(list, 0, 0), KeyList::none);
}

TEST(of_some_keys_in_a_row_those_are_seen_that_a_reach_holds) {
  for (const int first : {0, 16, 100})
    for (const int begin : {0, 5, 17, 130})
      for (const int end : {0, 16, 20, 31, 117, 200})
        for (const int count : {16, 32}) {
          const Reach visible{.begin = begin, .end = end};
          unsigned expected = 0;
          for (int i = 0; i < count; ++i) expected |= unsigned{visible.holds(first + i)} << i;
          CHECK_EQ(seen_keys(visible, first, count), expected);
        }
}

TEST(a_place_of_listed_queries_is_a_head_and_a_block_of_a_sequence) {
  BackwardParams params;
  params.shape = sizes(4, 130, 300, 2, 2, 64);
  params.listed.key_rows = 4 * 300;
  params.listed.block = 64;
  const ListedBlock dense = listed_block(params, {}, 3, 1200 + 2 * 300 + 128);
  CHECK_EQ(dense.head, 1);
  CHECK_EQ(dense.sequence.batch_k, 2);
  CHECK_EQ(dense.sequence.first_q_tile, 6);
  CHECK_EQ(dense.key_begin, 128);
  // Packed sequences of 65, 0, 0 and 70 keys, in a table.
  Sequence sequences[4];
  for (int i = 0, row = 0; i < 4; ++i) {
    sequences[i] = sequence_of_shape(params.shape, i);
    sequences[i].row_k = row;
    row += sequences[i].seqlen_k = std::array{65, 0, 0, 70}[i];
  }
  const int counts[2] = {};
  SequenceTable table;
  table.counts = counts;
  table.sequences = sequences;
  params.listed.key_rows = 135;
  for (const auto [row, index, key] :
       {std::array{0, 0, 0}, std::array{64, 0, 64}, std::array{65, 3, 0}, std::array{129, 3, 64}}) {
    const ListedBlock found = listed_block(params, table, 0, 135 + row);
    CHECK_EQ(found.sequence.index, index);
    CHECK_EQ(found.key_begin, key);
    CHECK_EQ(found.head, 1);
  }
  CHECK(listed_block(params, table, 0, 66).key_begin < 0);
}
