// The producer of a forward CTA over keys and values of e4m3: four warps, two for K and two for V,
// each for half of a tile's rows. A warp copies bytes, 16 a lane, from pages of any size, and makes
// fp16 of what it copied itself, where wgmma reads it. Scales are left to the consumers
// (sm90/tile/effects.h).
#pragma once

#include <cute/arch/copy_sm80.hpp>

#include "shared/e4m3_pairs.h"
#include "sm90/forward/producer.h"

namespace flash_attn_cuda::sm90 {

// One of the warps for K, or for V.
template <class Traits, bool kIsValue>
struct E4m3Producer {
  using Element = typename Traits::Element;
  static constexpr int block_n = Traits::block_n;
  static constexpr int columns = Traits::head_dim;
  static constexpr int own_rows = block_n / Traits::e4m3_writers;  // a warp's of a tile
  static constexpr int groups = own_rows / 32;
  // A pass of the warp: 8 rows of a box, 64 columns, so that its stores meet every bank once.
  static constexpr int box = 64;
  static constexpr int boxes = columns / box;
  static constexpr int pass_rows = 8;
  static constexpr int passes = own_rows / pass_rows;
  static constexpr int boxes_at_once = boxes == 1 ? 1 : 2;
  static constexpr int chunk = 16;
  static constexpr int chunks = box / chunk;
  static_assert(Traits::head_dim_v == columns && columns % box == 0 && own_rows % 32 == 0);

  // Of every 32 of the warp's rows in a block a lane has one: where the block table says it lies.
  struct Places {
    KeyPlace of[groups];
  };
  struct Rows {
    const std::uint8_t* of[groups];  // null where there is none
    float scales[groups];            // of tokens
    bool misses;                     // one of them lies in no page
  };

  ForwardArguments const& args;
  typename Traits::SharedStorage& smem;
  const int lane;
  const int part;         // of the tile's rows
  const int own_columns;  // that exist, from this lane's first on
  uint4* const bytes;     // where this lane keeps what it copies
  PipelineState<Traits::stages> state{};

  CUTE_DEVICE E4m3Producer(ForwardArguments const& args, typename Traits::SharedStorage& smem,
                           int part)
      : args(args),
        smem(smem),
        lane(threadIdx.x % 32),
        part(part),
        own_columns((kIsValue ? args.params.shape.head_dim_v : args.params.shape.head_dim) -
                    lane % chunks * chunk),
        bytes(smem.bytes + (kIsValue * Traits::e4m3_writers + part) * (own_rows * columns / chunk) +
              lane) {}

  CUTE_DEVICE TensorView const& view() const { return kIsValue ? args.params.v : args.params.k; }
  CUTE_DEVICE ScaleView const& scales() const {
    return kIsValue ? args.params.scales.v : args.params.scales.k;
  }
  CUTE_DEVICE auto& ring() const {
    if constexpr (kIsValue)
      return smem.v_ring;
    else
      return smem.k_ring;
  }

  // Where the keys of a tile lie: those of a sequence one behind the other, or in pages.
  struct Source {
    TileWork const& work;
    int seqlen_k;
    const std::uint8_t* rows;  // the head's in the sequence's first row, or in every page
  };

  // Of the head of a tile, in a tensor laid out as the cache.
  template <class Tensor>
  CUTE_DEVICE std::int64_t first_offset(TileWork const& work, Tensor const& tensor) const {
    AttentionShape const& shape = args.params.shape;
    const int head = shape.key_head(work.head);
    const std::int64_t offset = head * tensor.head_stride;
    if (is_paged()) return offset;
    Sequence const& sequence = work.sequence;
    return offset + sequence.batch_k * tensor.batch_stride + sequence.row_k * tensor.row_stride;
  }

  CUTE_DEVICE Source source_of(TileWork const& work) const {
    return {.work = work,
            .seqlen_k = work.sequence.seqlen_k,
            .rows = static_cast<const std::uint8_t*>(view().data) + first_offset(work, view())};
  }

  CUTE_DEVICE bool is_paged() const { return args.params.paged.block_table != nullptr; }

