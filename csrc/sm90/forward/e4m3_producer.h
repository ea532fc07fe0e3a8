// The producer of a forward CTA over keys and values of e4m3: four warps, two for K and two for V,
// each for half of a tile's rows. A warp copies bytes, 16 a lane, and makes what it copied itself
// into 16 bits, times their scales, where wgmma reads them. So the products are those over a cache
// of 16 bits that holds the numbers which these stand for, in pages of any size.
#pragma once

#include <cute/arch/copy_sm80.hpp>

#include "shared/e4m3_pairs.h"
#include "sm90/forward/producer.h"

namespace flash_attn_cuda::sm90 {

template <class Traits>
struct E4m3Producer {
  using Element = typename Traits::Element;
  static constexpr int block_n = Traits::block_n;
  static constexpr int columns = Traits::head_dim;
  static constexpr int chunk = 16;
  static constexpr int chunks_per_row = columns / chunk;
  static constexpr int rows_per_pass = 32 / chunks_per_row;
  static constexpr int groups = block_n / 2 / 32;  // of rows, of which a lane looks up one each
  static constexpr int buffers = Traits::byte_buffers;
  static constexpr std::int64_t nowhere = -1;
  static_assert(Traits::head_dim_v == columns && columns % 64 == 0 && chunks_per_row <= 32);
  static_assert(block_n % 64 == 0, "a warp has whole groups of 32 rows");

  // This lane's rows of half a tile.
  struct Rows {
    std::int64_t offsets[groups];  // of k, or of v
    float scales[groups];
    bool misses;  // a row of the tile lies in no page; of the warp that tells so
  };

  ForwardArguments const& args;
  typename Traits::SharedStorage& smem;
  const int warp;
  const int lane;
  const bool is_value;
  const int first_row;  // of the tile
  TensorView const& view;
  ScaleView const& scales;
  PipelineState<Traits::stages> state{};
  PipelineState<Traits::work_stages> work_state{};

  CUTE_DEVICE E4m3Producer(ForwardArguments const& args, typename Traits::SharedStorage& smem,
                           int warp)
      : args(args),
        smem(smem),
        warp(warp),
        lane(threadIdx.x % 32),
        is_value(warp >= 2),
        first_row(warp % 2 * (block_n / 2)),
        view(is_value ? args.params.v : args.params.k),
        scales(is_value ? args.params.scales.v : args.params.scales.k) {}

  CUTE_DEVICE bool tells_misses() const { return warp == 0; }

  CUTE_DEVICE int key_head(TileWork const& work) const {
    AttentionShape const& shape = args.params.shape;
    return work.head / (shape.num_heads_q / shape.num_heads_k);
  }

  CUTE_DEVICE Rows find_rows(TileWork const& work, int block) const {
    ForwardParams const& params = args.params;
    Sequence const& sequence = work.sequence;
    const KeyRows keys = KeyRows::of(params.paged, sequence);
    const int head = key_head(work);
    Rows rows{};
    CUTE_UNROLL
    for (int i = 0; i < groups; ++i) {
      const int key = block * block_n + first_row + 32 * i + lane;
      const bool exists = key < sequence.seqlen_k;
      const KeyPlace place = exists ? keys.find(key, params.errors) : KeyPlace{};
      rows.offsets[i] = place.exists() ? place.offset(view, head) : nowhere;
      rows.scales[i] = !place.exists() ? 0.0f
                       : scales.per_token
                           ? scales.data[place.batch * scales.batch_stride +
                                         place.row * scales.row_stride + head * scales.head_stride]
                           : 1.0f;
      rows.misses = rows.misses || (exists && !place.exists());
      if (tells_misses() && keys.is_paged()) {
        const int other = key + block_n / 2;
        rows.misses = rows.misses || (other < sequence.seqlen_k && !keys.has(other));
      }
    }
    rows.misses = __any_sync(0xffffffffu, rows.misses);
    return rows;
  }

  // Where this lane keeps what it copies: 16 bytes of every rows_per_pass'th row.
  CUTE_DEVICE uint4* bytes_of(int buffer) const {
    constexpr int chunks = block_n / 2 * chunks_per_row;
    return smem.bytes + (buffer * 4 + warp) * chunks + lane;
  }

  // The warp's row that this lane has a chunk of in a pass.
  CUTE_DEVICE int row_of_pass(int pass) const {
    return pass * rows_per_pass + lane / chunks_per_row;
  }

