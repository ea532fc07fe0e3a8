// Loads of keys wherever their rows lie: those of a list, or in pages that no box of TMA fits.
#pragma once

#include "shared/sequence/key_list.h"
#include "sm90/latent/producer.h"

namespace flash_attn_cuda::sm90 {

// visit(item, places) for each block of the CTA's, by a whole warp: each lane has kRows of a
// block's rows, `row` and every 32nd behind it, whose places they are. pause() for an item without
// blocks: the one behind it may come no sooner than the blocks before it have been read.
template <class Traits, int kRows, class Visit, class Pause>
CUTE_DEVICE void for_each_block(LatentArguments const& args, typename Traits::SharedStorage& smem,
                                int row, Visit visit, Pause pause) {
  ForwardParams const& params = args.params;
  const Divider page_size = Divider::by(max(params.paged.page_size, 1));
  for_each_item<Traits>(smem, [&](LatentItem const& item) {
    if (item.range.empty()) return pause();
    Sequence const& sequence = item.work.sequence;
    const KeyRows rows = KeyRows::of(params.paged, sequence, page_size);
    const auto list =
        KeyList::of(params, sequence, latent_row<Traits>(args, item.work, 0).query, item.work.head);
    const bool has_list = has_key_lists(params);
    const int count = has_list ? list.count : sequence.seqlen_k;
    const int end = item.range.end;
    const auto ask = [&](int block, int i) {
      const int index = block * Traits::block_n + row + 32 * i;
      if (block >= end || index >= count) return KeyList::none;
      return has_list ? list.entries[index] : index;
    };
    const auto checked = [&](int key) { return has_list ? list.key_of(key, params.errors) : key; };
    const auto look_up = [&](int key) { return key < 0 ? KeyPlace{} : rows.look_up(key); };
    // A list is asked two blocks ahead, the block table one block.
    int key[kRows], next_key[kRows];
    KeyPlace place[kRows];
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      key[i] = checked(ask(item.range.begin, i));
      next_key[i] = ask(item.range.begin + 1, i);
      place[i] = look_up(key[i]);
    }
    CUTE_NO_UNROLL
    for (int block = item.range.begin; block < end; ++block) {
      KeyPlace here[kRows];
      CUTE_UNROLL
      for (int i = 0; i < kRows; ++i) {
        here[i] = key[i] < 0 ? KeyPlace{} : rows.checked(place[i], params.errors);
        key[i] = checked(next_key[i]);
        place[i] = look_up(key[i]);
        next_key[i] = ask(block + 2, i);
      }
      visit(item, here);
    }
  });
}

// One of the warps that copy rows of 16 bits by cp.async, 16 bytes a lane: they take a block's
// pieces in turn.
template <class Traits>
struct RowLoader {
  using Element = typename Traits::Element;
  using Vector = uint128_t;
  static constexpr int arrivals = 32 + 1;  // of a piece: threads, and the warp
  static constexpr int own_rows = Traits::block_n / 32;
  static constexpr int chunk = sizeof(Vector) / sizeof(Element);
  static constexpr int lanes_per_row = Traits::piece_columns / chunk;
  static constexpr int rows_per_pass = 32 / lanes_per_row;
  static constexpr int passes = 32 / rows_per_pass;  // of 32 rows
  static constexpr int atom_rows = 8;                // of the swizzle
  static constexpr int atom_passes = atom_rows / rows_per_pass;

  LatentArguments const& args;
  typename Traits::SharedStorage& smem;
  int piece;  // the next of this warp's, counted from the first of the next block
  PipelineState<Traits::stages> state = PipelineState<Traits::stages>{}.plus(piece);
  int lane = threadIdx.x % 32;

  CUTE_DEVICE int row_of(int pass) const { return pass * rows_per_pass + lane / lanes_per_row; }
  CUTE_DEVICE int column() const { return lane % lanes_per_row * chunk; }

  // Where this lane's rows are, in chunks (has_near_rows of host/tensor_map.h), from its columns of
  // the first row on.
  struct Sources {
    const Vector* data;
    std::uint32_t rows[own_rows];
  };
  CUTE_DEVICE Sources find(TensorView const& view, KeyPlace const (&places)[own_rows],
                           int head) const {
    Sources sources{static_cast<const Vector*>(view.data) + column() / chunk};
    CUTE_UNROLL
    for (int i = 0; i < own_rows; ++i) {
      const std::int64_t offset = places[i].exists() ? places[i].offset(view, head) : 0;
      sources.rows[i] = static_cast<std::uint32_t>(offset / chunk);
    }
    return sources;
  }

  // Starts the loads of 64 columns of a block's keys. Those that are not seen become zeros. Rows
  // are told here: for a whole block there are no registers beside two consumer warpgroups.
  CUTE_DEVICE void copy_piece(Sources const& sources, int first_column, int columns,
                              unsigned const (&seen)[own_rows]) const {
    Element* targets[atom_passes];
    CUTE_UNROLL
    for (int i = 0; i < atom_passes; ++i)
      targets[i] = smem.pieces + typename Traits::PieceOffsets{}(row_of(i), column(), state.stage);
    // Of no origin that the compiler knows: an address is then one instruction, not four.
    const Vector* source = sources.data + first_column / chunk;
    asm volatile("" : "+l"(source));
    const bool has_columns = first_column + column() < columns;
    CUTE_UNROLL
    for (int i = 0; i < own_rows; ++i) {
      // A bit each, of which this lane's first is the lowest.
      const unsigned copied = has_columns ? seen[i] >> lane / lanes_per_row : 0;
      CUTE_UNROLL
      for (int pass = 0; pass < passes; ++pass) {
        const int atom = (i * passes + pass) / atom_passes;
        Element* target = targets[pass % atom_passes] + atom * atom_rows * Traits::piece_columns;
        SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<Vector>::copy(
            source[__shfl_sync(0xffffffffu, sources.rows[i], row_of(pass))],
            *reinterpret_cast<Vector*>(target), (copied & 1u << pass * rows_per_pass) != 0);
      }
    }
    cutlass::arch::cpasync_barrier_arrive_noinc(&smem.ring.full[state.stage]);
    producer_commit(smem.ring, state);  // of what was stored
  }

  CUTE_DEVICE void advance() {
    piece += Traits::loading_warps;
    state = state.plus(Traits::loading_warps);
  }

  CUTE_DEVICE void load(KeyPlace const (&places)[own_rows], int head) {
    ForwardParams const& params = args.params;
    unsigned seen[own_rows];
    CUTE_UNROLL
    for (int i = 0; i < own_rows; ++i) seen[i] = __ballot_sync(0xffffffffu, places[i].exists());
    if (piece == 0) {
      producer_acquire(smem.ring, state);
      CUTE_UNROLL
      for (int i = 0; i < own_rows; ++i) {
        if (lane == 0) smem.seen[state.stage][i] = seen[i];
      }
      copy_piece(find(params.k, places, head), 0, params.shape.head_dim, seen);
      advance();
    }
    const Sources values = find(params.v, places, head);
    CUTE_NO_UNROLL
    for (; piece < Traits::pieces; advance()) {
      producer_acquire(smem.ring, state);
      copy_piece(values, (piece - 1) * Traits::piece_columns, params.shape.head_dim_v, seen);
    }
    piece -= Traits::pieces;
  }

  CUTE_DEVICE void run() {
    const auto visit = [&](LatentItem const& item, KeyPlace const(&places)[own_rows]) {
      load(places, item.work.head);
    };
    for_each_block<Traits, own_rows>(args, smem, lane, visit, [] {});
  }
};

}  // namespace flash_attn_cuda::sm90
