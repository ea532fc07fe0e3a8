// What one attention call is, as plain structs: filled by the caller with designated initialisers,
// handed to the kernels by value. All strides are in elements and 64-bit; the last dimension of
// every tensor is contiguous. Pointers are to device memory unless they say otherwise.
#pragma once

#include <cstdint>

#include "flash_attn/config.h"
#include "flash_attn/device_errors.h"

namespace flash_attn_cuda {

// A (batch, seqlen, heads, columns) tensor, whose columns are head_dim or, of values and outputs,
// head_dim_v; packed sequences are one batch entry, (1, total, heads, columns). Of a paged cache,
// (pages, page_size, heads, columns).
struct TensorView {
  void* data = nullptr;
  std::int64_t batch_stride = 0;
  std::int64_t row_stride = 0;
  std::int64_t head_stride = 0;
};

// Whether a thread can load or store 16 bytes at once from where rows begin.
inline bool has_vector_rows(const TensorView& view, int element_bytes) {
  const int elements = vector_bytes / element_bytes;
  return reinterpret_cast<std::uintptr_t>(view.data) % vector_bytes == 0 &&
         view.batch_stride % elements == 0 && view.row_stride % elements == 0 &&
         view.head_stride % elements == 0;
}

// One fp32 number per query and head, contiguous along queries: (batch, heads, seqlen_q), or
// (heads, total_q) of packed sequences, whose batch_stride is 0.
template <class Number>
struct RowView {
  Number* data = nullptr;
  std::int64_t batch_stride = 0;
  std::int64_t head_stride = 0;
};

// For packed or cached sequences seqlen_q and seqlen_k are upper bounds that the tensors' shapes
// give: total_q, total_k, or what a cache holds for one sequence.
struct AttentionShape {
  int batch_size = 0;  // sequences
  int seqlen_q = 0;
  int seqlen_k = 0;
  int num_heads_q = 0;
  int num_heads_k = 0;  // divides num_heads_q
  int head_dim = 0;     // of q, k, dq and dk
  int head_dim_v = 0;   // of v, out, dv and dout

  // Query heads that read a key head, and the one that a query head reads.
  constexpr int heads_per_key_head() const { return num_heads_q / num_heads_k; }
  constexpr int key_head(int head) const { return head / heads_per_key_head(); }
};

// Where the sequences lie and how long they are, as far as device memory says it; null for what
// the shape says. Contents are never trusted: what is out of range is clamped and reported
// (device_errors.h).
struct SequenceParams {
  const int* cu_seqlens_q = nullptr;  // (batch_size + 1): q, out, dq are packed
  const int* cu_seqlens_k = nullptr;  // (batch_size + 1): k, v, dk, dv are packed
  const int* seqused_q =
      nullptr;  // (batch_size): the first so many queries attend; out of others 0
  const int* seqused_k = nullptr;  // (batch_size): keys that are there, counted from the sequence's
                                   // first row, left padding and what was appended not excluded
  const int* leftpad_k = nullptr;  // (batch_size): rows before the first key
  // (batch_size, 4), of packed sequences: stream, first_q, first_k and shift of each, where it is a
  // shard of a longer one (Sequence, shared/sequence/sequence.h).
  const int* origin = nullptr;
  const int* kv_batch_idx = nullptr;  // (batch_size): batch entry of k and v; null: the sequence's
  // Keys appended since seqused_k was written: of sequence b cu_seqlens_k_new[b + 1] -
  // cu_seqlens_k_new[b], or seqlen_k_new of every one.
  const int* cu_seqlens_k_new = nullptr;
  int seqlen_k_new = 0;
  int max_seqlen_q = 0;    // of packed sequences, to choose a kernel by; 0: not known. Results
                           // do not depend on it
  int num_kv_batches = 0;  // batch entries of k and v, for kv_batch_idx; 0: batch_size
  int max_seqlen_k = 0;    // of keys, to bound splits of fixed length by: the last split of a
                           // longer sequence has all that is left
};

// Key j is visible to query i iff i + shift - left <= j <= i + shift + right, where shift is
// seqlen_k - seqlen_q of the sequence or what its origin says.
struct Window {
  static constexpr int unbounded = -1;
  int left = unbounded;
  int right = unbounded;
  bool has_tree = false;  // ForwardParams::tree hides keys as well, and right none