  CUTE_DEVICE int key_of_group(int block, int group) const {
    return block * block_n + part * own_rows + 32 * group + lane;
  }

  // Asked for a block before find_rows wants it. Without pages nothing is looked up.
  CUTE_DEVICE Places look_up(Source const& source, int block) const {
    Places places{};
    if (!is_paged()) return places;
    const KeyRows keys = KeyRows::of(args.params.paged, source.work.sequence);
    CUTE_UNROLL
    for (int i = 0; i < groups; ++i) {
      const int key = key_of_group(block, i);
      if (key < source.seqlen_k) places.of[i] = keys.look_up(key);
    }
    return places;
  }

  CUTE_DEVICE Rows find_rows(Source const& source, int block, Places const& places) const {
    Rows rows{};
    CUTE_UNROLL
    for (int i = 0; i < groups; ++i) {
      const int key = key_of_group(block, i);
      if (key >= source.seqlen_k) continue;
      KeyPlace place{.batch = 0, .row = key};
      if (is_paged()) {
        const KeyRows keys = KeyRows::of(args.params.paged, source.work.sequence);
        place = keys.checked(places.of[i], args.params.errors);
        if (!place.exists()) {
          rows.misses = true;
          continue;
        }
      }
      const auto offset_in = [&](auto const& tensor) {
        const std::int64_t of_row = place.row * tensor.row_stride;
        return is_paged() ? of_row + place.batch * tensor.batch_stride : of_row;
      };
      rows.of[i] = source.rows + offset_in(view());
      if (scales().per_token)
        rows.scales[i] = scales().data[first_offset(source.work, scales()) + offset_in(scales())];
    }
    return rows;
  }

  // Starts the copy of this lane's bytes of a row's box, or of zeros. row: from the lane's first
  // byte on, or less than a row where there is none.
  CUTE_DEVICE void copy(std::uint64_t row, int box_index, uint4* target) const {
    const int column = box_index * box;
    cute::SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<uint4>::copy(
        *reinterpret_cast<const uint4*>(row + column), *target,
        row >= columns && column < own_columns);
  }

  // Where the lane's first byte of a pass lies.
  CUTE_DEVICE std::uint64_t row_of_pass(Rows const& rows, int pass) const {
    constexpr int passes_of_group = 32 / pass_rows;
    static_assert(groups <= 2);
    const auto address = reinterpret_cast<std::uint64_t>(
        groups == 2 && pass >= passes_of_group ? rows.of[groups - 1] : rows.of[0]);
    return __shfl_sync(0xffffffffu, address, pass % passes_of_group * pass_rows + lane / chunks) +
           lane % chunks * chunk;
  }

  CUTE_DEVICE void copy_rows(Rows const& rows) const {
    uint4* target = bytes;
    CUTE_NO_UNROLL
    for (int pass = 0; pass < passes; ++pass) {
      const std::uint64_t row = row_of_pass(rows, pass);
      CUTE_UNROLL
      for (int b = 0; b < boxes; ++b, target += 32) copy(row, b, target);
    }
    cute::cp_async_fence();
  }

  // Makes fp16 of a block's bytes, and starts the copies of the next block's bytes into the place
  // of those that were read. A pass's bytes are read while those of the pass before are converted.
  CUTE_DEVICE void convert(Element* tile, Rows const& next) const {
    const int row = part * own_rows + lane / chunks;
    const int vector = lane % chunks * 2;
    tile += row * box;
    Element* first = tile + (vector ^ row % 8) * 8;
    Element* second = tile + ((vector + 1) ^ row % 8) * 8;
    uint4* source = bytes;
    uint4 now[boxes_at_once];
    read(now, source);
    CUTE_NO_UNROLL
    for (int pass = 0; pass < passes; ++pass) {
      const std::uint64_t next_row = row_of_pass(next, pass);
      CUTE_UNROLL
      for (int b = 0; b < boxes; b += boxes_at_once) {
        uint4 after[boxes_at_once];
        if (b + boxes_at_once < boxes || pass + 1 < passes)
          read(after, source + boxes_at_once * 32);
        CUTE_UNROLL
        for (int i = 0; i < boxes_at_once; ++i) {
          const std::uint32_t words[] = {now[i].x, now[i].y, now[i].z, now[i].w};
          const auto pair = [&](int j) {
            return pair_of_e4m3<Element>(static_cast<std::uint16_t>(words[j / 2] >> j % 2 * 16));
          };
          constexpr int of_box = block_n * box;
          *reinterpret_cast<uint4*>(first + (b + i) * of_box) = {pair(0), pair(1), pair(2),
                                                                 pair(3)};
          *reinterpret_cast<uint4*>(second + (b + i) * of_box) = {pair(4), pair(5), pair(6),
                                                                  pair(7)};
          copy(next_row, b + i, source + i * 32);
          now[i] = after[i];
        }
        source += boxes_at_once * 32;
      }
      first += pass_rows * box;
      second += pass_rows * box;
    }
    cute::cp_async_fence();
  }

