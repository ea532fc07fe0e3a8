// From cu_seqlens to the table that packed calls read (shared/sequence/sequence.h): bounds of every
// sequence, checked and made safe, and the lists of tiles. One block: a batch of a few thousand
// sequences is a few thousand additions, and a second block would need a second launch.
//
// The tiles of a sequence stay together and in order, or have one entry if a CTA takes them all;
// sequences come by what an entry costs, the most first, so that the grid ends on short ones. Costs
// are sorted into buckets 1/8 of an octave wide.
#include <cub/block/block_scan.cuh>

#include "auxiliary/auxiliary.h"
#include "shared/kernel_order.h"
#include "shared/launch.h"
#include "shared/sequence/sequence.h"

namespace flash_attn_cuda {
namespace {

constexpr int threads = 1024;
constexpr int buckets = 256;

struct TableArguments {
  SequenceTableRequest request;
  int tile_rows;  // this and others as of SequenceTablePlan
  int rows_per_query;
  bool tiles_descend;
  int q_tile_rows;
  int max_q_tiles;
  int swept_rows;
  int max_tiles;
  int* counts;
  Sequence* sequences;
  TileEntry* tiles;
  TileEntry* q_tiles;
};

using Scan = cub::BlockScan<int, threads>;

struct Maximum {
  __device__ int operator()(int a, int b) const { return a < b ? b : a; }
};

__device__ int ceil_div_device(std::int64_t dividend, int divisor) {
  return static_cast<int>((dividend + divisor - 1) / divisor);
}

// Higher costs have smaller buckets.
__device__ int bucket_of(int cost) {
  if (cost < 8) return buckets - 1 - cost;
  const int octave = 31 - __clz(cost);
  return buckets - 1 - (8 * (octave - 2) + (cost >> (octave - 3)) % 8);
}

// Running bounds of one side of the batch, a block of sequences at a time: begin(b) is the largest
// of cu_seqlens[0..b], so that whatever it holds, sequences neither overlap nor leave the tensor.
struct Bounds {
  const int* cu_seqlens;
  int batch_size;
  int total;
  DeviceCheck check;
  int previous;  // end of the last sequence so far; the same in every thread

  __device__ int entry(int index) const {
    const int value = cu_seqlens[index];
    return value < 0 ? 0 : (value > total ? total : value);
  }

  __device__ static Bounds of(const int* cu_seqlens, int batch_size, int total, DeviceCheck check,
                              DeviceErrors* errors) {
    Bounds bounds{cu_seqlens, batch_size, total, check, 0};
    if (cu_seqlens == nullptr) return bounds;
    bounds.previous = bounds.entry(0);
    if (threadIdx.x == 0) {
      const int last = cu_seqlens[batch_size];
      if (cu_seqlens[0] != 0)
        report(errors, check, 0, cu_seqlens[0], 0);
      else if (last > total)
        report(errors, check, batch_size, last, total);
    }
    return bounds;
  }

