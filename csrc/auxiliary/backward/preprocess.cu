// Before the backward's main kernel, one pass over O and dO (FlashAttention-2, Algorithm 2, line
// 4):
//   softmax_d = rowsum(dO * O) - dlse, so that dS = P * (dP - softmax_d) carries the gradient of
//   LSE as well; lse_log2 = lse * log2(e), +inf for rows without a key, rows past the end and rows
//   of which lse says too little (largest_lse), so that their P is exp2(-inf) = 0; zeros where key
//   tiles will add all of dQ, where they count additions, where tiles count that have started and
//   parts of them that have ended, and, where nothing follows that would write it, in dq of the
//   query tiles that see no key; of a sink's gradient, the sum of exp(sink - lse) * -softmax_d over
//   the rows of a block, as the sink has the weight exp(sink - lse) in every row and no value. The
//   last block of a head sums those in a fixed order, unless the main kernel does.
//   With tangents also that of lse and rowsum(dO * tangent of O), and of a sink's gradient what
//   they make of it: exp(sink - lse) * ((that of lse - the sink's) * softmax_d - that rowsum).
// Everything lies tile by tile, as the main kernel reads it. A row is read by the fewest lanes that
// cover it with 16 bytes each, or by so many more that a block's rows are of one tile.
#include <bit>
#include <cmath>

#include "auxiliary/auxiliary.h"
#include "auxiliary/vector_types.h"
#include "flash_attn/instance.h"
#include "shared/block_sum.h"
#include "shared/kernel_order.h"
#include "shared/launch.h"
#include "shared/out_rounding.h"
#include "shared/schedule/marked_counter.h"
#include "shared/schedule/tile_work.h"
#include "shared/scores/score_scale.h"

