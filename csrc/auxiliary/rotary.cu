// Rotary embedding of one tensor, in place or not.
//
// A thread has one or two vectors of columns (Piece) of a row, the same in several heads of one
// token. It reads their cosines and sines once and first: after its loads of x they would come
// last. It then reads every element of x once, and several heads before it writes the first.
// Halves: two vectors, the first and the second members of the same pairs. Interleaved: one vector
// of whole pairs, or, of single columns, two that are a pair. Columns after rotary_dim are copied
// likewise.
#include <algorithm>
#include <type_traits>

#include "auxiliary/rotary.h"
#include "auxiliary/vector_types.h"
#include "flash_attn/api.h"
#include "shared/kernel_order.h"
#include "shared/launch.h"

namespace flash_attn_cuda {
namespace {

constexpr int most_threads = 128;
constexpr int least_blocks = 5;  // of an SM: as many more loads are under way
constexpr int pieces_per_thread = 8;

template <int kVector, bool kInterleaved>
inline constexpr int pieces_per_head = kInterleaved && kVector > 1 ? 1 : 2;
template <int kVector, bool kInterleaved>
inline constexpr int heads_per_thread = pieces_per_thread / pieces_per_head<kVector, kInterleaved>;

struct RotaryArguments {
  RotaryParams params;
  std::int64_t tokens;
  int turning_units;  // units of a row that rotate; unit: the vectors that a thread has of a head
  int units;          // those, and where it is not in place those that are copied
  int head_groups;    // thread g of them has heads g, g + head_groups, ..
  int units_per_block;
  int groups_per_block;
  int tokens_per_block;
  bool in_place;
};

struct Pieces {
  int first = 0;   // column where it begins
  int second = 0;  // likewise
  bool turn = false;
  bool has_second = true;

  __device__ int gap() const { return second - first; }
};

template <int kVector, bool kInterleaved>
__device__ Pieces find_pieces(const RotaryArguments& args, int unit) {
  const RotaryParams& params = args.params;
  if constexpr (pieces_per_head<kVector, kInterleaved> == 1) {
    return {unit * kVector, unit * kVector, unit < args.turning_units, false};
  } else {
    if (unit < args.turning_units) {
      if (kInterleaved) return {2 * unit, 2 * unit + 1, true};
      return {unit * kVector, unit * kVector + params.rotary_dim / 2, true};
    }
    const int first = params.rotary_dim + (unit - args.turning_units) * kVector;
    const int gap = (args.units - args.turning_units) * kVector;
    const bool has_second = first < params.head_dim - gap;
    return {first, has_second ? first + gap : first, false, has_second};
  }
}

// Where a token lies in x and out.
struct TokenPlace {
  std::int64_t batch;
  std::int64_t row;  // in it

  __device__ static TokenPlace find(const RotaryParams& params, std::int64_t token) {
    if (params.cu_seqlens.is_given() || params.batch_size == 1) return {0, token};
    const std::int64_t batch = token / params.seqlen;
    return {batch, token - batch * params.seqlen};
  }

  template <class Element>
  __device__ Element* row_of(const TensorView& view) const {
    return static_cast<Element*>(view.data) + batch * view.batch_stride + row * view.row_stride;
  }

  // The row of the tables, -1: none.
  __device__ std::int64_t position(const RotaryParams& params) const {
    std::int64_t sequence = batch;
    std::int64_t index = row;
    if (params.cu_seqlens.is_given()) {
      sequence = find_sequence(params.cu_seqlens, params.batch_size, row);
      if (sequence < 0) return -1;
      index = row - params.cu_seqlens[sequence];
    }
    const std::int64_t offset =
        params.offsets.is_given() ? params.offsets[sequence] : params.offset;
    // Unsigned, as the sum with any offset is to be defined.
    const auto sum = static_cast<std::uint64_t>(index) + static_cast<std::uint64_t>(offset);
    return sum < static_cast<std::uint64_t>(params.positions) ? static_cast<std::int64_t>(sum) : -1;
  }
};

template <class Entry, int kCount>
__device__ void read_entries(const RotaryTable& table, std::int64_t position, int column,
                             float* target) {
  constexpr int step = std::min<int>(kCount, vector_bytes / sizeof(Entry));
  const Entry* row = static_cast<const Entry*>(table.data) + position * table.row_stride;
#pragma unroll
  for (int i = 0; i < kCount; i += step) {
    const auto part = Columns<Entry, step>::at(row, column + i);
#pragma unroll
    for (int j = 0; j < step; ++j) target[i + j] = static_cast<float>(part.values[j]);
  }
}

template <int kCount>
__device__ void read_table(const RotaryTable& table, std::int64_t position, int column,
                           float* target) {
  if (table.is_fp32)
    read_entries<float, kCount>(table, position, column, target);
  else if (table.dtype == Dtype::fp16)
    read_entries<__half, kCount>(table, position, column, target);
  else
    read_entries<__nv_bfloat16, kCount>(table, position, column, target);
}

// The cosines and sines of the pairs that a thread has of a head.
template <int kVector, bool kInterleaved>
struct Angles {
  static constexpr int pairs = kVector * pieces_per_head<kVector, kInterleaved> / 2;
  float cosines[pairs];
  float sines[pairs];

