// Effects: what happens to the scores of a tile. A row of the kernel table has an effect or lacks
// it.
#pragma once

#include <type_traits>

#include "shared/sequence/sequence.h"

namespace flash_attn_cuda {

// A tile of scores.
struct ScoreTile {
  Sequence const& sequence;
  int head;  // of q
  int query_begin;
  int key_begin;
};

// Takes the place of an effect that a row lacks: its calls have no code.
struct NoEffect {
  template <class... Any>
  __device__ __forceinline__ static void apply(Any&&...) {}
  template <class... Any>
  __device__ __forceinline__ static void add_gradient(Any&&...) {}
};

template <bool kHas, class Effect>
using EffectIf = std::conditional_t<kHas, Effect, NoEffect>;

}  // namespace flash_attn_cuda
