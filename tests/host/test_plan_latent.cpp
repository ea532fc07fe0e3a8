// Calls with a qv, of absorbed latent attention: their rows, which no other call has.
#include "check.h"
#include "planning.h"
#include "shared/schedule/packed_rows.h"

using namespace host_tests;

namespace {

// Queries of 4 sequences, with so many heads for the one of the cache.
constexpr AttentionShape latent_call(int seqlen_q, int heads) {
  return sizes(4, seqlen_q, 8192, heads, 1, 64, 512);
}

// Rotary columns behind latent ones, in a cache of both.
ForwardParams with_latent_tensors(ForwardParams params) {
  const AttentionShape& shape = params.shape;
  params.q = contiguous_view(shape.seqlen_q, shape.num_heads_q, shape.head_dim);
  params.qv = params.out = contiguous_view(shape.seqlen_q, shape.num_heads_q, shape.head_dim_v);
  params.k = params.v =
      contiguous_view(shape.seqlen_k, shape.num_heads_k, shape.head_dim + shape.head_dim_v);
  return params;
}

template <class Change>
ForwardPlan planned(const AttentionShape& shape, Change change, const DeviceInfo& device = h200) {
  ForwardParams params = with_latent_tensors(call<ForwardParams>(shape));
  change(params);
  return plan(params, device);
}

template <class Change>
std::string row(const AttentionShape& shape, Change change, const DeviceInfo& device = h200) {
  return planned(shape, change, device).instance->name;
}

auto pages(int page_size) {
  return [=](ForwardParams& params) {
    params.paged.block_table = &some_int;
    params.paged.page_size = page_size;
    params.paged.num_pages = 1024;
  };
}

const std::string decode_row = "hd64_dv512_decode_latent";

}  // namespace

TEST(hopper_gpus_have_latent_rows_by_the_rows_of_a_sequence) {
  CHECK_EQ(row(latent_call(1, 16), nothing), "sm90_hd64_dv512_rows16");
  CHECK_EQ(row(latent_call(1, 17), nothing), "sm90_hd64_dv512_rows32");
  CHECK_EQ(row(latent_call(2, 16), nothing), "sm90_hd64_dv512_rows32");
  CHECK_EQ(row(latent_call(1, 128), nothing), "sm90_hd64_dv512_rows64");
  CHECK_EQ(row(latent_call(1, 16), pages(64)), "sm90_hd64_dv512_rows16");
  CHECK_EQ(row(latent_call(1, 16), softcap), "sm90_hd64_dv512_rows16");
}

TEST(tiles_of_the_same_keys_are_in_pairs_where_those_of_every_sequence_are_even_in_number) {
  const auto are_paired = [](const AttentionShape& shape, auto change) {
    DeviceInfo device = h200;
    device.num_sms = 131;
    const ForwardPlan plan = planned(shape, change, device);
    CHECK_EQ(plan.grid, plan.in_pairs ? 130 : 131);
    return plan.in_pairs;
  };
  CHECK(are_paired(latent_call(1, 128), nothing));
  CHECK(are_paired(latent_call(5, 16), pages(64)));
  CHECK(!are_paired(latent_call(3, 64), nothing));
  CHECK(!are_paired(latent_call(1, 16), nothing));
  // Copied row by row.
  CHECK(are_paired(latent_call(1, 128), pages(20)));
  CHECK(are_paired(latent_call(3, 128), [](ForwardParams& params) { params.keys_per_list = 64; }));
  const auto packed = [](ForwardParams& params) { params.sequences.cu_seqlens_q = &some_int; };
  CHECK(are_paired(latent_call(1, 128), both(packed, pages(64))));
  CHECK(!are_paired(latent_call(4, 64), both(packed, pages(64))));
}

