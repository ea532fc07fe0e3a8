// Loads of keys wherever their rows lie: those of a list, or in pages that no box of TMA fits.
#pragma once

#include "shared/sequence/key_list.h"
#include "sm90/latent/producer.h"

namespace flash_attn_cuda::sm90 {

// visit(item, place) for each block of the CTA's, by a whole warp: each lane has one of a block's
// rows, whose place it is. pause() for an item without blocks: the one behind it may come no sooner
// than the blocks before it have been read.
template <class Traits, class Visit, class Pause>
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
    const auto ask = [&](int block) {
      const int index = block * Traits::block_n + row;
      if (block >= end || index >= count) return KeyList::none;
      return has_list ? list.entries[index] : index;
    };
    const auto checked = [&](int key) { return has_list ? list.key_of(key, params.errors) : key; };
    const auto look_up = [&](int key) { return key < 0 ? KeyPlace{} : rows.look_up(key); };
    // A list is asked two blocks ahead, the block table one block.
    int key = checked(ask(item.range.begin));
    int next_key = ask(item.range.begin + 1);
    KeyPlace place = look_up(key);
    CUTE_NO_UNROLL
    for (int block = item.range.begin; block < end; ++block) {
      const KeyPlace here = key < 0 ? KeyPlace{} : rows.checked(place, params.errors);
      key = checked(next_key);
      place = look_up(key);
      next_key = ask(block + 2);
      visit(item, here);
    }
  });
}

// A warp's copies of rows of 16 bits by cp.async, 16 bytes a lane.
template <class Traits>
struct RowLoader {
  using Element = typename Traits::Element;
  using Vector = uint128_t;
  static constexpr int warps = Traits::loading_warps;
  static constexpr int arrivals = warps * (32 + 1);  // of a piece: threads, and warps
  static constexpr int chunk = sizeof(Vector) / sizeof(Element);
  static constexpr int lanes_per_row = Traits::piece_columns / chunk;
  static constexpr int rows_per_pass = 32 / lanes_per_row;
  static constexpr int passes = 32 / rows_per_pass;
  static constexpr int atom_rows = 8;  // of the swizzle
  static constexpr int atom_passes = atom_rows / rows_per_pass;

  LatentArguments const& args;
  typename Traits::SharedStorage& smem;
  int half;  // of a block's keys
  int lane = threadIdx.x % 32;
  PipelineState<Traits::stages> state{};

  CUTE_DEVICE int row_of(int pass) const { return pass * rows_per_pass + lane / lanes_per_row; }
  CUTE_DEVICE int column() const { return lane % lanes_per_row * chunk; }

  // Where this lane's columns are of the row of each pass, in chunks (has_near_rows of
  // host/tensor_map.h).
  struct Sources {
    const Vector* data;
    std::uint32_t rows[passes];
  };
  CUTE_DEVICE Sources find(TensorView const& view, KeyPlace const& place, int head) const {
    const std::int64_t offset = place.exists() ? place.offset(view, head) : 0;
    const auto own = static_cast<std::uint32_t>(offset / chunk);
    Sources sources{static_cast<const Vector*>(view.data) + column() / chunk};
    CUTE_UNROLL
    for (int pass = 0; pass < passes; ++pass)
      sources.rows[pass] = __shfl_sync(0xffffffffu, own, row_of(pass));
    return sources;
  }

  // Starts the loads of 64 columns of this warp's keys. Those that are not seen become zeros.
  CUTE_DEVICE void copy_piece(Sources const& sources, int first_column, int columns,
                              unsigned seen) const {
    Element* targets[atom_passes];
    CUTE_UNROLL
    for (int i = 0; i < atom_passes; ++i)
      targets[i] = smem.pieces +
                   typename Traits::PieceOffsets{}(half * 32 + row_of(i), column(), state.stage);
    // Of no origin that the compiler knows: an address is then one instruction, not four.
    const Vector* source = sources.data + first_column / chunk;
    asm volatile("" : "+l"(source));
    // A bit each, of which this lane's first is the lowest.
    const bool has_columns = first_column + column() < columns;
    const unsigned copied = has_columns ? seen >> lane / lanes_per_row : 0;
    CUTE_UNROLL
    for (int pass = 0; pass < passes; ++pass) {
      Element* target =
          targets[pass % atom_passes] + pass / atom_passes * atom_rows * Traits::piece_columns;
      SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<Vector>::copy(source[sources.rows[pass]],
                                                    *reinterpret_cast<Vector*>(target),
                                                    (copied & 1u << pass * rows_per_pass) != 0);
    }
    cutlass::arch::cpasync_barrier_arrive_noinc(&smem.ring.full[state.stage]);
    producer_commit(smem.ring, state);  // of what was stored
  }

  CUTE_DEVICE void load(KeyPlace const& place, int head) {
    ForwardParams const& params = args.params;
    const unsigned seen = __ballot_sync(0xffffffffu, place.exists());
    producer_acquire(smem.ring, state);
    if (lane == 0) smem.seen[state.stage][half] = seen;
    copy_piece(find(params.k, place, head), 0, params.shape.head_dim, seen);
    state.advance();
    const Sources values = find(params.v, place, head);
    CUTE_NO_UNROLL
    for (int piece = 0; piece < Traits::value_pieces; ++piece, state.advance()) {
      producer_acquire(smem.ring, state);
      copy_piece(values, piece * Traits::piece_columns, params.shape.head_dim_v, seen);
    }
  }

  CUTE_DEVICE void run() {
    const auto visit = [&](LatentItem const& item, KeyPlace const& place) {
      load(place, item.work.head);
    };
    for_each_block<Traits>(args, smem, half * 32 + lane, visit, [] {});
  }
};

}  // namespace flash_attn_cuda::sm90
