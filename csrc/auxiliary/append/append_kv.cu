// Before attention over a cache: new keys, rotated, and values go into the cache after what it
// holds, and queries are rotated into a tensor of their own (Su et al., "RoFormer", 2021, section
// 3.2.2). Rotations are computed in fp32.
//
// A row is one position and head of k_new, v_new or q, shared by the lanes of a power of two. What
// goes into a cache of e4m3 is first rounded to 16 bits, as a cache of those would hold it.
#include <algorithm>
#include <cstdint>

#include "auxiliary/append/e4m3.h"
#include "auxiliary/append/rows.h"
#include "auxiliary/rotary.h"
#include "auxiliary/vector_types.h"
#include "flash_attn/api.h"
#include "shared/kernel_order.h"
#include "shared/launch.h"

namespace flash_attn_cuda {
namespace {

constexpr int threads = 256;

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
  for (int column = lane * kVector; column < columns; column += args.lanes_per_row() * kVector) {
    const bool rotates = position >= 0 && column < params.rotary_dim;
    *reinterpret_cast<Columns<Element, kVector>*>(target + column) =
        rotates ? rotated<Element, kVector>(params, source, column, position)
                : Columns<Element, kVector>::at(source, column);
  }
}

template <class Element, int kVector>
__device__ void append_row(const AppendArguments& args, std::int64_t index, bool is_value,
                           int lane) {
  const AppendParams& params = args.params;
  const auto [row, head] = split_index(args.heads_k, index);
  const RowPlace place =
      find_row(params.sequences.cu_seqlens_k_new, params.shape.batch_size, args.seqlen_k_new, row);
  if (place.sequence < 0) return;
  const int used = used_keys(params, place.sequence);
  const int cache_row = used + place.position;
  const KeyPlace target = find_cache_row(args, place.sequence, used, cache_row);
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
  const QueryRow query = find_query(args, index);
  const RowPlace& place = query.place;
  move_row<Element, kVector>(args,
                             row_of<const Element>(params.q, place.batch, place.row, query.head),
                             row_of<Element>(params.q_rotated, place.batch, place.row, query.head),
                             params.shape.head_dim, query.position, lane);
}

// -- the kernel -----------------------------------------------------------------------------------

// How rows are moved, how many columns of one a lane moves at once, how many rows of the grid a
// new key and its value are, how many lanes a row has at least, as a power of two, and whether
// queries begin with a warp of their own.
template <class Element, int kVector>
struct To16Bits {
  static constexpr int columns = kVector;
  static constexpr int rows_per_key = 2;
  static constexpr int least_lanes_shift = 0;
  static constexpr bool fills_warps = false;

  // row: one of k_new, or of v_new after those.
  __device__ static void append(const AppendArguments& args, std::int64_t row, int lane) {
    if (row < args.key_rows)
      append_row<Element, kVector>(args, row, false, lane);
    else
      append_row<Element, kVector>(args, row - args.key_rows, true, lane);
  }
  __device__ static void rotate(const AppendArguments& args, std::int64_t query, int lane) {
    rotate_query<Element, kVector>(args, query, lane);
  }
};

template <class Element, int kPairs>
struct ToE4m3 {
  static constexpr int columns = 2 * kPairs;
  static constexpr int rows_per_key = 1;  // with its value, which goes to the same place
  static constexpr int least_lanes_shift = 0;
  static constexpr bool fills_warps = true;

  __device__ static void append(const AppendArguments& args, std::int64_t row, int lane) {
    append_quantized<Element, kPairs>(args, row, lane);
  }
  __device__ static void rotate(const AppendArguments& args, std::int64_t query, int lane) {
    rotate_query_pairs<Element, kPairs>(args, query, lane);
  }
};

// Latent rows become e4m3, each by a warp, and rotary columns stay in 16 bits.
template <class Element, int kVector>
struct ToLatent {
  static constexpr int columns = kVector;
  static constexpr int rows_per_key = 2;
  static constexpr int least_lanes_shift = 5;
  static constexpr bool fills_warps = false;