  constexpr bool is_full() const { return left == unbounded && right == unbounded && !has_tree; }
};

// A (batch or 1, heads or 1, seqlen_q or 1, seqlen_k) tensor added to the scores; a dimension of 1
// has stride 0. Sequences may be shorter than it.
struct BiasParams {
  const void* data = nullptr;  // of the call's dtype, or fp32
  bool is_fp32 = false;
  std::int64_t batch_stride = 0;
  std::int64_t head_stride = 0;
  std::int64_t row_stride = 0;
  int rows = 0;  // seqlen_q, also where row_stride is 0
  int columns = 0;
  // Of forwards over caches and pages, not negative: (heads, 2 * reach + 1), of which a pair has
  // the element of key j - (i + shift), clamped to the reach, behind the middle one.
  int reach = -1;

  constexpr bool is_relative() const { return reach >= 0; }
};

// The bias's gradient, summed over what the bias is broadcast over: a dimension of 1 has stride 0.
struct BiasGradient {
  void* data = nullptr;  // zero before the call where not every pair is visited; null: not wanted
  bool is_fp32 = true;   // as a sum is, and the gradient of an fp32 bias; else of the call's dtype
  std::int64_t batch_stride = 0;
  std::int64_t head_stride = 0;
  std::int64_t row_stride = 0;
  bool is_summed = false;        // several pairs add to one element
  std::int64_t word_stride = 0;  // > 0: elements are exact sums (shared/scores/exact_sum.h)
};

// score = softmax_scale * q k^T, or softmax_scale * (q k^T + qv v^T) with qv; then softcap *
// tanh(score / softcap) if softcap > 0; then minus slope * |i + shift - j|; then plus bias(i, j).
// The softmax's denominator also has exp(sink).
struct ScoreParams {
  float softmax_scale = 1.0f;
  float softcap = 0.0f;
  const float* alibi_slopes = nullptr;  // (num_heads_q) or (batch_size, num_heads_q)
  std::int64_t alibi_batch_stride = 0;  // 0: the same slopes for every sequence
  BiasParams bias;
  const float* sink = nullptr;  // (num_heads_q); of a backward, whose lse has it, for dsink alone

  // Whether the call needs a kernel that has one of these features.
  constexpr bool wants(FeatureSet features) const {
    return ((features & feature::softcap) != 0 && softcap > 0.0f) ||
           ((features & feature::alibi) != 0 && alibi_slopes != nullptr) ||
           ((features & feature::bias) != 0 && bias.data != nullptr);
  }
  // All features that it needs.
  constexpr FeatureSet features() const {
    FeatureSet wanted = 0;
    for (FeatureSet each = 1; each != 0; each <<= 1) wanted |= wants(each) ? each : 0;
    return wanted;
  }
};

// Which tiles of 128 keys a tile of 128 queries visits, or, in a backward, the other way round
// (Dao et al., "FlashAttention", 2022, section 3.3). data: (batch or 1, heads_q or 1, tiles, 2 +
// others), of whose row r the first number is how many tiles tile r visits, the second which tile
// is the r'th to be worked on, and the others the visits in ascending order: a tile times 256, and
// for each of the four pieces of 64 x 64 pairs two bits, those of piece (query half, key half) at
// 2 * (2 * query half + key half): 0 hidden, 1 visible, 2 as the pair's bit says. Contents are
// never trusted: what is out of range is clamped.
struct BlockLists {
  const int* data = nullptr;  // null: every tile visits all others
  std::int64_t batch_stride = 0;
  std::int64_t head_stride = 0;
  int tiles = 0;
  int others = 0;