  CUTE_DEVICE void copy(Rows const& rows, int buffer) const {
    AttentionShape const& shape = args.params.shape;
    const int column = lane % chunks_per_row * chunk;
    const bool has_columns = column < (is_value ? shape.head_dim_v : shape.head_dim);
    const auto* data = static_cast<const std::uint8_t*>(view.data);
    uint4* target = bytes_of(buffer);
    CUTE_UNROLL
    for (int i = 0; i < groups; ++i) {
      CUTE_NO_UNROLL
      for (int pass = 0; pass < chunks_per_row; ++pass) {
        const std::int64_t offset = __shfl_sync(0xffffffffu, rows.offsets[i], row_of_pass(pass));
        const bool exists = offset != nowhere && has_columns;
        cute::SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<uint4>::copy(
            *reinterpret_cast<const uint4*>(exists ? data + offset + column : data), *target,
            exists);
        target += 32;
      }
    }
    cute::cp_async_fence();
  }

  // scale: of the head.
  CUTE_DEVICE void convert(Rows const& rows, int buffer, float scale, Element* tile) const {
    constexpr int box = 64;
    const int column = lane % chunks_per_row * chunk;
    const uint4* source = bytes_of(buffer);
    tile += column / box * (block_n * box);
    CUTE_UNROLL
    for (int i = 0; i < groups; ++i) {
      CUTE_NO_UNROLL
      for (int pass = 0; pass < chunks_per_row; ++pass) {
        const int row = first_row + 32 * i + row_of_pass(pass);
        const float factor = scale * __shfl_sync(0xffffffffu, rows.scales[i], row_of_pass(pass));
        const uint4 bytes = *source;
        source += 32;
        const std::uint32_t words[] = {bytes.x, bytes.y, bytes.z, bytes.w};
        CUTE_UNROLL
        for (int half = 0; half < 2; ++half) {
          const auto pair = [&](int j) {
            const std::uint32_t word = words[2 * half + j / 2];
            return scaled_pair_of_e4m3<Element>(static_cast<std::uint16_t>(word >> j % 2 * 16),
                                                factor);
          };
          const int vector = (column % box / 8 + half) ^ row % 8;
          *reinterpret_cast<uint4*>(tile + row * box + vector * 8) = {pair(0), pair(1), pair(2),
                                                                      pair(3)};
        }
      }
    }
  }

  CUTE_DEVICE float scale_of(TileWork const& work) const {
    ForwardParams const& params = args.params;
    const int head = key_head(work);
    const float own = scale_of_head(scales, work.sequence.index, head);
    return is_value ? own : own * scale_of_head(params.scales.q, work.sequence.index, head);
  }

  CUTE_DEVICE void load(TileWork const& work, BlockRange const& range) {
    const VisitOrder order = visit_order<Traits>(args.params, work, range);
    auto& ring = is_value ? smem.v_ring : smem.k_ring;
    Element* tiles = is_value ? smem.v : smem.k;
    const float scale = scale_of(work);
    int buffer = 0;
    Rows rows = find_rows(work, order.block_at(range.end - 1));
    copy(rows, buffer);
    CUTE_NO_UNROLL
    for (int position = range.end - 1; position >= range.begin; --position) {
      const int after = (buffer + 1) % buffers;
      const bool has_next = position > range.begin;
      Rows next = rows;
      if (has_next) next = find_rows(work, order.block_at(position - 1));
      if (buffers > 1 && has_next) {
        copy(next, after);
        cute::cp_async_wait<1>();
      } else {
        cute::cp_async_wait<0>();
      }
      producer_acquire(ring, state);
      if (tells_misses() && lane == 0) smem.misses_keys[state.stage] = rows.misses;
      convert(rows, buffer, scale, tiles + state.stage * block_n * columns);
      cutlass::arch::fence_view_async_shared();
      __syncwarp();
      producer_commit(ring, state);
      state.advance();
      if (buffers == 1 && has_next) copy(next, after);
      rows = next;
      buffer = after;
    }
  }

  // Every warp of the producer's warpgroup.
  CUTE_DEVICE void run() {
    const bool leads = warp == 0 && lane == 0;
    TileAnnouncer<Traits> announcer{args, smem};
    Producer<Traits> queries{args, smem};
    if (leads) announcer.announce_next();
    for (;; work_state.advance()) {
      consumer_wait(smem.work_ring, work_state);
      const int tile = work_state.stage;
      TileWork const& work = smem.work[tile].work;
      if (work.tile == no_tile) break;
      if (warp == 0) queries.load_queries(work);
      load(work, smem.work[tile].range);
      __syncwarp();
      if (leads) announcer.announce_next();
      if (lane == 0) EmptyBarrier::arrive(&smem.work_ring.empty[tile]);
    }
  }
};

}  // namespace flash_attn_cuda::sm90
