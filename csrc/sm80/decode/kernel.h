// Forward attention for a few queries and many keys (split-KV, "Flash-Decoding"): the time is that
// of reading K and V, so everything serves loads under way.
//
// A tile is 16 rows: the query heads that share a key head, of as many queries as fit. The warps of
// a CTA share the keys, not the rows. Each streams its own slices through its own stages of shared
// memory, with its own softmax and O, so that no barrier stops the loads; they are merged once at
// the end. Of wide heads two warps share a slice, and each loads half of its columns: they add up S
// and have half of O each. With splits several CTAs share a tile's keys as well, and leave O and
// LSE in fp32; the last of them combines them.
//
// Latent rows have S = Q K^T + QV V^T. A slice of V lies once in shared memory, for both products.
// With lists of keys a tile has rows of one query, and slices and splits are of places of its list.
#pragma once

#include "shared/kernel_order.h"
#include "shared/mask/tree_mask.h"
#include "shared/scores/score_bias.h"
#include "shared/scores/score_modifiers.h"
#include "sm80/decode/combine.h"
#include "sm80/decode/loader.h"
#include "sm80/decode/output.h"

namespace flash_attn_cuda::sm80 {

// What a thread needs of each of its rows to modify and hide its scores.
template <int kRows>
struct RowPositions {
  RowModifiers<kRows> modifiers;
  int centre[kRows];  // the key that windows and modifiers count from

  CUTE_DEVICE void set(int i, ScoreParams const& score, Sequence const& sequence, Band const& band,
                       PackedRow const& row) {
    modifiers.set(i, score, row.query < sequence.seqlen_q, sequence.index, row.head);
    centre[i] = row.query + band.shift;
  }

  // What is outside the window or the span becomes -inf.
  template <class Scores, class Coords>
  CUTE_DEVICE void hide(Window const& window, KeySpan const& span, Scores& scores,
                        Coords const& coords, int key_begin) const {
    CUTE_UNROLL
    for (int row = 0; row < kRows; ++row) {
      int low = span.begin;  // visible keys: [low, high)
      int high = span.end;
      if (window.left != Window::unbounded) low = max(low, centre[row] - window.left);
      if (window.right != Window::unbounded) high = min(high, centre[row] + window.right + 1);
      CUTE_UNROLL
      for (int col = 0; col < size<1>(scores); ++col) {
        const int key = key_begin + get<1>(coords(row, col));
        if (key < low || key >= high) scores(row, col) = -INFINITY;
      }
    }
  }
};

// Q or QV straight into the fragments of the product: 16 rows are too few to be worth shared
// memory. Of `columns` it takes those from column_begin on. Rows that do not attend and columns
// that do not exist are zeros. Columns lie as the keys' do.
template <class Traits, class Fragment, class Coords>
CUTE_DEVICE void load_queries(DecodeArguments const& args, TensorView const& view, int columns,
                              Sequence const& sequence,
                              PackedRow const (&rows)[Traits::rows_per_thread], int column_begin,
                              Coords const& coords, Fragment& fragment) {
  using Element = typename Traits::Element;
  constexpr std::uint32_t two_signs = 0x8000'8000;
  const int own_columns = columns - column_begin;
  const std::uint16_t* sources[Traits::rows_per_thread];
  CUTE_UNROLL
  for (int i = 0; i < Traits::rows_per_thread; ++i) {
    const bool attends = rows[i].query < sequence.seqlen_q;
    sources[i] = attends ? row_pointer<const std::uint16_t>(view, sequence.batch_q, rows[i].head,
                                                            sequence.row_q + rows[i].query) +
                               column_begin
                         : nullptr;
  }
  auto* pairs = reinterpret_cast<std::uint32_t*>(fragment.data());
  static_assert(Traits::rows_per_thread == 2, "pairs of elements alternate between two rows");
  const auto column_at = [&](int i) {
    const int column = get<1>(coords(i));
    return Traits::is_e4m3 ? e4m3_query_column(column) : column;
  };
  if (args.has_vector_rows) {
    CUTE_UNROLL
    for (int i = 0; i < size(fragment) / 2; ++i) {
      const int column = column_at(2 * i);
      const bool exists = sources[i % 2] != nullptr && column < own_columns;
      pairs[i] = exists ? *reinterpret_cast<const std::uint32_t*>(sources[i % 2] + column) : 0u;
    }
  } else {
    CUTE_UNROLL
    for (int i = 0; i < size(fragment) / 2; ++i) {
      const int column = column_at(2 * i);
      const bool exists = sources[i % 2] != nullptr && column < own_columns;
      const std::uint32_t low = exists ? sources[i % 2][column] : 0u;
      const std::uint32_t high =
          exists && column + 1 < own_columns ? sources[i % 2][column + 1] : 0u;
      pairs[i] = low | high << 16;
    }
  }
  if (args.negate_q) {
    CUTE_UNROLL
    for (int i = 0; i < size(fragment) / 2; ++i) pairs[i] ^= two_signs;
  }
}

// The fragments of Q in shared memory, as all warps hold them: an A operand of sm80/isa/gemm.h that
// needs registers for two steps.
template <class Fragment>
struct SharedQueries {
  static constexpr int steps = decltype(size<2>(Fragment{}))::value;  // of 16 columns

