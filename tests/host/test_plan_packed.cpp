// Plans of packed calls: the sequence table, whose lists of tiles are only known on the device.
#include <random>
#include <string>

#include "check.h"
#include "fixtures.h"
#include "host/normalize_window.h"
#include "host/plan.h"
#include "host/plan_steps.h"
#include "no_driver.h"
#include "shared/sequence/sequence.h"

using namespace host_tests;

namespace {

constexpr AttentionShape batch_of_8{.batch_size = 8,
                                    .seqlen_q = 10'000,
                                    .seqlen_k = 12'000,
                                    .num_heads_q = 16,
                                    .num_heads_k = 4,
                                    .head_dim = 128,
                                    .head_dim_v = 128};

ForwardPlan forward(const ForwardParams& params, const DeviceInfo& device = h200) {
  return plan_forward(params, device, complete_forward_table());
}

BackwardPlan backward(const BackwardParams& params, const DeviceInfo& device = h200) {
  return plan_backward(params, device, backward_table());
}

// Tiles that `lengths` fill, each its own.
std::int64_t tiles_of(const std::vector<int>& lengths, int rows_per_row, int tile_rows) {
  std::int64_t tiles = 0;
  for (const int length : lengths)
    tiles += ceil_div(std::int64_t{length} * rows_per_row, std::int64_t{tile_rows});
  return tiles;
}

// A causal call of `rows` in one sequence for each 1,024. longest: what the host is told, or 0.
template <class Params>
Params causal_batch(int rows, int heads_q, int heads_k, int head_dim, int longest) {
  AttentionShape shape = batch_of_8;
  shape.batch_size = rows / 1024;
  shape.seqlen_q = shape.seqlen_k = rows;
  shape.num_heads_q = heads_q;
  shape.num_heads_k = heads_k;
  shape.head_dim = shape.head_dim_v = head_dim;
  auto params = with_tensors(packed_call<Params>(shape, causal));
  params.sequences.max_seqlen_q = params.sequences.max_seqlen_k = longest;
  return params;
}

// Runs visit(lengths) over every way to share `rows` out to `parts` sequences.
template <class Visit>
void for_each_sharing(int rows, int parts, std::vector<int>& lengths, Visit visit) {
  if (parts == 1) {
    lengths.push_back(rows);
    visit(lengths);
    lengths.pop_back();
    return;
  }
  for (int length = 0; length <= rows; ++length) {
    lengths.push_back(length);
    for_each_sharing(rows - length, parts - 1, lengths, visit);
    lengths.pop_back();
  }
}

// The most tiles that any sharing fills.
std::int64_t most_tiles(int rows, int parts, int rows_per_row, int tile_rows) {
  std::int64_t most = 0;
  std::vector<int> lengths;
  for_each_sharing(rows, parts, lengths, [&](const std::vector<int>& shared) {
    most = std::max(most, tiles_of(shared, rows_per_row, tile_rows));
  });
  return most;
}

}  // namespace

std::span<const ForwardInstance* const> flash_attn_cuda::forward_instances() {
  return complete_forward_table();
}
std::span<const BackwardInstance* const> flash_attn_cuda::backward_instances() {
  return backward_table();
}

TEST(every_batch_of_lengths_fits_the_list_of_tiles) {
  for (const int batch_size : {0, 1, 2}) {
    for (int rows = 0; rows <= 12; ++rows) {
      for (const int rows_per_row : {1, 3}) {
        for (const int tile_rows : {1, 2, 4, 5, 16}) {
          const AttentionShape shape{.batch_size = batch_size};
          const int one_batch = checked_tiles(rows, rows_per_row, tile_rows);
          const int planned = most_packed_tiles(shape, one_batch, rows);
          // The rows before the first sequence and behind the last one are two more.
          const std::int64_t most =
              most_tiles(rows, batch_size + gap_sequences, rows_per_row, tile_rows);
          CHECK(most <= planned);
          CHECK(planned <= most + batch_size + gap_sequences);
        }
      }
    }
  }
}

