// Plans of calls with lists of blocks or a bias.
#include <array>
#include <string>
#include <vector>

#include "check.h"
#include "planning.h"
#include "shared/mask/block_lists.h"
#include "workspaces.h"

using namespace host_tests;

namespace {

constexpr auto fp32_bias = [](auto& params) {
  bias(params);
  params.score.bias.is_fp32 = true;
};
// Of biases, those that TMA can load have sm90 rows.
template <class Params>
void check_biases_of_tma() {
  const auto with_bias = [](auto change, const AttentionShape& shape = training) {
    const auto of_bias = [=](auto& params) { change(params.score.bias); };
    return chosen<Params>(both(bias, of_bias), shape);
  };
  CHECK_EQ(chosen<Params>(fp32_bias), "hd128_masked");
  CHECK_EQ(with_bias([](auto& b) { b.row_stride = 0; }), "hd128_masked");
  CHECK_EQ(with_bias([](auto& b) { b.row_stride += 4; }), "hd128_masked");
  CHECK_EQ(with_bias([](auto& b) { b.row_stride += 8; }), "sm90_hd128_bias");
  CHECK_EQ(with_bias([](auto& b) { b.head_stride += 1; }), "hd128_masked");
  CHECK_EQ(with_bias([](auto& b) { b.head_stride = 0; }), "sm90_hd128_bias");
  CHECK_EQ(with_bias([](auto& b) { b.batch_stride = 16 * b.head_stride; }), "sm90_hd128_bias");
  CHECK_EQ(with_bias([](auto& b) { b.data = static_cast<const char*>(b.data) + 8; }),
           "hd128_masked");
  AttentionShape odd = training;
  odd.seqlen_k = 4095;
  CHECK_EQ(chosen<Params>(bias, odd), "hd128_masked");
  // Further columns do not matter to a row stride that suits.
  const auto padded = [](auto& b) {
    b.row_stride = 4096;
    b.head_stride = 4096 * b.row_stride;
  };
  CHECK_EQ(with_bias(padded, odd), "sm90_hd128_bias");
}

template <class Params>
void check_choices() {
  CHECK_EQ(chosen<Params>(nothing), "sm90_hd128");
  CHECK_EQ(chosen<Params>(lists), "sm90_hd128_sparse");
  CHECK_EQ(chosen<Params>(lists, training, causal), "sm90_hd128_sparse");
  CHECK_EQ(chosen<Params>(lists, training, {}, rtx4090), "hd128_masked");
  CHECK_EQ(chosen<Params>(bias), "sm90_hd128_bias");
  CHECK_EQ(chosen<Params>(bias, training, causal), "sm90_hd128_bias");
  CHECK_EQ(chosen<Params>(bias, training, {}, a100), "hd128_masked");
  CHECK_EQ(chosen<Params>(both(lists, bias)), "hd128_masked");
  check_biases_of_tma<Params>();
  const auto with_lists = [](auto change) { return chosen<Params>(both(lists, change)); };
  CHECK_EQ(with_lists(softcap), "hd128_masked");
  CHECK_EQ(with_lists(alibi), "hd128_masked");
  CHECK_EQ(with_lists(dropout), "hd128_masked");
  CHECK_EQ(with_lists(negative_scale), "hd128_masked");
  CHECK_EQ(with_lists([](auto& p) { p.k.row_stride = 0; }), "hd128_masked");
  // Every kernel has these.
  const auto sink = [](auto& p) { p.score.sink = &some_float; };
  CHECK_EQ(chosen<Params>(sink), "sm90_hd128");
  CHECK_EQ(with_lists(sink), "sm90_hd128_sparse");
  CHECK_EQ(with_lists(used_lengths), "sm90_hd128_sparse");
}

}  // namespace

TEST(what_a_forward_has_chooses_the_row) { check_choices<ForwardParams>(); }
TEST(what_a_backward_has_chooses_the_row) { check_choices<BackwardParams>(); }

// Lists of blocks

