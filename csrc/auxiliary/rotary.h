// What the kernels that rotate share (Su et al., "RoFormer", 2021, section 3.2.2): the rotation of
// a pair in fp32, vectors of consecutive columns, and which packed sequence a row belongs to.
#pragma once

#include <cstdint>

namespace flash_attn_cuda {

// A pair (x, y) becomes (x cos - y sin, y cos + x sin): x with the negative sine, y with the sine.
__device__ inline float turned(float own, float partner, float cosine, float sine) {
  return fmaf(own, cosine, partner * sine);
}

template <class Element, int kVector>
struct alignas(sizeof(Element) * kVector) Columns {
  Element values[kVector];

  __device__ static Columns at(const void* row, int column) {
    return *reinterpret_cast<const Columns*>(static_cast<const Element*>(row) + column);
  }
};

// The last sequence that begins at or before the row. Whatever cu_seqlens (batch_size + 1) holds,
// only a sequence that does contain the row counts; -1: there is none. Bounds: a pointer, or what
// can be indexed like one.
template <class Bounds, class Index>
__device__ int find_sequence(const Bounds& cu_seqlens, int batch_size, Index row) {
  int low = 0;
  int high = batch_size;
  while (high - low > 1) {
    const int middle = low + (high - low) / 2;
    (cu_seqlens[middle] <= row ? low : high) = middle;
  }
  const bool inside = low < batch_size && cu_seqlens[low] >= 0 && cu_seqlens[low] <= row &&
                      row < cu_seqlens[low + 1];
  return inside ? low : -1;
}

}  // namespace flash_attn_cuda