TEST(random_batches_fit_the_lists_of_both_passes) {
  std::mt19937 random(20);
  for (int round = 0; round < 500; ++round) {
    std::vector<int> lengths(1 + random() % 40);
    const int longest = 1 << random() % 12;
    int total = 0;
    for (int& length : lengths) total += length = static_cast<int>(random() % longest);
    AttentionShape shape = batch_of_8;
    shape.batch_size = static_cast<int>(lengths.size()) - gap_sequences;
    if (shape.batch_size < 0) continue;
    shape.seqlen_q = shape.seqlen_k = total;
    shape.num_heads_q = shape.num_heads_k * (1 << random() % 3);
    auto params = packed_call<ForwardParams>(shape);
    params.sequences.max_seqlen_q = random() % 2 ? 1 : 0;
    const ForwardPlan plan = forward(params);
    const SequenceTablePlan& table = plan.table;
    CHECK(tiles_of(lengths, table.rows_per_query, table.tile_rows) <= table.tiles.count);
    const SequenceTablePlan keys = backward(packed_call<BackwardParams>(shape)).table;
    CHECK(tiles_of(lengths, 1, keys.tile_rows) <= keys.tiles.count);
    CHECK(tiles_of(lengths, 1, keys.q_tile_rows) <= keys.q_tiles.count);
  }
}

TEST(dense_calls_need_no_table) {
  CHECK(!forward(call<ForwardParams>(batch_of_8)).table.used());
  CHECK_EQ(forward(call<ForwardParams>(batch_of_8)).workspace_bytes, std::size_t{0});
  CHECK(!backward(call<BackwardParams>(batch_of_8)).table.used());
  auto with_lengths = call<ForwardParams>(batch_of_8);
  with_lengths.sequences.seqused_q = with_lengths.sequences.seqused_k = &some_int;
  CHECK(!forward(with_lengths).table.used());
}

TEST(the_forwards_grid_is_the_list_for_every_head) {
  const ForwardPlan plan = forward(packed_call<ForwardParams>(batch_of_8));
  CHECK_EQ(std::string(plan.instance->name), "hd128");
  CHECK(plan.table.used());
  CHECK_EQ(plan.table.tiles.count, 79 + 10);  // ceil(10000 / 128), 8 sequences and 2 gaps
  CHECK_EQ(plan.table.tile_rows, 128);
  CHECK_EQ(plan.table.rows_per_query, 1);
  CHECK_EQ(plan.table.q_tiles.count, 0);
  CHECK_EQ(plan.schedule.num_tiles, plan.table.tiles.count);
  CHECK_EQ(plan.schedule.num_heads, 16);
  CHECK_EQ(plan.schedule.num_batch_heads, 16);
}

TEST(decode_tiles_of_packed_queries_hold_several_heads) {
  auto params = packed_call<ForwardParams>(batch_of_8);
  params.shape.seqlen_q = 11;
  params.sequences.max_seqlen_q = 4;
  const ForwardPlan plan = forward(params);
  CHECK_EQ(std::string(plan.instance->name), "hd128_decode");
  CHECK_EQ(plan.table.tiles.count, 3 + 10);  // ceil(11 * 4 / 16)
  CHECK_EQ(plan.table.tile_rows, 16);
  CHECK_EQ(plan.table.rows_per_query, 4);
  CHECK_EQ(plan.schedule.num_heads, 4);
}

TEST(the_backwards_lists_are_of_keys_and_of_queries) {
  const BackwardPlan plan = backward(packed_call<BackwardParams>(batch_of_8));
  CHECK_EQ(plan.table.tiles.count, 94 + 10);     // ceil(12000 / 128)
  CHECK_EQ(plan.table.q_tiles.count, 157 + 10);  // ceil(10000 / 64)
  CHECK_EQ(plan.table.tile_rows, 128);
  CHECK_EQ(plan.table.q_tile_rows, 64);
  CHECK_EQ(plan.table.rows_per_query, 1);
  CHECK_EQ(plan.q_tiles, plan.table.q_tiles.count);
  CHECK_EQ(plan.schedule.num_tiles, plan.table.tiles.count);
  CHECK_EQ(plan.schedule.num_batch_heads, 4 * plan.dkdv_splits);
}