  __device__ static void append(const AppendArguments& args, std::int64_t row, int lane) {
    if (row < args.key_rows)
      append_row<Element, kVector>(args, row, false, lane);
    else
      append_latent<Element>(args, row - args.key_rows, lane);
  }
  __device__ static void rotate(const AppendArguments& args, std::int64_t query, int lane) {
    rotate_query<Element, kVector>(args, query, lane);
  }
};

template <class Move>
__global__ void __launch_bounds__(threads)
    append_kernel(const __grid_constant__ AppendArguments args) {
  let_next_kernel_start();  // launched by launch_kernel, after all before it
  const std::int64_t thread = std::int64_t{blockIdx.x} * threads + threadIdx.x;
  const std::int64_t row = thread >> args.lanes_shift;
  const int lane = static_cast<int>(threadIdx.x) & (args.lanes_per_row() - 1);
  check_new_lengths(args.params, thread);
  const std::int64_t query = row - args.first_query_row;
  if (query >= args.query_rows) return;
  if (query >= 0)
    Move::rotate(args, query, lane);
  else
    Move::append(args, row, lane);
}

bool has_vector_angles(const AppendParams& params) {
  return reinterpret_cast<std::uintptr_t>(params.rotary_cos) % vector_bytes == 0 &&
         reinterpret_cast<std::uintptr_t>(params.rotary_sin) % vector_bytes == 0;
}

bool has_vector_rows(const AppendParams& params) {
  const int bytes_k = params.e4m3_cache ? 1 : bytes_of(params.dtype);
  const int bytes_v = params.e4m3_latent ? 1 : bytes_k;
  if (!has_vector_rows(params.k_cache, bytes_k) || !has_vector_rows(params.v_cache, bytes_v))
    return false;
  for (const TensorView* view : {&params.k_new, &params.v_new, &params.q, &params.q_rotated}) {
    if (!has_vector_rows(*view, bytes_of(params.dtype))) return false;
  }
  return true;
}

// Whether 16 bytes of a row are whole pairs, and their partners 16 bytes as well.
bool can_copy_vectors(const AppendParams& params) {
  const int step = params.rotary_interleaved ? vector_elements : 2 * vector_elements;
  const AttentionShape& shape = params.shape;
  return shape.head_dim % vector_elements == 0 && shape.head_dim_v % vector_elements == 0 &&
         (params.rotary_cos == nullptr || params.rotary_dim % step == 0) && has_vector_rows(params);
}

// The same of eight pairs and their angles, and of a row that a warp holds.
bool can_quantize_vectors(const AppendParams& params) {
  constexpr int step = ToE4m3<__half, vector_elements>::columns;
  const AttentionShape& shape = params.shape;
  return shape.head_dim % step == 0 && shape.head_dim_v % step == 0 &&
         std::max(shape.head_dim, shape.head_dim_v) <= 32 * step &&
         (params.rotary_cos == nullptr || params.rotary_dim % step == 0) &&
         has_vector_angles(params) && has_vector_rows(params);
}

template <class Move>
void launch_append(const AppendParams& params, Stream stream) {
  const AttentionShape& shape = params.shape;
  const std::int64_t sequences = shape.batch_size;
  const std::int64_t new_rows = params.sequences.cu_seqlens_k_new != nullptr
                                    ? params.total_k_new
                                    : sequences * params.sequences.seqlen_k_new;
  const std::int64_t query_rows =
      params.sequences.cu_seqlens_q != nullptr ? params.total_q : sequences * shape.seqlen_q;
  const int columns = std::max(shape.head_dim, shape.head_dim_v);
  int lanes_shift = Move::least_lanes_shift;
  while (lanes_shift < 5 && (Move::columns << lanes_shift) < columns) ++lanes_shift;
  const std::int64_t key_rows = params.k_new.data == nullptr ? 0 : new_rows * shape.num_heads_k;
  const std::int64_t rotated_rows = params.q.data == nullptr ? 0 : query_rows * shape.num_heads_q;
  std::int64_t first_query_row = Move::rows_per_key * key_rows;
  if (Move::fills_warps) {
    const int rows_per_warp = 32 >> lanes_shift;
    first_query_row = (first_query_row + rows_per_warp - 1) / rows_per_warp * rows_per_warp;
  }
  const AppendArguments arguments{.params = params,
                                  .key_rows = key_rows,
                                  .query_rows = rotated_rows,
                                  .first_query_row = first_query_row,
                                  .lanes_shift = lanes_shift,
                                  .heads_k = HeadDivider::by(shape.num_heads_k, key_rows),
                                  .heads_q = HeadDivider::by(shape.num_heads_q, rotated_rows),
                                  .seqlen_k_new = Divider::by(params.sequences.seqlen_k_new),
                                  .seqlen_q = Divider::by(shape.seqlen_q),
                                  .page_size = Divider::by(params.paged.page_size)};
  const std::int64_t rows = first_query_row + rotated_rows;
  std::int64_t work = rows << lanes_shift;
  if (params.sequences.cu_seqlens_k_new != nullptr && work <= sequences) work = sequences + 1;
  launch_kernel<&append_kernel<Move>>((work + threads - 1) / threads, threads, 0, stream,
                                      arguments);
}

template <int kVector>
void launch_vectors(const AppendParams& params, Stream stream) {
  dispatch_dtype(params.dtype, [&](auto element) {
    using Element = decltype(element);
    if (params.e4m3_cache)
      launch_append<ToE4m3<Element, kVector>>(params, stream);
    else if (params.e4m3_latent)
      launch_append<ToLatent<Element, kVector>>(params, stream);
    else
      launch_append<To16Bits<Element, kVector>>(params, stream);
  });
}

}  // namespace

void run_append(const AppendParams& params, Stream stream) {
  if (params.shape.batch_size == 0) return;
  if (params.e4m3_cache ? can_quantize_vectors(params) : can_copy_vectors(params))
    launch_vectors<vector_elements>(params, stream);
  else
    launch_vectors<1>(params, stream);
}

}  // namespace flash_attn_cuda
