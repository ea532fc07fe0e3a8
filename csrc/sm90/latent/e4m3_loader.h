// Loads of keys whose latent columns are e4m3: warps convert them to 16 bits, times their scales,
// on the way to the ring.
#pragma once

#include "shared/e4m3_pairs.h"
#include "sm90/latent/row_loader.h"

namespace flash_attn_cuda::sm90 {

// One of the warps that share a block's keys: four lanes a row. Copies of a block's bytes are under
// way (cp.async) while the block before it is converted. A lane reads what it has copied alone, so
// that no barrier is between; in registers loads would wait for each other.
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
  PipelineState<Traits::stages> state{};  // of the first piece of the block to be converted
  int buffer = 0;                         // of the next block's bytes
  bool has_block = false;
  unsigned seen = 0;  // of the block in the other buffer, the warp's keys, a bit each

  CUTE_DEVICE void copy(const void* source, bool exists, uint4& target) const {
    SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<Vector>::copy(*static_cast<const Vector*>(source),
                                                  reinterpret_cast<Vector&>(target), exists);
  }

  // Starts the copies of this lane's columns of a row, and of the scales of some pieces.
  CUTE_DEVICE void start_copies(LatentItem const& item, KeyPlace const& place) {
    ForwardParams const& params = args.params;
    auto& staged = smem.staged[buffer];
    const int head = item.work.head;
    const bool exists = place.exists();
    const std::int64_t rotary = exists ? place.offset(params.k, head) + column : 0;
    const auto* keys = static_cast<const Element*>(params.k.data) + rotary;
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i)
      copy(keys + chunk * i, exists && column + chunk * i < params.shape.head_dim,
           staged.rotary[i][thread]);
    const std::int64_t latent = exists ? place.offset(params.v, head) + column : 0;
    const auto* numbers = static_cast<const std::uint8_t*>(params.v.data) + latent;
    CUTE_UNROLL
    for (int piece = 0; piece < Traits::value_pieces; ++piece) {
      const int first = piece * Traits::piece_columns;
      copy(numbers + first, exists && first + column < params.shape.head_dim_v,
           staged.latent[piece][thread]);
    }
    ScaleView const& view = params.scales.v;
    const std::int64_t of_row = view.per_token
                                    ? place.batch * view.batch_stride + place.row * view.row_stride
                                    : item.work.sequence.index * view.batch_stride;
    CUTE_UNROLL
    for (int i = 0; i < scales; ++i) {
      const int first = (lane % lanes_per_row * scales + i) * Traits::piece_columns;
      const bool is_there = exists && first < params.shape.head_dim_v;
      float& target = staged.scales[i][thread];
      if (view.data == nullptr) {
        target = 1.0f;
      } else {
        const std::int64_t at =
            of_row + head * view.head_stride + (first >> view.group_shift) * view.group_stride;
        SM80_CP_ASYNC_CACHEALWAYS_ZFILL<float>::copy(view.data[is_there ? at : 0], target,
                                                     is_there);
      }
    }
    cp_async_fence();
  }

  CUTE_DEVICE uint4& target(int stage, int i) const {
    typename Traits::PieceOffsets offsets;
    const int row = 8 * warp + lane / lanes_per_row;
    return reinterpret_cast<uint4&>(smem.pieces[offsets(row, column + chunk * i, stage)]);
  }

  // Sixteen numbers times a scale.
  CUTE_DEVICE void convert(uint4 const& numbers, float scale, int stage) const {
    const std::uint32_t words[4] = {numbers.x, numbers.y, numbers.z, numbers.w};
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) {
      std::uint32_t pairs[4];
      CUTE_UNROLL
      for (int j = 0; j < 4; ++j) {
        const auto two = static_cast<std::uint16_t>(words[2 * i + j / 2] >> (j % 2 * 16));
        const float2 x = __half22float2(half2_of_e4m3(two));
        pairs[j] = pair_of<Element>({x.x * scale, x.y * scale});
      }
      target(stage, i) = {pairs[0], pairs[1], pairs[2], pairs[3]};
    }
  }

  // The block in the other buffer goes to the ring.
  CUTE_DEVICE void pass_on() {
    auto const& staged = smem.staged[buffer ^ 1];
    producer_acquire(smem.ring, state);
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) target(state.stage, i) = staged.rotary[i][thread];
    if (lane == 0)
      reinterpret_cast<std::uint8_t*>(smem.seen[state.stage])[warp] =
          static_cast<std::uint8_t>(seen);
    const auto finish = [&] {
      __syncwarp();
      producer_commit(smem.ring, state);
      state.advance();
    };
    finish();
    float own_scales[scales];
    CUTE_UNROLL
    for (int i = 0; i < scales; ++i) own_scales[i] = staged.scales[i][thread];
    CUTE_UNROLL
    for (int piece = 0; piece < Traits::value_pieces; ++piece) {
      const int owner = lane / lanes_per_row * lanes_per_row + piece / scales;
      const float scale = __shfl_sync(0xffffffffu, own_scales[piece % scales], owner);
      producer_acquire(smem.ring, state);
      convert(staged.latent[piece][thread], scale, state.stage);
      finish();
    }
  }

  // A bit for each of the warp's rows, which four lanes have.
  CUTE_DEVICE static unsigned rows_of(bool exists) {
    unsigned bits = __ballot_sync(0xffffffffu, exists) & 0x1111'1111u;
    bits = (bits | bits >> 3) & 0x0303'0303u;
    bits = (bits | bits >> 6) & 0x000f'000fu;
    return (bits | bits >> 12) & 0xffu;
  }

  CUTE_DEVICE void run() {
    const int row = 8 * warp + lane / lanes_per_row;
    const auto visit = [&](LatentItem const& item, KeyPlace const& place) {
      start_copies(item, place);
      if (has_block) {
        cp_async_wait<1>();
        pass_on();
      }
      has_block = true;
      seen = rows_of(place.exists());
      buffer ^= 1;
    };
    for_each_block<Traits>(args, smem, row, visit);
    cp_async_wait<0>();
    if (has_block) pass_on();
  }
};

}  // namespace flash_attn_cuda::sm90