  constexpr const int* row(int sequence, int head, int tile) const {
    return data + sequence * batch_stride + head * head_stride + std::int64_t{tile} * (2 + others);
  }
};

// Which pairs of those pieces are visible: bit j % 32 of word j / 32 of row i. (batch or 1, heads_q
// or 1, rows, words), words a multiple of 4.
struct PairBits {
  const std::uint32_t* data = nullptr;  // null: no list has such a piece
  std::int64_t batch_stride = 0;
  std::int64_t head_stride = 0;
  std::int64_t row_stride = 0;
  int rows = 0;
  int words = 0;
};

struct SparsityParams {
  BlockLists lists;
  PairBits bits;
};

// Which of a sequence's last seqlen_q keys, those of its queries, each query sees: key j of them
// where byte j of row i is not 0, none behind `columns`. (batch, seqlen_q, columns), or of packed
// queries (total_q, columns), with a batch_stride of 0.
struct TreeMask {
  const std::uint8_t* data = nullptr;  // as Window::has_tree says
  std::int64_t batch_stride = 0;
  std::int64_t row_stride = 0;
  int columns = 0;
};

// Where the seed and the offset of a call's random numbers come from: values, or, while a CUDA
// graph is captured and in a backward, device memory.
struct RngSource {
  std::uint64_t seed = 0;
  std::uint64_t offset = 0;
  const std::int64_t* seed_pointer = nullptr;
  const std::int64_t* offset_pointer = nullptr;
  std::uint64_t offset_in_graph = 0;  // added to *offset_pointer
};

// p_dropout in units of 2^-16, which is how exactly it is kept.
constexpr std::uint32_t dropout_threshold(double p_dropout) {
  const double scaled = p_dropout * 65536.0 + 0.5;
  return scaled >= 65535.0 ? 65535u : static_cast<std::uint32_t>(scaled);
}

struct DropoutParams {
  std::uint32_t threshold = 0;  // of p_dropout; 0: nothing is dropped
  RngSource rng;
  std::int64_t* rng_state = nullptr;  // (2): seed and offset, written by the forward if not null
};

// k and v are pages of a pool: key j of sequence b lies in page block_table[b][j / page_size].
struct PagedKvParams {
  const int* block_table = nullptr;  // (batch_size, max_pages), null: not paged
  std::int64_t table_stride = 0;
  int max_pages = 0;  // of one sequence
  int page_size = 0;
  int num_pages = 0;  // of the pool
};

struct SplitParams {
  int num_splits = 1;            // 0: as many as serve the device; else exactly so many at most
  bool batch_invariant = false;  // splits of fixed length: the same bits whatever the batch and
                                 // the capacity
};

// A direction that results are differentiated in: tangents of what has a gradient, each like it;
// data null: zero. And those of the results, which a forward writes and a backward reads.
struct TangentParams {
  bool is_given = false;
  TensorView q, k, v;
  BiasParams bias;
  const float* sink = nullptr;
  TensorView out;
  TensorView out_rounding;  // what rounding takes from out; data null: not wanted, or not known
  RowView<float> lse;
};

// What numbers of e4m3 are multiplied by: (batch, heads_k), or one for each token and head, laid
// out as k is, or, of latent rows, for each group of its columns. data null: 1. Any number may be
// there, and none of a token that is not. is_e8m0: data and strides are of bytes, each the power of
// two 2^(byte - 127), of groups alone.
struct ScaleView {
  static constexpr int one_group = 31;

  float* data = nullptr;
  bool per_token = false;
  std::int8_t group_shift = one_group;  // a group has 2^group_shift columns, from 64 on
  bool is_e8m0 = false;
  std::int32_t group_stride = 0;
  std::int64_t batch_stride = 0;
  std::int64_t row_stride = 0;  // of scales per token alone
  std::int64_t head_stride = 0;
};

struct ScaleParams {
  ScaleView q;  // never per token; of a key head's query heads
  ScaleView k, v;
};

struct ForwardParams {
  Dtype dtype = Dtype::bf16;   // of q and out
  bool e4m3_kv = false;        // k and v are of e4m3, whatever dtype, and stand for what scales say
  bool e4m3_products = false;  // then: q is as well, and multiplied so
  bool e4m3_latent = false;    // v alone is, of a call with qv: its strides are in bytes
  bool values_include_rope = false;  // then: values are v's columns, and k's behind them
  ScaleParams scales;
  AttentionShape shape;
  SequenceParams sequences;
  Window window;
  ScoreParams score;
  DropoutParams dropout;
  SparsityParams sparsity;  // lists by query tiles
  PagedKvParams paged;
  SplitParams split;
  TensorView q, k, v, out;
  TensorView qv;  // scores also have qv v^T; data null: none
  // int32 (batch, seqlen_q, heads_k, keys_per_list / key_list_block): the blocks of keys that a
  // query's heads of a key head see, from its sequence's first key on; what is no block is skipped,
  // and noted unless it is -1. A block that stands twice counts twice.
  TensorView key_lists;
  int keys_per_list = 0;   // 0: no lists, and queries see all keys
  int key_list_block = 1;  // a power of two; with qv 1
  TreeMask tree;
  bool fp32_results = false;  // out is fp32, whatever dtype
  // What rounding takes from out, eight bits of each number (shared/out_rounding.h); data null: not
  // wanted, or, with tangents, not known. Not of fp32 results, nor of caches and pages. Strides are
  // multiples of eight.
  TensorView out_rounding;
  RowView<float> lse;  // natural logarithm
  // (batch_size, num_heads_q): the largest score of each head's pairs, without the sink, not below
  // what the caller wrote there; null: not wanted.
  float* max_logits = nullptr;
  TangentParams tangents;          // given: out and lse are read, and their tangents written
  DeviceErrors* errors = nullptr;  // may be null
  void* workspace = nullptr;  // ForwardPlan::workspace_bytes, 256-byte aligned, contents irrelevant
};

// Those that v has itself.
constexpr int columns_of_v(const ForwardParams& params) {
  return params.shape.head_dim_v - (params.values_include_rope ? params.shape.head_dim : 0);
}

constexpr bool has_key_lists(const ForwardParams& params) { return params.keys_per_list > 0; }

// Rows of q over all sequences.
inline std::int64_t query_rows(const ForwardParams& params) {
  const bool is_packed = params.sequences.cu_seqlens_q != nullptr;
  return std::int64_t{is_packed ? 1 : params.shape.batch_size} * params.shape.seqlen_q;
}

// A forward's key_lists the other way round: their entries, sorted by the block that each names.
// Places are of blocks: key head * key_rows + the row of k that the block begins with. Entries that
// name no block come last.
struct ListedQueries {
  const int* places = nullptr;  // (entries), ascending; of no block num_heads_k * key_rows
  const int* rows = nullptr;    // (entries): of q, over all sequences. Contents are never trusted
  const int* begins = nullptr;  // (num_heads_k * key_rows + 1): the first entry from a place on
  const int* ranks = nullptr;   // (entries): lower places that the same list of a query has; for
                                // sums in a fixed order, or null
  int entries = 0;
  int key_rows = 0;  // of k, over all sequences
  int block = 0;     // keys, a power of two; 0: no lists

