// Loads of keys whose latent columns are e4m3: warps convert them to 16 bits, times their scales,
// on the way to the ring.
#pragma once

#include "shared/e4m3_pairs.h"
#include "sm90/latent/row_loader.h"

namespace flash_attn_cuda::sm90 {

// One of the warps that share a block's keys: four lanes a row. Bytes of a block come by cp.async,
// each piece into the place from which that of the block before it has just been converted. A lane
// reads what it has copied alone, so that no barrier is between; in registers the loads would wait
// for each other.
template <class Traits>
struct E4m3Loader {
  using Element = typename Traits::Element;
  using Vector = uint128_t;
  static constexpr int lanes_per_row = 4;
  static constexpr int columns = 16;                                   // of a lane, in each piece
  static constexpr int chunk = columns / 2;                            // of 16 bits
  static constexpr int scales = Traits::value_pieces / lanes_per_row;  // of a lane
  static_assert(Traits::converters * warpgroup_threads == Traits::block_n * lanes_per_row);
  static_assert(columns * lanes_per_row == Traits::piece_columns);

  LatentArguments const& args;
  typename Traits::SharedStorage& smem;
  int warp;
  int lane = threadIdx.x % 32;
  int column = lane % lanes_per_row * columns;
  int thread = 32 * warp + lane;
  PipelineState<Traits::stages> state{};  // of the next piece
  bool has_block = false;                 // some block's bytes are there, or on their way
  unsigned seen = 0;                      // of it the warp's keys, a bit each

  // Where this lane's columns of a key are.
  struct Source {
    const Element* rotary;
    const std::uint8_t* latent;
    LatentScales scales;
    std::int64_t scale;  // the row's first
    bool exists;
  };
  CUTE_DEVICE Source source_of(LatentItem const& item, KeyPlace const& place) const {
    ForwardParams const& params = args.params;
    const int head = item.work.head;
    Source source{
        static_cast<const Element*>(params.k.data), static_cast<const std::uint8_t*>(params.v.data),
        LatentScales::of(params.scales.v, item.work.sequence.index, head), 0, place.exists()};
    if (!source.exists) return source;
    source.rotary += place.offset(params.k, head) + column;
    source.latent += place.offset(params.v, head) + column;
    source.scale = source.scales.offset(place.batch, place.row);
    return source;
  }

  CUTE_DEVICE static void copy(const void* source, bool exists, uint4& target) {
    SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<Vector>::copy(*static_cast<const Vector*>(source),
                                                  reinterpret_cast<Vector&>(target), exists);
  }

  // Starts the copies of a piece; with the rotary one those of the scales of some pieces.
  CUTE_DEVICE void start_copies(Source const& source, int piece) {
    ForwardParams const& params = args.params;
    auto& staged = smem.staged;
    if (piece > 0) {
      const int first = (piece - 1) * Traits::piece_columns;
      copy(source.latent + first, source.exists && first + column < params.shape.head_dim_v,
           staged.latent[piece - 1][thread]);
      cp_async_fence();
      return;
    }
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i)
      copy(source.rotary + chunk * i, source.exists && column + chunk * i < params.shape.head_dim,
           staged.rotary[i][thread]);
    CUTE_UNROLL
    for (int i = 0; i < scales; ++i) {
      const int first = (lane % lanes_per_row * scales + i) * Traits::piece_columns;
      const bool is_there = source.exists && first < params.shape.head_dim_v;
      const float* scale = source.scales.data;
      if (is_there) scale = &source.scales.at(source.scale, first);
      SM80_CP_ASYNC_CACHEALWAYS_ZFILL<float>::copy(*scale, staged.scales[i][thread], is_there);
    }
    cp_async_fence();
  }

  CUTE_DEVICE uint4& target(int i) const {
    typename Traits::PieceOffsets offsets;
    const int row = 8 * warp + lane / lanes_per_row;
    return reinterpret_cast<uint4&>(smem.pieces[offsets(row, column + chunk * i, state.stage)]);
  }

  // Sixteen numbers times a scale.
  CUTE_DEVICE void convert(uint4 const& numbers, float scale) const {
    const std::uint32_t words[4] = {numbers.x, numbers.y, numbers.z, numbers.w};
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) {
      std::uint32_t pairs[4];
      CUTE_UNROLL
      for (int j = 0; j < 2; ++j) {
        __half2 halves[2];
        halves_of_e4m3(words[2 * i + j], halves);
        CUTE_UNROLL
        for (int h = 0; h < 2; ++h) {
          const float2 x = __half22float2(halves[h]);
          pairs[2 * j + h] = pair_of<Element>({x.x * scale, x.y * scale});
        }
      }
      target(i) = {pairs[0], pairs[1], pairs[2], pairs[3]};
    }
  }

  // A piece of the block that is there goes to the ring. own_scales: this lane's.
  CUTE_DEVICE void pass_on(int piece, float (&own_scales)[scales]) {
    auto const& staged = smem.staged;
    producer_acquire(smem.ring, state);
    if (piece == 0) {
      CUTE_UNROLL
      for (int i = 0; i < 2; ++i) target(i) = staged.rotary[i][thread];
      CUTE_UNROLL
      for (int i = 0; i < scales; ++i) own_scales[i] = staged.scales[i][thread];
      auto* of_warps = reinterpret_cast<std::uint8_t*>(smem.seen[state.stage]);
      if (lane == 0) of_warps[warp] = static_cast<std::uint8_t>(seen);
    } else {
      const int owner = lane / lanes_per_row * lanes_per_row + (piece - 1) / scales;
      const float scale = __shfl_sync(0xffffffffu, own_scales[(piece - 1) % scales], owner);
      convert(staged.latent[piece - 1][thread], scale);
    }
    __syncwarp();
    producer_commit(smem.ring, state);
    state.advance();
  }

  // A bit for each of the warp's rows, which four lanes have.
  CUTE_DEVICE static unsigned rows_of(bool exists) {
    unsigned bits = __ballot_sync(0xffffffffu, exists) & 0x1111'1111u;
    bits = (bits | bits >> 3) & 0x0303'0303u;
    bits = (bits | bits >> 6) & 0x000f'000fu;
    return (bits | bits >> 12) & 0xffu;
  }

  // Passes on the block that is there, if one is: no other comes behind it for now.
  CUTE_DEVICE void finish() {
    if (!has_block) return;
    has_block = false;
    cp_async_wait<0>();
    float own_scales[scales];
    CUTE_UNROLL
    for (int piece = 0; piece < Traits::pieces; ++piece) pass_on(piece, own_scales);
  }

  CUTE_DEVICE void run() {
    const int row = 8 * warp + lane / lanes_per_row;
    const auto visit = [&](LatentItem const& item, KeyPlace const& place) {
      const Source source = source_of(item, place);
      float own_scales[scales];
      CUTE_UNROLL
      for (int piece = 0; piece < Traits::pieces; ++piece) {
        if (has_block) {
          cp_async_wait<Traits::pieces - 1>();
          pass_on(piece, own_scales);
        }
        start_copies(source, piece);
      }
      has_block = true;
      seen = rows_of(place.exists());
    };
    const auto pause = [&] { finish(); };
    for_each_block<Traits>(args, smem, row, visit, pause);
    finish();
  }
};

}  // namespace flash_attn_cuda::sm90