  // Begin and end of this thread's sequence; every thread of the block must call it.
  __device__ int2 next(int sequence, Scan::TempStorage& storage, DeviceErrors* errors) {
    int end = previous;
    if (cu_seqlens != nullptr && sequence < batch_size) {
      end = entry(sequence + 1);
      if (cu_seqlens[sequence + 1] < cu_seqlens[sequence])
        report(errors, check, sequence + 1, cu_seqlens[sequence + 1], cu_seqlens[sequence]);
    }
    int begin, last;
    __syncthreads();
    Scan(storage).ExclusiveScan(end, begin, previous, Maximum{}, last);
    begin = begin < previous ? previous : begin;
    end = end < begin ? begin : end;
    previous = last < previous ? previous : last;
    return {begin, end};
  }
};

__device__ Sequence make_sequence(const SequenceTableRequest& request, int index, int2 q, int2 k) {
  const SequenceParams& params = request.sequences;
  const AttentionShape& shape = request.shape;
  Sequence sequence = sequence_of_shape(shape, index);
  if (params.cu_seqlens_q != nullptr) {
    sequence.batch_q = 0;
    sequence.row_q = q.x;
    sequence.rows_q = q.y - q.x;
  }
  sequence.seqlen_q = params.seqused_q == nullptr
                          ? sequence.rows_q
                          : detail::checked(request.errors, DeviceCheck::seqused_q, index,
                                            params.seqused_q[index], sequence.rows_q);
  if (request.most_queries > 0 && sequence.seqlen_q > request.most_queries)
    report(request.errors, DeviceCheck::tree_mask, index, sequence.seqlen_q, request.most_queries);
  const bool is_packed = params.cu_seqlens_k != nullptr && !request.is_paged;
  int capacity = is_packed ? k.y - k.x : shape.seqlen_k;
  if (request.is_paged && params.cu_seqlens_k != nullptr) {
    capacity = detail::checked(request.errors, DeviceCheck::cu_seqlens_k, index, k.y - k.x,
                               shape.seqlen_k);
  }
  read_cached_keys(params, shape.batch_size, capacity, index, request.errors, sequence);
  if (is_packed) {
    sequence.batch_k = 0;
    sequence.row_k += k.x;
  }
  sequence.shift = sequence.seqlen_k - sequence.seqlen_q;
  if (params.origin != nullptr)
    read_origin(params.origin, request.drops, index, request.errors, sequence);
  return sequence;
}

// Rows of the tensors that belong to no sequence. Their index is the first one's: kernels read what
// each sequence has of its own, such as slopes, before they see that there is nothing to do.
__device__ Sequence make_gap(bool packed_q, int2 q, bool packed_k, int2 k) {
  return {.index = 0,
          .batch_q = 0,
          .batch_k = 0,
          .row_q = q.x,
          .row_k = k.x,
          .seqlen_q = 0,
          .rows_q = packed_q ? q.y - q.x : 0,
          .seqlen_k = 0,
          .rows_k = packed_k ? k.y - k.x : 0,
          .first_q_tile = 0,
          .shift = 0,
          .stream = 0,
          .first_q = 0,
          .first_k = 0};
}

__device__ int main_tiles(const TableArguments& args, const Sequence& sequence) {
  const int rows = args.request.tiles_of_keys ? sequence.rows_k : sequence.rows_q;
  return ceil_div_device(std::int64_t{rows} * args.rows_per_query, args.tile_rows);
}

// A sequence's entries in the main kernel's list of tiles.
__device__ int main_entries(const TableArguments& args, const Sequence& sequence) {
  const int tiles = main_tiles(args, sequence);
  return is_swept(sequence, args.swept_rows) ? min(tiles, 1) : tiles;
}

__device__ int query_tiles(const TableArguments& args, const Sequence& sequence) {
  return args.max_q_tiles == 0 ? 0 : ceil_div_device(sequence.rows_q, args.q_tile_rows);
}

// What a tile of the sequence costs grows with what it is multiplied with.
__device__ int cost_bucket(const TableArguments& args, const Sequence& sequence) {
  const int cost = args.request.tiles_of_keys ? sequence.seqlen_q : sequence.seqlen_k;
  const bool takes_all = is_swept(sequence, args.swept_rows);
  return bucket_of(takes_all ? cost * main_tiles(args, sequence) : cost);
}

struct SharedStorage {
  Scan::TempStorage scan;
  int first_tile[buckets];  // entries of a bucket, then where its next one goes
};

__global__ void __launch_bounds__(threads)
    sequence_table_kernel(const __grid_constant__ TableArguments args) {
  __shared__ SharedStorage smem;
  let_next_kernel_start();  // launched by launch_kernel, after all before it
  const SequenceTableRequest& request = args.request;
  const SequenceParams& params = request.sequences;
  const int batch_size = request.shape.batch_size;
  const bool packed_q = params.cu_seqlens_q != nullptr;
  const bool packed_k = params.cu_seqlens_k != nullptr && !request.is_paged;
  const int thread = threadIdx.x;

  if (thread < buckets) smem.first_tile[thread] = 0;
  const int total_q = request.shape.seqlen_q;
  const int total_k = request.is_paged ? INT_MAX : request.shape.seqlen_k;
  Bounds bounds_q = Bounds::of(params.cu_seqlens_q, batch_size, total_q, DeviceCheck::cu_seqlens_q,
                               request.errors);
  Bounds bounds_k = Bounds::of(params.cu_seqlens_k, batch_size, total_k, DeviceCheck::cu_seqlens_k,
                               packed_k ? request.errors : nullptr);
  const int first_q = bounds_q.previous;
  const int first_k = bounds_k.previous;

  int q_tiles_before = 0;
  const int entries = batch_size + gap_sequences;
  for (int base = 0; base < entries; base += threads) {
    const int index = base + thread;
    const int2 q = bounds_q.next(index, smem.scan, request.errors);
    const int2 k = bounds_k.next(index, smem.scan, request.errors);
    Sequence sequence{};
    if (index < batch_size) {
      sequence = make_sequence(request, index, q, k);
    } else if (index == batch_size) {
      // previous: the end of the last sequence, as this is the last round or the one after it
      sequence = make_gap(packed_q, {q.x, total_q}, packed_k, {k.x, total_k});
    } else if (index == batch_size + 1) {
      sequence = make_gap(packed_q, {0, first_q}, packed_k, {0, first_k});
    }
    const bool exists = index < entries;
    int q_tiles = exists ? query_tiles(args, sequence) : 0;
    int offset, sum;
    __syncthreads();
    Scan(smem.scan).ExclusiveSum(q_tiles, offset, sum);
    sequence.first_q_tile = q_tiles_before + offset;
    q_tiles_before += sum;
    if (exists) {
      args.sequences[index] = sequence;
      const int count = main_entries(args, sequence);
      if (count > 0) atomicAdd(&smem.first_tile[cost_bucket(args, sequence)], count);
    }
  }

  __syncthreads();
  int tiles_before, tiles;
  Scan(smem.scan).ExclusiveSum(thread < buckets ? smem.first_tile[thread] : 0, tiles_before, tiles);
  __syncthreads();
  if (thread < buckets) smem.first_tile[thread] = tiles_before;
  if (thread == 0) {
    args.counts[0] = min(tiles, args.max_tiles);
    args.counts[1] = min(q_tiles_before, args.max_q_tiles);
  }
  __syncthreads();

  // A warp writes the tiles of 32 sequences, one sequence after the other.
  const int lane = thread % 32;
  for (int base = thread - lane; base < entries; base += threads) {
    Sequence sequence{};
    int count = 0, q_count = 0, first = 0;
    if (base + lane < entries) {
      sequence = args.sequences[base + lane];
      count = main_entries(args, sequence);
      q_count = query_tiles(args, sequence);
      if (count > 0) first = atomicAdd(&smem.first_tile[cost_bucket(args, sequence)], count);
    }
    for (int owner = 0; owner < 32 && base + owner < entries; ++owner) {
      const int owner_count = __shfl_sync(0xffffffffu, count, owner);
      const int owner_first = __shfl_sync(0xffffffffu, first, owner);
      for (int tile = lane; tile < owner_count; tile += 32) {
        const int slot = owner_first + (args.tiles_descend ? owner_count - 1 - tile : tile);
        if (slot < args.max_tiles) args.tiles[slot] = {base + owner, tile};
      }
      const int owner_q_count = __shfl_sync(0xffffffffu, q_count, owner);
      const int owner_q_first = __shfl_sync(0xffffffffu, sequence.first_q_tile, owner);
      for (int tile = lane; tile < owner_q_count; tile += 32) {
        if (owner_q_first + tile < args.max_q_tiles)
          args.q_tiles[owner_q_first + tile] = {base + owner, tile};
      }
    }
  }
}

}  // namespace

void make_sequence_table(const SequenceTablePlan& plan, const SequenceTableRequest& request,
                         Stream stream) {
  if (!plan.used()) return;
  const TableArguments arguments{.request = request,
                                 .tile_rows = plan.tile_rows,
                                 .rows_per_query = plan.rows_per_query,
                                 .tiles_descend = plan.tiles_descend,
                                 .q_tile_rows = plan.q_tile_rows,
                                 .max_q_tiles = static_cast<int>(plan.q_tiles.count),
                                 .swept_rows = plan.swept_rows,
                                 .max_tiles = static_cast<int>(plan.tiles.count),
                                 .counts = plan.counts.in(request.workspace),
                                 .sequences = plan.sequences.in(request.workspace),
                                 .tiles = plan.tiles.in(request.workspace),
                                 .q_tiles = plan.q_tiles.in(request.workspace)};
  launch_kernel<&sequence_table_kernel>(1, threads, 0, stream, arguments);
}

}  // namespace flash_attn_cuda
