// The fp32 buffer that the key tiles of a backward pass add dQ into. A tile lies there in the order
// in which the threads of the product hold it (element i of atom a of thread t), so that a warp's
// additions are whole 512-byte lines; what converts it reads it in the same order and never needs
// the inverse permutation.
#pragma once

#include <cute/tensor.hpp>
#include <utility>

namespace flash_attn_cuda {

template <int kThreads>
struct DqAccumulator {
  static constexpr int atom_elements = 4;  // of an m16n8 accumulator, a thread

  // red.v4 exists from sm_90 on: one 16-byte addition a thread and atom. Before, four 4-byte
  // additions, each contiguous over the warp.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  static constexpr bool vector_add = true;
#else
  static constexpr bool vector_add = false;
#endif

  CUTE_DEVICE static int offset(int atom, int element, int thread) {
    return vector_add ? (atom * kThreads + thread) * atom_elements + element
                      : (atom * atom_elements + element) * kThreads + thread;
  }

  template <class Accumulator>
  CUTE_DEVICE static void add(float* tile, Accumulator const& dq, int thread) {
    CUTE_UNROLL
    for (int atom = 0; atom < elements<Accumulator> / atom_elements; ++atom) {
      [[maybe_unused]] const int first = atom * atom_elements;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
      asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};"
                   :
                   : "l"(__cvta_generic_to_global(tile + offset(atom, 0, thread))), "f"(dq(first)),
                     "f"(dq(first + 1)), "f"(dq(first + 2)), "f"(dq(first + 3))
                   : "memory");
#else
      CUTE_UNROLL
      for (int i = 0; i < atom_elements; ++i)
        atomicAdd(tile + offset(atom, i, thread), dq(first + i));
#endif
    }
  }

  // Takes the place of an addition to zeros, from sm_90 on.
  template <class Accumulator>
  CUTE_DEVICE static void store(float* tile, Accumulator const& dq, int thread) {
    CUTE_UNROLL
    for (int first = 0; first < elements<Accumulator>; first += atom_elements) {
      float4* sums = reinterpret_cast<float4*>(tile + offset(first / atom_elements, 0, thread));
      __stcg(sums, {dq(first), dq(first + 1), dq(first + 2), dq(first + 3)});
    }
  }

  // Loads past L1, which knows nothing of additions.
  template <class Accumulator>
  CUTE_DEVICE static void load(float const* tile, Accumulator& dq, int thread) {
    for_each_sum<elements<Accumulator>>(tile, thread, [&](int i, float sum) { dq(i) = sum; });
  }

  template <class Accumulator>
  CUTE_DEVICE static void load_and_add(float const* tile, Accumulator& dq, int thread) {
    for_each_sum<elements<Accumulator>>(tile, thread, [&](int i, float sum) { dq(i) += sum; });
  }

 private:
  template <class Accumulator>
  static constexpr int elements = decltype(cute::size(std::declval<Accumulator>()))::value;

  template <int kElements, class Take>
  CUTE_DEVICE static void for_each_sum(float const* tile, int thread, Take take) {
    CUTE_UNROLL
    for (int atom = 0; atom < kElements / atom_elements; ++atom) {
      const int first = atom * atom_elements;
      if constexpr (vector_add) {
        const float4 sums = __ldcg(reinterpret_cast<float4 const*>(tile + offset(atom, 0, thread)));
        take(first, sums.x);
        take(first + 1, sums.y);
        take(first + 2, sums.z);
        take(first + 3, sums.w);
      } else {
        CUTE_UNROLL
        for (int i = 0; i < atom_elements; ++i) take(first + i, tile[offset(atom, i, thread)]);
      }
    }
  }
};

}  // namespace flash_attn_cuda
