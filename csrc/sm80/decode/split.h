// What a CTA of a decode kernel works on: a tile, and a split of the keys that it sees.
//
// Sequences of one length: all tiles have the same number of splits, and the grid counts them.
// Otherwise every CTA reads all lengths, finds out how many splits each sequence gets, and takes
// the next item of the list that they make; nobody has to write the list first. Long sequences have
// many splits then, short ones a single one. If the list has more items than there are places for
// CTAs, a CTA that is done takes a ticket for the next.
#pragma once

#include "shared/mask/block_range.h"
#include "shared/schedule/tile_work.h"
#include "shared/sequence/paged_kv.h"
#include "shared/sequence/splits.h"
#include "sm80/decode/traits.h"

namespace flash_attn_cuda::sm80 {

struct DecodeArguments {
  ForwardParams params;
  TileSchedule schedule;  // heads are key heads
  SequenceTable table;
  Divider group;       // rows of a query: rows_of_query()
  int heads_of_group;  // query heads of a key head
  float scale_log2;    // as in ForwardArguments
  bool negate_q;       // softmax_scale < 0
  bool scales_scores;  // modifiers: scores are scaled before the softmax
  bool
      has_vector_rows;  // every row of q, k, v and out begins at 16 bytes and is a multiple of them
  bool lengths_decide;  // about the number of splits
  int num_splits;       // at most
  int ctas_per_split;
  int keys_per_split;  // 0: what the lengths ask for
  int resident_ctas;   // on the whole device
  // Results of rows of q over all sequences; a row's splits lie together.
  float* out_partial;  // (rows, num_heads_q, num_splits, Traits::head_dim_v)
  float* lse_partial;  // (rows, num_heads_q, num_splits), in powers of two
  // Counters (shared/schedule/marked_counter.h).
  unsigned long long* arrivals;  // (rows, num_heads_q): of splits, at a tile's first row
  unsigned long long* tickets;   // of items that CTAs have taken
  unsigned long long call_mark;
};

// Items for each CTA that fits the device, where lengths differ and tiles alone do not fit.
inline constexpr int most_waves = 3;

struct DecodeItem {
  TileWork work;
  int split;
  int splits;  // of this tile
};

// Keys [begin, end), or entries of a list, in slices that count from `origin`: group g of the warps
// takes g, g + num_groups, ..
struct KeySpan {
  int origin;
  int begin;
  int end;