  const uint4* source;  // (steps, lanes)
  int lane;
  Fragment fragment;

  CUTE_DEVICE void load(int k) { at(fragment, k) = source[k * 32 + lane]; }
  CUTE_DEVICE static void leave(uint4* target, int lane, Fragment& whole) {
    CUTE_UNROLL
    for (int k = 0; k < steps; ++k) target[k * 32 + lane] = at(whole, k);
  }

  // A step's four registers of a fragment.
  CUTE_DEVICE static uint4& at(Fragment& fragment, int k) {
    return reinterpret_cast<uint4*>(fragment.data())[k];
  }
};

// S of a slice, of which each of a group's two warps has what its columns add.
template <class Traits, class Scores>
CUTE_DEVICE void add_scores_of_group(typename Traits::SharedStorage& smem, int warp, int lane,
                                     int current, Scores& scores) {
  constexpr int vectors = Traits::block_m * Traits::slice / 32 / 4;
  auto* buffer = reinterpret_cast<float4*>(smem.scores) +
                 current / Traits::num_groups % 2 * Traits::num_warps * vectors * 32;
  auto* own = reinterpret_cast<float4*>(scores.data());
  float4* left = buffer + warp * vectors * 32 + lane;
  CUTE_UNROLL
  for (int i = 0; i < vectors; ++i) left[i * 32] = own[i];
  // The warp that rewrites a buffer, and its reader, have passed the barrier of the slice between.
  asm volatile("bar.sync %0, 64;" ::"r"(1 + warp / 2) : "memory");
  const float4* found = buffer + (warp ^ 1) * vectors * 32 + lane;
  CUTE_UNROLL
  for (int i = 0; i < vectors; ++i) {
    const float4 other = found[i * 32];
    own[i].x += other.x;
    own[i].y += other.y;
    own[i].z += other.z;
    own[i].w += other.w;
  }
}

// The B operand of S of a slice, for this lane.
template <class Traits>
CUTE_DEVICE auto keys_of_slice(const typename Traits::Cached* data, int lane) {
  if constexpr (Traits::is_e4m3) {
    using Keys = E4m3Keys<Traits::slice, Traits::key_columns>;
    return Keys{data, lane, {}, {}};
  } else {
    return operand_b(LoadMatrix<typename Traits::Element>{}, typename Traits::Mma{},
                     smem_tile<typename Traits::KeyLayout>(data), lane);
  }
}

// The B operand that V is of S.
template <class Traits>
CUTE_DEVICE auto latents_of_slice(const typename Traits::Cached* data, int lane) {
  return operand_b(LoadMatrix<typename Traits::Element>{}, typename Traits::Mma{},
                   smem_tile<typename Traits::ValueLayout>(data + Traits::key_elements), lane);
}

// The B operand of O += P V, for one piece of V's columns.
template <class Traits>
CUTE_DEVICE auto values_of_slice(const typename Traits::Cached* data, int piece, int lane) {
  constexpr int slice = Traits::slice;
  if constexpr (Traits::is_e4m3) {
    using Values = E4m3Values<slice, Traits::value_columns, Traits::piece>;
    return Values{data + Traits::key_elements, piece * Traits::piece, lane, {}};
  } else {
    auto sV = smem_tile<typename Traits::PieceLayout>(
        data + (Traits::key_elements + piece * slice * Traits::piece));
    return operand_b(LoadMatrixTransposed<typename Traits::Element>{}, typename Traits::Mma{},
                     transposed(sV), lane);
  }
}

// One item: O and LSE of a tile over its keys, or over a split of them.
template <class Traits>
CUTE_DEVICE void decode_item(DecodeArguments const& args, DecodeItem const& item,
                             typename Traits::SharedStorage& smem) {
  using Factor = typename Traits::Factor;
  using Cached = typename Traits::Cached;
  constexpr int block_m = Traits::block_m;
  constexpr int slice = Traits::slice;
  constexpr int stages = Traits::stages;

  ForwardParams const& params = args.params;
  TileWork const& work = item.work;
  const int split = item.split;
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const int group = warp / Traits::warps_per_group;
  const int part = warp % Traits::warps_per_group;  // of the columns

  Sequence const& sequence = work.sequence;
  const Band band = band_from_queries(params.window, sequence.shift);
  const int first_query = packed_row<Traits>(args, work, 0).query;
  const int last_query =
      min(packed_row<Traits>(args, work, block_m - 1).query, sequence.seqlen_q - 1);
  // A range of keys: those that some row of the tile sees, and the interior that every one does.
  BlockRange visible = block_range(band, first_query, last_query, sequence.seqlen_k, 1);
  KeyList list;  // rows are of one query where there is one
  if constexpr (Traits::has_lists) {
    list = KeyList::of(params, sequence, first_query, work.head);
    if (list.entries != nullptr) visible = {.begin = 0, .end = list.count};
    if (Traits::lists_blocks) smem.sequence_of_list = sequence.index;  // for bad entries alone
  }
  const KeySpan span = split_span<Traits>(args, visible, item);
  if (span.empty() && split > 0) {
    write_unused_split<Traits>(args, work, split);
    return;
  }

  // This group's slices: its loads run `stages - 1` of them ahead.
  const int slices = span.empty() ? 0 : ceil_div_positive(span.end - span.origin, slice);
  const int first_slice = (span.begin - span.origin) / slice;
  const int own_slice =
      first_slice +
      (group + Traits::num_groups - first_slice % Traits::num_groups) % Traits::num_groups;
  SliceLoader<Traits> loader(args, work, span, list, &smem.sequence_of_list, part, lane);
  if (own_slice < slices) loader.start(span.origin + own_slice * slice);

  typename Traits::Mma mma;
  auto cQ =
      a_share(mma, make_identity_tensor(Shape<Int<block_m>, Int<Traits::key_columns>>{}), lane);
  auto cS = make_identity_tensor(Shape<Int<block_m>, Int<slice>>{});
  auto tScS = rows_cols_view(accumulator_share(mma, cS, lane));  // this thread's (rows, columns)
  PackedRow rows[Traits::rows_per_thread];
  RowPositions<Traits::rows_per_thread> positions;
  CUTE_UNROLL
  for (int i = 0; i < Traits::rows_per_thread; ++i) {
    rows[i] = packed_row<Traits>(args, work, get<0>(tScS(i, 0)));
    positions.set(i, params.score, sequence, band, rows[i]);
  }
  auto tSrQ = make_tensor<Factor>(shape(cQ));
  auto* shared_queries =  // (steps of 16 columns, lanes)
      reinterpret_cast<uint4*>(smem.queries) + part * Traits::query_columns / 16 * 32;
  SharedQueries<decltype(tSrQ)> q{shared_queries, lane, {}};
  auto cQv =
      a_share(mma, make_identity_tensor(Shape<Int<block_m>, Int<Traits::value_columns>>{}), lane);
  [[maybe_unused]] auto tSrQv = make_tensor<Factor>(shape(cQv));
  [[maybe_unused]] SharedQueries<decltype(tSrQv)> qv{shared_queries + q.steps * 32, lane, {}};
  [[maybe_unused]] float query_unit = 1.0f;
  if (!Traits::shares_queries || group == 0) {
    load_queries<Traits>(args, params.q, params.shape.head_dim, sequence, rows,
                         part * Traits::key_columns, cQ, tSrQ);
    if constexpr (Traits::is_e4m3 && Traits::config.dtype == Dtype::bf16)
      query_unit = queries_to_half<decltype(size(tSrQ))::value / 2>(
          reinterpret_cast<std::uint32_t*>(tSrQ.data()));
  }
  if constexpr (Traits::shares_queries) {
    if (group == 0) {
      q.leave(shared_queries, lane, tSrQ);
      if (Traits::is_e4m3 && lane == 0) smem.query_units[warp] = query_unit;
      if constexpr (Traits::is_latent) {
        load_queries<Traits>(args, params.qv, columns_of_v(params), sequence, rows,
                             part * Traits::value_columns, cQv, tSrQv);
        qv.leave(shared_queries + q.steps * 32, lane, tSrQv);
      }
    }
    __syncthreads();
    if (Traits::is_e4m3) query_unit = smem.query_units[warp % Traits::warps_per_group];
  }

  AccumulatorOf<decltype(mma), Shape<Int<block_m>, Int<Traits::value_columns>>> tOrO;
  clear(tOrO);
  OnlineSoftmax<Traits::rows_per_thread> softmax(args.scale_log2);
  [[maybe_unused]] ScoreScales score_scales;
  [[maybe_unused]] ValueUnit value_unit;
  [[maybe_unused]] const bool values_have_own = Traits::is_e4m3 && params.scales.v.per_token;
  if constexpr (Traits::is_e4m3)
    score_scales = ScoreScales::of(params.scales, sequence.index, work.head, query_unit);

  const int interior_begin = max(visible.interior_begin, span.begin);
  const int interior_end = min(visible.interior_end, span.end);
  int stage_to_fill = 0;
  int stage = 0;
  const int ahead = (stages - 1) * Traits::num_groups;
  [[maybe_unused]] unsigned listed[stages];  // keys of the slices under way that lists name
#pragma unroll 1
  for (int next = own_slice; next - ahead < slices; next += Traits::num_groups) {
    if (next < slices) {
      const int key_begin = span.origin + next * slice;
      loader.load(key_begin, key_begin + Traits::step,
                  smem.pipelines[warp] + stage_to_fill * Traits::stage_elements,
                  Traits::is_e4m3 ? smem.scales[warp] + stage_to_fill * 2 * slice : nullptr);
    }
    stage_to_fill = stage_to_fill + 1 == stages ? 0 : stage_to_fill + 1;
    commit_loads();
    if constexpr (Traits::has_lists) {
      CUTE_UNROLL
      for (int i = 1; i < stages; ++i) listed[i - 1] = listed[i];
      listed[stages - 1] = loader.present_keys();
    }
    const int current = next - ahead;
    if (current < own_slice) continue;
    cp_async_wait<stages - 1>();
    __syncwarp();  // the lanes' loads of this slice are here
    const Cached* data = smem.pipelines[warp] + stage * Traits::stage_elements;
    [[maybe_unused]] const float* token_scales =
        Traits::is_e4m3 ? smem.scales[warp] + stage * 2 * slice : nullptr;
    stage = stage + 1 == stages ? 0 : stage + 1;
    const int key_begin = span.origin + current * slice;
    if (Traits::lists_blocks && listed[0] == 0) continue;

    AccumulatorOf<decltype(mma), Shape<Int<block_m>, Int<slice>>> tSrS;
    clear(tSrS);
    auto k = keys_of_slice<Traits>(data, lane);
    if constexpr (Traits::shares_queries)
      gemm(mma, tSrS, q, k);
    else
      gemm_registers_a(mma, tSrS, tSrQ, k);
    if constexpr (Traits::is_latent) {
      auto latents = latents_of_slice<Traits>(data, lane);
      gemm(mma, tSrS, qv, latents);
    }
    auto scores = rows_cols_view(tSrS);
    if constexpr (Traits::is_e4m3) score_scales.apply(scores, tScS, token_scales);
    if constexpr (Traits::warps_per_group > 1)
      add_scores_of_group<Traits>(smem, warp, lane, current, tSrS);

    if (args.scales_scores)
      positions.modifiers.apply(params.score, scores, tScS, positions.centre, key_begin);
    if (Traits::has_bias && params.score.bias.data != nullptr) {
      add_bias_of_rows<typename Traits::Element>(
          params.score.bias, sequence, scores, tScS, key_begin,
          [&](int row) { return positions.centre[row] - band.shift; },
          [&](int row) { return rows[row].head; });
    }
    const bool has_list = Traits::lists_blocks || (Traits::is_latent && list.entries != nullptr);
    if (has_list) hide_absent_keys(listed[0], scores, tScS, 0, -INFINITY);
    if (!has_list && (key_begin < interior_begin || key_begin + slice > interior_end)) {
      positions.hide(params.window, span, scores, tScS, key_begin);
      if (params.window.has_tree) {
        SequenceTree::of(params.tree, sequence)
            .hide(
                scores, [&](int row) { return positions.centre[row] - sequence.shift; }, key_begin,
                -INFINITY);
      }
    }
    if (!has_list && loader.misses_page()) {
      hide_missing_keys<slice>(loader.key_rows(), scores, tScS, key_begin, sequence.seqlen_k,
                               -INFINITY);
    }
    auto output = rows_cols_view(tOrO);
    softmax.softmax_rescale_o(scores, output);
    if constexpr (Traits::is_e4m3) {
      if (values_have_own) value_unit.weigh<slice>(token_scales + slice, scores, tScS, tOrO);
    }

    auto rP = convert_fragment<Factor>(tSrS);
    auto tOrP = a_operand_view(rP);
    AccumulatorOf<decltype(mma), Shape<Int<block_m>, Int<Traits::piece>>> piece;
    CUTE_UNROLL
    for (int i = 0; i < Traits::pieces; ++i) {
      auto v = values_of_slice<Traits>(data, i, lane);
      auto tOrO_piece = make_tensor(tOrO.data() + i * int(size(piece)), piece.layout());
      gemm_registers_a(mma, tOrO_piece, tOrP, v);
    }
    __syncwarp();  // the stage may be filled anew
  }

  float factor = 1.0f;
  if constexpr (Traits::is_e4m3)
    factor = values_have_own ? value_unit.unit
                             : scale_of_head(params.scales.v, sequence.index, work.head);
  leave_output<Traits>(smem, tOrO, factor, softmax, warp, lane);
  __syncthreads();
  write_merged<Traits>(args, work, split, item.splits == 1, smem);
}

template <class Tag>
__global__ void __launch_bounds__(DecodeTraits<Tag>::threads, DecodeTraits<Tag>::ctas_per_sm)
    decode_kernel(const __grid_constant__ DecodeArguments args) {
  using Traits = DecodeTraits<Tag>;
  extern __shared__ __align__(128) char smem_bytes[];
  auto& smem = *reinterpret_cast<typename Traits::SharedStorage*>(smem_bytes);
  const ItemPlace place = ItemPlace::of_cta(args);
  follow_earlier_kernels();
  const float steps_wanted =
      args.lengths_decide && args.keys_per_split == 0 ? balanced_steps<Traits>(args, smem) : 0.0f;
  DecodeItem item;
  int items = unknown_items;
  for (int index = blockIdx.x;
       find_item<Traits>(args, index, place, steps_wanted, smem, item, items);
       index = smem.next_item) {
    const bool is_shared = item.splits > 1;
    const bool draws = args.lengths_decide && items > gridDim.x;
    auto arrivals = arrivals_of<Traits>(args, item.work);
    MarkedCounter tickets(args.tickets);
    int ticket = 0;
    if (is_shared && threadIdx.x == 0) arrivals.look();
    if (draws && threadIdx.x == 0) tickets.look();
    decode_item<Traits>(args, item, smem);
    if (draws && threadIdx.x == 0) {
      tickets.mark(args.call_mark);
      ticket = tickets.draw();
    }
    if (is_shared) {
      if (threadIdx.x == 0) arrivals.mark(args.call_mark);
      if (is_last_split<Traits>(arrivals, item.splits, smem)) combine_splits<Traits>(args, item);
    }
    if (!draws) return;
    if (threadIdx.x == 0) {
      if (ticket == items - 1) tickets.reset();  // one ticket for each item: this is the last
      smem.next_item = gridDim.x + ticket;
    }
    __syncthreads();
  }
}

}  // namespace flash_attn_cuda::sm80
