#include "host/select_instance.h"

#include <string>

#include "check.h"
#include "fixtures.h"
#include "host/names.h"

using namespace host_tests;

namespace {

std::string selected(std::span<const ForwardInstance* const> instances,
                     const KernelRequest& request, const DeviceInfo& device = h200) {
  return select_instance(instances, request, device).name;
}

KernelRequest request(int head_dim, MaskKind mask = MaskKind::full, Dtype dtype = Dtype::bf16) {
  return {.dtype = dtype, .mask = mask, .head_dim = head_dim, .head_dim_v = head_dim};
}

}  // namespace

TEST(takes_the_first_bucket_that_is_wide_enough) {
  CHECK_EQ(selected(forward_table(), request(8)), "hd64_full");
  CHECK_EQ(selected(forward_table(), request(64)), "hd64_full");
  CHECK_EQ(selected(forward_table(), request(72)), "hd128_full");
  CHECK_EQ(selected(forward_table(), request(128)), "hd128_full");
}

TEST(windowed_covers_full_and_full_does_not_cover_windowed) {
  CHECK_EQ(selected(forward_table(), request(64, MaskKind::windowed)), "hd64_windowed");
  const InstanceList<ForwardInstance> windowed({forward_instance("w", 64, MaskKind::windowed)});
  CHECK_EQ(selected(windowed, request(64)), "w");
  const InstanceList<ForwardInstance> full({forward_instance("f", 64, MaskKind::full)});
  CHECK_ERROR(selected(full, request(64, MaskKind::windowed)), "windowed mask");
}

TEST(order_decides_between_rows_that_cover) {
  const InstanceList<ForwardInstance> table({
      forward_instance("first", 128, MaskKind::windowed),
      forward_instance("narrower", 64, MaskKind::full),
  });
  CHECK_EQ(selected(table, request(64)), "first");
}

TEST(dtype_must_match) {
  const InstanceList<ForwardInstance> table({
      forward_instance("bf16", 64, MaskKind::full),
      forward_instance("fp16", 64, MaskKind::full, KernelFamily::sm80, Dtype::fp16),
  });
  CHECK_EQ(selected(table, request(64, MaskKind::full, Dtype::fp16)), "fp16");
  CHECK_EQ(selected(table, request(64)), "bf16");
}

TEST(sm90_rows_run_on_compute_capability_9_0_only) {
  const InstanceList<ForwardInstance> table({
      forward_instance("sm90", 64, MaskKind::full, KernelFamily::sm90),
      forward_instance("sm80", 64, MaskKind::full),
  });
  KernelRequest suitable = request(64);
  suitable.suits_sm90 = true;
  DeviceInfo device = h200;
  CHECK_EQ(selected(table, suitable, device), "sm90");
  for (const int capability : {80, 86, 89, 100, 103, 120}) {
    device.compute_capability = capability;
    CHECK_EQ(selected(table, suitable, device), "sm80");
  }
  device.compute_capability = 75;
  CHECK_ERROR(selected(table, suitable, device), "compute capability 7.5");
}

TEST(sm90_rows_run_on_suitable_calls_only) {
  KernelRequest needs = request(64);
  CHECK(!needs.suits_sm90);
  CHECK_EQ(selected(sm90_forward_table(), needs), "hd64");
  needs.suits_sm90 = true;
  CHECK_EQ(selected(sm90_forward_table(), needs), "sm90_hd64");
  DeviceInfo limited = h200;
  limited.smem_per_block = a100.smem_per_block;
  CHECK_EQ(selected(sm90_forward_table(), needs, limited), "hd64");
  needs.features = feature::paged_kv;
  CHECK_EQ(selected(sm90_forward_table(), needs), "sm90_hd64_cache");
  needs.head_dim = needs.head_dim_v = 72;
  CHECK_EQ(selected(sm90_forward_table(), needs), "sm90_hd128_cache");
  needs.features |= feature::softcap;
  CHECK_EQ(selected(sm90_forward_table(), needs), "sm90_hd128_cache_modifiers");
  const InstanceList<ForwardInstance> pages_alone(
      {sm90_instance("paged", 128, 128, 0, feature::paged_kv)});
  needs.features = 0;
  CHECK_ERROR(selected(pages_alone, needs), "no compiled forward kernel");
}

