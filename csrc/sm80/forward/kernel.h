// Forward attention, FlashAttention-2 Algorithm 1: O = softmax(score(Q K^T)) V and LSE, for one
// query tile a CTA.
//
// Threads: num_warps x 32; every warp owns block_m / num_warps query rows of S, P and O, all in
// registers. Shared memory: Q block_m x head_dim, K and V block_n x head_dim each
// (traits.h). One buffer each for K and V is enough: V(n) travels while S(n) multiplies,
// K(n - 1) while softmax and P V run.
//
// Of keys and values of e4m3 (e4m3.h), both of the next block travel while this one multiplies.
//
// With splits the key blocks of a tile are shared out to several CTAs, which leave O and LSE of
// their split in fp32 for combine_splits.cu. Of wide heads several CTAs share the columns of V and
// O; each makes S for itself.
#pragma once

#include "shared/dropout/dropout.h"
#include "shared/mask/block_range.h"
#include "shared/mask/mask.h"
#include "shared/mask/pair_mask.h"
#include "shared/mask/tree_mask.h"
#include "shared/online_softmax.h"
#include "shared/schedule/tile_work.h"
#include "shared/scores/score_bias.h"
#include "shared/scores/score_modifiers.h"
#include "shared/sequence/paged_kv.h"
#include "shared/write_rounding.h"
#include "sm80/epilogue.h"
#include "sm80/forward/traits.h"

namespace flash_attn_cuda::sm80 {

struct ForwardArguments {
  ForwardParams params;
  TileSchedule schedule;
  SequenceTable table;
  float scale_log2;  // from a score to powers of two: log2(e), times |softmax_scale| unless
                     // the kernel scales scores itself; never zero
  bool negate_q;     // softmax_scale < 0: the sign moves into Q, so that the row maximum stays a
                     // maximum
  int num_splits;
  int ctas_per_split;
  int keys_per_split;         // 0: equal shares of what the tile sees
  std::int64_t partial_rows;  // per split: rows of q over all sequences
  float* out_partial;         // (num_splits, partial_rows, num_heads_q, head_dim_v)
  float* lse_partial;         // (num_splits, partial_rows, num_heads_q)
  int ctas_per_row;           // CTAs that share the columns of V and O
};

// -Q in place, each thread the elements it loaded itself.
template <class Traits, class SmemTensor>
CUTE_DEVICE void negate_queries(SmemTensor& sQ, int thread) {
  constexpr std::uint32_t two_signs = 0x8000'8000;
  Traits::QueryLoader::Share::for_each(sQ, thread, [&](int, int, uint128_t& chunk) {
    auto* pairs = reinterpret_cast<std::uint32_t*>(&chunk);
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) pairs[i] ^= two_signs;
  });
}

// The key blocks of one split of a tile: block 0 of `range` on, or, for splits of fixed length,
// key 0 on.
template <int kBlockN>
CUTE_DEVICE BlockRange split_range(BlockRange range, int split, int num_splits,
                                   int keys_per_split) {
  const int blocks = keys_per_split > 0 ? keys_per_split / kBlockN
                                        : (range.end - range.begin + num_splits - 1) / num_splits;
  const int begin = (keys_per_split > 0 ? 0 : range.begin) + split * blocks;
  range.end = min(range.end, begin + blocks);
  range.begin = max(range.begin, begin);
  return range;
}

// Rows of the tile for a softmax that knows a maximum (shared/max_logits.h).
template <class Coords>
struct RowsOfTile {
  ForwardParams const& params;
  TileWork const& work;
  int query_begin;
  Coords const& coords;  // of a thread's scores

  CUTE_DEVICE bool are_wanted() const { return params.max_logits != nullptr; }
  CUTE_DEVICE float* place() const {
    return place_of_maximum(params, work.sequence.index, work.head);
  }
  CUTE_DEVICE bool attends(int row) const {
    return query_begin + get<0>(coords(row, 0)) < work.sequence.seqlen_q;
  }
};

// Rows that are the sequence's but do not attend, from `used` on.
template <class Traits, class Output, class Coords>
CUTE_DEVICE void clear_unused_rows(Output& output, float* lse, Coords const& coords, int used) {
  CUTE_UNROLL
  for (int row = 0; row < Traits::rows_per_thread; ++row) {
    if (get<0>(coords(row, 0)) < used) continue;
    lse[row] = -INFINITY;
    CUTE_UNROLL
    for (int col = 0; col < size<1>(output); ++col) output(row, col) = 0.0f;
  }
}

