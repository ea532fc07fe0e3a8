// The probabilities of every query and key, for tests: before dropout, negative where it drops
// them, 0 where a key is hidden. A block for every query and head.
#include <cmath>

#include "auxiliary/vector_types.h"
#include "flash_attn/api.h"
#include "shared/dropout/dropout.h"
#include "shared/launch.h"
#include "shared/mask/block_range.h"
#include "shared/scores/score_modifiers.h"
#include "shared/sequence/paged_kv.h"

namespace flash_attn_cuda {
namespace {

constexpr int threads = 128;

// Begin and length of sequence `index` of a packed tensor: begins are the running maximum of
// cu_seqlens, so that no content of it leads outside.
__device__ int2 packed_bounds(const int* cu_seqlens, int index, int total) {
  int begin = 0;
  for (int i = 0; i <= index; ++i) begin = max(begin, min(cu_seqlens[i], total));
  return {begin, max(begin, min(cu_seqlens[index + 1], total)) - begin};
}

__device__ Sequence debug_sequence(const ForwardParams& params, int index) {
  const SequenceParams& sequences = params.sequences;
  Sequence sequence{};
  sequence.index = index;
  sequence.batch_q = index;
  sequence.rows_q = params.shape.seqlen_q;
  if (sequences.cu_seqlens_q != nullptr) {
    const int2 q = packed_bounds(sequences.cu_seqlens_q, index, params.shape.seqlen_q);
    sequence.batch_q = 0;
    sequence.row_q = q.x;
    sequence.rows_q = q.y;
  }
  sequence.seqlen_q = sequence.rows_q;
  if (sequences.seqused_q != nullptr)
    sequence.seqlen_q = detail::clamp(sequences.seqused_q[index], 0, sequence.rows_q);
  int2 k{0, params.shape.seqlen_k};
  const bool has_bounds = sequences.cu_seqlens_k != nullptr;
  const bool is_paged = params.paged.block_table != nullptr;
  if (has_bounds) {
    // The lengths of pages have no total, only a capacity.
    constexpr int unknown_total = 2'147'483'647;
    k = packed_bounds(sequences.cu_seqlens_k, index,
                      is_paged ? unknown_total : params.shape.seqlen_k);
    k.y = min(k.y, params.shape.seqlen_k);
  }
  read_cached_keys(sequences, params.shape.batch_size, k.y, index, nullptr, sequence);
  if (has_bounds && !is_paged) {
    sequence.batch_k = 0;
    sequence.row_k += k.x;
  }
  return sequence;
}

template <class Element>
__global__ void __launch_bounds__(threads)
    probabilities_kernel(const __grid_constant__ DebugProbabilitiesParams args) {
  const ForwardParams& params = args.forward;
  const AttentionShape& shape = params.shape;
  const int query = static_cast<int>(blockIdx.x % args.rows);
  const int batch_head = static_cast<int>(blockIdx.x / args.rows);
  const int head = batch_head % shape.num_heads_q;
  const int head_k = shape.key_head(head);
  const Sequence sequence = debug_sequence(params, batch_head / shape.num_heads_q);
  Element* result =
      static_cast<Element*>(args.probabilities) + std::int64_t{blockIdx.x} * args.columns;

  const bool attends = query < sequence.seqlen_q;
  const std::int64_t row = std::int64_t{sequence.row_q} + (attends ? query : 0);
  const Element* q = static_cast<const Element*>(params.q.data) +
                     sequence.batch_q * params.q.batch_stride + row * params.q.row_stride +
                     head * params.q.head_stride;
  const float lse = attends ? params.lse.data[sequence.batch_q * params.lse.batch_stride +
                                              head * params.lse.head_stride + row]
                            : -INFINITY;
  const KeyRows keys = KeyRows::of(params.paged, sequence);
  const int centre = query + sequence.seqlen_k - sequence.seqlen_q;
  const auto modifiers =
      ScoreModifiers::of(params.score, sequence.index, head, sequence.seqlen_k - sequence.seqlen_q);
  const DropoutMask dropout =
      DropoutMask::of(read_rng(params.dropout.rng), params.dropout.threshold,
                      sequence_of_shape(shape, sequence.index).stream, head);

  for (int key = threadIdx.x; key < args.columns; key += threads) {
    float probability = 0.0f;
    const bool in_window =
        (params.window.left < 0 || key >= std::int64_t{centre} - params.window.left) &&
        (params.window.right < 0 || key <= std::int64_t{centre} + params.window.right);
    if (key < sequence.seqlen_k && in_window && lse != -INFINITY) {
      if (const auto* k = keys.row<const Element>(params.k, head_k, key, nullptr)) {
        float dot = 0.0f;
        for (int i = 0; i < shape.head_dim; ++i)
          dot += static_cast<float>(q[i]) * static_cast<float>(k[i]);
        const float score = modifiers.apply(dot, query, key) * score_unit(params.score);
        probability = expf(score - lse);
      }
    }
    if (params.dropout.threshold > 0 && attends && key < sequence.seqlen_k &&
        !dropout.keeps(query, key))
      probability = -probability;
    result[key] = static_cast<Element>(probability);
  }
}

}  // namespace

void run_debug_probabilities(const DebugProbabilitiesParams& params, Stream stream) {
  const AttentionShape& shape = params.forward.shape;
  const std::int64_t grid =
      params.columns == 0 ? 0 : std::int64_t{shape.batch_size} * shape.num_heads_q * params.rows;
  constexpr std::int64_t most = 2'147'483'647;
  if (grid > most)
    throw Error("probabilities: at most " + std::to_string(most) + " rows, got " +
                std::to_string(grid));
  dispatch_dtype(params.forward.dtype, [&](auto element) {
    launch_kernel<&probabilities_kernel<decltype(element)>>(grid, threads, 0, stream, params);
  });
}

}  // namespace flash_attn_cuda