namespace flash_attn_cuda {
namespace {

constexpr int threads = preprocess_threads;

struct PreprocessArguments {
  BackwardParams params;
  SequenceTable table;
  int* additions;
  int additions_per_tile;
  int* tickets;
  int* part_counters;
  int num_part_counters;  // at most the rows
  float* lse_log2;
  float* softmax_d;
  float* tangent_lse;
  float* tangent_dot;
  float* dq_accum;
  float* sink_shares;  // one number a block; null: not wanted
  int sink_shares_per_head;
  unsigned long long* sink_arrivals;  // of a head's blocks; null: the main kernel sums the shares
  unsigned long long call_mark;
  int q_tiles;               // of a head, over all sequences
  int q_tiles_per_sequence;  // without a table
  int log2_tile_rows;
  int log2_lanes_per_row;  // 0 to 5
  int accum_columns;       // the instance's head_dim
  int block_n;             // the instance's
  bool writes_dq;          // the instance
  bool zeroes_sums;        // of dQ, where a sequence has several key tiles,
  int swept_rows;          // but those of at most so many rows, if packed
};

// A row of dq that no key tile adds to or writes; it stays as it is where dq accumulates.
template <class Element>
__device__ void clear_query_gradient(const PreprocessArguments& args, const Sequence& sequence,
                                     int head, int query, int lane) {
  const TensorView& dq = args.params.dq;
  if (query >= sequence.rows_q || args.params.accumulate) return;
  const int element_bytes =
      static_cast<int>(args.params.fp32_results ? sizeof(float) : sizeof(Element));
  const std::int64_t first = sequence.batch_q * dq.batch_stride +
                             (std::int64_t(sequence.row_q) + query) * dq.row_stride +
                             head * dq.head_stride;
  char* row = static_cast<char*>(dq.data) + first * element_bytes;
  for (int byte = lane * vector_bytes; byte < args.params.shape.head_dim * element_bytes;
       byte += vector_bytes << args.log2_lanes_per_row)
    *reinterpret_cast<uint4*>(row + byte) = {0, 0, 0, 0};
}

// What a forward kept of the rounding of a vector of O.
struct alignas(vector_elements) Rounding {
  std::int8_t of[vector_elements];
};

// rowsum(dO * out), in the first lane of the row's. rounding: of out; data null: not known.
template <class Element>
__device__ float output_dot(const PreprocessArguments& args, const TensorView& out_view,
                            const TensorView& rounding, const Sequence& sequence, int head,
                            int query, bool is_used, int lane) {
  using OfElement = OutRounding<std::is_same_v<Element, __half> ? Dtype::fp16 : Dtype::bf16>;
  float dot = 0.0f;
  const int columns = is_used ? args.params.shape.head_dim_v : 0;
  for (int column = lane * vector_elements; column < columns;
       column += vector_elements << args.log2_lanes_per_row) {
    const auto offset = [&](const TensorView& view) {
      return sequence.batch_q * view.batch_stride +
             (std::int64_t(sequence.row_q) + query) * view.row_stride + head * view.head_stride +
             column;
    };
    const auto load = [&](const TensorView& view) {
      return *reinterpret_cast<const Vector<Element>*>(static_cast<const Element*>(view.data) +
                                                       offset(view));
    };
    const Vector<Element> out = load(out_view);
    const Vector<Element> dout = load(args.params.dout);
    Rounding kept{};
    if (rounding.data != nullptr)
      kept = *reinterpret_cast<const Rounding*>(static_cast<const std::int8_t*>(rounding.data) +
                                                offset(rounding));
    for (int i = 0; i < vector_elements / 2; ++i) {
      float2 o = out.pair(i);
      if (rounding.data != nullptr)
        o = {OfElement::exact(o.x, kept.of[2 * i]), OfElement::exact(o.y, kept.of[2 * i + 1])};
      dot += o.x * dout.pair(i).x + o.y * dout.pair(i).y;
    }
  }
  for (int step = (1 << args.log2_lanes_per_row) / 2; step > 0; step /= 2)
    dot += __shfl_xor_sync(0xffffffffu, dot, step);
  return dot;
}

template <class Number>
__device__ Number* row_of(const RowView<Number>& view, const Sequence& sequence, int head) {
  return view.data + sequence.batch_q * view.batch_stride + head * view.head_stride +
         sequence.row_q;
}

// What a row adds to the gradient of its head's sink; nothing where lse is -inf.
__device__ float sink_gradient_of_row(float sink, float lse, float softmax_d) {
  const float weight = lse == -INFINITY ? 0.0f : exp2f((sink - lse) * log2e);
  return weight == 0.0f ? 0.0f : -weight * softmax_d;
}

// By a block, of whose rows thread 0 has the sum.
__device__ void leave_sink_share(const PreprocessArguments& args, int head, float share) {
  if (threadIdx.x >= 32) return;
  int earlier = 0;  // blocks of the head that have left theirs
  if (threadIdx.x == 0) {
    args.sink_shares[blockIdx.x] = share;
    if (args.sink_arrivals != nullptr) {
      MarkedCounter arrivals(args.sink_arrivals + head);
      arrivals.look();
      arrivals.mark(args.call_mark);
      earlier = arrivals.arrive();
      if (earlier >= args.sink_shares_per_head - 1) arrivals.reset();
    }
  }
  if (args.sink_arrivals == nullptr) return;
  if (__shfl_sync(0xffffffffu, earlier, 0) < args.sink_shares_per_head - 1) return;
  __syncwarp();
  const float* shares = args.sink_shares + std::int64_t{head} * args.sink_shares_per_head;
  float sum = 0.0f;
#pragma unroll 16
  for (int i = threadIdx.x; i < args.sink_shares_per_head; i += 32) sum += shares[i];
  sum = warp_sum(sum);
  if (threadIdx.x == 0) args.params.dsink[head] = sum;
}

template <class Element, bool kTangents>
__global__ void __launch_bounds__(threads)
    preprocess_kernel(const __grid_constant__ PreprocessArguments args) {
  const BackwardParams& params = args.params;
  follow_earlier_kernels();
  // Rows of the tiles of all heads, one after the other. Shifts and 32-bit divisions: every lane
  // pays for them.
  const int rows_per_block = threads >> args.log2_lanes_per_row;
  const std::int64_t row =
      std::int64_t(blockIdx.x) * rows_per_block + (threadIdx.x >> args.log2_lanes_per_row);
  const int lane = threadIdx.x & ((1 << args.log2_lanes_per_row) - 1);
  const auto tile = static_cast<unsigned>(row >> args.log2_tile_rows);
  const int row_in_tile = static_cast<int>(row) & ((1 << args.log2_tile_rows) - 1);
  const int head = static_cast<int>(tile / static_cast<unsigned>(args.q_tiles));
  QueryTile work;
  const bool exists = head < params.shape.num_heads_q &&
                      find_query_tile(args.table, params, args.q_tiles_per_sequence,
                                      static_cast<int>(tile - head * args.q_tiles), work);
  const int query = exists ? (work.tile << args.log2_tile_rows) + row_in_tile : 0;
  const bool is_used = exists && query < work.sequence.seqlen_q;
  const float dot = output_dot<Element>(args, params.out, params.out_rounding, work.sequence, head,
                                        query, is_used, lane);
  float tangent_dot = 0.0f;
  if constexpr (kTangents)
    tangent_dot = output_dot<Element>(args, params.tangents.out, params.tangents.out_rounding,
                                      work.sequence, head, query, is_used, lane);

  if (row == 0 && lane == 0) args.tickets[0] = args.tickets[1] = 0;
  if (row < args.num_part_counters && lane == 0) args.part_counters[row] = 0;
  if (args.additions != nullptr && head < params.shape.num_heads_q && lane == 0) {
    for (int i = row_in_tile; i < args.additions_per_tile; i += 1 << args.log2_tile_rows)
      args.additions[std::int64_t{tile} * args.additions_per_tile + i] = 0;
  }
  if (!exists) {
    if (args.sink_shares != nullptr) leave_sink_share(args, head, 0.0f);
    return;
  }
  float sink_gradient = 0.0f;
  if (lane == 0) {
    const float lse = is_used ? row_of(params.lse, work.sequence, head)[query] : -INFINITY;
    const float dlse = is_used && params.dlse.data != nullptr
                           ? row_of(params.dlse, work.sequence, head)[query]
                           : 0.0f;
    const float softmax_d = lse == -INFINITY ? 0.0f : dot - dlse;
    args.softmax_d[row] = softmax_d;
    args.lse_log2[row] = fabsf(lse) > largest_lse ? INFINITY : lse * log2e;
    if (params.softmax_d.data != nullptr && query < work.sequence.rows_q)
      row_of(params.softmax_d, work.sequence, head)[query] = softmax_d;
    float of_sink = softmax_d;
    if constexpr (kTangents) {
      const float tangent =
          lse == -INFINITY ? 0.0f : row_of(params.tangents.lse, work.sequence, head)[query];
      args.tangent_lse[row] = tangent;
      args.tangent_dot[row] = lse == -INFINITY ? 0.0f : tangent_dot;
      const float* sink = params.tangents.sink;
      of_sink = tangent_dot - (tangent - (sink == nullptr ? 0.0f : sink[head])) * softmax_d;
    }
    if (args.sink_shares != nullptr)
      sink_gradient = sink_gradient_of_row(params.score.sink[head], lse, of_sink);
  }
  bool is_summed = true;  // dQ of the row, over key tiles
  if (args.writes_dq) {
    const Sequence& sequence = work.sequence;
    const int first = work.tile << args.log2_tile_rows;
    const int last = min(first + (1 << args.log2_tile_rows), sequence.seqlen_q) - 1;
    const Band band = band_from_queries(params.window, sequence.shift);
    const bool sees_keys = !reach_of(band, first, last, sequence.seqlen_k).empty();
    if (!sees_keys) clear_query_gradient<Element>(args, sequence, head, query, lane);
    is_summed = args.zeroes_sums && sees_keys && sequence.seqlen_k > args.block_n &&
                !is_swept(sequence, args.swept_rows);
  }
  if (is_summed) {
    float4* accum = reinterpret_cast<float4*>(args.dq_accum + row * args.accum_columns);
    for (int i = lane; i < args.accum_columns / 4; i += 1 << args.log2_lanes_per_row)
      accum[i] = {0.0f, 0.0f, 0.0f, 0.0f};
  }
  if (args.sink_shares != nullptr) {
    leave_sink_share(args, head, block_sum<threads>(sink_gradient));
  }
}

}  // namespace

void backward_preprocess(const BackwardPlan& plan, const BackwardParams& params, Stream stream) {
  const AttentionShape& shape = params.shape;
  const BackwardConfig& config = plan.instance->config;
  void* workspace = params.workspace;
  const int lanes = preprocess_lanes(params, config.block_m);
  const std::int64_t tiles = std::int64_t{shape.num_heads_q} * plan.q_tiles;
  const std::int64_t rows = tiles * config.block_m;
  const PreprocessArguments arguments{
      .params = params,
      .table = SequenceTable::at(workspace, plan.table),
      .additions = plan.additions.in(workspace),
      .additions_per_tile =
          plan.additions.exists() ? static_cast<int>(plan.additions.count / tiles) : 0,
      .tickets = plan.tickets.in(workspace),
      .part_counters = plan.part_counters.in(workspace),
      .num_part_counters = static_cast<int>(plan.part_counters.count),
      .lse_log2 = plan.lse_log2.in(workspace),
      .softmax_d = plan.softmax_d.in(workspace),
      .tangent_lse = plan.tangent_lse.in(workspace),
      .tangent_dot = plan.tangent_dot.in(workspace),
      .dq_accum = plan.dq_accum.in(workspace),
      .sink_shares = plan.sink_shares.in(workspace),
      .sink_shares_per_head = plan.sink_shares_per_head,
      .sink_arrivals = plan.sink_arrivals.in(workspace),
      .call_mark = plan.sink_arrivals.exists() ? mark_of_next_call() : 0,
      .q_tiles = plan.q_tiles,
      .q_tiles_per_sequence = plan.q_tiles_per_sequence,
      .log2_tile_rows = std::countr_zero(static_cast<unsigned>(config.block_m)),
      .log2_lanes_per_row = std::countr_zero(static_cast<unsigned>(lanes)),
      .accum_columns = config.head_dim,
      .block_n = config.block_n,
      .writes_dq = plan.instance->writes_dq,
      .zeroes_sums = plan.leaves_sums(),
      .swept_rows = plan.table.swept_rows};
  const std::int64_t grid = (rows * lanes + threads - 1) / threads;
  dispatch_dtype(params.dtype, [&](auto element) {
    using Element = decltype(element);
    if (params.tangents.is_given) {
      launch_early<&preprocess_kernel<Element, true>>(grid, threads, 0, stream, arguments);
    } else {
      launch_early<&preprocess_kernel<Element, false>>(grid, threads, 0, stream, arguments);
    }
  });
}

}  // namespace flash_attn_cuda