TEST(queries_with_lists_of_blocks_have_tiles_of_their_own) {
  const auto listed = [](ForwardParams& params) {
    params.key_list_block = 64;
    params.keys_per_list = 16 * 64;
  };
  for (const DeviceInfo& device : {h200, a100, rtx4090}) {
    CHECK_EQ(chosen<ForwardParams>(listed, training, causal, device), "hd128_decode_lists");
    CHECK_EQ(chosen<ForwardParams>(both(listed, softcap), training, {}, device),
             "hd128_decode_lists");
  }
  AttentionShape shape = training;
  for (const auto [heads_q, heads_k, tiles] :
       {std::array{16, 16, 1}, std::array{64, 4, 1}, std::array{96, 4, 2}}) {
    shape.num_heads_q = heads_q;
    shape.num_heads_k = heads_k;
    ForwardParams params = with_tensors(call<ForwardParams>(shape));
    listed(params);
    const ForwardPlan made = plan(params);
    CHECK_EQ(made.num_splits, 1);
    CHECK_EQ(made.grid, std::int64_t{4} * 4096 * heads_k * tiles);
  }
}

TEST(ctas_of_a_backward_take_as_many_listed_queries) {
  AttentionShape shape = training;
  shape.num_heads_q = 60;  // 15 a key head, which take 16 rows of 64
  shape.num_heads_k = 4;
  const auto planned = [&](int entries, int block, bool deterministic = false) {
    BackwardParams params = with_tensors(call<BackwardParams>(shape, causal));
    params.deterministic = deterministic;
    params.listed = {.entries = entries, .key_rows = 4 * 4096, .block = block};
    return plan(params);
  };
  const BackwardPlan many = planned(1 << 24, 64);
  CHECK_EQ(std::string(many.instance->name), "hd128_lists");
  CHECK_EQ(many.entries_per_cta, 4 * 64);
  CHECK_EQ(many.grid, 1 << 16);
  CHECK_EQ(planned(1 << 24, 128).grid, 2 << 16);
  const BackwardPlan few = planned(1001, 64);
  CHECK_EQ(few.entries_per_cta, 4 * 4);
  CHECK_EQ(few.grid, 63);
  CHECK_EQ(planned(0, 64).grid, 0);
  // Sums of dK and dV that one kernel adds to, and another rounds.
  CHECK_EQ(few.dkdv_splits, 1);
  CHECK(few.leaves_key_sums() && few.leaves_sums());
  CHECK_EQ(few.dk_partial.count, std::int64_t{4} * 4096 * 4 * 128);
  CHECK(!few.listed_turns.exists());
  const BackwardPlan ordered = planned(1001, 128, true);
  CHECK(!ordered.takes_turns && !ordered.additions.exists());
  CHECK_EQ(ordered.listed_turns.count, std::int64_t{4} * 4 * (4096 + 2 * 4096) + 1);
  // A block of fewer keys has a tile to itself.
  for (const int block : {1, 16, 32}) CHECK_EQ(planned(1001, block).grid, few.grid);
  shape.num_heads_q = 4 * 65;
  CHECK_ERROR(planned(1001, 64), "heads_per_key_head must be at most 64 with key_lists");
}

