// Backward attention where each query lists the blocks of keys that it sees: as sm80/backward/, but
// that a step's rows are gathered, of queries that list the tile's block and of all query heads
// that share its key head.
//
// Which queries list a block says ListedQueries: the lists' entries, sorted by block. CTAs take as
// many entries each, whatever block they are of, so that one that every query lists is shared by
// many. A CTA walks runs of entries of one block each, with dK and dV of the tile in registers, and
// adds them to fp32 sums at the end of a run. dQ is added to fp32 sums in every step, row by row.
// turns.h has what both do in a fixed order. Blocks of fewer keys than a tile have one to
// themselves, whose other keys count as hidden.
//
// Threads: num_warps x 32. Shared memory: K and V, Q and dO of a step, P and dS in 16 bits. The
// next rows load while dQ is multiplied.
#pragma once

#include "shared/gradient/backward_arguments.h"
#include "shared/gradient/row_sums.h"
#include "shared/scores/score_modifiers.h"
#include "sm80/backward/scores.h"
#include "sm80/epilogue.h"
#include "sm80/listed_backward/turns.h"

namespace flash_attn_cuda::sm80 {

// The run that begins at an entry; part: which of the block's tiles.
template <class Traits>
CUTE_DEVICE void find_run(ListedArguments const& args, int begin, int end, int part,
                          ListedRun& run) {
  const ListedQueries& listed = args.of.params.listed;
  const int place = listed.places[begin];
  run.place = place;
  run.part = part;
  run.block = listed_block(args.of.params, args.of.table, args.of.q_tiles_per_sequence, place);
  run.key_begin = run.block.key_begin + part * Traits::block_n;
  run.key_end = min(run.block.key_begin + listed.block, run.block.sequence.seqlen_k);
  run.begin = begin;
  run.end = min(end, listed.begins[place + 1]);
}

// S -> P, handed over by calling store_probabilities; dP -> dS.
template <class Traits, class Scores, class Coords, class Store>
CUTE_DEVICE void differentiate_listed(ListedArguments const& args, GatheredRows<Traits> const& rows,
                                      int buffer, Scores& scores, Scores& dscores,
                                      Coords const& coords, Store store_probabilities) {
  BackwardParams const& params = args.of.params;
  typename Traits::SharedStorage& smem = rows.smem;
  const Sequence& sequence = smem.run.block.sequence;
  const auto hide = [&] {
    const Band band = band_from_queries(params.window, sequence.shift);
    CUTE_UNROLL
    for (int row = 0; row < size<0>(scores); ++row) {
      const int query = rows.query_of(get<0>(coords(row, 0)), buffer);
      const Reach seen = reach_of(band, query, query, smem.run.key_end);
      CUTE_UNROLL
      for (int col = 0; col < size<1>(scores); ++col) {
        if (!seen.holds(smem.run.key_begin + get<1>(coords(row, col)))) scores(row, col) = 0.0f;
      }
    }
  };
  const auto modifiers =
      ScoreModifiers::of(params.score, sequence.index, smem.run.block.head, sequence.shift);
  if (!modifiers.is_curved()) {
    probabilities(scores, coords, args.of.scale_log2, smem.lse_log2);
    hide();
    store_probabilities();
    score_gradients(scores, dscores, coords, smem.softmax_d);
    return;
  }
  const bool reaches = modifiers.scale_to_curve(scores);
  modifiers.apply_and_differentiate(scores, reaches, coords, 0, 0, [&](auto derivative) {
    CUTE_UNROLL
    for (int row = 0; row < size<0>(scores); ++row) {
      const float row_d = smem.softmax_d[get<0>(coords(row, 0))];
      CUTE_UNROLL
      for (int col = 0; col < size<1>(scores); ++col)
        dscores(row, col) = (dscores(row, col) - row_d) * derivative(scores(row, col));
    }
  });
  probabilities(scores, coords, args.of.scale_log2, smem.lse_log2);
  hide();
  store_probabilities();
  CUTE_UNROLL
  for (int i = 0; i < size(scores); ++i) dscores(i) *= scores(i);
}

// A run's dK or dV, added to the sums of its tile's keys.
template <class Traits, class Accumulator>
CUTE_DEVICE void add_key_gradient(ListedArguments const& args, ListedRun const& run, float* sums,
                                  Accumulator const& accumulator, int thread) {
  AttentionShape const& shape = args.of.params.shape;
  const Sequence& sequence = run.block.sequence;
  const std::int64_t first_row =
      std::int64_t(sequence.batch_k) * shape.seqlen_k + sequence.row_k + run.key_begin;
  float* first = sums + (first_row * shape.num_heads_k + run.block.head) * Traits::head_dim;
  const int keys = run.key_end - run.key_begin;
  add_rows<Traits::block_n, Traits::head_dim>(
      accumulator, typename Traits::DkdvMma{}, thread, [&](int row) -> float* {
        if (row >= keys) return nullptr;
        return first + std::int64_t(row) * (shape.num_heads_k * Traits::head_dim);
      });
}

template <class Traits>
CUTE_DEVICE void walk_run(ListedArguments const& args, typename Traits::SharedStorage& smem,
                          int thread) {
  using Element = typename Traits::Element;
  constexpr int block_m = Traits::block_m;
  constexpr int block_n = Traits::block_n;
  constexpr int head_dim = Traits::head_dim;
  BackwardParams const& params = args.of.params;
  ListedRun const& run = smem.run;
  const Sequence& sequence = run.block.sequence;
  const GatheredRows<Traits> rows{args, smem, thread};
  const OwnListedTurns<Traits> turns{args, smem, thread};

  auto sQ = smem_tile<typename Traits::QueryLayout>(smem.q);  // (block_m, head_dim)
  auto sdO = smem_tile<typename Traits::QueryLayout>(smem.dout);
  auto sK = smem_tile<typename Traits::KeyLayout>(smem.k);  // (block_n, head_dim)
  auto sV = smem_tile<typename Traits::KeyLayout>(smem.v);
  auto sP = smem_tile<typename Traits::ScoresLayout>(smem.p);  // (block_m, block_n)
  auto sdS = smem_tile<typename Traits::ScoresLayout>(smem.ds);

  using Rows = LoadMatrix<Element>;
  using Columns = LoadMatrixTransposed<Element>;
  typename Traits::ScoresMma scores_mma;
  typename Traits::DkdvMma dkdv_mma;
  typename Traits::DqMma dq_mma;
  AccumulatorOf<decltype(dkdv_mma), Shape<Int<block_n>, Int<head_dim>>> tdKrdK;
  AccumulatorOf<decltype(dkdv_mma), Shape<Int<block_n>, Int<head_dim>>> tdVrdV;
  clear(tdKrdK);
  clear(tdVrdV);
  auto cS = make_identity_tensor(Shape<Int<block_m>, Int<block_n>>{});
  // This thread's (rows, columns) of S -> (row of the step, key)
  auto tScS = rows_cols_view(accumulator_share(scores_mma, cS, thread));
  const auto to_shared = [&](auto const& accumulator, auto& tile) {
    fragment_to_shared<Element>(accumulator, scores_mma, tile, thread);
  };
  const auto load_keys = [&](TensorView const& view, int columns, auto& tile) {
    Traits::KeyLoader::load(view, sequence.batch_k, run.block.head, sequence.row_k + run.key_begin,
                            run.key_end - run.key_begin, columns, tile, thread);
  };

  load_keys(params.k, params.shape.head_dim, sK);
  load_keys(params.v, params.shape.head_dim_v, sV);
  rows.find_queries(run.begin, 0);
  __syncthreads();
  rows.load(0);
  commit_loads();
  int buffer = 0;
#pragma unroll 1
  for (int first = run.begin; first < run.end; first += rows.queries_per_step()) {
    const int following = first + rows.queries_per_step();
    wait_for_loads();  // this step's rows are here; the last step's queries are not needed
    if (following < run.end) rows.find_queries(following, buffer ^ 1);

    AccumulatorOf<decltype(scores_mma), Shape<Int<block_m>, Int<block_n>>> tSrS;
    clear(tSrS);
    gemm_tiles<Rows, Rows>(scores_mma, tSrS, sQ, sK, thread);
    AccumulatorOf<decltype(scores_mma), Shape<Int<block_m>, Int<block_n>>> tdPrdP;
    clear(tdPrdP);
    gemm_tiles<Rows, Rows>(scores_mma, tdPrdP, sdO, sV, thread);
    auto scores = rows_cols_view(tSrS);
    auto dscores = rows_cols_view(tdPrdP);
    differentiate_listed<Traits>(args, rows, buffer, scores, dscores, tScS,
                                 [&] { to_shared(tSrS, sP); });
    to_shared(tdPrdP, sdS);
    __syncthreads();  // P and dS are whole

    gemm_tiles<Columns, Columns>(dkdv_mma, tdVrdV, transposed(sP), transposed(sdO), thread);
    gemm_tiles<Columns, Columns>(dkdv_mma, tdKrdK, transposed(sdS), transposed(sQ), thread);
    if (following < run.end) {
      __syncthreads();  // Q and dO are read
      rows.load(buffer ^ 1);
      commit_loads();
    }
    turns.wait_for_queries(first, rows.queries_per_step());
    constexpr int dq_columns = Traits::dq_columns;
#pragma unroll 1
    for (int column = 0; column < head_dim; column += dq_columns) {
      AccumulatorOf<decltype(dq_mma), Shape<Int<block_m>, Int<dq_columns>>> tdQrdQ;
      clear(tdQrdQ);
      auto sSomeK = smem_tile<typename Traits::SomeKeysLayout>(smem.k + column * block_n);
      gemm_tiles<Rows, Columns>(dq_mma, tdQrdQ, sdS, transposed(sSomeK), thread);
      add_rows<block_m, dq_columns>(tdQrdQ, dq_mma, thread, [&](int row) -> float* {
        if (!rows.exists(row, buffer)) return nullptr;
        return args.of.dq_accum + (rows.place_of(row, buffer) * head_dim + column);
      });
    }
    turns.pass_on_queries(first, rows.queries_per_step());
    buffer ^= 1;
  }
  turns.wait_for_tile();
  CUTE_UNROLL
  for (int i = 0; i < size(tdKrdK); ++i) tdKrdK(i) *= args.of.score_factor;
  add_key_gradient<Traits>(args, run, args.of.dk_partial, tdKrdK, thread);
  add_key_gradient<Traits>(args, run, args.of.dv_partial, tdVrdV, thread);
  turns.pass_on_tile();
}

template <class Tag>
__global__ void __launch_bounds__(ListedBackwardTraits<Tag>::threads,
                                  ListedBackwardTraits<Tag>::ctas_per_sm)
    listed_backward_kernel(const __grid_constant__ ListedArguments args) {
  using Traits = ListedBackwardTraits<Tag>;
  extern __shared__ __align__(128) char smem_bytes[];
  auto& smem = *reinterpret_cast<typename Traits::SharedStorage*>(smem_bytes);
  const ListedQueries& listed = args.of.params.listed;
  const int thread = threadIdx.x;
  const OwnListedTurns<Traits> turns{args, smem, thread};
  // Neighbours have the same queries.
  const int index = turns.ticket();
  const int share = index / args.tiles_per_block;
  const int part = index - share * args.tiles_per_block;
  const int entries = listed.begins[args.of.params.shape.num_heads_k * listed.key_rows];
  const std::int64_t first = std::int64_t(share) * args.entries_per_cta;
  if (first >= entries) return;
  int next = static_cast<int>(first);
  const int end = next + min(args.entries_per_cta, entries - next);
#pragma unroll 1
  while (next < end) {
    if (thread == 0) find_run<Traits>(args, next, end, part, smem.run);
    __syncthreads();
    next = smem.run.end;
    if (smem.run.block.key_begin >= 0 && smem.run.key_begin < smem.run.key_end)
      walk_run<Traits>(args, smem, thread);
    else
      turns.skip_run();
    __syncthreads();  // what is in shared memory is not needed
  }
}

// dq = scale * the sums of a query tile's rows.
template <class Traits>
__global__ void __launch_bounds__(Traits::threads)
    convert_rows_kernel(const __grid_constant__ ConvertDqArguments args) {
  using Element = typename Traits::Element;
  constexpr int columns = sizeof(uint4) / sizeof(Element);  // a thread's
  constexpr int vectors = Traits::head_dim / columns;       // of a row
  const int head = blockIdx.x / args.q_tiles;
  QueryTile work;
  if (!find_query_tile(args.table, args.params, args.q_tiles_per_sequence,
                       blockIdx.x - head * args.q_tiles, work))
    return;
  const Sequence& sequence = work.sequence;
  const int query_begin = work.tile * Traits::block_m;
  const float* tile =
      args.dq_accum + std::int64_t(blockIdx.x) * (Traits::block_m * Traits::head_dim);
  for (int i = threadIdx.x; i < Traits::block_m * vectors; i += Traits::threads) {
    const int row = i / vectors;
    const int column = i % vectors * columns;
    if (query_begin + row >= sequence.rows_q || column >= args.params.shape.head_dim) continue;
    alignas(16) float sums[columns];
    const auto* source = reinterpret_cast<const float4*>(tile + row * Traits::head_dim + column);
    reinterpret_cast<float4*>(sums)[0] = __ldcg(source);
    reinterpret_cast<float4*>(sums)[1] = __ldcg(source + 1);
    CUTE_UNROLL
    for (int j = 0; j < columns; ++j) sums[j] *= args.factor;
    auto converted = convert_fragment<Element>(make_tensor(&sums[0], Layout<Int<columns>>{}));
    Element* target = row_pointer<Element>(args.params.dq, sequence.batch_q, head,
                                           sequence.row_q + query_begin + row);
    *reinterpret_cast<uint4*>(target + column) = *reinterpret_cast<const uint4*>(converted.data());
  }
}

}  // namespace flash_attn_cuda::sm80