TEST(a_row_for_short_sequences_is_passed_over_by_others) {
  const auto with_queries = [](int head_dim, int queries, FeatureSet features = 0,
                               bool is_causal = true) {
    KernelRequest needs = request(head_dim, MaskKind::windowed);
    needs.suits_sm90 = true;
    needs.seqlen = queries;
    needs.is_causal = is_causal;
    needs.features = features;
    return selected(sm90_forward_table(), needs);
  };
  CHECK_EQ(with_queries(64, 1, 0, false), "sm90_hd64");  // that row is for a right bound alone
  CHECK_EQ(with_queries(64, 1), "sm90_hd64_short");
  CHECK_EQ(with_queries(8, 1280), "sm90_hd64_short");
  CHECK_EQ(with_queries(64, 1281), "sm90_hd64");
  CHECK_EQ(with_queries(64, 1280, feature::dropout), "sm90_hd64_dropout");
  CHECK_EQ(with_queries(72, 1280), "sm90_hd128");
  CHECK_EQ(with_queries(64, 1280, feature::bias), "sm90_hd64_bias");

  // Each mask has a bound of its own.
  const InstanceList<ForwardInstance> both(
      {sm90_instance("short", 64, 128, 1280, 0, 320), sm90_instance("any", 64)});
  const auto of_both = [&](int queries, bool is_causal) {
    KernelRequest needs = request(64, MaskKind::windowed);
    needs.suits_sm90 = true;
    needs.seqlen = queries;
    needs.is_causal = is_causal;
    return selected(both, needs);
  };
  CHECK_EQ(of_both(320, false), "short");
  CHECK_EQ(of_both(321, false), "any");
  CHECK_EQ(of_both(1280, true), "short");
  CHECK_EQ(of_both(1281, true), "any");

  // A table of such rows alone does not serve every call.
  const InstanceList<ForwardInstance> limited({sm90_instance("short", 64, 128, 1280)});
  KernelRequest needs = request(64);
  needs.suits_sm90 = true;
  CHECK(find_instance(limited, needs, h200) == nullptr);
}

TEST(a_row_that_needs_more_shared_memory_than_there_is_is_passed_over) {
  const auto with_smem = [](const char* name, int bytes) {
    return forward_instance(name, 128, MaskKind::full, KernelFamily::sm80, Dtype::bf16, bytes);
  };
  const InstanceList<ForwardInstance> table(
      {with_smem("large", 160 * 1024), with_smem("exact", 99 * 1024)});
  CHECK_EQ(selected(table, request(128), a100), "large");
  CHECK_EQ(selected(table, request(128), rtx4090), "exact");
}

TEST(every_requested_feature_must_be_there) {
  ForwardInstance plain = forward_instance("plain", 64, MaskKind::full);
  ForwardInstance rich = forward_instance("rich", 64, MaskKind::full);
  plain.config.features = feature::softcap;
  rich.config.features = feature::softcap | feature::alibi;
  const InstanceList<ForwardInstance> table({plain, rich});
  KernelRequest needs = request(64);
  CHECK_EQ(selected(table, needs), "plain");
  needs.features = feature::softcap;
  CHECK_EQ(selected(table, needs), "plain");
  needs.features = feature::alibi;
  CHECK_EQ(selected(table, needs), "rich");
  needs.features = feature::alibi | feature::dropout;
  CHECK_ERROR(selected(table, needs), "features alibi, dropout on");
}

TEST(rows_for_masks_and_biases_have_no_fp32_results) {
  ForwardInstance masked = forward_instance("masked", 64, MaskKind::windowed);
  masked.config.features = feature::softcap | feature::block_sparse | feature::bias;
  ForwardInstance rich = forward_instance("rich", 64, MaskKind::windowed);
  rich.config.features = feature::softcap | feature::dropout;
  KernelRequest needs = request(64);
  needs.features = feature::softcap;
  CHECK_EQ(selected(InstanceList<ForwardInstance>({masked, rich}), needs), "masked");
  needs.fp32_results = true;
  CHECK_EQ(selected(InstanceList<ForwardInstance>({masked, rich}), needs), "rich");
  CHECK_ERROR(selected(InstanceList<ForwardInstance>({masked}), needs), "fp32 results on");
}

TEST(the_kind_must_match) {
  KernelRequest needs = request(64);
  CHECK_EQ(selected(complete_forward_table(), needs), "hd64");
  needs.kind = ForwardKind::decode;
  CHECK_EQ(selected(complete_forward_table(), needs), "hd64_decode");
  CHECK(find_instance(forward_table(), needs, h200) == nullptr);
  CHECK_ERROR(selected(forward_table(), needs), "no compiled decode kernel");
}

