// One attention call as Python describes it, before anything is checked: flash_attn_cuda's
// AttentionCall (flash_attn_cuda/call.py), whose docstring says what each field is. An argument is
// added here, in that class and where it is used: visit() is the list that everything reads.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

namespace flash_attn_cuda::binding {

using OptionalTensor = std::optional<at::Tensor>;
using OptionalInt = std::optional<std::int64_t>;

struct CallArguments {
  at::Tensor q, k, v;
  double dropout_p = 0.0;
  std::optional<double> softmax_scale;  // none: head_dim ** -0.5
  bool causal = false;
  std::int64_t window_size_left = -1;
  std::int64_t window_size_right = -1;
  double softcap = 0.0;
  OptionalTensor alibi_slopes, bias, sink;
  bool deterministic = false;
  OptionalTensor rng_state;  // of a forward; not given: drawn
  OptionalTensor cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, leftpad_k, origin;
  std::int64_t max_seqlen_q = 0;  // 0: not known
  std::int64_t max_seqlen_k = 0;
  OptionalTensor block_table;
  OptionalTensor block_rows, block_columns, mask_bits;
  bool return_softmax = false;
  std::int64_t num_splits = 0;
  bool batch_invariant = false;
  bool over_cache = false;
  OptionalTensor cache_batch_idx;
  OptionalInt seqlen_k;
  OptionalTensor k_new, v_new, cu_seqlens_k_new;
  OptionalTensor rotary_cos, rotary_sin;
  bool rotary_interleaved = true;
  bool fp32_results = false;
  std::int64_t sm_margin = 0;
  OptionalTensor out;  // to be written; not given: a new one

  const char* dropout_p_name = "dropout_p";  // in errors

  template <class Visitor>
  void visit(Visitor&& visitor) {
    visitor("q", q);
    visitor("k", k);
    visitor("v", v);
    visitor("dropout_p", dropout_p);
    visitor("softmax_scale", softmax_scale);
    visitor("causal", causal);
    visitor("window_size_left", window_size_left);
    visitor("window_size_right", window_size_right);
    visitor("softcap", softcap);
    visitor("alibi_slopes", alibi_slopes);
    visitor("bias", bias);
    visitor("sink", sink);
    visitor("deterministic", deterministic);
    visitor("rng_state", rng_state);
    visitor("cu_seqlens_q", cu_seqlens_q);
    visitor("cu_seqlens_k", cu_seqlens_k);
    visitor("seqused_q", seqused_q);
    visitor("seqused_k", seqused_k);
    visitor("leftpad_k", leftpad_k);
    visitor("origin", origin);
    visitor("max_seqlen_q", max_seqlen_q);
    visitor("max_seqlen_k", max_seqlen_k);
    visitor("block_table", block_table);
    visitor("block_rows", block_rows);
    visitor("block_columns", block_columns);
    visitor("mask_bits", mask_bits);
    visitor("return_softmax", return_softmax);
    visitor("num_splits", num_splits);
    visitor("batch_invariant", batch_invariant);
    visitor("over_cache", over_cache);
    visitor("cache_batch_idx", cache_batch_idx);
    visitor("seqlen_k", seqlen_k);
    visitor("k_new", k_new);
    visitor("v_new", v_new);
    visitor("cu_seqlens_k_new", cu_seqlens_k_new);
    visitor("rotary_cos", rotary_cos);
    visitor("rotary_sin", rotary_sin);
    visitor("rotary_interleaved", rotary_interleaved);
    visitor("fp32_results", fp32_results);
    visitor("sm_margin", sm_margin);
    visitor("out", out);
  }
};

// What a backward has beyond the forward's arguments: Incoming in flash_attn_cuda/call.py.
struct GradientArguments {
  OptionalTensor dout, dlse;
  at::Tensor out, softmax_lse;
  OptionalTensor rng_state;
  bool wants_dbias = false;
  OptionalTensor dq, dk, dv;  // to be written; not given: new ones
  bool accumulate = false;    // added to what those three hold
  bool wants_softmax_d = false;

  template <class Visitor>
  void visit(Visitor&& visitor) {
    visitor("dout", dout);
    visitor("dlse", dlse);
    visitor("out", out);
    visitor("softmax_lse", softmax_lse);
    visitor("rng_state", rng_state);
    visitor("wants_dbias", wants_dbias);
    visitor("dq", dq);
    visitor("dk", dk);
    visitor("dv", dv);
    visitor("accumulate", accumulate);
    visitor("wants_softmax_d", wants_softmax_d);
  }
};

}  // namespace flash_attn_cuda::binding