  // Those of so many keys that a block has, or has a part of.
  constexpr int tiles_of_block(int block_n) const { return block < block_n ? 1 : block / block_n; }
};

struct BackwardParams {
  Dtype dtype = Dtype::bf16;
  AttentionShape shape;
  SequenceParams sequences;  // cu_seqlens and seqused alone
  Window window;
  ScoreParams score;
  DropoutParams dropout;    // rng: pointers to the forward's rng_state
  SparsityParams sparsity;  // lists by key tiles
  ListedQueries listed;
  bool deterministic = false;  // the same bits every run
  TensorView q, k, v, out, dout;
  TensorView out_rounding;  // as the forward wrote it; data null: out alone is known
  TensorView dq, dk, dv;
  bool fp32_results = false;  // those three are fp32, whatever dtype
  bool accumulate = false;    // dq, dk and dv are added to; with fp32_results alone
  BiasGradient dbias;
  float* dsink = nullptr;     // (num_heads_q), the gradient of score.sink, written if there are
                              // queries; null: not wanted
  RowView<const float> lse;   // as the forward wrote it
  RowView<const float> dlse;  // gradient of lse; data null: none
  TangentParams tangents;     // given: gradients are those of <dout, tangent of out> + <dlse, that
                              // of lse>
  RowView<float> softmax_d;   // rowsum(dO * O) - dlse; data null: not wanted
  DeviceErrors* errors = nullptr;
  void* workspace =
      nullptr;  // BackwardPlan::workspace_bytes, 256-byte aligned, contents irrelevant
};

// Rows of q over all sequences.
inline std::int64_t query_rows(const BackwardParams& params) {
  const bool is_packed = params.sequences.cu_seqlens_q != nullptr;
  return std::int64_t{is_packed ? 1 : params.shape.batch_size} * params.shape.seqlen_q;
}

// Rows of k over all sequences.
inline std::int64_t key_rows(const BackwardParams& params) {
  const bool is_packed = params.sequences.cu_seqlens_k != nullptr;
  return std::int64_t{is_packed ? 1 : params.shape.batch_size} * params.shape.seqlen_k;
}

// The step before attention over a cache: new keys and values are written into it after what it
// holds, and keys and queries are rotated (Su et al., "RoFormer", 2021, section 3.2.2).
struct AppendParams {
  Dtype dtype = Dtype::bf16;
  bool e4m3_cache = false;        // new keys and values are divided by scales and rounded to e4m3
  bool quantizes_tokens = false;  // whose scales, one for each token, are made of them and written
  bool e4m3_latent = false;       // as e4m3_cache, of new values alone
  ScaleView k_scale, v_scale;
  AttentionShape shape;  // seqlen_q: new queries, seqlen_k: rows that the cache holds of a sequence
  SequenceParams sequences;  // cu_seqlens_q, seqused_k (before appending), kv_batch_idx,
                             // cu_seqlens_k_new or seqlen_k_new
  PagedKvParams paged;
  TensorView k_new, v_new;  // (batch, seqlen_k_new, heads_k, columns) or packed; data null:
                            // nothing to append
  TensorView k_cache, v_cache;
  TensorView q, q_rotated;           // data null: queries are not rotated
  const void* rotary_cos = nullptr;  // (seqlen_rotary, rotary_dim / 2) of dtype, null: no rotation
  const void* rotary_sin = nullptr;
  int rotary_dim = 0;
  int seqlen_rotary = 0;
  bool rotary_interleaved =
      true;  // pairs (0, 1), (2, 3), ..; false: (0, r / 2), (1, r / 2 + 1), ..
  bool rotate_queries_in_order = true;  // query i at seqused_k + i; false: all at seqused_k
  int total_q = 0;                      // rows of q where it is packed
  int total_k_new = 0;                  // rows of k_new where it is packed
  int seqlen_k_used = -1;  // keys before appending of every sequence where seqused_k is null
  DeviceErrors* errors = nullptr;
};

// Numbers in device memory, of either width. Contents are never trusted.
struct IndexArray {
  const std::int32_t* narrow = nullptr;
  const std::int64_t* wide = nullptr;  // instead of narrow

