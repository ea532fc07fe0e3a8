// Everything a backward kernel for wide heads derives from its row of the kernel
// table (kernel_table/).
#pragma once

#include "flash_attn/api.h"
#include "shared/mask/block_range.h"
#include "shared/schedule/tile_work.h"
#include "sm90/isa/barriers.h"
#include "sm90/isa/copy.h"
#include "sm90/isa/cta.h"
#include "sm90/isa/gemm.h"
#include "sm90/wide/partner.h"
#include "sm90/wide/slots.h"

namespace flash_attn_cuda::sm90 {

// What a CTA makes a tile of.
enum class Gradient : std::uint8_t { dk, dq, dv, none };

// The blocks of the other sequence that a tile's rows see, of one head after the other.
struct GradientSteps {
  BlockRange range;
  int first_head;
  int heads;

  struct Place {
    int head;
    int block;
  };

  CUTE_DEVICE int count() const { return range.empty() ? 0 : heads * (range.end - range.begin); }
  CUTE_DEVICE Place at(int step) const {
    const int blocks = range.end - range.begin;
    const int head = step / blocks;
    return {first_head + head, range.begin + step - head * blocks};
  }
};

struct WideJob {
  Gradient gradient;
  Sequence sequence;
  int tile;  // of queries for dq, else of keys
  int head;  // of q for dq, else of k
  GradientSteps steps;
};

template <class Tag>
struct WideBackwardTraits {
  static constexpr BackwardConfig config = Tag::config;
  static constexpr Sm90WideBackwardConfig own = Tag::own;
  static constexpr int block = config.block_m;  // of queries and of keys
  static constexpr int head_dim = config.head_dim;
  static constexpr int consumers = 2;
  static constexpr int loaders = consumers;  // a ring of buffers for each
  static constexpr int threads = warpgroup_threads * (1 + consumers);
  static constexpr bool writes_fp32 = can_write_fp32(config.features);

  using Element = ElementOf<config.dtype>;
  using Slots = WideSlots<Element, head_dim, /*columns=*/64, /*rows=*/16, own.stages_kv>;
  using ScoresMma = typename Slots::ScoresMma;

  static constexpr int launch_registers = launch_registers_of(threads);
  static constexpr int producer_registers = own.producer_registers;
  static constexpr int consumer_registers = own.key_registers;

  struct SharedStorage {
    alignas(1024) Element tiles[2][block * head_dim];  // K and V of keys, or Q and dO of queries
    alignas(1024) Element slots[consumers][Slots::count * Slots::elements];
    alignas(16) Told told[2][consumers];
    std::uint64_t tile_full[2];
    Ring<Slots::count> rings[consumers];
    WideJob job;
  };

  static_assert(block == Slots::block && config.block_n == block && config.head_dim_v == head_dim);
  static_assert(config.features == 0 || config.features == feature::deterministic);
  static_assert(sizeof(SharedStorage) <= smem_limit_of(1));
};

}  // namespace flash_attn_cuda::sm90
