// Rows that append_kv.cu moves where the cache is of e4m3: new keys and values are quantized.
#pragma once

#include <cuda_runtime_api.h>

#include <cmath>
#include <cstdint>

#include "auxiliary/append/e4m3_quotient.h"
#include "auxiliary/append/row_pairs.h"
#include "auxiliary/append/rows.h"
#include "auxiliary/vector_types.h"
#include "flash_attn/params.h"
#include "shared/e4m3.h"
#include "shared/e8m0.h"

namespace flash_attn_cuda {

// Whether the lanes of a row hold all of its parts, of 16 columns, at once (can_quantize_vectors).
template <int kPairs>
inline constexpr bool holds_row = kPairs == vector_elements;

__device__ inline RowPairing pairing_of(const AppendParams& params, int columns, bool rotates) {
  const bool is_rotated = rotates && params.rotary_cos != nullptr;
  return {.columns = static_cast<unsigned>(columns),
          .rotary_dim = is_rotated ? static_cast<unsigned>(params.rotary_dim) : 0,
          .is_interleaved = params.rotary_interleaved};
}

template <int kPairs>
__device__ int parts_of(const RowPairing& pairing) {
  return static_cast<int>(pairing.columns / (2 * kPairs));
}

__device__ inline std::uint8_t* cache_row_of(const TensorView& view, const KeyPlace& place,
                                             int head) {
  return row_of<std::uint8_t>(view, place.batch, place.row, head);
}

// position: -1 for a copy.
template <class Element, int kPairs>
__device__ void rotate(const AppendParams& params, RowPairs<Element, kPairs>& part, int position) {
  if (!part.is_rotated || position < 0) return;
  const auto half = static_cast<unsigned>(params.rotary_dim) / 2;
  const std::uint64_t angles = std::uint64_t{static_cast<unsigned>(position)} * half;
  part.rotate(static_cast<const Element*>(params.rotary_cos) + angles,
              static_cast<const Element*>(params.rotary_sin) + angles, params.rotary_interleaved);
}

// The largest of the lanes that share a row: of two numbers, neither NaN nor negative, that Element
// holds. All lanes of the warp call it that have not ended: with masks of single rows the compiler
// would have every exchange find out which lanes have the same one.
template <class Element>
__device__ float2 largest_of_lanes(float2 x, int lanes_shift) {
  using Two = Packed<Element, 2>;
  Two two;
  two.set_pair(0, x.x, x.y);
#pragma unroll
  for (int step = 4; step >= 0; --step) {
    if (step < lanes_shift)
      two.raise_pair(0, Two::pair_of(__shfl_xor_sync(~0u, two.words[0], 1 << step)));
  }
  return two.pair(0);
}

__device__ inline float scale_of_largest(float largest) {
  return largest > 0.f ? __fdiv_rn(largest, largest_e4m3) : 1.f;
}

// What one head's numbers are divided by, unless tokens have scales of their own.
__device__ inline float scale_of_head(const ScaleView& view, int sequence, int head) {
  if (view.data == nullptr || view.per_token) return 1.f;
  return view.data[offset_of(sequence, view.batch_stride) + offset_of(head, view.head_stride)];
}

__device__ inline std::int64_t offset_of_token(const ScaleView& view, const KeyPlace& place,
                                               int head) {
  return offset_of(place.batch, view.batch_stride) + offset_of(place.row, view.row_stride) +
         offset_of(head, view.head_stride);
}
__device__ inline float* scale_of_token(const ScaleView& view, const KeyPlace& place, int head) {
  return view.data + offset_of_token(view, place, head);
}

// The scale at an offset of a view of any kind.
struct LatentScale {
  const ScaleView& view;
  std::int64_t offset;