// This split's O and LSE in fp32.
template <class Traits, class Output, class Coords>
CUTE_DEVICE void write_partial(ForwardArguments const& args, Sequence const& sequence, int split,
                               int head, int query_begin, int column_begin, Output const& output,
                               Coords const& coords, float const* lse) {
  AttentionShape const& shape = args.params.shape;
  const std::int64_t first_row = split * args.partial_rows +
                                 std::int64_t(sequence.batch_q) * shape.seqlen_q + sequence.row_q +
                                 query_begin;
  CUTE_UNROLL
  for (int row = 0; row < Traits::rows_per_thread; ++row) {
    const int query = get<0>(coords(row, 0));
    if (query_begin + query >= sequence.rows_q) continue;
    const std::int64_t index = (first_row + query) * shape.num_heads_q + head;
    if (get<1>(coords(row, 0)) == 0 && column_begin == 0) args.lse_partial[index] = lse[row];
    if (lse[row] == -INFINITY) continue;  // will not be read
    float* target = args.out_partial + index * shape.head_dim_v + column_begin;
    const int columns = shape.head_dim_v - column_begin;
    CUTE_UNROLL
    for (int col = 0; col < size<1>(output); col += 2) {
      const int column = get<1>(coords(row, col));
      if (column < columns) {
        *reinterpret_cast<float2*>(target + column) = {output(row, col), output(row, col + 1)};
      }
    }
  }
}

// O and LSE of the tile: registers -> shared memory (Q's buffer) -> global memory. value_scale:
// what O is to be multiplied by.
template <class Traits, class Accumulator>
CUTE_DEVICE void write_output(ForwardArguments const& args, Sequence const& sequence, int split,
                              int head, int query_begin, int column_begin, Accumulator& tOrO,
                              typename Traits::Softmax& softmax,
                              typename Traits::SharedStorage& smem, int thread, float value_scale) {
  using Element = typename Traits::Element;
  ForwardParams const& params = args.params;
  const int rows = sequence.rows_q - query_begin;
  const int columns = params.shape.head_dim_v - column_begin;

  float lse[Traits::rows_per_thread];
  auto output = rows_cols_view(tOrO);
  const float o_scale = Traits::has(feature::dropout)
                            ? 1.0f / keep_probability(params.dropout.threshold)
                            : value_scale;
  // One split has it, and so their combination.
  const float sink = split == 0 ? sink_of(params.score, head) : -INFINITY;
  softmax.normalize_softmax_lse(output, lse, sink, o_scale);

  typename Traits::Mma mma;
  auto cO = make_identity_tensor(Shape<Int<Traits::block_m>, Int<Traits::columns_per_cta>>{});
  auto coords = rows_cols_view(accumulator_share(mma, cO, thread));
  if (sequence.seqlen_q < sequence.rows_q) {
    clear_unused_rows<Traits>(output, lse, coords, sequence.seqlen_q - query_begin);
  }
  if (Traits::has(feature::split_kv) && args.num_splits > 1) {
    write_partial<Traits>(args, sequence, split, head, query_begin, column_begin, output, coords,
                          lse);
    return;
  }
  float* row_lse = params.lse.data + sequence.batch_q * params.lse.batch_stride +
                   head * params.lse.head_stride + sequence.row_q + query_begin;
  if (get<1>(coords(0, 0)) == 0 && column_begin == 0) {
    CUTE_UNROLL
    for (int row = 0; row < Traits::rows_per_thread; ++row) {
      const int query = get<0>(coords(row, 0));
      if (query < rows) row_lse[query] = lse[row];
    }
  }

  if (Traits::writes_fp32 && params.fp32_results) {
    fragment_to_fp32_rows<Traits::block_m, Traits::columns_per_cta>(
        tOrO, mma,
        {.first =
             row_pointer<float>(params.out, sequence.batch_q, head, sequence.row_q + query_begin) +
             column_begin,
         .row_stride = params.out.row_stride,
         .rows = rows,
         .columns = columns},
        thread);
    return;
  }

  if constexpr (Traits::keeps_rounding) {
    if (params.out_rounding.data != nullptr) {
      auto* kept = row_pointer<std::int8_t>(params.out_rounding, sequence.batch_q, head,
                                            sequence.row_q + query_begin);
      write_rounding<Traits::config.dtype>(kept + column_begin, params.out_rounding.row_stride,
                                           output, rows, columns,
                                           [&](int i) { return get<0>(coords(i, 0)); });
    }
  }
  // A warp's rows of O lie where its own rows of Q lay, so only the read-back needs the barrier.
  auto sO = smem_tile<typename Traits::OutputLayout>(smem.q);
  if (Traits::shares_columns) __syncthreads();  // the rows of narrower tiles lie elsewhere
  fragment_to_shared<Element>(tOrO, mma, sO, thread);
  __syncthreads();
  Traits::OutputWriter::store(
      from_column<Element, Traits::shares_columns>(params.out, column_begin), sequence.batch_q,
      head, sequence.row_q + query_begin, rows, columns, sO, thread);
}

