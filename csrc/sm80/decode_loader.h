// A warp's own copies of keys and values, slice by slice, from wherever their rows lie (cp.async,
// 16 bytes a thread; element by element where rows are not aligned).
#pragma once

#include "shared/paged_kv.h"
#include "sm80/decode_traits.h"

namespace flash_attn_cuda::sm80 {

template <class Traits>
struct SliceLoader {
  using Element = typename Traits::Element;
  using Bits = std::uint16_t;  // an element, unread
  static constexpr int slice = Traits::slice;

  TensorView const& k;
  TensorView const& v;
  KeyRows rows;
  DeviceErrors* errors;
  int head;
  int head_dim;
  int head_dim_v;
  bool has_vector_rows;
  int begin;  // keys of this CTA: [begin, end); the others of a slice become zeros, unread
  int end;
  KeyPlace next{};           // of this lane's key of the slice to come
  bool misses_page = false;  // some key of this warp lies in no page; the same in all lanes

  static constexpr int atom_columns = decltype(size<1>(SwizzleAtom<Traits::head_dim>{}))::value;
  static constexpr int chunk = sizeof(uint128_t) / sizeof(Element);
  static constexpr int chunks_per_row = atom_columns / chunk;
  static constexpr int rows_per_pass = 32 / chunks_per_row;
  static constexpr int atom_rows = 8;
  static constexpr int phases = atom_rows / rows_per_pass;  // rows of the atom a lane writes

  CUTE_DEVICE void look_up(int key_begin, int lane) {
    const int key = key_begin + lane;
    next = lane < slice && key >= begin && key < end ? rows.look_up(key) : KeyPlace{};
  }

  // The slice from key_begin on, which look_up was called for, into `stage`: K, then V. Asks for
  // the places of the slice from key_after on.
  CUTE_DEVICE void load(int key_begin, int key_after, Element* stage, int lane) {
    constexpr std::int64_t none = -1;
    const int key = key_begin + lane;
    std::int64_t k_offset = none;
    std::int64_t v_offset = none;
    bool misses = false;
    if (lane < slice && key >= begin && key < end) {
      const KeyPlace place = rows.checked(next, errors);
      misses = !place.exists();
      if (!misses) {
        k_offset = place.offset(k, head);
        v_offset = place.offset(v, head);
      }
    }
    if (rows.is_paged()) misses_page |= __any_sync(0xffffffffu, misses);
    look_up(key_after, lane);
    if (has_vector_rows)
      copy_vectors(stage, k_offset, v_offset, lane);
    else
      copy_elements(stage, k_offset, v_offset, lane);
  }

 private:
  static CUTE_DEVICE void copy_vector(const void* data, std::int64_t offset, bool exists,
                                      Element* target) {
    SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<uint128_t>::copy(
        *reinterpret_cast<const uint128_t*>(static_cast<const Element*>(data) + offset),
        *reinterpret_cast<uint128_t*>(target), exists);
  }

  CUTE_DEVICE void copy_vectors(Element* stage, std::int64_t k_offset, std::int64_t v_offset,
                                int lane) const {
    const int lane_row = lane / chunks_per_row;
    const int lane_column = lane % chunks_per_row * chunk;
    auto tile = smem_tile<typename Traits::KeyLayout>(stage);
    const auto distance = get_nonswizzle_portion(typename Traits::KeyLayout{});
    CUTE_UNROLL
    for (int phase = 0; phase < phases; ++phase) {
      Element* first = &tile(lane_row + phase * rows_per_pass, lane_column);
      CUTE_UNROLL
      for (int row = 0; row < slice; row += atom_rows) {
        const int source_lane = lane_row + phase * rows_per_pass + row;
        const std::int64_t k_row = __shfl_sync(0xffffffffu, k_offset, source_lane);
        const std::int64_t v_row = __shfl_sync(0xffffffffu, v_offset, source_lane);
        CUTE_UNROLL
        for (int column = 0; column < Traits::head_dim; column += atom_columns) {
          const bool exists = k_row >= 0 && lane_column + column < head_dim;
          const bool exists_v = k_row >= 0 && lane_column + column < head_dim_v;
          Element* target = first + distance(row, column);
          copy_vector(k.data, k_row + lane_column + column, exists, target);
          copy_vector(v.data, v_row + lane_column + column, exists_v,
                      target + Traits::stage_elements / 2);
        }
      }
    }
  }

  CUTE_DEVICE void copy_elements(Element* stage, std::int64_t k_offset, std::int64_t v_offset,
                                 int lane) const {
    auto tile = smem_tile<typename Traits::KeyLayout>(reinterpret_cast<Bits*>(stage));
    constexpr int rows_in_flight = 4;
#pragma unroll 1
    for (int first = 0; first < slice; first += rows_in_flight) {
#pragma unroll 1
      for (int column = lane; column < Traits::head_dim; column += 32) {
        Bits k_bits[rows_in_flight];
        Bits v_bits[rows_in_flight];
        CUTE_UNROLL
        for (int i = 0; i < rows_in_flight; ++i) {
          const std::int64_t k_row = __shfl_sync(0xffffffffu, k_offset, first + i);
          const std::int64_t v_row = __shfl_sync(0xffffffffu, v_offset, first + i);
          const bool exists = k_row >= 0 && column < head_dim;
          const bool exists_v = k_row >= 0 && column < head_dim_v;
          k_bits[i] = exists ? static_cast<const Bits*>(k.data)[k_row + column] : Bits{0};
          v_bits[i] = exists_v ? static_cast<const Bits*>(v.data)[v_row + column] : Bits{0};
        }
        CUTE_UNROLL
        for (int i = 0; i < rows_in_flight; ++i) {
          Bits* target = &tile(first + i, column);
          target[0] = k_bits[i];
          target[Traits::stage_elements / 2] = v_bits[i];
        }
      }
    }
  }
};

}  // namespace flash_attn_cuda::sm80
