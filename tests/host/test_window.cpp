// normalize_window against the definition of a window in flash_attn/params.h.
#include "check.h"
#include "fixtures.h"
#include "host/normalize_window.h"

using namespace host_tests;

namespace {

constexpr int max_int = 2'147'483'647;

AttentionShape lengths(int seqlen_q, int seqlen_k) {
  return {.batch_size = 1,
          .seqlen_q = seqlen_q,
          .seqlen_k = seqlen_k,
          .num_heads_q = 1,
          .num_heads_k = 1,
          .head_dim = 64,
          .head_dim_v = 64};
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

TEST(causal_with_one_query_is_full) {
  CHECK(normalize_window(causal, lengths(1, 4096)).is_full());
  CHECK(!normalize_window(causal, lengths(2, 1)).is_full());
}