TEST(of_few_queries_tiles_are_run_as_well) {
  AttentionShape few = training;
  few.seqlen_q = 1;
  CHECK_EQ(chosen<ForwardParams>(nothing, few), "hd128_decode");
  CHECK_EQ(chosen<ForwardParams>(lists, few), "sm90_hd128_sparse");
  CHECK_EQ(chosen<ForwardParams>(bias, few), "sm90_hd128_bias");
  CHECK_EQ(chosen<ForwardParams>(fp32_bias, few), "hd128_masked");
  static float number = 0.0f;
  const auto max_logits = [](auto& p) { p.max_logits = &number; };
  CHECK_EQ(chosen<ForwardParams>(max_logits, few), "sm90_hd128");
  CHECK_EQ(chosen<ForwardParams>(both(used_lengths, max_logits), few), "sm90_hd128");
  // Over caches, and pages, which no sm90 row with a bias reads, a bias of few queries decodes.
  const auto pages = [](auto& p) {
    static const int table = 0;
    p.paged = {.block_table = &table, .table_stride = 64, .max_pages = 64};
    p.paged.page_size = p.paged.num_pages = 64;
  };
  CHECK_EQ(chosen<ForwardParams>(both(bias, pages), few), "hd128_decode");
  CHECK_EQ(chosen<ForwardParams>(both(fp32_bias, used_lengths), few), "hd128_decode");
  CHECK_EQ(chosen<ForwardParams>(both(bias, pages)), "hd128_masked");
  CHECK_EQ(chosen<ForwardParams>(both(bias, used_lengths)), "sm90_hd128_bias");
  const auto relative = [](auto& p) { p.score.bias = {.data = &some_float, .reach = 4}; };
  CHECK_EQ(chosen<ForwardParams>(both(relative, used_lengths), few), "hd128_decode");
  CHECK_EQ(chosen<ForwardParams>(both(relative, used_lengths)), "hd128_masked");
  // Masked rows of wide heads read no pages.
  const InstanceList<ForwardInstance> of_wide_heads(
      {decode_instance("hd512_decode", 512),
       features_instance("hd512_masked", 512, masked_features)});
  AttentionShape wide = training;
  wide.head_dim = wide.head_dim_v = 512;
  auto params = with_tensors(call<ForwardParams>(wide, {}));
  bias(params);
  CHECK_EQ(std::string(plan_forward(params, h200, of_wide_heads).instance->name), "hd512_masked");
  relative(params);
  CHECK_EQ(std::string(plan_forward(params, h200, of_wide_heads).instance->name), "hd512_decode");
  bias(params);
  pages(params);
  CHECK_EQ(std::string(plan_forward(params, h200, of_wide_heads).instance->name), "hd512_decode");
  // Only decode rows read such tensors.
  const auto unaligned = [](auto& p) { p.q.row_stride += 1; };
  CHECK_ERROR(chosen<ForwardParams>(both(max_logits, unaligned), few), "max_logits must be null");
  CHECK_ERROR(chosen<ForwardParams>(both(lists, unaligned)), "no compiled decode kernel");
}

TEST(of_gradients_of_a_bias_sm90_rows_write_whole_vectors) {
  const auto with_dbias = [](const AttentionShape& shape, auto change) {
    return chosen<BackwardParams>(both(bias,
                                       [=](BackwardParams& params) {
                                         params.dbias = contiguous_dbias(params.shape);
                                         change(params);
                                       }),
                                  shape);
  };
  AttentionShape one = training;
  one.batch_size = 1;
  const auto as_it_is = nothing;
  for (const AttentionShape& shape : {one, training})
    CHECK_EQ(with_dbias(shape, as_it_is), "sm90_hd128_bias");
  CHECK_EQ(with_dbias(one, [](BackwardParams& p) { p.dbias.is_fp32 = true; }), "hd128_masked");
  const auto misaligned = [](BackwardParams& p) {
    p.dbias.data = static_cast<char*>(p.dbias.data) + 8;
  };
  for (const AttentionShape& shape : {one, training})
    CHECK_EQ(with_dbias(shape, misaligned), "hd128_masked");
  // A bias with padded rows, whose gradient has none.
  for (AttentionShape shape : {one, training}) {
    shape.seqlen_k = 4095;
    const auto padded = [](BackwardParams& p) {
      p.score.bias.row_stride = 4096;
      p.score.bias.head_stride = 4096 * 4096;
    };
    CHECK_EQ(with_dbias(shape, padded), "hd128_masked");
    // One with padded rows has a last vector beyond its columns.
    const auto both_padded = [=](BackwardParams& p) {
      padded(p);
      p.dbias.row_stride = p.score.bias.row_stride;
      p.dbias.head_stride = p.score.bias.head_stride;
    };
    CHECK_EQ(with_dbias(shape, both_padded), "hd128_masked");
  }
}

TEST(sm90_forwards_load_bits_that_tma_can_move) {
  alignas(16) static std::uint32_t words[8];
  const auto with_bits = [](std::uint32_t* data, std::int64_t row_stride) {
    return chosen<ForwardParams>(both(lists, [=](auto& p) {
      p.sparsity.bits = {.data = data,
                         .batch_stride = 0,
                         .head_stride = 0,
                         .row_stride = row_stride,
                         .rows = 4096,
                         .words = 128};
    }));
  };
  CHECK_EQ(with_bits(words, 128), "sm90_hd128_sparse");
  CHECK_EQ(with_bits(words + 4, 132), "sm90_hd128_sparse");
  CHECK_EQ(with_bits(words + 1, 128), "hd128_masked");
  CHECK_EQ(with_bits(words, 130), "hd128_masked");
  CHECK_EQ(with_bits(words, 0), "hd128_masked");
}