  __device__ void read(const RotaryParams& params, std::int64_t position, const Pieces& pieces) {
    const int column = kInterleaved ? pieces.first / 2 : pieces.first;
    read_table<pairs>(params.cos, position, column, cosines);
    read_table<pairs>(params.sin, position, column, sines);
#pragma unroll
    for (int i = 0; i < pairs; ++i) sines[i] = params.conjugate ? -sines[i] : sines[i];
  }

  __device__ void turn(int index, float& x, float& y) const {
    const float before = x;
    x = turned(before, y, cosines[index], -sines[index]);
    y = turned(y, before, cosines[index], sines[index]);
  }
};

// Consecutive columns in whole registers, which 16-bit elements by themselves would not share.
template <class Element, int kVector>
struct Piece {
  using Whole = std::conditional_t<(kVector > 1), uint4, Element>;
  static constexpr bool is_vector_of_16_bits = kVector == vector_elements;
  Whole whole;

  __device__ void load(const Element* from) { whole = *reinterpret_cast<const Whole*>(from); }
  __device__ void store(Element* to) const { *reinterpret_cast<Whole*>(to) = whole; }

  __device__ void unpack(float (&values)[kVector]) const {
    if constexpr (is_vector_of_16_bits) {
      const auto& vector = reinterpret_cast<const Vector<Element>&>(whole);
#pragma unroll
      for (int i = 0; i < kVector / 2; ++i) {
        const float2 pair = vector.pair(i);
        values[2 * i] = pair.x;
        values[2 * i + 1] = pair.y;
      }
    } else {
#pragma unroll
      for (int i = 0; i < kVector; ++i)
        values[i] = static_cast<float>(reinterpret_cast<const Element*>(&whole)[i]);
    }
  }

  __device__ void pack(const float (&values)[kVector]) {
    if constexpr (is_vector_of_16_bits) {
      auto& vector = reinterpret_cast<Vector<Element>&>(whole);
#pragma unroll
      for (int i = 0; i < kVector / 2; ++i) vector.set_pair(i, {values[2 * i], values[2 * i + 1]});
    } else {
#pragma unroll
      for (int i = 0; i < kVector; ++i)
        reinterpret_cast<Element*>(&whole)[i] = static_cast<Element>(values[i]);
    }
  }
};

// The vectors that a thread has of one head.
template <class Element, int kVector, bool kInterleaved>
struct PiecesOfHead {
  static constexpr int count = pieces_per_head<kVector, kInterleaved>;
  Piece<Element, kVector> pieces[count];

  __device__ void load(const Element* at, const Pieces& where) {
    pieces[0].load(at);
    if (count == 2 && where.has_second) pieces[count - 1].load(at + where.gap());
  }

  __device__ void store(Element* at, const Pieces& where) const {
    pieces[0].store(at);
    if (count == 2 && where.has_second) pieces[count - 1].store(at + where.gap());
  }

