// Which forward calls the decode kernels take, and how many CTAs share a tile's keys.
#include <cstdint>
#include <string>
#include <tuple>

#include "check.h"
#include "fixtures.h"
#include "host/plan.h"
#include "host/plan_steps.h"
#include "no_driver.h"

using namespace host_tests;

namespace {

// One new query of each of 4 sequences, with 4 query heads for each of 8 key heads.
constexpr AttentionShape decoding = sizes(4, 1, 8192, 32, 8, 128);

ForwardParams cached_call(const AttentionShape& shape, Window window = {}) {
  auto params = call<ForwardParams>(shape, window);
  params.sequences.seqused_k = &some_int;
  return params;
}

ForwardPlan plan(const ForwardParams& params, const DeviceInfo& device = h200) {
  return plan_forward(params, device, complete_forward_table());
}

std::string chosen(const ForwardParams& params) { return plan(params).instance->name; }

template <class Change>
std::string chosen(const AttentionShape& shape, Change change) {
  auto params = call<ForwardParams>(shape);
  change(params);
  return chosen(params);
}

TensorView view_at(std::uintptr_t address, std::int64_t row_stride = 4096) {
  return {.data = reinterpret_cast<void*>(address),
          .batch_stride = 8 * row_stride,
          .row_stride = row_stride,
          .head_stride = 128};
}

}  // namespace

std::span<const ForwardInstance* const> flash_attn_cuda::forward_instances() {
  return complete_forward_table();
}

// Which kernel

TEST(few_rows_decode_and_more_where_there_is_a_cache) {
  const auto by_rows = [](int seqlen_q, auto change) {
    AttentionShape shape = decoding;  // 4 rows a query
    shape.seqlen_q = seqlen_q;
    return chosen(shape, change);
  };
  const auto nothing = [](auto&) {};
  CHECK_EQ(by_rows(4, nothing), "hd128_decode");
  CHECK_EQ(by_rows(5, nothing), "hd128");
  const auto with_lengths = [](auto& p) { p.sequences.seqused_k = &some_int; };
  CHECK_EQ(by_rows(16, with_lengths), "hd128_decode");
  CHECK_EQ(by_rows(17, with_lengths), "hd128");
  const auto with_pages = [](auto& p) { p.paged.block_table = &some_int; };
  CHECK_EQ(by_rows(16, with_pages), "hd128_decode");
  CHECK_EQ(by_rows(17, with_pages), "hd128_cache");
  const auto with_splits = [](auto& p) { p.split.num_splits = 0; };
  CHECK_EQ(by_rows(16, with_splits), "hd128_decode");
  CHECK_EQ(by_rows(17, with_splits), "hd128");
}

TEST(of_packed_queries_the_longest_decides_where_it_is_known) {
  AttentionShape shape = decoding;
  shape.seqlen_q = 400;  // in all
  auto params = packed_call<ForwardParams>(shape);
  CHECK_EQ(chosen(params), "hd128");
  params.sequences.max_seqlen_q = 4;
  CHECK_EQ(chosen(params), "hd128_decode");
  params.sequences.max_seqlen_q = 5;
  CHECK_EQ(chosen(params), "hd128");
}

TEST(features_choose_among_the_kernels_of_a_kind) {
  AttentionShape shape = decoding;
  for (const int seqlen_q : {1, 512}) {
    shape.seqlen_q = seqlen_q;
    const std::string decode = seqlen_q == 1 ? "hd128_decode" : "hd128_features";
    CHECK_EQ(chosen(shape, [](auto& p) { p.score.softcap = 20.0f; }), decode);
    CHECK_EQ(chosen(shape, [](auto& p) { p.score.alibi_slopes = &some_float; }), decode);
    const std::string cached = seqlen_q == 1 ? "hd128_decode" : "hd128_cache";
    CHECK_EQ(chosen(shape, [](auto& p) { p.paged.block_table = &some_int; }), cached);
    // Decode kernels drop nothing.
    CHECK_EQ(chosen(shape, [](auto& p) { p.dropout.threshold = 1; }), "hd128_features");
  }
}

TEST(without_a_decode_kernel_that_fits_the_others_take_the_call) {
  CHECK_EQ(std::string(plan_forward(cached_call(decoding), h200, forward_table()).instance->name),
           "hd128_full");
  DeviceInfo small = h200;
  small.smem_per_block = 64 * 1024;
  CHECK_EQ(std::string(plan(cached_call(decoding), small).instance->name), "hd128");
}