// Keys and values of a block of e4m3, of v the columns from own_values on: their bytes.
template <class Traits>
CUTE_DEVICE void load_bytes(ForwardParams const& params, Sequence const& sequence, int head_k,
                            TensorView const& own_values, int own_columns, int block,
                            typename Traits::SharedStorage& smem, int thread) {
  const int key = block * Traits::block_n;
  const KeyRows rows = KeyRows::of(params.paged, sequence);
  const auto place_at = [&](int row) {
    return key + row < sequence.seqlen_k ? rows.find(key + row, params.errors) : KeyPlace{};
  };
  Traits::E4m3Keys::load(params.k, params.scales.k, head_k, params.shape.head_dim, smem.bytes.k,
                         thread, place_at);
  Traits::E4m3Values::load(own_values, params.scales.v, head_k, own_columns, smem.bytes.v, thread,
                           place_at);
  commit_loads();
}

// And their tiles of 16 bits, once all threads have the bytes.
template <class Traits, class Keys, class Values>
CUTE_DEVICE void convert_bytes(ScaleParams const& scales, typename Traits::SharedStorage& smem,
                               Keys& sK, Values& sV, int thread) {
  auto& bytes = smem.bytes;
  Traits::E4m3Keys::convert(bytes.k, scales.k.per_token, sK, bytes.key_scales, thread);
  Traits::E4m3Values::convert(bytes.v, scales.v.per_token, sV, bytes.value_scales, thread);
  __syncthreads();
}

// What this CTA does, for all its threads.
template <class Traits>
CUTE_DEVICE void find_tile(ForwardArguments const& args, int split, int block_id,
                           typename Traits::SharedStorage& smem) {
  ForwardParams const& params = args.params;
  TileWork work;
  if (!find_work(args.schedule, args.table, params, block_id - split * args.ctas_per_split, work)) {
    smem.work.tile = no_tile;
    return;
  }
  if constexpr (Traits::is_sparse) {
    work.tile =
        ranked_tile<Traits::block_m>(params, args.table, work.sequence.index, work.head, work.tile);
  }
  const int seqlen_q = work.sequence.seqlen_q;
  const int seqlen_k = work.sequence.seqlen_k;
  const int query_begin = work.tile * Traits::block_m;
  const int query_last = min(query_begin + Traits::block_m, seqlen_q) - 1;
  smem.work = work;
  smem.range = block_range(band_from_queries(params.window, work.sequence.shift), query_begin,
                           query_last, seqlen_k, Traits::block_n);
  smem.visits.find(params.sparsity.lists, work.sequence.index, work.head, query_begin / list_tile,
                   smem.range);
  if (Traits::has(feature::split_kv) && args.num_splits > 1) {
    smem.range =
        split_range<Traits::block_n>(smem.range, split, args.num_splits, args.keys_per_split);
  }
}