// Lists of blocks, and a bias

namespace {

// What a request can have besides; none of them goes with the lists of an sm90 kernel.
constexpr FeatureSet beside_lists[] = {feature::softcap, feature::alibi, feature::dropout,
                                       feature::bias};

KernelRequest request_with(FeatureSet features, int head_dim = 128,
                           MaskKind mask = MaskKind::full) {
  KernelRequest needs = request(head_dim, mask);
  needs.features = features;
  needs.suits_sm90 = true;
  return needs;
}

std::string selected_backward(const KernelRequest& needs, const DeviceInfo& device = h200) {
  return select_instance(sm90_backward_table(), needs, device).name;
}

}  // namespace

// Rows of which values have another head dim, before those whose have the same.
InstanceList<ForwardInstance> narrow_forward_table() {
  ForwardInstance narrow = sm90_instance("sm90_hd192_dv128", 192);
  narrow.config.head_dim_v = 128;
  return InstanceList<ForwardInstance>(
      {sm90_instance("sm90_hd96", 96), sm90_instance("sm90_hd128", 128), narrow,
       sm90_instance("sm90_hd192", 192),
       sm90_instance("sm90_hd192_dropout", 192, 128, 0, feature::dropout),
       forward_instance("hd128", 128, MaskKind::windowed),
       forward_instance("hd192", 192, MaskKind::windowed),
       features_instance("hd192_dropout", 192, training_features)});
}

InstanceList<BackwardInstance> narrow_backward_table() {
  BackwardInstance narrow = sm90_backward_instance("sm90_hd192_dv128", 192);
  narrow.config.head_dim_v = 128;
  return InstanceList<BackwardInstance>(
      {sm90_backward_instance("sm90_hd96", 96), sm90_backward_instance("sm90_hd128", 128), narrow,
       sm90_backward_instance("sm90_hd192", 192),
       sm90_backward_instance("sm90_hd192_dropout", 192, 64, backward_features),
       backward_instance("hd96", 96, MaskKind::windowed),
       backward_instance("hd128", 128, MaskKind::windowed),
       backward_instance("hd192", 192, MaskKind::windowed),
       backward_instance("hd192_dropout", 192, MaskKind::windowed, 64, 64, backward_features)});
}

TEST(both_head_dims_choose_the_row) {
  struct Case {
    int head_dim;
    int head_dim_v;
    std::string forward;
    std::string backward;
  };
  for (const Case& c :
       {Case{192, 128, "sm90_hd192_dv128", "sm90_hd192_dv128"},
        Case{136, 72, "sm90_hd192_dv128", "sm90_hd192_dv128"},
        Case{192, 136, "sm90_hd192", "sm90_hd192"}, Case{192, 192, "sm90_hd192", "sm90_hd192"},
        // A backward's dP is a sum over boxes, of which each must have a column.
        Case{192, 64, "sm90_hd192_dv128", "hd192"}, Case{128, 64, "sm90_hd128", "hd128"},
        Case{128, 72, "sm90_hd128", "sm90_hd128"},
        // Boxes of 96 columns are narrower.
        Case{96, 64, "sm90_hd96", "hd96"}, Case{96, 72, "sm90_hd96", "sm90_hd96"},
        // S is one as well.
        Case{64, 128, "hd128", "hd128"}, Case{72, 128, "sm90_hd128", "sm90_hd128"},
        Case{128, 192, "hd192", "hd192"}}) {
    for (const MaskKind mask : {MaskKind::full, MaskKind::windowed}) {
      KernelRequest needs = request_with(0, c.head_dim, mask);
      needs.head_dim_v = c.head_dim_v;
      CHECK_EQ(selected(narrow_forward_table(), needs), c.forward);
      CHECK_EQ(std::string(select_instance(narrow_backward_table(), needs, h200).name), c.backward);
    }
  }
}

TEST(rows_of_narrow_values_have_no_features) {
  KernelRequest needs = request_with(feature::dropout, 192);
  needs.head_dim_v = 128;
  CHECK_EQ(selected(narrow_forward_table(), needs), "sm90_hd192_dropout");
  CHECK_EQ(std::string(select_instance(narrow_backward_table(), needs, h200).name),
           "hd192_dropout");
  needs.features = feature::deterministic;
  CHECK_EQ(std::string(select_instance(narrow_backward_table(), needs, h200).name),
           "sm90_hd192_dv128");
  needs.suits_sm90 = false;
  CHECK_EQ(std::string(select_instance(narrow_backward_table(), needs, h200).name), "hd192");
}