  __device__ std::uint8_t* byte() const {
    return reinterpret_cast<std::uint8_t*>(view.data) + offset;
  }
  __device__ float load() const {
    return view.is_e8m0 ? number_of_scale(*byte()) : view.data[offset];
  }
  __device__ void store(float scale) const {
    if (view.is_e8m0)
      *byte() = next_e8m0(scale);
    else
      view.data[offset] = scale;
  }
  // Of e8m0 the next power of two.
  __device__ float of_largest(float largest) const {
    if (!view.is_e8m0) return scale_of_largest(largest);
    constexpr float least = 0x1p-13f;
    return number_of_scale(next_e8m0(fmaxf(__fdiv_rn(largest, largest_e4m3), least)));
  }
};

// A row of k_new or v_new, as one of its lanes sees it.
template <class Element, int kPairs>
class NewRow {
 public:
  using Pairs = RowPairs<Element, kPairs>;

  // Its first part arrives while the target is looked up. Lanes without a part load the last one
  // again: behind a condition the compiler would wait for what is loaded.
  __device__ __forceinline__ NewRow(const AppendArguments& args, const Element* source,
                                    const RowPairing& pairing, int lane)
      : args_(args),
        source_(source),
        pairing_(pairing),
        parts_(parts_of<kPairs>(pairing)),
        lane_(lane),
        loaded_(Pairs::load(source, pairing, lane < parts_ ? lane : parts_ - 1)) {}

  __device__ __forceinline__ void rotate_by(int position) {
    position_ = position;
    rotate(args_.params, loaded_, position);
  }

  __device__ __forceinline__ float largest_of_lane() const {
    float largest = loaded_.largest_magnitude();
    for_others([&](const auto& part) { largest = fmaxf(largest, part.largest_magnitude()); });
    return largest;
  }

  __device__ __forceinline__ void store(std::uint8_t* target, float scale) const {
    const auto product = E4m3Quotient::by(scale);
    if (product.is_exact)
      store_all(target, [&](float x) { return product.of(x); });
    else  // What a scale of 0 stands for is 0, whatever is divided.
      store_all(target, [&](float x) { return scale == 0.f ? 0.f : __fdiv_rn(x, scale); });
  }

 private:
  const AppendArguments& args_;
  const Element* source_;
  RowPairing pairing_;
  int parts_;
  int lane_;
  int position_ = -1;
  Pairs loaded_;

  template <class Use>
  __device__ __forceinline__ void for_others(Use use) const {
    if constexpr (!holds_row<kPairs>) {
      for (int number = lane_ + args_.lanes_per_row(); number < parts_;
           number += args_.lanes_per_row()) {
        Pairs part = Pairs::load(source_, pairing_, number);
        rotate(args_.params, part, position_);
        use(part);
      }
    }
  }