TEST(the_list_has_the_order_that_a_dense_schedule_would_have) {
  const auto forward_descends = [](Window window) {
    const ForwardPlan plan = forward(packed_call<ForwardParams>(batch_of_8, window));
    CHECK(!plan.schedule.longest_first);  // the list is in order already
    return plan.table.tiles_descend;
  };
  CHECK(!forward_descends({}));
  CHECK(forward_descends(causal));
  CHECK(!forward_descends({.left = 100, .right = Window::unbounded}));
  const auto backward_descends = [](Window window) {
    const BackwardPlan plan = backward(packed_call<BackwardParams>(batch_of_8, window));
    CHECK(!plan.schedule.longest_first);
    CHECK_EQ(plan.tiles_descend, plan.table.tiles_descend);
    return plan.table.tiles_descend;
  };
  CHECK(!backward_descends({}));
  CHECK(!backward_descends(causal));
  CHECK(backward_descends({.left = 100, .right = Window::unbounded}));
}

TEST(sections_of_a_packed_backward_hold_wide_rows_or_what_short_sequences_leave_in_l2) {
  const auto section = [](int heads, int head_dim, int longest, bool deterministic = false,
                          bool has_lists = false, const DeviceInfo& device = h200) {
    auto params = causal_batch<BackwardParams>(32'768, heads, heads, head_dim, longest);
    params.deterministic = deterministic;
    if (has_lists) {
      params.sparsity.lists = {.data = &some_int, .tiles = 256, .others = 256};
    }
    return plan_backward(params, device, sm90_backward_table()).schedule.heads_per_section;
  };
  // 512 bytes of a row.
  CHECK_EQ(section(32, 64, 0), 4);
  CHECK_EQ(section(16, 128, 0), 2);
  CHECK_EQ(section(8, 256, 0), 1);
  CHECK_EQ(section(32, 64, 32'768), 4);
  // A 16th of L2 is 3.1 MiB: 25 heads of 256 rows of 512 bytes, 6 of 1,024, where 8 divide 32.
  CHECK_EQ(section(32, 64, 256), 32);
  CHECK_EQ(section(32, 64, 1024), 8);
  CHECK_EQ(section(16, 128, 256), 16);
  CHECK_EQ(section(16, 128, 1024), 4);  // 3 would do
  // 8 tiles of a head at a time.
  CHECK_EQ(section(32, 64, 0, true), 16);
  CHECK_EQ(section(8, 256, 0, true), 8);
  CHECK_EQ(section(32, 64, 0, false, true), 1);
  // Kernels without CTAs that stay.
  CHECK_EQ(section(32, 64, 256, false, false, a100), 1);
}

TEST(sections_of_grouped_heads_in_a_packed_backward_are_of_key_heads_and_of_all_their_parts) {
  const auto plan_of = [](int heads_k, int longest) {
    const auto params = causal_batch<BackwardParams>(8192, 32, heads_k, 128, longest);
    return plan_backward(params, h200, sm90_backward_table());
  };
  // 2 tiles for each of 132 SMs are 4 key heads of 74. Of 4 query heads of 128 rows, 512 KiB, 6
  // fit.
  CHECK_EQ(plan_of(8, 0).dkdv_splits, 1);
  CHECK_EQ(plan_of(8, 0).schedule.heads_per_section, 4);
  CHECK_EQ(plan_of(8, 128).schedule.heads_per_section, 8);
  // Parts of the query heads of one key head stay together.
  const BackwardPlan shared = plan_of(1, 0);
  CHECK(shared.dkdv_splits > 1);
  CHECK_EQ(shared.schedule.heads_per_section, shared.dkdv_splits);
}

TEST(sections_of_a_packed_forward_hold_as_many_short_sequences_as_a_part_of_l2) {
  const auto section = [](int longest, const DeviceInfo& device = h200) {
    const auto params = causal_batch<ForwardParams>(32'768, 16, 16, 128, longest);
    return plan_forward(params, device, sm90_forward_table()).schedule.heads_per_section;
  };
  // 8 tiles for each of 132 SMs are 4 heads of 290 tiles.
  CHECK_EQ(section(0), 4);
  CHECK_EQ(section(32'768), 4);
  // An eighth of L2 is 6.25 MiB: 50 heads of 256 keys, 12 of 1,024, where all 16 are the next.
  CHECK_EQ(section(256), 16);
  CHECK_EQ(section(1024), 16);
  CHECK_EQ(section(2048), 8);  // 6 would do
  CHECK_EQ(section(256, a100), section(0, a100));
}

TEST(the_mask_is_judged_by_bounds_of_the_lengths) {
  // One query in all, so that no sequence has two: causal hides nothing.
  AttentionShape shape = batch_of_8;
  shape.seqlen_q = 1;
  const InstanceList<ForwardInstance> both({forward_instance("full", 128, MaskKind::full),
                                            forward_instance("windowed", 128, MaskKind::windowed)});
  const auto chosen = [&](int seqlen_q) {
    shape.seqlen_q = seqlen_q;
    const auto params = packed_call<ForwardParams>(shape, causal);
    return std::string(plan_forward(params, h200, both).instance->name);
  };
  CHECK_EQ(chosen(1), "full");
  CHECK_EQ(chosen(2), "windowed");
}

TEST(with_an_origin_every_bound_may_hide_keys_and_nothing_else_of_a_plan_changes) {
  static const int origin[4] = {};
  constexpr int no_bound = most_bound_with_origin + 1;
  const InstanceList<ForwardInstance> both({forward_instance("full", 128, MaskKind::full),
                                            forward_instance("windowed", 128, MaskKind::windowed)});
  for (const int bound : {0, 1, 11'999, 12'000, most_bound_with_origin, no_bound}) {
    auto params = packed_call<ForwardParams>(batch_of_8);
    auto gradients = packed_call<BackwardParams>(batch_of_8);
    params.window = gradients.window = {.left = bound, .right = bound};
    params.sequences.origin = gradients.sequences.origin = origin;
    const std::string name = plan_forward(params, h200, both).instance->name;
    CHECK_EQ(name, bound == no_bound ? "full" : "windowed");
    const std::size_t bytes = backward(gradients).workspace_bytes;
    gradients.sequences.origin = nullptr;
    gradients.window = bound == no_bound ? Window{} : Window{.left = 5, .right = 5};
    CHECK_EQ(backward(gradients).workspace_bytes, bytes);
  }
}

TEST(calls_that_have_no_origin_are_refused_with_one) {
  static const int origin[4] = {};
  ForwardParams dense;
  dense.shape = batch_of_8;
  dense.sequences.origin = origin;
  CHECK_ERROR(forward(dense), "must be given with origin");
  auto paged = packed_call<ForwardParams>(batch_of_8);
  paged.sequences.origin = origin;
  paged.paged.block_table = origin;
  CHECK_ERROR(forward(paged), "origin must be null");
  auto long_one = packed_call<BackwardParams>(batch_of_8);
  long_one.sequences.origin = origin;
  long_one.shape.seqlen_k = max_seqlen_with_origin + 1;
  CHECK_ERROR(backward(long_one), "seqlen_k with origin must be from 0 to");
}

TEST(workspace_buffers_of_a_packed_backward_do_not_overlap) {
  for (const int batch_size : {0, 1, 7, 1000}) {
    for (const int total : {0, 1, 1000, 10'001}) {
      for (const bool deterministic : {false, true}) {
        auto params = packed_call<BackwardParams>(batch_of_8);
        params.shape.batch_size = batch_size;
        params.shape.seqlen_q = params.shape.seqlen_k = total;
        params.shape.head_dim = params.shape.head_dim_v = 40;
        params.deterministic = deterministic;
        const BackwardPlan plan = backward(params);
        const BackwardConfig& config = plan.instance->config;
        const std::size_t query_tiles = std::size_t{16} * plan.q_tiles;
        const std::size_t rows = query_tiles * config.block_m;
        std::vector<Bytes> buffers{bytes_of_table(plan.table), bytes_of_buffer(plan.lse_log2, rows),
                                   bytes_of_buffer(plan.softmax_d, rows),
                                   bytes_of_buffer(plan.dq_accum, rows * config.head_dim),
                                   bytes_of_buffer(plan.tickets, 2)};
        if (deterministic) buffers.push_back(bytes_of_buffer(plan.additions, query_tiles));
        if (plan.dkdv_splits > 1) {
          const std::size_t partial = std::size_t{4} * total * config.head_dim * plan.dkdv_splits;
          buffers.push_back(bytes_of_buffer(plan.dk_partial, partial));
          buffers.push_back(bytes_of_buffer(plan.dv_partial, partial));
        }
        check_workspace(buffers, plan.workspace_bytes);
      }
    }
  }
}

TEST(the_table_is_laid_out_within_its_bytes) {
  const SequenceTablePlan plan = backward(packed_call<BackwardParams>(batch_of_8)).table;
  alignas(256) static char workspace[1 << 16];
  const auto [begin, bytes] = bytes_of_table(plan);
  CHECK(begin + bytes <= sizeof(workspace));
  const SequenceTable table = SequenceTable::at(workspace, plan);
  const auto offset = [](const void* data) {
    return static_cast<std::size_t>(static_cast<const char*>(data) - workspace);
  };
  CHECK_EQ(offset(table.counts), begin);
  CHECK(offset(table.sequences) >= offset(table.counts + 2));
  CHECK_EQ(offset(table.sequences) % alignof(Sequence), std::size_t{0});
  CHECK_EQ(offset(table.tiles), offset(table.sequences + 8 + gap_sequences));
  CHECK_EQ(offset(table.tiles) % alignof(TileEntry), std::size_t{0});
  CHECK_EQ(offset(table.q_tiles), offset(table.tiles + plan.tiles.count));
  CHECK_EQ(offset(table.q_tiles + plan.q_tiles.count), begin + bytes);
  CHECK(SequenceTable::at(workspace, {}).counts == nullptr);
}

TEST(empty_packed_calls_keep_the_grids_that_have_zeros_to_write) {
  auto params = packed_call<BackwardParams>(batch_of_8);
  params.shape.seqlen_q = 0;
  BackwardPlan plan = backward(params);
  CHECK_EQ(plan.q_tiles, 0);
  CHECK(plan.schedule.grid_size() > 0);  // dk = dv = 0
  CHECK_EQ(plan.dkdv_splits, 1);
  params.shape.seqlen_q = 1000;
  params.shape.seqlen_k = 0;
  plan = backward(params);
  CHECK_EQ(plan.schedule.grid_size(), 0);
  CHECK(plan.q_tiles > 0);      // dq = 0
  params.shape.batch_size = 0;  // rows that belong to no sequence
  CHECK(backward(params).q_tiles > 0);

  auto no_queries = packed_call<ForwardParams>(batch_of_8);
  no_queries.shape.seqlen_q = 0;
  CHECK_EQ(forward(no_queries).schedule.grid_size(), 0);
  auto no_sequences = packed_call<ForwardParams>(batch_of_8);
  no_sequences.shape.batch_size = 0;
  CHECK(forward(no_sequences).schedule.grid_size() > 0);  // out = 0
}

TEST(lists_beyond_the_grid_are_refused) {
  AttentionShape shape = batch_of_8;
  shape.num_heads_q = shape.num_heads_k = 1;
  shape.batch_size = 2'147'483'647;
  shape.seqlen_q = max_seqlen;  // each row a sequence of its own
  auto params = packed_call<ForwardParams>(shape);
  CHECK_EQ(forward(params).table.tiles.count, 7'812'500 + max_seqlen);
  params.shape.num_heads_q = params.shape.num_heads_k = 3;
  CHECK_ERROR(forward(params),
              "batch_size * heads * tiles must be at most 2147483647, got 1 * 3 * 1007812500");
  params.shape.num_heads_q = 3 * 64;  // rows of a decode tile: 64 to a query
  params.sequences.max_seqlen_q = 1;
  params.split.batch_invariant = true;
  const std::string rule =
      "rows of queries and of the heads that share a key head must be at most ";
  CHECK_ERROR(forward(params), rule + "2147483631, got 1000000000 * 64");
  params.shape.num_heads_q = 3 * 2;
  params.sequences.max_seqlen_k = 1;
  CHECK_ERROR(forward(params), "batch_size * heads * tiles must be at most 2147483647");
  params.shape.num_heads_q = params.shape.num_heads_k = 1;
  CHECK_EQ(forward(params).table.tiles.count, 62'500'000 + max_seqlen);
}