TEST(an_error_names_the_head_dim_of_values_where_it_is_another) {
  KernelRequest needs = request(64);
  needs.head_dim_v = 200;
  CHECK_ERROR(select_instance(forward_table(), needs, a100), "head_dim 64, head_dim_v 200, full");
}

TEST(lists_alone_have_sm90_rows) {
  for (const MaskKind mask : {MaskKind::full, MaskKind::windowed}) {
    const auto chosen = [&](int head_dim) {
      const KernelRequest needs = request_with(feature::block_sparse, head_dim, mask);
      const std::string forward = selected(sm90_forward_table(), needs);
      CHECK_EQ(selected_backward(needs), forward);
      return forward;
    };
    CHECK_EQ(chosen(8), "sm90_hd64_sparse");
    CHECK_EQ(chosen(64), "sm90_hd64_sparse");
    CHECK_EQ(chosen(72), "sm90_hd128_sparse");
    CHECK_EQ(chosen(128), "sm90_hd128_sparse");
  }
  CHECK_EQ(selected_backward(request_with(feature::block_sparse, 136)), "hd256_masked");
  KernelRequest unsuitable = request_with(feature::block_sparse);
  unsuitable.suits_sm90 = false;
  CHECK_EQ(selected(sm90_forward_table(), unsuitable), "hd128_masked");
  CHECK_EQ(selected_backward(unsuitable), "hd128_masked");
  for (const DeviceInfo& device : {a100, rtx4090}) {
    CHECK_EQ(selected(sm90_forward_table(), request_with(feature::block_sparse), device),
             "hd128_masked");
    CHECK_EQ(selected_backward(request_with(feature::block_sparse), device), "hd128_masked");
  }
}

TEST(a_bias_alone_has_sm90_rows) {
  const auto chosen = [](int head_dim) {
    const KernelRequest needs = request_with(feature::bias, head_dim, MaskKind::windowed);
    const std::string forward = selected(sm90_forward_table(), needs);
    CHECK_EQ(selected_backward(needs), forward);
    return forward;
  };
  CHECK_EQ(chosen(40), "sm90_hd64_bias");
  CHECK_EQ(chosen(64), "sm90_hd64_bias");
  CHECK_EQ(chosen(72), "sm90_hd128_bias");
  CHECK_EQ(chosen(128), "sm90_hd128_bias");
  KernelRequest unsuitable = request_with(feature::bias);
  unsuitable.suits_sm90 = false;
  CHECK_EQ(selected(sm90_forward_table(), unsuitable), "hd128_masked");
  CHECK_EQ(selected_backward(unsuitable), "hd128_masked");
  CHECK_EQ(selected_backward(request_with(feature::bias), a100), "hd128_masked");
}

TEST(what_a_bias_and_lists_come_with_has_sm80_rows) {
  const auto goes_to_masked = [](FeatureSet features) {
    CHECK_EQ(selected(sm90_forward_table(), request_with(features)), "hd128_masked");
    CHECK_EQ(selected_backward(request_with(features)), "hd128_masked");
    CHECK_EQ(selected(sm90_forward_table(), request_with(features, 40)), "hd64_masked");
    CHECK_EQ(selected_backward(request_with(features, 40)), "hd64_masked");
  };
  for (const FeatureSet other : beside_lists) {
    goes_to_masked(feature::block_sparse | other);
    if (other != feature::bias) goes_to_masked(feature::bias | other);
  }
  goes_to_masked(masked_features);
  CHECK_EQ(selected_backward(request_with(feature::bias, 256)), "hd256_masked");
}

TEST(calls_without_a_bias_never_run_an_sm90_row_that_loads_one) {
  const InstanceList<ForwardInstance> bias_first(
      {sm90_instance("bias", 128, 128, 0, feature::bias),
       forward_instance("plain", 128, MaskKind::windowed)});
  CHECK_EQ(selected(bias_first, request_with(0)), "plain");
  CHECK_EQ(selected(bias_first, request_with(feature::bias)), "bias");
}