  CUTE_DEVICE bool empty() const { return begin >= end; }
};

CUTE_DEVICE int ceil_div_positive(int dividend, int divisor) {
  return (dividend + divisor - 1) / divisor;
}

CUTE_DEVICE Sequence sequence_at(DecodeArguments const& args, int index) {
  return args.table.counts != nullptr
             ? args.table.sequences[index]
             : read_sequence(args.params.sequences, args.params.shape, index, args.params.errors);
}

template <class Traits>
CUTE_DEVICE int tiles_of(DecodeArguments const& args, int queries) {
  return ceil_div_positive(queries * static_cast<int>(args.group.divisor), Traits::block_m);
}

// What a tile of the sequence has to read, in steps of a CTA, or a little more.
template <class Traits>
CUTE_DEVICE int steps_of(Window const& window, Sequence const& sequence) {
  std::int64_t keys = sequence.seqlen_k;
  if (window.left != Window::unbounded && window.right != Window::unbounded)
    keys = min(keys, std::int64_t(window.left) + window.right + sequence.seqlen_q);
  return ceil_div_positive(static_cast<int>(keys), Traits::step);
}

// fewest_splits() (host/choose_forward.cpp) for equal tiles: each lane of a warp tries a number.
// Here every CTA that an SM can hold is a slot: the grid has CTAs without an item, and nothing puts
// those that have one on an SM each.
CUTE_DEVICE int fewest_splits(float tiles, int slots, int steps, int most) {
  if (tiles >= static_cast<float>(most_tiles_per_slot * slots)) return 1;
  const int splits = min(static_cast<int>(threadIdx.x % 32) + 1, max(most, 1));
  const float cost = cost_of_splits(static_cast<int>(tiles), slots, steps, splits);
  float least = cost;
  CUTE_UNROLL
  for (int step = 16; step > 0; step /= 2)
    least = fminf(least, __shfl_xor_sync(0xffffffffu, least, step));
  return __ffs(__ballot_sync(0xffffffffu, is_about_as_long(cost, least)));
}

// Steps that a CTA should have, so that all of a call take about as long: shorter splits where a
// long one could end up last.
template <class Traits>
CUTE_DEVICE float balanced_steps(DecodeArguments const& args,
                                 typename Traits::SharedStorage& smem) {
  TotalWork own{0.0f, 0.0f, 0.0f};
  for (int i = threadIdx.x; i < args.params.shape.batch_size; i += Traits::threads) {
    const Sequence sequence = sequence_at(args, i);
    const auto steps = static_cast<float>(steps_of<Traits>(args.params.window, sequence));
    const auto tiles = static_cast<float>(tiles_of<Traits>(args, sequence.seqlen_q));
    if (sequence.seqlen_k > 0) own.tiles += tiles;
    own.steps += tiles * steps;
    own.longest = fmaxf(own.longest, steps);
  }
  // Always in the same order, so that all CTAs agree.
  CUTE_UNROLL
  for (int step = 16; step > 0; step /= 2) {
    own.steps += __shfl_xor_sync(0xffffffffu, own.steps, step);
    own.tiles += __shfl_xor_sync(0xffffffffu, own.tiles, step);
    own.longest = fmaxf(own.longest, __shfl_xor_sync(0xffffffffu, own.longest, step));
  }
  if (threadIdx.x % 32 == 0) smem.totals[threadIdx.x / 32] = own;
  __syncthreads();
  TotalWork total{0.0f, 0.0f, 0.0f};
  for (int warp = 0; warp < Traits::num_warps; ++warp) {
    total.steps += smem.totals[warp].steps;
    total.tiles += smem.totals[warp].tiles;
    total.longest = fmaxf(total.longest, smem.totals[warp].longest);
  }
  const auto heads = static_cast<float>(args.params.shape.num_heads_k);
  const auto resident = static_cast<float>(args.resident_ctas);
  const bool is_even = total.longest * total.tiles <= 1.15f * total.steps;
  if (is_even) {
    const int steps = static_cast<int>(total.longest);
    const int splits = fewest_splits(total.tiles * heads, args.resident_ctas, steps,
                                     min(args.num_splits, steps / Traits::least_steps));
    return total.longest / static_cast<float>(splits);
  }
  const bool fits = total.tiles * heads <= resident;
  const float waves = fits ? 2.0f : float(most_waves);
  return total.steps * heads / (resident * waves);
}

// Splits of every tile of a sequence.
template <class Traits>
CUTE_DEVICE int splits_of(DecodeArguments const& args, Sequence const& sequence,
                          float steps_wanted) {
  if (args.keys_per_split > 0) {
    const int splits = ceil_div_positive(sequence.seqlen_k, args.keys_per_split);
    return max(1, min(splits, args.num_splits));
  }
  constexpr float tolerance = 0.15f;  // that a CTA may be longer rather than split once more
  const int steps = steps_of<Traits>(args.params.window, sequence);
  const int most = max(1, min(args.num_splits, steps / Traits::least_steps));
  const float parts = ceilf(static_cast<float>(steps) / fmaxf(steps_wanted, 1.0f) - tolerance);
  return static_cast<int>(fminf(fmaxf(parts, 1.0f), static_cast<float>(most)));
}

inline constexpr int unknown_items = 0x7fff'ffff;  // of a list: more than any index

// Item `index` of the list that the lengths make: of one sequence after the other all heads and
// tiles of its first split, of its second, and so on. False beyond its end. Every thread of the CTA
// must call it; what they did with shared memory before is over when it finds one. items: those of
// the list, which the first call finds out.
template <class Traits>
CUTE_DEVICE bool find_listed(DecodeArguments const& args, int index, float steps_wanted,
                             typename Traits::SharedStorage& smem, DecodeItem& item, int& items) {
  if (index >= items) return false;
  const int heads = args.params.shape.num_heads_k;
  const int sequences =
      args.params.shape.batch_size + (args.table.counts != nullptr ? gap_sequences : 0);
  const int warp = threadIdx.x / 32;
  int before = 0;  // items of earlier sequences
  for (int first = 0; first < sequences; first += Traits::threads) {
    const int candidate = first + threadIdx.x;
    int own = 0;
    int splits = 0;
    if (candidate < sequences) {
      const Sequence sequence = sequence_at(args, candidate);
      splits = splits_of<Traits>(args, sequence, steps_wanted);
      own = splits * heads * tiles_of<Traits>(args, sequence.rows_q);
    }
    int end = own;  // of this thread's items, within the warp first
    CUTE_UNROLL
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(0xffffffffu, end, step);
      if (int(threadIdx.x % 32) >= step) end += other;
    }
    if (threadIdx.x % 32 == 31) smem.item_sums[warp] = end;
    __syncthreads();
    end += before;
    CUTE_UNROLL
    for (int w = 0; w < Traits::num_warps; ++w) {
      if (w < warp) end += smem.item_sums[w];
      before += smem.item_sums[w];
    }
    if (index >= end - own && index < end)
      smem.found = {.sequence = candidate, .item = index - (end - own), .splits = splits};
    __syncthreads();
    if (index < before && items < unknown_items) break;
  }
  if (items == unknown_items) items = before;
  if (index >= before) return false;
  const FoundSequence found = smem.found;
  item.work.sequence = sequence_at(args, found.sequence);
  item.splits = found.splits;
  const int tiles = tiles_of<Traits>(args, item.work.sequence.rows_q);
  item.split = found.item / (tiles * heads);
  const int rest = found.item - item.split * tiles * heads;
  item.work.tile = rest / heads;
  item.work.head = rest - item.work.tile * heads;
  return true;
}

