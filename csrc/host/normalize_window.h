// The one form in which planning and kernels see a window.
#pragma once

#include "flash_attn/params.h"

namespace flash_attn_cuda {

// Where sequences have an origin: most rows of a call, and the largest bound of a window, of which
// larger ones are none. With shifts within most_shift (shared/sequence/sequence.h) index arithmetic
// on them cannot overflow.
inline constexpr int max_seqlen_with_origin = 1 << 28;
inline constexpr int most_bound_with_origin = (1 << 29) - 1;

// A window of the same visible pairs, with a bound that hides nothing (or is negative) replaced by
// Window::unbounded. What stays bounded is smaller than a sequence, so that index arithmetic on it
// cannot overflow, and a window that hides nothing (causal with one query) is recognised as full.
// With an origin any bound may hide something. With a tree mask `right` is bounded, and hides
// nothing.
constexpr Window normalize_window(Window window, const AttentionShape& shape,
                                  const SequenceParams& sequences = {}) {
  if (shape.seqlen_q == 0 || shape.seqlen_k == 0) return {};
  if (sequences.origin != nullptr) {
    const auto bound = [](int given) {
      return given < 0 || given > most_bound_with_origin ? Window::unbounded : given;
    };
    return {.left = bound(window.left), .right = bound(window.right)};
  }
  // The last query sees key 0 iff left >= seqlen_k - 1; the first query sees the last key iff right
  // >= seqlen_q - 1.
  const bool left_hides = window.left >= 0 && window.left < shape.seqlen_k - 1;
  const bool right_hides = window.right >= 0 && window.right < shape.seqlen_q - 1;
  const int left = left_hides ? window.left : Window::unbounded;
  if (window.has_tree) return {.left = left, .right = shape.seqlen_q - 1, .has_tree = true};
  return {.left = left, .right = right_hides ? window.right : Window::unbounded};
}

}  // namespace flash_attn_cuda