TEST(gradients_with_lists_or_a_bias_have_a_fixed_order_in_sm80_rows) {
  CHECK_EQ(chosen<BackwardParams>(both(lists, ordered)), "hd128_masked");
  CHECK_EQ(chosen<BackwardParams>(both(bias, ordered)), "hd128_masked");
}

TEST(a_forward_of_the_sm90_family_counts_the_tiles_that_have_started) {
  for (const bool is_packed : {false, true}) {
    for (const int batch_size : {1, 7, 1000}) {
      AttentionShape shape = training;
      shape.batch_size = batch_size;
      auto params =
          with_tensors(is_packed ? packed_call<ForwardParams>(shape) : call<ForwardParams>(shape));
      lists(params);
      const ForwardPlan sparse = plan(params);
      CHECK_EQ(std::string(sparse.instance->name), "sm90_hd128_sparse");
      CHECK_EQ(sparse.num_ctas, 132);
      CHECK_EQ(sparse.num_splits, 1);
      CHECK_EQ(sparse.table.used(), is_packed);
      std::vector<Bytes> buffers{bytes_of_buffer(sparse.tickets, 1)};
      if (is_packed) buffers.push_back(bytes_of_table(sparse.table));
      check_workspace(buffers, sparse.workspace_bytes);

      // Those of the sm80 family have no such counter.
      const ForwardPlan ampere = plan(params, a100);
      CHECK_EQ(std::string(ampere.instance->name), "hd128_masked");
      CHECK(!ampere.tickets.exists());
      CHECK_EQ(ampere.workspace_bytes > 0, is_packed);
    }
  }
}

TEST(workspace_buffers_of_a_backward_with_lists_do_not_overlap) {
  for (const int seqlen_q : {1001, 9001}) {
    for (const int num_heads_k : {1, 16}) {
      for (const DeviceInfo& device : {h200, a100}) {
        auto params =
            with_tensors(call<BackwardParams>(sizes(1, seqlen_q, 300, 16, num_heads_k, 128)));
        lists(params);
        const BackwardPlan sparse = plan(params, device);
        CHECK((sparse.instance->config.features & feature::block_sparse) != 0);
        CHECK_EQ(sparse.dkdv_splits > 1, num_heads_k == 1);
        const bool is_sm90 = device.compute_capability == 90;
        CHECK(sparse.dq_path == (is_sm90 ? DqPath::finished : DqPath::converted));
        // A counter for each head of the schedule has room.
        if (is_sm90) CHECK(sparse.schedule.num_batch_heads <= sparse.additions.count);
        CHECK_EQ(sparse.turn_words, 0);
        check_backward_workspace(sparse, params);
        // A word has the marks of 32 key tiles.
        params.deterministic = true;
        for (const int seqlen_k : {128 * 32, 128 * 32 + 1}) {
          params.shape.seqlen_k = seqlen_k;
          const BackwardPlan ordered = plan(params, device);
          CHECK_EQ(ordered.turn_words, seqlen_k == 128 * 32 ? 1 : 2);
          check_backward_workspace(ordered, params);
        }
      }
    }
  }
}

TEST(lists_make_tiles_unequal) {
  // 32 tiles a head, 64 heads, of which L2 holds none.
  const auto section = [&](auto change) {
    auto params = with_tensors(call<ForwardParams>(sizes(4, 4096, 65'536, 16, 16, 128)));
    change(params);
    return plan(params).schedule.heads_per_section;
  };
  CHECK_EQ(section(nothing), 1);
  CHECK_EQ(section(bias), 1);
  CHECK_EQ(section(lists), 16);              // 2 tiles for 132 SMs: 9 heads
  CHECK_EQ(section(both(lists, bias)), 64);  // 8 tiles: 33 heads
}
