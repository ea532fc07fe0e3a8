// Before attention over a cache: new keys, rotated, and values go into the cache after what it
// holds, and queries are rotated into a tensor of their own (Su et al., "RoFormer", 2021, section
// 3.2.2). Rotations are computed in fp32.
//
// A row is one position and head of k_new, v_new or q, shared by the lanes of a power of two.
#include <algorithm>

#include "auxiliary/rotary.h"
#include "auxiliary/vector_types.h"
#include "flash_attn/api.h"
#include "shared/kernel_order.h"
#include "shared/launch.h"
#include "shared/mask/block_range.h"
#include "shared/sequence/paged_kv.h"

namespace flash_attn_cuda {
namespace {

constexpr int threads = 256;

struct AppendArguments {
  AppendParams params;
  std::int64_t key_rows;    // of k_new, and of v_new: positions times heads
  std::int64_t query_rows;  // of q
  int lanes_per_row;        // a power of two
};

// Where a row of a dense or packed tensor belongs.
struct RowPlace {
  int sequence;  // -1: to none
  int batch;     // batch entry of the tensor
  int row;       // in it
  int position;  // in the sequence
};

// `row`: over all sequences of `seqlen` rows each, or of the packed tensor.
__device__ RowPlace find_row(const int* cu_seqlens, int batch_size, int seqlen, int row) {
  if (cu_seqlens == nullptr) {
    const int sequence = row / seqlen;
    return {sequence, sequence, row - sequence * seqlen, row - sequence * seqlen};
  }
  const int sequence = find_sequence(cu_seqlens, batch_size, row);
  return {sequence, 0, row, sequence >= 0 ? row - cu_seqlens[sequence] : 0};
}

// Keys that sequence `index` had before.
__device__ int used_keys(const AppendParams& params, int index) {
  const int capacity = params.shape.seqlen_k;
  const int* used = params.sequences.seqused_k;
  if (used == nullptr) return detail::clamp(params.seqlen_k_used, 0, capacity);
  return detail::checked(params.errors, DeviceCheck::seqused_k, index, used[index], capacity);
}

// Where row `row` of sequence `index` lies in the cache.
__device__ KeyPlace find_cache_row(const AppendParams& params, int index, int used, int row) {
  const int capacity = params.shape.seqlen_k;
  if (row >= capacity) {
    report(params.errors, DeviceCheck::append_capacity, index, used, capacity);
    return {};
  }
  Sequence sequence{};
  sequence.batch_k = index;
  if (params.sequences.kv_batch_idx != nullptr) {
    const int entries = params.sequences.num_kv_batches > 0 ? params.sequences.num_kv_batches
                                                            : params.shape.batch_size;
    sequence.batch_k = params.sequences.kv_batch_idx[index];
    if (sequence.batch_k < 0 || sequence.batch_k >= entries) {
      report(params.errors, DeviceCheck::cache_batch_idx, index, sequence.batch_k, entries - 1);
      return {};
    }
  }
  return KeyRows::of(params.paged, sequence).find(row, params.errors);
}

template <class Element>
__device__ float to_float(Element x) {
  return static_cast<float>(x);
}

// Columns `column` on of a row, rotated by the angles of `position`.
template <class Element, int kVector>
__device__ Columns<Element, kVector> rotated(const AppendParams& params, const Element* row,
                                             int column, int position) {
  using Part = Columns<Element, kVector>;
  const int half = params.rotary_dim / 2;
  const Part own = Part::at(row, column);
  const bool halves = !params.rotary_interleaved;
  const bool is_first_half = column < half;
  Part other;
  if (halves)
    other = Part::at(row, is_first_half ? column + half : column - half);
  else if constexpr (kVector == 1)
    other = Part::at(row, column ^ 1);
  const std::int64_t angles = std::int64_t{position} * half;
  const auto* cosines = static_cast<const Element*>(params.rotary_cos) + angles;
  const auto* sines = static_cast<const Element*>(params.rotary_sin) + angles;
  Part result;
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    const int col = column + i;
    const int pair = halves ? (is_first_half ? col : col - half) : col / 2;
    const bool is_x = halves ? is_first_half : col % 2 == 0;
    Element partner = other.values[i];
    if constexpr (kVector > 1) {
      if (!halves) partner = own.values[i ^ 1];
    }
    const float c = to_float(cosines[pair]);
    const float s = to_float(sines[pair]);
    result.values[i] =
        static_cast<Element>(turned(to_float(own.values[i]), to_float(partner), c, is_x ? -s : s));
  }
  return result;
}

// position: -1 for a copy.
template <class Element, int kVector>
__device__ void move_row(const AppendArguments& args, const Element* source, Element* target,
                         int columns, int position, int lane) {
  const AppendParams& params = args.params;
  for (int column = lane * kVector; column < columns; column += args.lanes_per_row * kVector) {
    const bool rotates = position >= 0 && column < params.rotary_dim;
    *reinterpret_cast<Columns<Element, kVector>*>(target + column) =
        rotates ? rotated<Element, kVector>(params, source, column, position)
                : Columns<Element, kVector>::at(source, column);
  }
}

// The position whose angles a row is rotated by; -1: not rotated.
__device__ int rotary_position(const AppendParams& params, int sequence, int position) {
  if (params.rotary_cos == nullptr) return -1;
  if (position < params.seqlen_rotary) return position;
  report(params.errors, DeviceCheck::rotary_position, sequence, position, params.seqlen_rotary - 1);
  return -1;
}

template <class Element>
__device__ Element* row_of(const TensorView& view, int batch, int row, int head) {
  return static_cast<Element*>(view.data) + batch * view.batch_stride + row * view.row_stride +
         head * view.head_stride;
}

template <class Element, int kVector>
__device__ void append_row(const AppendArguments& args, std::int64_t index, bool is_value,
                           int lane) {
  const AppendParams& params = args.params;
  const auto row = static_cast<int>(index / params.shape.num_heads_k);
  const auto head = static_cast<int>(index - std::int64_t{row} * params.shape.num_heads_k);
  const RowPlace place = find_row(params.sequences.cu_seqlens_k_new, params.shape.batch_size,
                                  params.sequences.seqlen_k_new, row);
  if (place.sequence < 0) return;
  const int used = used_keys(params, place.sequence);
  const int cache_row = used + place.position;
  const KeyPlace target = find_cache_row(params, place.sequence, used, cache_row);
  if (!target.exists()) return;
  const TensorView& source_view = is_value ? params.v_new : params.k_new;
  const TensorView& target_view = is_value ? params.v_cache : params.k_cache;
  const int columns = is_value ? params.shape.head_dim_v : params.shape.head_dim;
  const int position = is_value ? -1 : rotary_position(params, place.sequence, cache_row);
  move_row<Element, kVector>(
      args, row_of<const Element>(source_view, place.batch, place.row, head),
      static_cast<Element*>(target_view.data) + target.offset(target_view, head), columns, position,
      lane);
}

template <class Element, int kVector>
__device__ void rotate_query(const AppendArguments& args, std::int64_t index, int lane) {
  const AppendParams& params = args.params;
  const auto row = static_cast<int>(index / params.shape.num_heads_q);
  const auto head = static_cast<int>(index - std::int64_t{row} * params.shape.num_heads_q);
  const RowPlace place =
      find_row(params.sequences.cu_seqlens_q, params.shape.batch_size, params.shape.seqlen_q, row);
  int position = -1;
  if (place.sequence >= 0) {
    const int first = used_keys(params, place.sequence);
    position = rotary_position(params, place.sequence,
                               first + (params.rotate_queries_in_order ? place.position : 0));
  }
  move_row<Element, kVector>(args, row_of<const Element>(params.q, place.batch, place.row, head),
                             row_of<Element>(params.q_rotated, place.batch, place.row, head),
                             params.shape.head_dim, position, lane);
}

// A thread for every entry of cu_seqlens_k_new.
__device__ void check_new_lengths(const AppendParams& params, std::int64_t thread) {
  const int* cu_seqlens = params.sequences.cu_seqlens_k_new;
  if (cu_seqlens == nullptr || thread > params.shape.batch_size) return;
  const auto index = static_cast<int>(thread);
  const int value = cu_seqlens[index];
  const int low = index == 0 ? 0 : cu_seqlens[index - 1];
  const auto fail = [&](int limit) {
    report(params.errors, DeviceCheck::cu_seqlens_k_new, index, value, limit);
  };
  if (index == 0 && value != 0)
    fail(0);
  else if (value < low)
    fail(low);
  else if (index == params.shape.batch_size && value > params.total_k_new)
    fail(params.total_k_new);
}

template <class Element, int kVector>
__global__ void __launch_bounds__(threads)
    append_kernel(const __grid_constant__ AppendArguments args) {
  let_next_kernel_start();  // launched by launch_kernel, after all before it
  const std::int64_t thread = std::int64_t{blockIdx.x} * threads + threadIdx.x;
  const std::int64_t row = thread / args.lanes_per_row;
  const auto lane = static_cast<int>(thread - row * args.lanes_per_row);
  check_new_lengths(args.params, thread);
  const std::int64_t query = row - 2 * args.key_rows;
  if (query >= args.query_rows) return;
  if (query >= 0)
    rotate_query<Element, kVector>(args, query, lane);
  else if (row < args.key_rows)
    append_row<Element, kVector>(args, row, false, lane);
  else
    append_row<Element, kVector>(args, row - args.key_rows, true, lane);
}

// Whether 16 bytes of a row are whole pairs, and their partners 16 bytes as well.
bool has_vectors(const AppendParams& params) {
  const int step = params.rotary_interleaved ? vector_elements : 2 * vector_elements;
  const AttentionShape& shape = params.shape;
  if (shape.head_dim % vector_elements != 0 || shape.head_dim_v % vector_elements != 0)
    return false;
  if (params.rotary_cos != nullptr && params.rotary_dim % step != 0) return false;
  for (const TensorView* view : {&params.k_new, &params.v_new, &params.k_cache, &params.v_cache,
                                 &params.q, &params.q_rotated}) {
    if (!has_vector_rows(*view, bytes_of(params.dtype))) return false;
  }
  return true;
}

template <int kVector>
void launch_append(const AppendParams& params, Stream stream) {
  const AttentionShape& shape = params.shape;
  const std::int64_t sequences = shape.batch_size;
  const std::int64_t new_rows = params.sequences.cu_seqlens_k_new != nullptr
                                    ? params.total_k_new
                                    : sequences * params.sequences.seqlen_k_new;
  const std::int64_t query_rows =
      params.sequences.cu_seqlens_q != nullptr ? params.total_q : sequences * shape.seqlen_q;
  const int columns = std::max(shape.head_dim, shape.head_dim_v);
  int lanes = 1;
  while (lanes < 32 && lanes * kVector < columns) lanes *= 2;
  const AppendArguments arguments{
      .params = params,
      .key_rows = params.k_new.data == nullptr ? 0 : new_rows * shape.num_heads_k,
      .query_rows = params.q.data == nullptr ? 0 : query_rows * shape.num_heads_q,
      .lanes_per_row = lanes};
  const std::int64_t rows = 2 * arguments.key_rows + arguments.query_rows;
  std::int64_t work = rows * lanes;
  if (params.sequences.cu_seqlens_k_new != nullptr && work <= sequences) work = sequences + 1;
  dispatch_dtype(params.dtype, [&](auto element) {
    launch_kernel<&append_kernel<decltype(element), kVector>>((work + threads - 1) / threads,
                                                              threads, 0, stream, arguments);
  });
}

}  // namespace

void run_append(const AppendParams& params, Stream stream) {
  if (params.shape.batch_size == 0) return;
  if (has_vectors(params))
    launch_append<vector_elements>(params, stream);
  else
    launch_append<1>(params, stream);
}

}  // namespace flash_attn_cuda