TEST(keys_in_no_boxes_are_copied_row_by_row_and_what_has_no_vectors_decodes) {
  const AttentionShape shape = latent_call(1, 16);
  const auto padded = [](ForwardParams& params) { params.sequences.leftpad_k = &some_int; };
  const auto listed = [](ForwardParams& params) { params.keys_per_list = 64; };
  for (const auto& rows : {pages(1), pages(20)}) {
    const auto odd = [](ForwardParams& params) { params.v.row_stride += 4; };
    CHECK_EQ(row(shape, rows), "sm90_hd64_dv512_rows16");
    CHECK_EQ(row(shape, both(rows, odd)), decode_row);
  }
  CHECK_EQ(row(shape, both(pages(64), padded)), "sm90_hd64_dv512_rows16");
  CHECK_EQ(row(latent_call(3, 16), listed), "sm90_hd64_dv512_rows16");
  const auto far_apart = [](ForwardParams& params) {
    params.k.batch_stride = std::int64_t{1} << 33;
  };
  CHECK_EQ(row(shape, both(pages(20), far_apart)), decode_row);
  const auto with_odd_rows = [](TensorView ForwardParams::* view) {
    return [=](ForwardParams& params) { (params.*view).row_stride += 1; };
  };
  for (const auto view :
       {&ForwardParams::q, &ForwardParams::k, &ForwardParams::v, &ForwardParams::qv}) {
    const ForwardPlan plan = planned(latent_call(2, 16), with_odd_rows(view));
    CHECK_EQ(std::string(plan.instance->name), decode_row);
    CHECK(!plan.has_vector_rows);
  }
}

TEST(values_of_e4m3_have_rows_that_convert) {
  const auto of_e4m3 = [](ForwardParams& params) {
    params.e4m3_latent = true;
    params.v.row_stride = 656;  // in bytes, as keys' in 16 bits
    params.k.row_stride = 656 / 2;
  };
  const ForwardPlan plan = planned(latent_call(1, 16), both(pages(64), of_e4m3));
  CHECK_EQ(std::string(plan.instance->name), "sm90_hd64_dv512_rows16_e4m3");
  CHECK(plan.has_vector_rows);
  CHECK_EQ(row(latent_call(4, 16), of_e4m3), "sm90_hd64_dv512_rows32_e4m3");
  CHECK_EQ(row(latent_call(1, 16), of_e4m3, a100), decode_row);
  const auto with_odd_keys = [](ForwardParams& params) { params.k.row_stride += 4; };
  CHECK_ERROR(planned(latent_call(1, 16), both(of_e4m3, with_odd_keys)), "whole 16 bytes");
  const auto with_powers = [](ForwardParams& params) { params.scales.v.is_e8m0 = true; };
  CHECK_EQ(row(latent_call(1, 16), both(of_e4m3, with_powers)), decode_row);
}

TEST(rotary_columns_that_are_values_are_columns_of_out_and_keys) {
  const auto of_v4 = [](ForwardParams& params) {
    params.e4m3_latent = params.values_include_rope = true;
    params.v.row_stride = 576;
    params.k.row_stride = 576 / 2;
  };
  CHECK_EQ(row(latent_call(1, 16), both(pages(64), of_v4)), decode_row);
  const auto of_columns = [](int rotary, int all) {
    return [=](ForwardParams& params) {
      params.shape.head_dim = rotary;
      params.shape.head_dim_v = all;
    };
  };
  CHECK_EQ(row(latent_call(1, 16), both(of_v4, of_columns(24, 448 + 24)), a100), decode_row);
  CHECK_ERROR(planned(latent_call(1, 16), both(of_v4, of_columns(24, 480))), "whole 16 bytes");
}

TEST(other_gpus_decode_by_their_shared_memory) {
  for (const int heads : {1, 16, 128}) {
    CHECK_EQ(row(latent_call(1, heads), nothing, a100), decode_row);
    CHECK_EQ(row(latent_call(1, heads), nothing, rtx4090), decode_row + "_smem99k");
  }
}