// What a CTA knows of its item without a look at memory, where lengths do not decide: it has one.
struct ItemPlace {
  int split;
  TileCoord coord;

  CUTE_DEVICE static ItemPlace of_cta(DecodeArguments const& args) {
    if (args.lengths_decide) return {};
    const int split = blockIdx.x / args.ctas_per_split;
    return {split, tile_coord(args.schedule, blockIdx.x - split * args.ctas_per_split)};
  }
};

template <class Traits>
CUTE_DEVICE bool find_item(DecodeArguments const& args, int index, ItemPlace const& place,
                           float steps_wanted, typename Traits::SharedStorage& smem,
                           DecodeItem& item, int& items) {
  if (args.lengths_decide) return find_listed<Traits>(args, index, steps_wanted, smem, item, items);
  item.split = place.split;
  item.splits = args.num_splits;
  return find_work(place.coord, args.table, args.params, item.work);
}

// The keys of `visible` that a split takes, or entries of a list.
template <class Traits>
CUTE_DEVICE KeySpan split_span(DecodeArguments const& args, BlockRange const& visible,
                               DecodeItem const& item) {
  // A slice from `begin` on lies in one page, if pages hold whole slices.
  std::int64_t begin = visible.begin - (item.work.sequence.row_k + visible.begin) % Traits::slice;
  if (Traits::has_lists && args.params.keys_per_list > 0) begin = visible.begin;
  std::int64_t keys = args.keys_per_split;
  if (keys > 0) {
    begin = 0;  // whatever is visible, so that windows change no bits of what both sides see
  } else {
    const int steps = ceil_div_positive(visible.end - static_cast<int>(begin), Traits::step);
    const int least = item.splits > 1 ? Traits::least_steps : 0;
    keys = std::int64_t(max(ceil_div_positive(steps, item.splits), least)) * Traits::step;
  }
  begin += item.split * keys;
  if (begin >= visible.end) return {0, 0, 0};
  const bool is_last = item.split + 1 == item.splits;
  const int origin = static_cast<int>(begin);
  const int end =
      is_last ? visible.end : static_cast<int>(min(begin + keys, std::int64_t(visible.end)));
  return {origin, max(visible.begin, origin), end};
}

}  // namespace flash_attn_cuda::sm80