TEST(rows_off_16_byte_boundaries_decode_whatever_their_number) {
  AttentionShape shape = decoding;
  shape.seqlen_q = 512;
  auto aligned = call<ForwardParams>(shape);
  aligned.q = aligned.k = aligned.v = aligned.out = view_at(0x1000);
  CHECK_EQ(chosen(aligned), "hd128");
  CHECK(plan(aligned).has_vector_rows);
  for (TensorView ForwardParams::* view :
       {&ForwardParams::q, &ForwardParams::k, &ForwardParams::v, &ForwardParams::out}) {
    auto params = aligned;
    params.*view = view_at(0x1002);
    CHECK_EQ(chosen(params), "hd128_decode");
    CHECK(!plan(params).has_vector_rows);
    params.*view = view_at(0x1000, 4100);
    CHECK_EQ(chosen(params), "hd128_decode");
    // Dropout has no such kernel: better an error than a fault.
    params.dropout.threshold = 1;
    CHECK_ERROR(plan(params), "no compiled decode kernel covers");
    params.dropout.threshold = 0;
    CHECK_ERROR(plan_forward(params, h200, forward_table()), "no compiled decode kernel covers");
  }
}

TEST(any_head_dim_decodes) {
  AttentionShape shape = decoding;
  shape.seqlen_q = 512;
  for (const auto& [head_dim, name] : {std::pair{1, "hd64_decode"},
                                       {59, "hd64_decode"},
                                       {64, "hd64"},
                                       {65, "hd128_decode"},
                                       {127, "hd128_decode"},
                                       {128, "hd128"}}) {
    shape.head_dim = shape.head_dim_v = head_dim;
    CHECK_EQ(chosen(call<ForwardParams>(shape)), name);
  }
  shape.head_dim = shape.head_dim_v = 129;
  CHECK_ERROR(plan(call<ForwardParams>(shape)), "no compiled decode kernel");
}

TEST(a_batch_invariant_choice_does_not_look_at_the_batch) {
  AttentionShape shape = decoding;
  shape.seqlen_q = 4000;
  for (const int max_seqlen_q : {0, 1, 1000}) {
    auto packed = packed_call<ForwardParams>(shape);
    packed.split.batch_invariant = true;
    packed.sequences.max_seqlen_q = max_seqlen_q;
    CHECK_EQ(chosen(packed), "hd128_decode");
    CHECK_EQ(plan(packed).keys_per_split, 512);
  }
  auto dense = cached_call(shape);
  dense.split.batch_invariant = true;
  CHECK_EQ(chosen(dense), "hd128");
  CHECK_EQ(plan(dense).keys_per_split, 0);
}

TEST(decode_tiles_hold_the_heads_that_share_a_key_head) {
  for (const auto& [seqlen_q, group, tiles] :
       {std::tuple{1, 1, 1}, {1, 16, 1}, {1, 17, 2}, {3, 7, 2}, {16, 4, 4}, {17, 1, 2}}) {
    AttentionShape shape = decoding;
    shape.seqlen_q = seqlen_q;
    shape.num_heads_q = 8 * group;
    const ForwardPlan result = plan(cached_call(shape));
    CHECK_EQ(std::string(result.instance->name), "hd128_decode");
    CHECK_EQ(result.schedule.num_tiles, tiles);
    CHECK_EQ(result.schedule.num_heads, 8);
    CHECK_EQ(result.schedule.num_batch_heads, 32);
  }
}

// How many splits

TEST(without_the_feature_nothing_is_split) {
  auto params = cached_call(decoding);
  params.split.num_splits = 16;
  CHECK_EQ(plan_forward(params, h200, forward_table()).num_splits, 1);
  params.split.batch_invariant = true;
  CHECK_EQ(plan_forward(params, h200, forward_table()).num_splits, 1);
}

TEST(one_split_is_what_a_call_gets_unless_it_asks) {
  CHECK_EQ(plan(cached_call(decoding)).num_splits, 1);
  CHECK_EQ(plan(cached_call(decoding)).workspace_bytes, std::size_t{0});
}