TEST(calls_without_lists_never_run_an_sm90_row_that_has_them) {
  for (const FeatureSet features : {FeatureSet{0}, feature::softcap, training_features}) {
    const bool plain = features == 0;
    CHECK_EQ(selected(sm90_forward_table(), request_with(features)),
             plain ? "sm90_hd128" : "sm90_hd128_dropout");
    CHECK_EQ(selected_backward(request_with(features)),
             plain ? "sm90_hd128" : "sm90_hd128_dropout");
  }
  // Nor where nothing stands before it.
  const InstanceList<ForwardInstance> sparse_first(
      {sm90_instance("sparse", 128, 128, 0, feature::block_sparse),
       forward_instance("plain", 128, MaskKind::windowed)});
  CHECK_EQ(selected(sparse_first, request_with(0)), "plain");
  CHECK_EQ(selected(sparse_first, request_with(feature::block_sparse)), "sparse");
  const InstanceList<BackwardInstance> backward_alone(
      {sm90_backward_instance("sparse", 128, 64, feature::block_sparse)});
  CHECK_ERROR(select_instance(backward_alone, request_with(0), h200), "features none");
  CHECK_EQ(
      std::string(select_instance(backward_alone, request_with(feature::block_sparse), h200).name),
      "sparse");
}

TEST(sm80_rows_with_lists_can_run_calls_without) {
  const InstanceList<ForwardInstance> masked({features_instance("masked", 128, masked_features)});
  for (const FeatureSet features : {FeatureSet{0}, feature::dropout, feature::bias})
    CHECK_EQ(selected(masked, request_with(features)), "masked");
}

TEST(sm80_rows_have_a_bias_over_pages_and_none_decodes_lists) {
  for (const FeatureSet mask : {feature::block_sparse, feature::bias}) {
    CHECK_EQ(selected(sm90_forward_table(), request_with(mask | feature::paged_kv)),
             "hd128_masked");
    KernelRequest decode = request_with(mask | feature::paged_kv | feature::split_kv);
    decode.kind = ForwardKind::decode;
    CHECK((find_instance(sm90_forward_table(), decode, h200) == nullptr) ==
          (mask == feature::block_sparse));
    CHECK_EQ(selected_backward(request_with(mask | feature::deterministic)), "hd128_masked");
  }
}

// Derivatives in a direction

TEST(derivatives_in_a_direction_and_no_other_calls_run_rows_with_tangents) {
  constexpr FeatureSet all = 2 * feature::tangent - 1;
  // Wherever such rows stand.
  const InstanceList<ForwardInstance> forwards(
      {jvp_instance("tangent", 128), features_instance("masked", 128, masked_features)});
  const InstanceList<BackwardInstance> backwards(
      {hvp_instance("tangent", 128), backward_instance("all", 128, MaskKind::windowed, 64, 64,
                                                       masked_features | feature::deterministic)});
  const auto check = [](const KernelRequest& needs, const auto& table) {
    const bool wants_tangents = (needs.features & feature::tangent) != 0;
    try {
      const auto& row = select_instance(table, needs, h200);
      CHECK_EQ((row.config.features & feature::tangent) != 0, wants_tangents);
    } catch (const Error&) {
      // Forwards have no fixed order, nor have gradients with masks; of pages no row here has all.
      const FeatureSet refused =
          feature::deterministic | feature::paged_kv | feature::split_kv | feature::packed_gqa;
      CHECK((needs.features & refused) != 0);
    }
  };
  for (FeatureSet features = 0; features <= all; ++features) {
    for (const int head_dim : {40, 128}) {
      for (const MaskKind mask : {MaskKind::full, MaskKind::windowed}) {
        for (const bool suits_sm90 : {false, true}) {
          KernelRequest needs = request_with(features, head_dim, mask);
          needs.suits_sm90 = suits_sm90;
          check(needs, std::span<const ForwardInstance* const>(sm90_forward_table()));
          check(needs, std::span<const ForwardInstance* const>(forwards));
          check(needs, std::span<const BackwardInstance* const>(sm90_backward_table()));
          check(needs, std::span<const BackwardInstance* const>(backwards));
        }
      }
    }
  }
  CHECK_ERROR(selected(forward_table(), request_with(feature::tangent)), "features tangent on");
  const InstanceList<ForwardInstance> tangents_alone(
      {sm90_instance("sm90", 128, 128, 0, feature::tangent), jvp_instance("tangent", 128)});
  CHECK_ERROR(selected(tangents_alone, request_with(0)), "features none on");
}

