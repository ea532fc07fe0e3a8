// The gathered rows of a step: which they are, and their way to shared memory.
#pragma once

#include "shared/gradient/backward_arguments.h"
#include "sm80/listed_backward/traits.h"

namespace flash_attn_cuda::sm80 {

// Counters of sums in a fixed order (sm80/listed_backward/turns.h), zeros at first.
struct ListedTurns {
  int* of_queries = nullptr;  // (rows of q, num_heads_k): tiles that have added to dQ; null: nobody
                              // waits
  int* of_tiles = nullptr;    // (places of ListedQueries, tiles_per_block): CTAs that have added to
                              // dK and dV
  int* tickets = nullptr;     // CTAs that have started
  int query_rows = 0;

  CUTE_DEVICE bool are_taken() const { return of_queries != nullptr; }
};

struct ListedArguments {
  BackwardArguments of;
  ListedTurns turns;
  int log2_heads;       // rows that a query has in a step: its heads, or the power of two above
  int tiles_per_block;  // of keys
  int entries_per_cta;  // of ListedQueries
};

// Row r of a step is query r >> log2_heads of it, and of those that share the key head the query
// head of the bits below.
template <class Traits>
struct GatheredRows {
  using Element = typename Traits::Element;
  static constexpr int block_m = Traits::block_m;

  ListedArguments const& args;
  typename Traits::SharedStorage& smem;
  int thread;

  CUTE_DEVICE int queries_per_step() const { return block_m >> args.log2_heads; }
  CUTE_DEVICE int heads() const { return args.of.params.shape.heads_per_key_head(); }
  CUTE_DEVICE int head_of(int row) const { return row & ((1 << args.log2_heads) - 1); }
  CUTE_DEVICE int query_of(int row, int buffer) const {
    return smem.queries[buffer][row >> args.log2_heads];
  }
  CUTE_DEVICE bool exists(int row, int buffer) const {
    return query_of(row, buffer) >= 0 && head_of(row) < heads();
  }
  CUTE_DEVICE int query_head(int row) const { return smem.run.block.head * heads() + head_of(row); }

  // Among the rows of all heads, as the preprocess kernel lays them out.
  CUTE_DEVICE std::int64_t place_of(int row, int buffer) const {
    const Sequence& sequence = smem.run.block.sequence;
    const std::int64_t tile =
        std::int64_t(query_head(row)) * args.of.q_tiles + sequence.first_q_tile;
    return tile * block_m + query_of(row, buffer);
  }

  // Which queries the step from entry `first` on has.
  CUTE_DEVICE void find_queries(int first, int buffer) const {
    if (thread >= queries_per_step()) return;
    const ListedRun& run = smem.run;
    const Sequence& sequence = run.block.sequence;
    int query = -1;
    if (first + thread < run.end) {
      const int first_row = sequence.batch_q * args.of.params.shape.seqlen_q + sequence.row_q;
      query = args.of.params.listed.rows[first + thread] - first_row;
      if (query >= sequence.seqlen_q) query = -1;
    }
    smem.queries[buffer][thread] = query;
  }

  // Q, dO and the statistics of the step whose queries are known.
  CUTE_DEVICE void load(int buffer) const {
    BackwardParams const& params = args.of.params;
    int own = thread;
    asm volatile("" : "+r"(own));  // what follows is not kept from step to step: that spills
    load_tile(params.q, params.shape.head_dim, smem.q, buffer, own);
    load_tile(params.dout, params.shape.head_dim_v, smem.dout, buffer, own);
    if (own >= 2 * block_m) return;
    const int row = own % block_m;
    const bool is_lse = own < block_m;
    float& target = is_lse ? smem.lse_log2[row] : smem.softmax_d[row];
    if (exists(row, buffer)) {
      const float* source = is_lse ? args.of.lse_log2 : args.of.softmax_d;
      SM80_CP_ASYNC_CACHEALWAYS<float>::copy(source[place_of(row, buffer)], target);
    } else {
      target = is_lse ? INFINITY : 0.0f;
    }
  }

 private:
  CUTE_DEVICE void load_tile(TensorView const& view, int columns, Element* target, int buffer,
                             int own) const {
    const Sequence& sequence = smem.run.block.sequence;
    auto tile = smem_tile<typename Traits::QueryLayout>(target);
    Traits::RowsLoader::load(columns, tile, own, [&](int row) -> const Element* {
      if (!exists(row, buffer)) return nullptr;
      return row_pointer<const Element>(view, sequence.batch_q, query_head(row),
                                        sequence.row_q + query_of(row, buffer));
    });
  }
};

}  // namespace flash_attn_cuda::sm80