TEST(partial_results_have_the_latent_columns_and_pairs_of_warps_their_own_keys) {
  const auto in_parts = [](int num_splits) {
    return [=](ForwardParams& params) { params.split.num_splits = num_splits; };
  };
  const AttentionShape shape = latent_call(1, 16);
  const ForwardPlan plan = planned(shape, in_parts(7), a100);
  CHECK_EQ(plan.num_splits, 7);
  CHECK(plan.workspace_bytes >= sizeof(float) * 4 * 16 * 7 * (512 + 1));
  CHECK_EQ(planned(shape, in_parts(100000), a100).num_splits, 8192 / (2 * 16));
  CHECK_EQ(planned(shape, in_parts(7)).num_splits, 7);
  CHECK_EQ(planned(shape, in_parts(100000)).num_splits, 8192 / 64);
}

TEST(lists_give_every_query_tiles_of_its_own_and_splits_count_their_entries) {
  const auto lists = [](ForwardParams& params) {
    params.key_lists = contiguous_view(params.shape.seqlen_q, params.shape.num_heads_k, 2048);
    params.keys_per_list = 2048;
  };
  const auto parts = [](ForwardParams& params) { params.split.num_splits = 100000; };
  for (const auto& [heads, rows] : {std::pair(16, 1), std::pair(17, 2), std::pair(128, 8)}) {
    const ForwardPlan plan = planned(latent_call(3, heads), both(lists, parts), a100);
    CHECK_EQ(plan.schedule.num_tiles, 3 * rows);
    CHECK_EQ(plan.num_splits, 2048 / (2 * 16));
  }
  const auto invariant = [](ForwardParams& params) { params.split.batch_invariant = true; };
  CHECK_EQ(planned(latent_call(3, 16), both(lists, invariant), a100).num_splits, 2048 / 512);
  const auto packed = [](ForwardParams& params) {
    params.sequences.cu_seqlens_q = params.sequences.seqused_k = &some_int;
  };
  const ForwardPlan plan = planned(latent_call(30, 17), both(lists, packed), a100);
  CHECK_EQ(plan.schedule.num_tiles, 30 * 2);
  CHECK_EQ(plan.table.rows_per_query, 32);
  CHECK(!plan.lengths_decide);
  // Hopper's rows are chosen by the heads of a query, and load pages of any size.
  CHECK_EQ(row(latent_call(4, 16), both(lists, pages(1))), "sm90_hd64_dv512_rows16");
}

TEST(padded_rows_are_those_of_the_heads_of_one_query) {
  for (const int heads : {1, 15, 16, 17, 40}) {
    const AttentionShape shape = latent_call(3, heads);
    CHECK_EQ(rows_of_query(shape, 0, 16), heads);
    const int rows = rows_of_query(shape, 7, 16);
    CHECK_EQ(rows, (heads + 15) / 16 * 16);
    const Divider group = Divider::by(rows);
    TileWork work{};
    work.head = 2;
    for (work.tile = 0; work.tile < 3 * rows / 16; ++work.tile) {
      for (int row = 0; row < 16; ++row) {
        const PackedRow found = padded_row(group, heads, work, 16, row);
        const int index = work.tile * 16 + row;
        const bool exists = index % rows < heads;
        CHECK_EQ(found.query, exists ? index / rows : no_query);
        if (exists) CHECK_EQ(found.head, 2 * heads + index % rows);
      }
    }
  }
}

TEST(calls_without_a_qv_have_no_latent_row) {
  const auto without = [](ForwardParams& params) { params.qv.data = nullptr; };
  const AttentionShape narrow = sizes(4, 1, 8192, 16, 1, 64, 64);
  const InstanceList<ForwardInstance> latent_rows(
      {latent_instance("sm90", 16), decode_latent_instance("sm80", 4, 136)});
  for (const AttentionShape& shape : {narrow, latent_call(1, 16)}) {
    ForwardParams params = with_latent_tensors(call<ForwardParams>(shape));
    without(params);
    CHECK_ERROR(plan_forward(params, h200, latent_rows), "no compiled");
  }
  CHECK_EQ(row(narrow, both(without, pages(1))), "hd64_decode");
}
