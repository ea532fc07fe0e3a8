// Rows that append_kv.cu moves where the cache is of e4m3: new keys and values are quantized.
#pragma once

#include <cuda_runtime_api.h>

#include <cmath>
#include <cstdint>

#include "auxiliary/append_rows.h"
#include "auxiliary/row_pairs.h"
#include "auxiliary/vector_types.h"
#include "flash_attn/params.h"
#include "shared/e4m3.h"

namespace flash_attn_cuda {

// Whether the lanes of a row hold all of its parts, of 16 columns, at once (can_quantize_vectors).
template <int kPairs>
inline constexpr bool holds_row = kPairs == vector_elements;

__device__ inline RowPairing pairing_of(const AppendParams& params, int columns, bool rotates) {
  return {.columns = columns,
          .rotary_dim = rotates && params.rotary_cos != nullptr ? params.rotary_dim : 0,
          .is_interleaved = params.rotary_interleaved};
}

// position: -1 for a copy.
template <class Element, int kPairs>
__device__ void rotate(const AppendParams& params, RowPairs<Element, kPairs>& part, int position) {
  if (!part.is_rotated || position < 0) return;
  const std::int64_t angles = std::int64_t{position} * (params.rotary_dim / 2);
  part.rotate(static_cast<const Element*>(params.rotary_cos) + angles,
              static_cast<const Element*>(params.rotary_sin) + angles, params.rotary_interleaved);
}

// The largest of the lanes that share a row, all of which call it.
__device__ inline float largest_of_lanes(float x, int lanes) {
  const unsigned first = threadIdx.x % 32 / lanes * lanes;
  const unsigned mask = (lanes == 32 ? 0xffff'ffffu : (1u << lanes) - 1) << first;
  for (int apart = lanes / 2; apart > 0; apart /= 2) x = fmaxf(x, __shfl_xor_sync(mask, x, apart));
  return x;
}

__device__ inline float* scale_of(const ScaleView& view, int sequence, const KeyPlace& place,
                                  int head) {
  if (view.data == nullptr) return nullptr;
  const std::int64_t row = view.per_token
                               ? place.batch * view.batch_stride + place.row * view.row_stride
                               : sequence * view.batch_stride;
  return view.data + row + head * view.head_stride;
}

// Part after part of a row, of which the caller has loaded the lane's first one.
template <class Element, int kPairs, class PartOf>
__device__ void quantize_row(const AppendArguments& args, const RowPairs<Element, kPairs>& loaded,
                             PartOf part_of, std::uint8_t* target, float* scale_place, int parts,
                             int lane) {
  const int lanes = args.lanes_per_row;
  const auto for_others = [&](auto use) {
    if constexpr (!holds_row<kPairs>) {
      for (int number = lane + lanes; number < parts; number += lanes) use(part_of(number));
    }
  };
  float scale = 1.f;
  if (args.params.quantizes_tokens) {
    float largest = loaded.largest_magnitude();
    for_others([&](const auto& part) { largest = fmaxf(largest, part.largest_magnitude()); });
    largest = largest_of_lanes(largest, lanes);
    if (largest > 0.f) scale = __fdiv_rn(largest, largest_e4m3);
    if (lane == 0) *scale_place = scale;
  } else if (scale_place != nullptr) {
    scale = *scale_place;
  }
  if (lane < parts) loaded.store_quotients(target, scale);
  for_others([&](const auto& part) { part.store_quotients(target, scale); });
}

template <class Element, int kPairs>
__device__ void append_quantized(const AppendArguments& args, std::int64_t index, bool is_value,
                                 int lane) {
  using Pairs = RowPairs<Element, kPairs>;
  const AppendParams& params = args.params;
  const auto row = static_cast<int>(index / params.shape.num_heads_k);
  const auto head = static_cast<int>(index - std::int64_t{row} * params.shape.num_heads_k);
  const RowPlace place = find_row(params.sequences.cu_seqlens_k_new, params.shape.batch_size,
                                  params.sequences.seqlen_k_new, row);
  if (place.sequence < 0) return;
  const int columns = is_value ? params.shape.head_dim_v : params.shape.head_dim;
  const int parts = columns / (2 * kPairs);
  const RowPairing pairing = pairing_of(params, columns, !is_value);
  const auto* source =
      row_of<const Element>(is_value ? params.v_new : params.k_new, place.batch, place.row, head);
  // It arrives while the target is looked up.
  Pairs loaded;
  if (lane < parts) loaded = Pairs::load(source, pairing, lane);
  const int used = used_keys(params, place.sequence);
  const int cache_row = used + place.position;
  const KeyPlace target = find_cache_row(params, place.sequence, used, cache_row);
  if (!target.exists()) return;
  const int position = is_value ? -1 : rotary_position(params, place.sequence, cache_row);
  rotate(params, loaded, position);
  const auto part_of = [&](int number) {
    Pairs part = Pairs::load(source, pairing, number);
    rotate(params, part, position);
    return part;
  };
  const TensorView& cache = is_value ? params.v_cache : params.k_cache;
  const ScaleView& scales = is_value ? params.v_scale : params.k_scale;
  quantize_row(args, loaded, part_of,
               static_cast<std::uint8_t*>(cache.data) + target.offset(cache, head),
               scale_of(scales, place.sequence, target, head), parts, lane);
}

template <class Element, int kPairs>
__device__ void rotate_query_pairs(const AppendArguments& args, std::int64_t index, int lane) {
  using Pairs = RowPairs<Element, kPairs>;
  const AppendParams& params = args.params;
  const QueryRow query = find_query(params, index);
  const RowPlace& place = query.place;
  const RowPairing pairing = pairing_of(params, params.shape.head_dim, true);
  const auto* source = row_of<const Element>(params.q, place.batch, place.row, query.head);
  auto* target = row_of<Element>(params.q_rotated, place.batch, place.row, query.head);
  const int parts = pairing.columns / (2 * kPairs);
  const auto move = [&](int number) {
    Pairs part = Pairs::load(source, pairing, number);
    rotate(params, part, query.position);
    part.store(target);
  };
  if constexpr (holds_row<kPairs>) {
    if (lane < parts) move(lane);
  } else {
    for (int number = lane; number < parts; number += args.lanes_per_row) move(number);
  }
}

}  // namespace flash_attn_cuda