TEST(a_given_number_is_taken_as_far_as_there_are_keys) {
  auto params = cached_call(decoding);  // 128 steps of 4 warps * 16 keys
  for (const auto& [asked, planned] : {std::pair{1, 1}, {3, 3}, {128, 128}, {129, 128}}) {
    params.split.num_splits = asked;
    CHECK_EQ(plan(params).num_splits, planned);
    CHECK_EQ(plan(params).keys_per_split, 0);
  }
  params.shape.seqlen_k = 1;
  CHECK_EQ(plan(params).num_splits, 1);
  params.shape.seqlen_k = 0;
  CHECK_EQ(plan(params).num_splits, 1);
  AttentionShape prefill = decoding;
  prefill.seqlen_q = 128;
  params = call<ForwardParams>(prefill);
  params.paged.block_table = &some_int;
  params.split.num_splits = 200;  // 128 blocks of 64 keys
  CHECK_EQ(std::string(plan(params).instance->name), "hd128_cache");
  CHECK_EQ(plan(params).num_splits, 128);
}

TEST(splits_make_the_busiest_sm_as_idle_as_can_be) {
  auto params = call<ForwardParams>(decoding);
  params.split.num_splits = 0;
  for (const auto& device : {h200, rtx4090}) {
    for (const int batch_size : {1, 2, 3, 8, 15, 33, 60, 200}) {
      for (const int seqlen_k : {1, 100, 1000, 8192, 100'000}) {
        params.shape.batch_size = batch_size;
        params.shape.seqlen_k = seqlen_k;
        const int tiles = 8 * batch_size;
        const int splits = plan(params, device).num_splits;
        const int steps = ceil_div(seqlen_k, 64);
        const int most = std::max(1, steps / 2);
        CHECK(splits >= 1 && splits <= most);
        // Of an SM's CTAs, each of which has its keys, and as much again as a step for its own ends
        const auto time = [&](int candidate) {
          return ceil_div(tiles * candidate, device.num_sms) * (ceil_div(steps, candidate) + 1);
        };
        int least = time(1);
        for (int more = 2; more <= most && more * tiles <= 4 * device.num_sms; ++more)
          least = std::min(least, time(more));
        CHECK(time(splits) <= 1.051 * least);
        for (int fewer = 1; fewer < splits; ++fewer) CHECK(time(fewer) > 1.049 * least);
      }
    }
  }
}

TEST(one_sequence_gets_a_cta_for_every_sm) {
  auto params = call<ForwardParams>(decoding);
  params.split.num_splits = 0;
  params.shape.batch_size = 1;
  CHECK_EQ(plan(params).num_splits, 16);  // for each of 8 key heads, of 132 SMs
  params.shape.batch_size = 16;
  CHECK_EQ(plan(params).num_splits, 1);
}

TEST(lengths_that_may_differ_get_more_splits_to_share) {
  auto params = call<ForwardParams>(decoding);
  params.split.num_splits = 0;
  CHECK_EQ(plan(params).num_splits, 4);
  params.sequences.seqused_k = &some_int;
  CHECK_EQ(plan(params).num_splits, 32);
  params.shape.seqlen_k = 512;  // 8 steps, 2 at least for each
  CHECK_EQ(plan(params).num_splits, 4);
  params.shape.seqlen_k = 8192;
  params.shape.batch_size = 1;  // nothing to differ from
  const int of_one = plan(params).num_splits;
  params.sequences.seqused_k = nullptr;
  CHECK_EQ(plan(params).num_splits, of_one);
}

TEST(batch_invariant_splits_have_a_fixed_length) {
  auto params = cached_call(decoding);
  params.split.batch_invariant = true;
  for (const int batch_size : {1, 4, 1000}) {
    for (const int num_splits : {0, 1, 5}) {
      params.shape.batch_size = batch_size;
      params.split.num_splits = num_splits;
      for (const auto& [seqlen_k, splits] : {std::pair{1, 1}, {512, 1}, {513, 2}, {8192, 16}}) {
        params.shape.seqlen_k = seqlen_k;
        const ForwardPlan result = plan(params);
        CHECK_EQ(result.num_splits, splits);
        CHECK_EQ(result.keys_per_split, 512);
      }
    }
  }
  auto packed = packed_call<ForwardParams>(decoding);
  packed.split.batch_invariant = true;
  packed.shape.seqlen_k = 65536;  // of all sequences
  CHECK_EQ(plan(packed).num_splits, 128);
  for (const auto& [longest, splits] : {std::pair{4096, 8}, {4097, 9}, {100'000, 128}}) {
    packed.sequences.max_seqlen_k = longest;
    CHECK_EQ(plan(packed).num_splits, splits);
    CHECK_EQ(plan(packed).keys_per_split, 512);
  }
  params.shape.seqlen_q = 512;  // no decode kernel: nothing is split, so nothing can differ
  params.paged.block_table = &some_int;
  CHECK_EQ(std::string(plan(params).instance->name), "hd128_cache");
  CHECK_EQ(plan(params).num_splits, 1);
}

TEST(where_lengths_decide_as_many_ctas_as_fit_draw_the_splits) {
  auto params = call<ForwardParams>(decoding);  // 32 tiles
  params.split.num_splits = 16;
  const int fitting = 132 * 2;  // of 97 KiB in 227
  CHECK_EQ(plan(params).num_ctas, fitting);
  CHECK(!plan(params).lengths_decide);
  CHECK_EQ(plan(params).grid, 32 * 16);
  params.sequences.seqused_k = &some_int;
  CHECK(plan(params).lengths_decide);
  CHECK_EQ(plan(params).grid, fitting);
  params.split.num_splits = 8;
  CHECK_EQ(plan(params).grid, 32 * 8);
  DeviceInfo half = h200;  // the others are left to other kernels
  half.num_sms = 66;
  CHECK_EQ(plan(params, half).grid, 66 * 2);
  params.shape.batch_size = 1;  // one length
  CHECK(!plan(params).lengths_decide);
  params.split.batch_invariant = true;  // but as many splits as it asks for
  CHECK(plan(params).lengths_decide);
  params.shape.seqlen_k = 1;
  CHECK(!plan(params).lengths_decide);
  AttentionShape prefill = decoding;
  prefill.seqlen_q = 512;
  const ForwardPlan tiles = plan(cached_call(prefill));
  CHECK(!tiles.lengths_decide);
  CHECK_EQ(tiles.grid, tiles.schedule.grid_size());
}

TEST(partial_results_have_their_own_place_in_the_workspace) {
  for (const bool is_packed : {false, true}) {
    for (const int head_dim : {33, 64, 128}) {
      for (const int seqlen_q : {1, 3, 7}) {
        for (const int num_splits : {2, 3, 64}) {
          AttentionShape shape = decoding;
          shape.head_dim = head_dim;
          shape.head_dim_v = head_dim - 8;
          shape.seqlen_q = seqlen_q;
          auto params = is_packed ? packed_call<ForwardParams>(shape) : cached_call(shape);
          params.split.num_splits = num_splits;
          const ForwardPlan result = plan(params);
          CHECK_EQ(result.num_splits, num_splits);
          CHECK_EQ(result.table.used(), is_packed);
          const std::size_t rows =
              std::size_t{is_packed ? 1u : 4u} * seqlen_q * shape.num_heads_q * num_splits;
          const Bytes arrivals = bytes_of_buffer(result.arrivals, rows / num_splits);
          const Bytes tickets = bytes_of_buffer(result.item_tickets, 1);
          CHECK_EQ(tickets.first, arrivals.first + arrivals.second);
          std::vector<Bytes> buffers{
              bytes_of_buffer(result.out_partial, rows * result.instance->config.head_dim_v),
              bytes_of_buffer(result.lse_partial, rows),
              {arrivals.first, arrivals.second + tickets.second}};
          if (is_packed) buffers.push_back(bytes_of_table(result.table));
          check_workspace(buffers, result.workspace_bytes);
        }
      }
    }
  }
}

TEST(partial_results_past_4_gib_are_counted_in_64_bits) {
  AttentionShape shape = decoding;
  shape.batch_size = 4096;
  shape.seqlen_k = 1 << 20;
  auto params = cached_call(shape);
  params.split.num_splits = 1000;
  constexpr std::size_t tickets = 256;  // one more counter, and what aligns it
  CHECK_EQ(plan(params).workspace_bytes, std::size_t{4096} * 32 * (1000 * 129 * 4 + 8) + tickets);
}

TEST(splits_may_not_outgrow_the_grid) {
  AttentionShape shape = decoding;
  shape.num_heads_k = shape.num_heads_q;
  shape.batch_size = 1 << 20;
  shape.seqlen_k = max_seqlen;
  auto params = cached_call(shape);
  params.split.num_splits = 63;
  CHECK_EQ(plan(params).num_splits, 63);
  params.split.num_splits = 64;  // 2^20 * 32 * 64 = 2^31
  CHECK_ERROR(plan(params),
              "tiles * heads * num_splits must be at most 2147483647, got 33554432 * 64");
  params.split = {.num_splits = 0, .batch_invariant = true};
  CHECK_ERROR(plan(params), "num_splits must be at most 2147483647, got 33554432 * 1953125");
  params.split = {.num_splits = 0};
  CHECK_EQ(plan(params).num_splits, 1);  // more would take too much memory for partial results
}

TEST(unknown_lengths_get_as_many_splits_as_are_useful_and_affordable) {
  AttentionShape shape = decoding;
  shape.batch_size = 32;
  shape.seqlen_k = 1 << 16;
  auto params = cached_call(shape);
  params.split.num_splits = 0;
  CHECK_EQ(plan(params).num_splits, 32);
  shape.batch_size = 1;  // nobody to share with: what fills the device
  auto single = cached_call(shape);
  single.split.num_splits = 0;
  CHECK(plan(single).num_splits != 32);
  shape.batch_size = 32;
  shape.seqlen_k = 64;  // a step or two
  auto brief = cached_call(shape);
  brief.split.num_splits = 0;
  CHECK_EQ(plan(brief).num_splits, 1);
}

// Keys and values of e4m3

namespace {

ForwardParams e4m3_call(AttentionShape shape, std::int64_t row_stride = 4096) {
  auto params = cached_call(shape);
  params.e4m3_kv = true;
  params.k = params.v = view_at(1 << 20, row_stride);
  params.q = params.out = view_at(1 << 20, 4096);
  return params;
}

AttentionShape with(AttentionShape shape, int seqlen_q, int head_dim) {
  shape.seqlen_q = seqlen_q;
  shape.head_dim = shape.head_dim_v = head_dim;
  return shape;
}

}  // namespace

TEST(rows_of_e4m3_take_such_calls_and_no_others) {
  const auto check_on = [](const DeviceInfo& device, const std::string& tiles) {
    const auto chosen = [&](const ForwardParams& params) {
      return std::string(plan_forward(params, device, sm90_forward_table()).instance->name);
    };
    CHECK_EQ(chosen(e4m3_call(decoding)), "hd128_decode_e4m3");
    CHECK_EQ(chosen(e4m3_call(with(decoding, 1, 48))), "hd64_decode_e4m3");
    CHECK_EQ(chosen(e4m3_call(with(decoding, 100, 128))), tiles);
    CHECK_EQ(chosen(e4m3_call(with(decoding, 100, 80))), tiles);
    CHECK_EQ(chosen(cached_call(decoding)), "hd128_decode");
    auto paged = e4m3_call(with(decoding, 100, 128));
    paged.paged.block_table = &some_int;
    paged.paged.page_size = 3;
    paged.paged.max_pages = paged.paged.num_pages = 3000;
    CHECK_EQ(chosen(paged), tiles);  // pages of any size
    auto capped = e4m3_call(with(decoding, 100, 128));
    capped.score.softcap = 30.0f;
    CHECK_EQ(chosen(capped), "hd128_e4m3");
  };
  check_on(h200, "sm90_hd128_e4m3");
  check_on(a100, "hd128_e4m3");
}

TEST(e4m3_is_read_in_whole_16_bytes) {
  CHECK_ERROR(plan(e4m3_call(with(decoding, 1, 72))), "whole 16 bytes");
  CHECK_ERROR(plan(e4m3_call(decoding, 4104)), "whole 16 bytes");
  auto misaligned = e4m3_call(decoding);
  misaligned.v.data = static_cast<char*>(misaligned.v.data) + 8;
  CHECK_ERROR(plan(misaligned), "whole 16 bytes");
}

TEST(queries_of_any_alignment_decode_over_e4m3) {
  auto params = e4m3_call(with(decoding, 100, 128));
  params.q = view_at((1 << 20) + 2, 4097);
  CHECK_EQ(chosen(params), "hd128_decode_e4m3");
  CHECK(!plan(params).has_vector_rows);
}