TEST(tangents_with_a_window_at_most_have_sm90_rows) {
  for (const MaskKind mask : {MaskKind::full, MaskKind::windowed}) {
    const auto chosen = [&](int head_dim, bool suits_sm90 = true, const DeviceInfo& device = h200) {
      KernelRequest needs = request_with(feature::tangent, head_dim, mask);
      needs.suits_sm90 = suits_sm90;
      return selected(sm90_forward_table(), needs, device);
    };
    CHECK_EQ(chosen(8), "sm90_hd64_tangent");
    CHECK_EQ(chosen(64), "sm90_hd64_tangent");
    CHECK_EQ(chosen(72), "sm90_hd128_tangent");
    CHECK_EQ(chosen(128), "sm90_hd128_tangent");
    CHECK_EQ(chosen(136), "hd512_tangent");
    // One sm80 row serves the head dims of several others.
    CHECK_EQ(chosen(8, false), "hd128_tangent");
    for (const DeviceInfo& device : {a100, rtx4090}) {
      CHECK_EQ(chosen(64, true, device), "hd128_tangent");
      CHECK_EQ(chosen(128, true, device), "hd128_tangent");
    }
    CHECK_EQ(chosen(136, true, a100), "hd512_tangent");
  }
}

TEST(whatever_tangents_come_with_has_sm80_rows) {
  const FeatureSet others[] = {feature::softcap,      feature::alibi, feature::dropout,
                               feature::block_sparse, feature::bias,  masked_features};
  for (const FeatureSet other : others) {
    for (const MaskKind mask : {MaskKind::full, MaskKind::windowed}) {
      const KernelRequest needs = request_with(feature::tangent | other, 40, mask);
      CHECK_EQ(selected(sm90_forward_table(), needs), "hd128_tangent");
      CHECK_EQ(selected_backward(needs), "hd128_tangent");
    }
  }
  for (const FeatureSet cache : {feature::paged_kv, feature::split_kv, feature::packed_gqa})
    CHECK_ERROR(selected(sm90_forward_table(), request_with(feature::tangent | cache)),
                names_of(cache | feature::tangent));
  KernelRequest decode = request_with(feature::tangent);
  decode.kind = ForwardKind::decode;
  CHECK(find_instance(sm90_forward_table(), decode, h200) == nullptr);
}

TEST(the_second_backward_has_sm80_rows_for_any_order) {
  const auto chosen = [](int head_dim, const DeviceInfo& device = h200, FeatureSet others = 0) {
    return selected_backward(request_with(feature::tangent | others, head_dim), device);
  };
  CHECK_EQ(chosen(8), "hd128_tangent");
  CHECK_EQ(chosen(128, a100), "hd128_tangent");
  CHECK_EQ(chosen(128, rtx4090), "hd128_tangent");
  CHECK_EQ(chosen(136, a100), "hd256_tangent");
  CHECK_EQ(chosen(264), "hd512_tangent");
  CHECK_ERROR(chosen(136, rtx4090), "no compiled backward kernel");
  CHECK_ERROR(chosen(264, a100), "no compiled backward kernel");
  // Where a backward's gradients with lists or a bias have none.
  for (const FeatureSet others : {feature::deterministic, feature::deterministic | masked_features})
    CHECK_EQ(chosen(64, h200, others), "hd128_tangent");
}

TEST(features_have_the_names_of_the_table) {
  CHECK_EQ(names_of(FeatureSet{0}), "none");
  CHECK_EQ(names_of(~FeatureSet{0}),
           "softcap, alibi, dropout, deterministic, paged_kv, split_kv, packed_gqa, block_sparse, "
           "bias, tangent, e4m3_kv, latent, key_lists, e4m3_products");
}

TEST(the_error_says_what_was_required_and_what_exists) {
  const KernelRequest too_wide = request(256, MaskKind::windowed, Dtype::fp16);
  const char* const parts[] = {"no compiled forward kernel",
                               "dtype fp16",
                               "head_dim 256",
                               "windowed mask",
                               "compute capability 9.0",
                               "232448 bytes",
                               "hd64_full, hd64_windowed, hd128_full"};
  for (const char* part : parts) CHECK_ERROR(selected(forward_table(), too_wide), part);
  CHECK_ERROR(selected({}, request(64)), "compiled: none");
}

TEST(backward_rows_follow_the_same_rules) {
  const auto name = [](int head_dim, MaskKind mask) {
    return std::string(select_instance(backward_table(), request(head_dim, mask), h200).name);
  };
  CHECK_EQ(name(40, MaskKind::full), "hd64_full");
  CHECK_EQ(name(96, MaskKind::windowed), "hd128_windowed");
  CHECK_ERROR(name(136, MaskKind::full), "no compiled backward kernel");
}
