// Where a sequence's rows lie and how many of them attend: from the shape, from lengths in device
// memory, or, for packed sequences, from the table that sequence_table.cu made of cu_seqlens.
// Pure index logic; the only place that reads lengths on behalf of the attention kernels.
#pragma once

#include "flash_attn/api.h"
#include "shared/host_device.h"
#include "shared/mask/block_range.h"

#if defined(__CUDACC__)
#include <cuda_runtime_api.h>
#endif

namespace flash_attn_cuda {

struct Sequence {
  int index;         // which sequence of the call: whose slopes, lists and bias
  int batch_q;       // batch entry of q, out and their gradients
  int batch_k;       // batch entry of k, v; of a paged cache, row of the block table
  int row_q;         // its first query's row in the batch entry
  int row_k;         // its first key's row
  int seqlen_q;      // queries that attend
  int rows_q;        // rows that are the sequence's: the others get out 0, lse -inf
  int seqlen_k;      // keys that are there
  int rows_k;        // rows from row_k on that are the sequence's: the others get dk = dv = 0
  int first_q_tile;  // backward: of all query tiles of a head
  int shift;         // query i is at key i + shift: what windows and ALiBi count from
  int stream;        // of dropout's random numbers, the first query head's
  int first_q;       // dropout's number of the first query, a multiple of 16
  int first_k;       // of the first key
};

// Bounds of what an origin says. With these, and with sequences and windows as short as the host
// lets them be then (host/normalize_window.h), no arithmetic on positions overflows.
inline constexpr int most_shift = 1 << 30;
inline constexpr int most_first = 1 << 30;
inline constexpr int origin_step = 16;  // queries and keys of a group of dropout's

struct TileEntry {
  int sequence;
  int tile;
};

// Whether one CTA takes all key tiles of a packed sequence (SequenceTablePlan::swept_rows).
FAC_HOST_DEVICE constexpr bool is_swept(const Sequence& sequence, int swept_rows) {
  return sequence.rows_q <= swept_rows && sequence.rows_k <= swept_rows;
}

// Sequence batch_size holds the rows after the last one, batch_size + 1 those before the first:
// they attend to nothing, and are written like any row that sees no key.
inline constexpr int gap_sequences = 2;

// The table lies in the workspace.
struct SequenceTable {
  const int* counts = nullptr;  // (2): entries of tiles and of q_tiles; null: no table
  const Sequence* sequences = nullptr;
  const TileEntry* tiles = nullptr;    // of the main kernel, the costliest first
  const TileEntry* q_tiles = nullptr;  // backward: query tiles, in the order of first_q_tile