template <class Tag>
__global__ void __launch_bounds__(ForwardTraits<Tag>::threads)
    forward_kernel(const __grid_constant__ ForwardArguments args) {
  using Traits = ForwardTraits<Tag>;
  using Element = typename Traits::Element;
  constexpr int block_m = Traits::block_m;
  constexpr int block_n = Traits::block_n;

  extern __shared__ __align__(128) char smem_bytes[];
  auto& smem = *reinterpret_cast<typename Traits::SharedStorage*>(smem_bytes);
  ForwardParams const& params = args.params;
  AttentionShape const& shape = params.shape;
  const int thread = threadIdx.x;

  if (Traits::has(feature::dropout)) publish_rng(params.dropout, blockIdx.x, thread);
  int block_id = blockIdx.x;
  int column_begin = 0;  // of this CTA's columns of V and O
  if (Traits::shares_columns) {
    block_id = blockIdx.x / args.ctas_per_row;
    column_begin = (blockIdx.x - block_id * args.ctas_per_row) * Traits::columns_per_cta;
  }
  const int split = Traits::has(feature::split_kv) ? block_id / args.ctas_per_split : 0;
  // Work and range lie in shared memory, because registers are what this kernel is short of.
  if (thread == 0) find_tile<Traits>(args, split, block_id, smem);
  __syncthreads();
  TileWork const& work = smem.work;
  Sequence const& sequence = work.sequence;
  const BlockRange range = smem.range;
  if (work.tile == no_tile) return;
  const int head_k = shape.key_head(work.head);
  const int query_begin = work.tile * block_m;

  auto sQ = smem_tile<typename Traits::QueryLayout>(smem.q);  // (block_m, head_dim)
  auto sK = smem_tile<typename Traits::KeyLayout>(smem.k);    // (block_n, head_dim)
  auto sV = smem_tile<typename Traits::ValueLayout>(smem.v);  // (block_n, columns_per_cta)

  auto&& own_values =
      from_column<typename Traits::Cached, Traits::shares_columns>(params.v, column_begin);
  const int own_columns = shape.head_dim_v - column_begin;
  auto source_at = [&](TensorView const& view, int key) {
    return Traits::KeyLoader::source(view, sequence.batch_k, head_k, sequence.row_k + key,
                                     sequence.seqlen_k - key, thread);
  };
  [[maybe_unused]] const auto first_k = source_at(params.k, 0);
  [[maybe_unused]] const auto first_v = source_at(own_values, 0);
  auto load_keys = [&](TensorView const& view, int columns, auto const& first, auto& tile,
                       int block) {
    using Loaders = typename Traits::template LoadersOf<decltype(tile)>;
    const int key = block * block_n;
    if (Traits::has(feature::paged_kv) && params.paged.block_table != nullptr) {
      const KeyRows rows = KeyRows::of(params.paged, sequence);
      Loaders::Rows::load(columns, tile, thread, [&](int row) -> const Element* {
        if (key + row >= sequence.seqlen_k) return nullptr;
        return rows.row<const Element>(view, head_k, key + row, params.errors);
      });
    } else if constexpr (Traits::keeps_pointers) {
      Loaders::Tile::load(view, {first.first + key * view.row_stride, first.rows - key}, columns,
                          tile, thread);
    } else {
      const auto source = source_at(view, key);
      Loaders::Tile::load(view, {source.first, source.rows}, columns, tile, thread);
    }
    commit_loads();
  };

  typename Traits::Mma mma;
  auto q = operand_a(LoadMatrix<Element>{}, mma, sQ, thread);
  auto k = operand_b(LoadMatrix<Element>{}, mma, sK, thread);
  auto v = operand_b(LoadMatrixTransposed<Element>{}, mma, transposed(sV), thread);
  auto cS = make_identity_tensor(Shape<Int<block_m>, Int<block_n>>{});
  // This thread's (rows, columns) of S -> (query, key)
  auto tScS = rows_cols_view(accumulator_share(mma, cS, thread));

  AccumulatorOf<decltype(mma), Shape<Int<block_m>, Int<Traits::columns_per_cta>>> tOrO;
  clear(tOrO);
  const RowsOfTile rows{params, work, query_begin, tScS};
  typename Traits::Softmax softmax(args.scale_log2, rows);
  [[maybe_unused]] ScoreScales score_scales;  // of keys of e4m3
  [[maybe_unused]] ValueUnit value_unit;
  if constexpr (Traits::is_e4m3) {
    score_scales = ScoreScales::of(params.scales, sequence.index, head_k, 1.0f);
    if (!modifies_scores(params.score))
      softmax.scale_log2 = score_scales.leave_to_softmax(args.scale_log2);
  }
  ScoreModifiers modifiers{};
  if (Traits::modifies_scores)
    modifiers = ScoreModifiers::of(params.score, sequence.index, work.head, sequence.shift);
  DropoutMask dropout{};
  if (Traits::has(feature::dropout)) {
    const RngState rng = read_rng(params.dropout.rng);
    dropout = DropoutMask::of(rng, params.dropout.threshold, sequence.stream, work.head);
  }

  const bool has_lists = Traits::is_sparse && params.sparsity.lists.data != nullptr;
  auto visit_at = [&](int position) { return smem.visits.at(has_lists, position, range); };

  auto step = [&](int position, Visit const& visit, Visit const& next_visit) {
    const int block = visit.block;
    wait_for_loads();  // K(block) is here; V's buffer is free
    if constexpr (Traits::is_e4m3) {
      convert_bytes<Traits>(params.scales, smem, sK, sV, thread);
      if (position > range.begin)
        load_bytes<Traits>(params, sequence, head_k, own_values, own_columns, next_visit.block,
                           smem, thread);
    } else {
      load_keys(own_values, own_columns, first_v, sV, block);
    }
    const int key_begin = block * block_n;
    AccumulatorOf<decltype(mma), Shape<Int<block_m>, Int<block_n>>> tSrS;
    clear(tSrS);
    gemm_rows<Traits::shares_columns>(mma, tSrS, q, k, shape.head_dim);

    if constexpr (!Traits::is_e4m3) {
      wait_for_loads();  // V(block) is here; K's buffer is free
      if (position > range.begin)
        load_keys(params.k, shape.head_dim, first_k, sK, next_visit.block);
    }

    auto scores = rows_cols_view(tSrS);
    if constexpr (Traits::is_e4m3) {
      if (!score_scales.are_one()) score_scales.apply(scores, tScS, smem.bytes.key_scales);
    }
    const ScoreTile tile{sequence, work.head, query_begin, key_begin};
    if (Traits::modifies_scores && modifies_scores(params.score))
      modifiers.apply(scores, tScS, query_begin, key_begin);
    Traits::Bias::apply(params.score, tile, scores, tScS);
    Traits::Lists::apply(params.sparsity, visit, tile, scores, tScS, -INFINITY);
    if (!smem.visits.is_interior(has_lists, block, range)) {
      const ScoreMask<Traits::config.mask> mask{
          .band = band_from_queries(params.window, sequence.shift), .seqlen_k = sequence.seqlen_k};
      mask.apply(scores, tScS, query_begin, key_begin, -INFINITY);
      if (Traits::has(feature::split_kv) && params.window.has_tree) {
        SequenceTree::of(params.tree, sequence)
            .hide(
                scores, [&](int row) { return query_begin + get<0>(tScS(row, 0)); }, key_begin,
                -INFINITY);
      }
    }
    auto output = rows_cols_view(tOrO);
    softmax.softmax_rescale_o(scores, output, rows);
    if (Traits::has(feature::dropout)) {
      for_each_decision(dropout, scores, tScS, sequence.first_q + query_begin,
                        sequence.first_k + key_begin,
                        [](float& p, bool is_kept) { p = is_kept ? p : 0.0f; });
    }
    if constexpr (Traits::is_e4m3) {
      if (params.scales.v.per_token)
        value_unit.weigh<block_n>(smem.bytes.value_scales, scores, tScS, tOrO);
    }
    auto rP = convert_fragment<Element>(tSrS);
    gemm_registers_a(mma, tOrO, a_operand_view(rP), v);
  };

  if (!range.empty()) {
    Traits::QueryLoader::load(params.q, sequence.batch_q, work.head, sequence.row_q + query_begin,
                              sequence.seqlen_q - query_begin, shape.head_dim, sQ, thread);
    Visit visit = visit_at(range.end - 1);
    if constexpr (Traits::is_e4m3)
      load_bytes<Traits>(params, sequence, head_k, own_values, own_columns, visit.block, smem,
                         thread);
    else
      load_keys(params.k, shape.head_dim, first_k, sK, visit.block);
    if (args.negate_q) {
      cp_async_wait<0>();
      negate_queries<Traits>(sQ, thread);
    }
    for (int position = range.end - 1; position >= range.begin; --position) {
      const Visit next_visit = visit_at(position - 1);
      step(position, visit, next_visit);
      visit = next_visit;
    }
  }
  float value_scale = 1.0f;
  if constexpr (Traits::is_e4m3) {
    value_scale = params.scales.v.per_token
                      ? value_unit.unit
                      : scale_of_head(params.scales.v, sequence.index, head_k);
  }
  write_output<Traits>(args, sequence, split, work.head, query_begin, column_begin, tOrO, softmax,
                       smem, thread, value_scale);
}

}  // namespace flash_attn_cuda::sm80
