// Which rows of k_new, v_new and q append_kv.cu moves, and where to: from lengths and block tables,
// whose contents are checked here. A row is one position and head.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "auxiliary/rotary.h"
#include "flash_attn/api.h"
#include "shared/mask/block_range.h"
#include "shared/sequence/paged_kv.h"

namespace flash_attn_cuda {

// Divides numbers of rows, which may be wider than 31 bits, by the number of heads.
struct HeadDivider {
  Divider narrow;
  bool has_narrow_indices;
  double inverse;

  static HeadDivider by(int heads, std::int64_t rows) {
    return {.narrow = Divider::by(heads),
            .has_narrow_indices = rows <= std::numeric_limits<int>::max(),
            .inverse = 1.0 / std::max(heads, 1)};
  }
};

struct AppendArguments {
  AppendParams params;
  std::int64_t key_rows;         // of k_new, and of v_new: positions times heads
  std::int64_t query_rows;       // of q
  std::int64_t first_query_row;  // what row of the grid is q's first one
  int lanes_shift;               // a row has 2^lanes_shift lanes
  HeadDivider heads_k, heads_q;
  Divider seqlen_k_new, seqlen_q;
  Divider page_size;

  __device__ int lanes_per_row() const { return 1 << lanes_shift; }
};

// A position over all sequences, and a head of it.
struct PositionAndHead {
  int position;
  int head;
};

// `index`: a position times the heads, plus the head. A division of 64 bits would be slow.
__device__ inline PositionAndHead split_index(const HeadDivider& heads, std::int64_t index) {
  const auto count = static_cast<int>(heads.narrow.divisor);
  if (heads.has_narrow_indices) {
    const auto narrow = static_cast<int>(index);
    const int position = heads.narrow.quotient(narrow);
    return {position, narrow - position * count};
  }
  // Off by one at most, because positions are below 2^31.
  auto position = static_cast<int>(static_cast<double>(index) * heads.inverse);
  auto head = static_cast<int>(index - std::int64_t{position} * count);
  if (head < 0) {
    --position;
    head += count;
  } else if (head >= count) {
    ++position;
    head -= count;
  }
  return {position, head};
}

// Where a row of a dense or packed tensor belongs.
struct RowPlace {
  int sequence;  // -1: to none
  int batch;     // batch entry of the tensor
  int row;       // in it
  int position;  // in the sequence
};

// `row`: over all sequences of `seqlen` rows each, or of the packed tensor.
__device__ inline RowPlace find_row(const int* cu_seqlens, int batch_size, const Divider& seqlen,
                                    int row) {
  if (cu_seqlens == nullptr) {
    const int sequence = seqlen.quotient(row);
    const int position = row - sequence * static_cast<int>(seqlen.divisor);
    return {sequence, sequence, position, position};
  }
  const int sequence = find_sequence(cu_seqlens, batch_size, row);
  return {sequence, 0, row, sequence >= 0 ? row - cu_seqlens[sequence] : 0};
}

// Keys that sequence `index` had before.
__device__ inline int used_keys(const AppendParams& params, int index) {
  const int capacity = params.shape.seqlen_k;
  const int* used = params.sequences.seqused_k;
  if (used == nullptr) return detail::clamp(params.seqlen_k_used, 0, capacity);
  return detail::checked(params.errors, DeviceCheck::seqused_k, index, used[index], capacity);
}

// Where row `row` of sequence `index` lies in the cache.
__device__ inline KeyPlace find_cache_row(const AppendArguments& args, int index, int used,
                                          int row) {
  const AppendParams& params = args.params;
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
  KeyRows rows = KeyRows::of(params.paged, sequence);
  rows.page_size = args.page_size;  // which the host has made already
  return rows.find(row, params.errors);
}

// The position whose angles a row is rotated by; -1: not rotated.
__device__ inline int rotary_position(const AppendParams& params, int sequence, int position) {
  if (params.rotary_cos == nullptr) return -1;
  if (position < params.seqlen_rotary) return position;
  report(params.errors, DeviceCheck::rotary_position, sequence, position, params.seqlen_rotary - 1);
  return -1;
}

// An index is not negative, which its widening need not consider.
__device__ inline std::int64_t offset_of(int index, std::int64_t stride) {
  return static_cast<std::uint32_t>(index) * stride;
}

template <class Element>
__device__ Element* row_of(const TensorView& view, int batch, int row, int head) {
  return static_cast<Element*>(view.data) + offset_of(batch, view.batch_stride) +
         offset_of(row, view.row_stride) + offset_of(head, view.head_stride);
}

// Row `index` of q.
struct QueryRow {
  RowPlace place;
  int head;
  int position;  // whose angles it is rotated by; -1: it is copied
};

__device__ inline QueryRow find_query(const AppendArguments& args, std::int64_t index) {
  const AppendParams& params = args.params;
  const auto [row, head] = split_index(args.heads_q, index);
  const RowPlace place =
      find_row(params.sequences.cu_seqlens_q, params.shape.batch_size, args.seqlen_q, row);
  int position = -1;
  if (place.sequence >= 0) {
    const int first = used_keys(params, place.sequence);
    position = rotary_position(params, place.sequence,
                               first + (params.rotate_queries_in_order ? place.position : 0));
  }
  return {place, head, position};
}

// A thread for every entry of cu_seqlens_k_new.
__device__ inline void check_new_lengths(const AppendParams& params, std::int64_t thread) {
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

}  // namespace flash_attn_cuda
