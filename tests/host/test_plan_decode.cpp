// Which forward calls the decode kernels take, and how many CTAs share a tile's keys.
#include <cstdint>
#include <string>
#include <tuple>

#include "check.h"
#include "fixtures.h"
#include "host/plan.h"
#include "host/plan_steps.h"
#include "no_driver.h"
#include "plan_table.h"

using namespace host_tests;

namespace {

// One new query of each of 4 sequences, with 4 query heads for each of 8 key heads.
constexpr AttentionShape decoding = sizes(4, 1, 8192, 32, 8, 128);

// Of one new query of each of 4 sequences, with 4 query heads for each of 8 key heads, and others.
constexpr PlannedCall plans[] = {
    // Few rows decode, 4 a query, and more where there is a cache.
    {"4 4 8192 32 8 128", "row=hd128_decode"},
    {"4 5 8192 32 8 128", "row=hd128"},
    {"4 16 8192 32 8 128 used_k", "row=hd128_decode"},
    {"4 17 8192 32 8 128 used_k", "row=hd128"},
    {"4 16 8192 32 8 128 pages", "row=hd128_decode"},
    {"4 17 8192 32 8 128 pages", "row=hd128_cache"},
    {"4 16 8192 32 8 128 splits=0", "row=hd128_decode"},
    {"4 17 8192 32 8 128 splits=0", "row=hd128"},
    {"4 1 8192 32 8 128 used_k smem_kib=64", "row=hd128"},  // which decode rows do not fit
    // Of packed queries, 400 in all, the longest decides where it is known.
    {"4 400 8192 32 8 128 packed", "row=hd128"},
    {"4 400 8192 32 8 128 packed longest_q=4", "row=hd128_decode"},
    {"4 400 8192 32 8 128 packed longest_q=5", "row=hd128"},
    // Features choose among the kernels of a kind; decode kernels drop nothing.
    {"4 1 8192 32 8 128 softcap", "row=hd128_decode"},
    {"4 1 8192 32 8 128 alibi", "row=hd128_decode"},
    {"4 1 8192 32 8 128 pages", "row=hd128_decode"},
    {"4 1 8192 32 8 128 dropout", "row=hd128_features"},
    {"4 512 8192 32 8 128 softcap", "row=hd128_features"},
    {"4 512 8192 32 8 128 alibi", "row=hd128_features"},
    {"4 512 8192 32 8 128 pages", "row=hd128_cache"},
    {"4 512 8192 32 8 128 dropout", "row=hd128_features"},
    // Any head dim decodes.
    {"4 512 8192 32 8 1", "row=hd64_decode"},
    {"4 512 8192 32 8 59", "row=hd64_decode"},
    {"4 512 8192 32 8 64", "row=hd64"},
    {"4 512 8192 32 8 65", "row=hd128_decode"},
    {"4 512 8192 32 8 127", "row=hd128_decode"},
    {"4 512 8192 32 8 128", "row=hd128"},
    // A batch-invariant choice does not look at the batch.
    {"4 4000 8192 32 8 128 packed batch_invariant", "row=hd128_decode keys_per_split=512"},
    {"4 4000 8192 32 8 128 packed batch_invariant longest_q=1", "row=hd128_decode"},
    {"4 4000 8192 32 8 128 packed batch_invariant longest_q=1000", "row=hd128_decode"},
    {"4 4000 8192 32 8 128 used_k batch_invariant", "row=hd128 keys_per_split=0"},
    // Tiles hold the heads that share a key head.
    {"4 1 8192 8 8 128 used_k", "row=hd128_decode q_tiles=1 heads=8 batch_heads=32"},
    {"4 1 8192 128 8 128 used_k", "row=hd128_decode q_tiles=1 heads=8 batch_heads=32"},
    {"4 1 8192 136 8 128 used_k", "row=hd128_decode q_tiles=2 heads=8 batch_heads=32"},
    {"4 3 8192 56 8 128 used_k", "row=hd128_decode q_tiles=2 heads=8 batch_heads=32"},
    {"4 16 8192 32 8 128 used_k", "row=hd128_decode q_tiles=4 heads=8 batch_heads=32"},
    {"4 17 8192 8 8 128 used_k", "row=hd128_decode q_tiles=2 heads=8 batch_heads=32"},

    // One split is what a call gets unless it asks; of 128 steps of 4 warps * 16 keys it gets as
    // many as it asks for.
    {"4 1 8192 32 8 128 used_k", "splits=1 workspace=0"},
    {"4 1 8192 32 8 128 used_k splits=1", "splits=1 keys_per_split=0"},
    {"4 1 8192 32 8 128 used_k splits=3", "splits=3 keys_per_split=0"},
    {"4 1 8192 32 8 128 used_k splits=128", "splits=128 keys_per_split=0"},
    {"4 1 8192 32 8 128 used_k splits=129", "splits=128 keys_per_split=0"},
    {"4 1 1 32 8 128 used_k splits=129", "splits=1"},
    {"4 1 0 32 8 128 used_k splits=129", "splits=1"},
    {"4 128 8192 32 8 128 pages splits=200", "row=hd128_cache splits=128"},  // blocks of 64 keys
    // One sequence gets a CTA for every SM, of 132, for each of 8 key heads.
    {"1 1 8192 32 8 128 splits=0", "splits=16"},
    {"16 1 8192 32 8 128 splits=0", "splits=1"},
    // Lengths that may differ get more splits to share, as many as are useful and affordable.
    {"4 1 8192 32 8 128 splits=0", "splits=4"},
    {"4 1 8192 32 8 128 used_k splits=0", "splits=32"},
    {"32 1 65536 32 8 128 used_k splits=0", "splits=32"},
    {"4 1 512 32 8 128 used_k splits=0", "splits=4"},    // 8 steps, 2 at least for each
    {"32 1 64 32 8 128 used_k splits=0", "splits=1"},    // a step or two
    {"1 1 8192 32 8 128 used_k splits=0", "splits=16"},  // nothing to differ from
    {"1 1 65536 32 8 128 used_k splits=0", "splits=16"},
    // Batch-invariant splits have a fixed length, whatever is asked for.
    {"1 1 1 32 8 128 used_k batch_invariant", "splits=1 keys_per_split=512"},
    {"4 1 512 32 8 128 used_k batch_invariant splits=0", "splits=1 keys_per_split=512"},
    {"1 1 513 32 8 128 used_k batch_invariant splits=1", "splits=2 keys_per_split=512"},
    {"1000 1 513 32 8 128 used_k batch_invariant splits=5", "splits=2 keys_per_split=512"},
    {"1 1 8192 32 8 128 used_k batch_invariant splits=5", "splits=16 keys_per_split=512"},
    {"1000 1 8192 32 8 128 used_k batch_invariant splits=0", "splits=16 keys_per_split=512"},
    {"4 1 65536 32 8 128 packed batch_invariant", "splits=128 keys_per_split=512"},
    {"4 1 65536 32 8 128 packed batch_invariant longest_k=4096", "splits=8 keys_per_split=512"},
    {"4 1 65536 32 8 128 packed batch_invariant longest_k=4097", "splits=9 keys_per_split=512"},
    {"4 1 65536 32 8 128 packed batch_invariant longest_k=100000", "splits=128"},
    // No decode kernel: nothing is split, so nothing can differ.
    {"4 512 8192 32 8 128 used_k pages batch_invariant splits=5", "row=hd128_cache splits=1"},

    // Where lengths decide, as many CTAs as fit, two of 97 KiB in 227, draw the splits of 32 tiles;
    // the others are left to other kernels.
    {"4 1 8192 32 8 128 splits=16", "ctas=264 lengths_decide=no grid=512"},
    {"4 1 8192 32 8 128 used_k splits=16", "ctas=264 lengths_decide=yes grid=264"},
    {"4 1 8192 32 8 128 used_k splits=8", "lengths_decide=yes grid=256"},
    {"4 1 8192 32 8 128 used_k splits=8 sms=66", "grid=132"},
    {"1 1 8192 32 8 128 used_k splits=8", "lengths_decide=no"},  // one length
    // But as many splits as it asks for.
    {"1 1 8192 32 8 128 used_k splits=8 batch_invariant", "lengths_decide=yes"},
    {"1 1 1 32 8 128 used_k splits=8 batch_invariant", "lengths_decide=no"},
    {"4 512 8192 32 8 128 used_k", "lengths_decide=no grid=512"},
};

ForwardParams cached_call(const AttentionShape& shape, Window window = {}) {
  auto params = call<ForwardParams>(shape, window);
  params.sequences.seqused_k = &some_int;
  return params;
}

ForwardPlan plan(const ForwardParams& params, const DeviceInfo& device = h200) {
  return plan_forward(params, device, complete_forward_table());
}

std::string chosen(const ForwardParams& params) { return plan(params).instance->name; }

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

TEST(plans_of_calls) { check_plans<ForwardParams>(plans, plan, /*has_tensors=*/false); }

// Which kernel

TEST(without_a_decode_kernel_the_others_take_the_call) {
  CHECK_EQ(std::string(plan_forward(cached_call(decoding), h200, forward_table()).instance->name),
           "hd128_full");
  CHECK_ERROR(plan(call<ForwardParams>(sizes(4, 512, 8192, 32, 8, 129))),
              "no compiled decode kernel");
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

TEST(without_the_feature_nothing_is_split) {
  auto params = cached_call(decoding);
  params.split.num_splits = 16;
  CHECK_EQ(plan_forward(params, h200, forward_table()).num_splits, 1);
  params.split.batch_invariant = true;
  CHECK_EQ(plan_forward(params, h200, forward_table()).num_splits, 1);
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