  template <class Quotient>
  __device__ __forceinline__ void store_all(std::uint8_t* target, Quotient quotient_of) const {
    if (lane_ < parts_) loaded_.store_quotients(target, quotient_of);
    for_others([&](const auto& part) { part.store_quotients(target, quotient_of); });
  }
};

// The key and the value of one position and head. No other lane of the warp rotates queries.
template <class Element, int kPairs>
__device__ void append_quantized(const AppendArguments& args, std::int64_t index, int lane) {
  if (index >= args.key_rows) return;
  const AppendParams& params = args.params;
  const auto [row, head] = split_index(args.heads_k, index);
  const RowPlace place =
      find_row(params.sequences.cu_seqlens_k_new, params.shape.batch_size, args.seqlen_k_new, row);
  if (place.sequence < 0) return;
  const auto load = [&](const TensorView& view, int columns, bool rotates) {
    return NewRow<Element, kPairs>(args, row_of<const Element>(view, place.batch, place.row, head),
                                   pairing_of(params, columns, rotates), lane);
  };
  auto key = load(params.k_new, params.shape.head_dim, true);
  const auto value = load(params.v_new, params.shape.head_dim_v, false);
  float key_scale = scale_of_head(params.k_scale, place.sequence, head);
  float value_scale = scale_of_head(params.v_scale, place.sequence, head);
  const int used = used_keys(params, place.sequence);
  const int cache_row = used + place.position;
  const KeyPlace target = find_cache_row(args, place.sequence, used, cache_row);
  if (!target.exists()) return;
  key.rotate_by(rotary_position(params, place.sequence, cache_row));
  if (params.quantizes_tokens) {
    const float2 largest = largest_of_lanes<Element>(
        {key.largest_of_lane(), value.largest_of_lane()}, args.lanes_shift);
    key_scale = scale_of_largest(largest.x);
    value_scale = scale_of_largest(largest.y);
    if (lane == 0) {
      *scale_of_token(params.k_scale, target, head) = key_scale;
      *scale_of_token(params.v_scale, target, head) = value_scale;
    }
  } else if (params.k_scale.per_token || params.v_scale.per_token) {
    if (params.k_scale.per_token) key_scale = *scale_of_token(params.k_scale, target, head);
    if (params.v_scale.per_token) value_scale = *scale_of_token(params.v_scale, target, head);
  }
  key.store(cache_row_of(params.k_cache, target, head), key_scale);
  value.store(cache_row_of(params.v_cache, target, head), value_scale);
}

// A latent row, whose columns may have scales of their own groups. A lane of the warp has 16 of
// them; one that has none holds the last ones again.
template <class Element>
__device__ void append_latent(const AppendArguments& args, std::int64_t index, int lane) {
  constexpr int columns = 2 * vector_elements;
  const AppendParams& params = args.params;
  const ScaleView& view = params.v_scale;
  const auto [row, head] = split_index(args.heads_k, index);
  const RowPlace place =
      find_row(params.sequences.cu_seqlens_k_new, params.shape.batch_size, args.seqlen_k_new, row);
  if (place.sequence < 0) return;
  const int used = used_keys(params, place.sequence);
  const KeyPlace target = find_cache_row(args, place.sequence, used, used + place.position);
  if (!target.exists()) return;
  const int column = min(lane * columns, params.shape.head_dim_v - columns);
  const NewRow<Element, vector_elements> part(
      args, row_of<const Element>(params.v_new, place.batch, place.row, head) + column,
      {.columns = columns}, 0);
  float scale = scale_of_head(view, place.sequence, head);
  if (view.per_token) {
    const LatentScale own{view, offset_of_token(view, target, head) +
                                    offset_of(column >> view.group_shift, view.group_stride)};
    if (params.quantizes_tokens) {
      constexpr int columns_shift = 4;
      const float largest = part.largest_of_lane();
      const int lanes_shift = min(5, view.group_shift - columns_shift);
      scale = own.of_largest(largest_of_lanes<Element>({largest, largest}, lanes_shift).x);
      const bool is_first = (lane & ((1 << lanes_shift) - 1)) == 0;
      if (is_first && lane * columns == column) own.store(scale);
    } else {
      scale = own.load();
    }
  }
  if (lane * columns == column)
    part.store(cache_row_of(params.v_cache, target, head) + column, scale);
}

template <class Element, int kPairs>
__device__ void rotate_query_pairs(const AppendArguments& args, std::int64_t index, int lane) {
  using Pairs = RowPairs<Element, kPairs>;
  const AppendParams& params = args.params;
  const QueryRow query = find_query(args, index);
  const RowPlace& place = query.place;
  const RowPairing pairing = pairing_of(params, params.shape.head_dim, true);
  const auto* source = row_of<const Element>(params.q, place.batch, place.row, query.head);
  auto* target = row_of<Element>(params.q_rotated, place.batch, place.row, query.head);
  const int parts = parts_of<kPairs>(pairing);
  const auto move = [&](int number) {
    Pairs part = Pairs::load(source, pairing, number);
    rotate(params, part, query.position);
    part.store(target);
  };
  if constexpr (holds_row<kPairs>) {
    if (lane < parts) move(lane);
  } else {
    for (int number = lane; number < parts; number += args.lanes_per_row()) move(number);
  }
}

}  // namespace flash_attn_cuda