  CUTE_DEVICE static void read(uint4 (&chunks)[boxes_at_once], const uint4* source) {
    CUTE_UNROLL
    for (int i = 0; i < boxes_at_once; ++i) chunks[i] = source[i * 32];
  }

  // What the consumers read beside a block.
  CUTE_DEVICE void announce(Rows const& rows) const {
    if constexpr (!kIsValue) {
      const bool misses = __any_sync(0xffffffffu, rows.misses);
      if (lane == 0) smem.misses_keys[state.stage][part] = misses;
    }
    if (!scales().per_token) return;
    float* of_tokens = kIsValue ? smem.value_scales[state.stage] : smem.key_scales[state.stage];
    CUTE_UNROLL
    for (int i = 0; i < groups; ++i) of_tokens[part * own_rows + 32 * i + lane] = rows.scales[i];
  }

  CUTE_DEVICE void load(TileWork const& work, BlockRange const& range) {
    Element* tiles = kIsValue ? smem.v : smem.k;
    const Source source = source_of(work);
    const int begin = range.begin;
    int block = range.end - 1;
    Rows rows = find_rows(source, block, look_up(source, block));
    cute::cp_async_wait<0>();  // zeros that were copied behind the last tile
    copy_rows(rows);
    Places places = look_up(source, max(block - 1, begin));
    CUTE_NO_UNROLL
    for (; block >= begin; --block) {
      Rows next{};
      if (block > begin) next = find_rows(source, block - 1, places);
      places = look_up(source, max(block - 2, begin));
      cute::cp_async_wait<0>();
      producer_acquire(ring(), state);
      announce(rows);
      convert(tiles + state.stage * block_n * columns, next);
      cutlass::arch::fence_view_async_shared();
      __syncwarp();
      producer_commit(ring(), state);
      state.advance();
      rows = next;
    }
  }

  CUTE_DEVICE void run() {
    // One thread finds the tiles, and its warp loads their Q.
    [[maybe_unused]] TileAnnouncer<Traits> announcer{args, smem};
    [[maybe_unused]] Producer<Traits> queries{args, smem};
    const bool leads = kIsValue && part == 0;
    if (leads && lane == 0) announcer.announce_next();
    for (PipelineState<Traits::work_stages> work_state;; work_state.advance()) {
      consumer_wait(smem.work_ring, work_state);
      auto const& item = smem.work[work_state.stage];
      if (item.work.tile == no_tile) break;
      if (leads) queries.load_queries(item.work);
      load(item.work, item.range);
      __syncwarp();
      if (leads && lane == 0) announcer.announce_next();
      consumer_release(smem.work_ring, work_state);
    }
  }
};

template <class Traits>
CUTE_DEVICE void produce_from_e4m3(ForwardArguments const& args,
                                   typename Traits::SharedStorage& smem, int warp) {
  constexpr int writers = Traits::e4m3_writers;
  if (warp < writers)
    E4m3Producer<Traits, false>(args, smem, warp).run();
  else
    E4m3Producer<Traits, true>(args, smem, warp - writers).run();
}

}  // namespace flash_attn_cuda::sm90