  constexpr bool is_given() const { return narrow != nullptr || wide != nullptr; }
  constexpr std::int64_t operator[](std::int64_t i) const {
    return wide != nullptr ? wide[i] : narrow[i];
  }
};

// Cosines or sines of angles: (positions, rotary_dim / 2).
struct RotaryTable {
  const void* data = nullptr;
  Dtype dtype = Dtype::bf16;
  bool is_fp32 = false;  // whatever dtype
  std::int64_t row_stride = 0;
};

// Token t of sequence b is at position t + offsets[b], and its pair d is rotated by the angle whose
// cosine and sine are those tables' entries (position, d). Computed in fp32, rounded once. A token
// stays as it is where the tables have no row for its position, or where it is in no sequence.
struct RotaryParams {
  Dtype dtype = Dtype::bf16;
  bool is_fp32 = false;  // x and out, whatever dtype
  int batch_size = 0;    // sequences
  int seqlen = 0;        // rows of a sequence, or of the packed tensor
  int num_heads = 0;
  int head_dim = 0;
  int rotary_dim = 0;  // even; columns after it stay
  TensorView x, out;   // of the same data and strides: in place
  RotaryTable cos, sin;
  std::int64_t positions = 0;  // rows of the tables
  IndexArray cu_seqlens;       // (batch_size + 1): x and out are packed
  IndexArray offsets;          // (batch_size)
  std::int64_t offset = 0;     // of every sequence where those are not given
  bool interleaved = false;    // pairs (0, 1), (2, 3), ..; false: (0, r / 2), (1, r / 2 + 1), ..
  bool conjugate = false;      // rotates by the negative angles
};

// out = sum of exp(lse_partial - lse) * out_partial over splits; a split with lse -inf is not read.
struct CombineParams {
  Dtype out_dtype = Dtype::bf16;
  bool out_fp32 = false;  // out is fp32 whatever out_dtype
  int num_splits = 0;
  int head_dim = 0;
  int num_heads = 0;
  std::int64_t rows = 0;               // (batch *) seqlen_q
  const float* out_partial = nullptr;  // (num_splits, rows, num_heads, head_dim)
  const float* lse_partial = nullptr;  // (num_splits, rows, num_heads)
  TensorView out_rounding;             // ForwardParams::out_rounding
  void* out = nullptr;  // row r, head h at out + r * out_row_stride + h * out_head_stride for rows
                        // of batch 0; rows_per_batch rows further on the next batch begins
  std::int64_t out_batch_stride = 0;
  std::int64_t out_row_stride = 0;
  std::int64_t out_head_stride = 0;
  std::int64_t rows_per_batch = 0;
  RowView<float> lse;  // (batch, heads, rows_per_batch); batch_stride 0 and one batch where packed
};

// What a test wants to see: the probabilities of every pair, negative where dropout drops them.
struct DebugProbabilitiesParams {
  ForwardParams forward;          // after its run: lse and, with dropout, rng pointers to rng_state
  void* probabilities = nullptr;  // (batch, num_heads_q, rows, columns) of dtype, contiguous
  int rows = 0;
  int columns = 0;
};

}  // namespace flash_attn_cuda