  __device__ void turn(const Angles<kVector, kInterleaved>& angles) {
    float values[count][kVector];
#pragma unroll
    for (int i = 0; i < count; ++i) pieces[i].unpack(values[i]);
#pragma unroll
    for (int i = 0; i < angles.pairs; ++i) {
      if constexpr (count == 1)
        angles.turn(i, values[0][2 * i], values[0][2 * i + 1]);
      else
        angles.turn(i, values[0][i], values[1][i]);
    }
#pragma unroll
    for (int i = 0; i < count; ++i) pieces[i].pack(values[i]);
  }
};

// A thread block is (units, groups of heads, tokens).
template <class Element, int kVector, bool kInterleaved>
__global__ void __launch_bounds__(most_threads, least_blocks)
    rotary_kernel(const __grid_constant__ RotaryArguments args) {
  constexpr int heads_of_thread = heads_per_thread<kVector, kInterleaved>;
  const RotaryParams& params = args.params;
  const std::int64_t token = std::int64_t{blockIdx.x} * args.tokens_per_block + threadIdx.z;
  if (token >= args.tokens) return;

  follow_earlier_kernels();
  const TokenPlace place = TokenPlace::find(params, token);
  const Element* const source = place.row_of<const Element>(params.x);
  Element* const target = place.row_of<Element>(params.out);
  const std::int64_t position = place.position(params);
  for (int unit = threadIdx.x; unit < args.units; unit += args.units_per_block) {
    const Pieces pieces = find_pieces<kVector, kInterleaved>(args, unit);
    const bool turns = pieces.turn && position >= 0;
    if (!turns && args.in_place) break;  // nor does any later unit
    Angles<kVector, kInterleaved> angles;
    if (turns) angles.read(params, position, pieces);
    for (int group = threadIdx.y; group < args.head_groups; group += args.groups_per_block) {
      PiecesOfHead<Element, kVector, kInterleaved> heads[heads_of_thread];
      const auto has_head = [&](int i) { return group + i * args.head_groups < params.num_heads; };
      // run(vectors of a head, where the first of them begins)
      const auto each_head = [&](auto* row, std::int64_t head_stride, auto&& run) {
        const std::int64_t step = args.head_groups * head_stride;
        auto* at = row + pieces.first + group * head_stride;
#pragma unroll
        for (int i = 0; i < heads_of_thread; ++i) {
          if (has_head(i)) run(heads[i], at);
          at += step;
        }
      };
      each_head(source, params.x.head_stride,
                [&](auto& head, const Element* at) { head.load(at, pieces); });
      if (turns) {
#pragma unroll
        for (int i = 0; i < heads_of_thread; ++i) {
          if (has_head(i)) heads[i].turn(angles);
        }
      }
      each_head(target, params.out.head_stride,
                [&](auto& head, Element* at) { head.store(at, pieces); });
    }
  }
}

constexpr int ceil_div(int a, int b) { return a / b + (a % b != 0); }

template <class Element, int kVector, bool kInterleaved>
void launch_rotary(const RotaryParams& params, Stream stream) {
  constexpr int pieces = pieces_per_head<kVector, kInterleaved>;
  constexpr int most_tokens = 64;  // of a block, whose third extent has this limit
  const bool is_packed = params.cu_seqlens.is_given();
  RotaryArguments args{.params = params,
                       .tokens = std::int64_t{is_packed ? 1 : params.batch_size} * params.seqlen,
                       .turning_units = params.rotary_dim / pieces / kVector,
                       .in_place = params.x.data == params.out.data};
  const int copied = args.in_place ? 0 : (params.head_dim - params.rotary_dim) / kVector;
  args.units = args.turning_units + ceil_div(copied, pieces);
  args.head_groups = ceil_div(params.num_heads, heads_per_thread<kVector, kInterleaved>);
  if (args.tokens == 0 || args.units == 0 || args.head_groups == 0) return;
  args.units_per_block = std::min(args.units, most_threads);
  const int most_groups = std::min(args.head_groups, most_threads / args.units_per_block);
  // Every round has as many groups.
  args.groups_per_block = ceil_div(args.head_groups, ceil_div(args.head_groups, most_groups));
  const int lanes = args.units_per_block * args.groups_per_block;
  args.tokens_per_block = static_cast<int>(
      std::min<std::int64_t>(args.tokens, std::min(most_tokens, most_threads / lanes)));
  const std::int64_t grid = (args.tokens + args.tokens_per_block - 1) / args.tokens_per_block;
  const dim3 threads(args.units_per_block, args.groups_per_block, args.tokens_per_block);
  launch_early<&rotary_kernel<Element, kVector, kInterleaved>>(grid, threads, 0, stream, args);
}

bool is_aligned(const void* data, std::int64_t bytes) {
  return reinterpret_cast<std::uintptr_t>(data) % bytes == 0;
}

// entries: as many as a thread reads of a row of it.
bool has_vector_rows(const RotaryTable& table, int entries) {
  const std::int64_t entry = table.is_fp32 ? sizeof(float) : bytes_of(table.dtype);
  const std::int64_t bytes = std::min<std::int64_t>(vector_bytes, entries * entry);
  return is_aligned(table.data, bytes) && table.row_stride * entry % bytes == 0;
}

template <int kVector, bool kInterleaved>
bool has_vectors(const RotaryParams& params) {
  constexpr int columns = kVector * pieces_per_head<kVector, kInterleaved>;
  constexpr int element_bytes = vector_bytes / kVector;
  return params.head_dim % kVector == 0 && params.rotary_dim % columns == 0 &&
         has_vector_rows(params.x, element_bytes) && has_vector_rows(params.out, element_bytes) &&
         has_vector_rows(params.cos, columns / 2) && has_vector_rows(params.sin, columns / 2);
}

template <class Element, bool kInterleaved>
void run_as(const RotaryParams& params, Stream stream) {
  constexpr int vector = vector_bytes / sizeof(Element);
  if (has_vectors<vector, kInterleaved>(params))
    launch_rotary<Element, vector, kInterleaved>(params, stream);
  else
    launch_rotary<Element, 1, kInterleaved>(params, stream);
}

template <class Element>
void run_as(const RotaryParams& params, Stream stream) {
  if (params.interleaved)
    run_as<Element, true>(params, stream);
  else
    run_as<Element, false>(params, stream);
}

}  // namespace

void run_rotary(const RotaryParams& params, Stream stream) {
  if (params.is_fp32) {
    run_as<float>(params, stream);
    return;
  }
  dispatch_dtype(params.dtype, [&](auto element) { run_as<decltype(element)>(params, stream); });
}

}  // namespace flash_attn_cuda