  static SequenceTable at(void* workspace, const SequenceTablePlan& plan) {
    return {.counts = plan.counts.in(workspace),
            .sequences = plan.sequences.in(workspace),
            .tiles = plan.tiles.in(workspace),
            .q_tiles = plan.q_tiles.in(workspace)};
  }
};

// Keeps the first error. Cheap enough for a path that is never taken.
FAC_HOST_DEVICE void report(DeviceErrors* errors, DeviceCheck check, int index, int value,
                            int limit) {
#if defined(__CUDA_ARCH__)
  if (errors == nullptr) return;
  if (atomicCAS(&errors->check, 0, static_cast<int>(check)) != 0) return;
  errors->index = index;
  errors->value = value;
  errors->limit = limit;
#else
  if (errors == nullptr || errors->check != 0) return;
  *errors = {static_cast<int>(check), index, value, limit};
#endif
}

namespace detail {
// value clamped to [0, limit], reported where that changes it.
FAC_HOST_DEVICE int checked(DeviceErrors* errors, DeviceCheck check, int index, int value,
                            int limit) {
  if (value >= 0 && value <= limit) return value;
  report(errors, check, index, value, limit);
  return value < 0 ? 0 : limit;
}
}  // namespace detail

// Keys of sequence `index` of a call without cu_seqlens_k, and their place. `capacity`: rows that
// the tensor holds of every sequence.
FAC_HOST_DEVICE void read_cached_keys(const SequenceParams& params, int batch_size, int capacity,
                                      int index, DeviceErrors* errors, Sequence& sequence) {
  using detail::checked;
  int used = capacity;
  if (params.seqused_k != nullptr) {
    used = checked(errors, DeviceCheck::seqused_k, index, params.seqused_k[index], capacity);
    int added = params.seqlen_k_new;
    if (params.cu_seqlens_k_new != nullptr) {
      added = params.cu_seqlens_k_new[index + 1] - params.cu_seqlens_k_new[index];
    }
    if (added < 0) added = 0;
    if (added > capacity - used) {
      report(errors, DeviceCheck::append_capacity, index, used, capacity);
      added = capacity - used;
    }
    used += added;
  }
  const int leftpad = params.leftpad_k == nullptr ? 0
                                                  : checked(errors, DeviceCheck::leftpad_k, index,
                                                            params.leftpad_k[index], used);
  int batch = index;
  if (params.kv_batch_idx != nullptr) {
    const int entries = params.num_kv_batches > 0 ? params.num_kv_batches : batch_size;
    batch = params.kv_batch_idx[index];
    if (batch < 0 || batch >= entries) {
      report(errors, DeviceCheck::cache_batch_idx, index, batch, entries - 1);
      batch = 0;
      used = leftpad;  // no such entry, no keys
    }
  }
  sequence.batch_k = batch;
  sequence.row_k = leftpad;
  sequence.seqlen_k = used - leftpad;
  sequence.rows_k = capacity - leftpad;
}

// Sequence `index` as the shape alone describes it.
FAC_HOST_DEVICE Sequence sequence_of_shape(const AttentionShape& shape, int index) {
  return {.index = index,
          .batch_q = index,
          .batch_k = index,
          .row_q = 0,
          .row_k = 0,
          .seqlen_q = shape.seqlen_q,
          .rows_q = shape.seqlen_q,
          .seqlen_k = shape.seqlen_k,
          .rows_k = shape.seqlen_k,
          .first_q_tile = 0,
          .shift = shape.seqlen_k - shape.seqlen_q,
          .stream = static_cast<int>(static_cast<unsigned>(index) *
                                     static_cast<unsigned>(shape.num_heads_q)),
          .first_q = 0,
          .first_k = 0};
}

// Sequence `index` of a call that needs no table.
FAC_HOST_DEVICE Sequence read_sequence(const SequenceParams& params, const AttentionShape& shape,
                                       int index, DeviceErrors* errors) {
  Sequence sequence = sequence_of_shape(shape, index);
  if (params.seqused_q != nullptr) {
    sequence.seqlen_q = detail::checked(errors, DeviceCheck::seqused_q, index,
                                        params.seqused_q[index], shape.seqlen_q);
  }
  read_cached_keys(params, shape.batch_size, shape.seqlen_k, index, errors, sequence);
  sequence.shift = sequence.seqlen_k - sequence.seqlen_q;
  return sequence;
}

namespace detail {
FAC_HOST_DEVICE int checked_first(DeviceErrors* errors, int index, int value) {
  if (value >= 0 && value <= most_first && value % origin_step == 0) return value;
  report(errors, DeviceCheck::origin, index, value, origin_step);
  return clamp(value, 0, most_first) / origin_step * origin_step;
}
}  // namespace detail

// Where sequence `index`, whose lengths are known, lies in a longer one.
FAC_HOST_DEVICE void read_origin(const int* origin, bool drops, int index, DeviceErrors* errors,
                                 Sequence& sequence) {
  const int* own = origin + std::int64_t{4} * index;
  sequence.stream = own[0];
  if (drops) {  // else they are not used
    sequence.first_q = detail::checked_first(errors, index, own[1]);
    sequence.first_k = detail::checked_first(errors, index, own[2]);
  }
  sequence.shift = detail::clamp(own[3], -most_shift, most_shift);
}

}  // namespace flash_attn_cuda
