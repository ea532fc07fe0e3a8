// Tiles of a bias and of its gradient in shared memory: of every 64 keys a box of rows, one a
// query, that TMA moves. A row of 128 bytes is eight chunks, of which chunk c of row r lies in
// place c ^ r % 8. Four matrices of 8 x 8 that one instruction moves are eight elements of a
// thread's accumulator in their order: of S, or, transposed on the way, of S^T.
#pragma once

#include "flash_attn/params.h"
#include "shared/fragments.h"
#include "sm90/isa/copy.h"
#include "sm90/isa/cta.h"

namespace flash_attn_cuda::sm90 {

inline constexpr int box_keys = 64;  // of one box
inline constexpr int box_row_bytes = 128;

// The box of keys [key, key + 64) of one sequence and head, by one thread.
struct PairBox {
  int key;
  int query;
  int head;
  int batch;

  // A dimension that the tensor is broadcast over has a map of extent 1.
  template <class PairTensor>
  CUTE_DEVICE static PairBox of(PairTensor const& tensor, int key, int query, int head,
                                int sequence) {
    return {key, query, tensor.head_stride == 0 ? 0 : head,
            tensor.batch_stride == 0 ? 0 : sequence};
  }
};

// Starts the load of a tile of kRows queries and kKeys keys, by one thread; the barrier counts the
// whole tile. What lies beyond the tensor becomes zeros; no box lies wholly beyond it.
template <int kRows, int kKeys, class Element>
CUTE_DEVICE void load_bias(CUtensorMap const& map, std::uint64_t* barrier, Element* tile,
                           PairBox const& first, BiasParams const& bias) {
  constexpr auto hint = static_cast<std::uint64_t>(TMA::CacheHintSm90::EVICT_FIRST);
  CUTE_UNROLL
  for (int begin = 0; begin < kKeys; begin += box_keys) {
    // The scores of a box without keys are hidden; one without queries is of a packed sequence
    // longer than the bias. TMA wants boxes to begin at multiples of 16 bytes.
    const int key = first.key + begin < bias.columns ? first.key + begin : 0;
    const int query = min(first.query, bias.rows - 1);
    SM90_TMA_LOAD_4D::copy(&map, barrier, hint, tile + begin * kRows, key, query, first.head,
                           first.batch);
  }
}

// Starts the store of such a tile, by one thread, which may go on writing to it after wait_stores.
template <int kRows, int kKeys, class Element>
CUTE_DEVICE void store_bias_tile(CUtensorMap const& map, Element const* tile, PairBox const& first,
                                 BiasParams const& bias) {
  CUTE_UNROLL
  for (int begin = 0; begin < kKeys; begin += box_keys) {
    if (first.key + begin >= bias.columns || first.query >= bias.rows) break;
    SM90_TMA_STORE_4D::copy(&map, tile + begin * kRows, first.key + begin, first.query, first.head,
                            first.batch);
  }
  tma_store_arrive();
}

// scores = factor * scores + the numbers of four matrices.
template <class Element>
CUTE_DEVICE void scale_and_add(float* scores, float factor, std::uint32_t const (&matrices)[4]) {
  cutlass::NumericArrayConverter<float, Element, 2> convert;
  CUTE_UNROLL
  for (int i = 0; i < 4; ++i) {
    const auto pair = convert(reinterpret_cast<cutlass::Array<Element, 2> const&>(matrices[i]));
    scores[2 * i] = scores[2 * i] * factor + pair[0];
    scores[2 * i + 1] = scores[2 * i + 1] * factor + pair[1];
  }
}

// S of the 64 queries of a warpgroup from `first_row` of a tile on -> factor * S + bias.
template <int kRows, int kKeys, class Element, class Accumulator>
CUTE_DEVICE void add_bias(Element const* tile, int first_row, float factor, Accumulator& tSrS) {
  const unsigned lane = threadIdx.x % 32;
  const unsigned row = first_row + threadIdx.x % warpgroup_threads / 32 * 16 + lane % 16;
  const unsigned first =
      cast_smem_ptr_to_uint(tile) + row * box_row_bytes + ((lane / 16) ^ (row % 8)) * 16;
  CUTE_UNROLL
  for (int i = 0; i < kKeys / 16; ++i) {
    std::uint32_t matrices[4];
    const unsigned address = (first ^ (i % 4 * 32)) + i / 4 * (kRows * box_row_bytes);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(matrices[0]), "=r"(matrices[1]), "=r"(matrices[2]), "=r"(matrices[3])
                 : "r"(address));
    scale_and_add<Element>(tSrS.data() + 8 * i, factor, matrices);
  }
}

// Where a lane's row of the first four matrices lies that hold 16 queries and the warp's 16 of a
// box's 64 keys; those of the next 16 queries lie 16 rows further on.
CUTE_DEVICE unsigned transposed_matrices(void const* box) {
  const unsigned lane = threadIdx.x % 32;
  const unsigned chunk = threadIdx.x % warpgroup_threads / 32 * 2 + lane / 8 % 2;
  return cast_smem_ptr_to_uint(box) + (lane / 16 * 8 + lane % 8) * box_row_bytes +
         (chunk ^ (lane % 8)) * 16;
}

// S^T of 64 keys and kRows queries -> factor * S^T + bias.
template <int kRows, class Element, class Accumulator>
CUTE_DEVICE void add_transposed_bias(Element const* box, float factor, Accumulator& tSrS) {
  const unsigned first = transposed_matrices(box);
  CUTE_UNROLL
  for (int i = 0; i < kRows / 16; ++i) {
    std::uint32_t matrices[4];
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(matrices[0]), "=r"(matrices[1]), "=r"(matrices[2]), "=r"(matrices[3])
                 : "r"(first + i * (16 * box_row_bytes)));
    scale_and_add<Element>(tSrS.data() + 8 * i, factor, matrices);
  }
}

// dS^T of 64 keys and kRows queries, the left operand of a product, -> dS.
template <int kRows, class Fragment>
CUTE_DEVICE void operand_to_transposed_box(Fragment const& fragment,
                                           typename Fragment::value_type* box) {
  const unsigned first = transposed_matrices(box);
  auto registers = recast<std::uint32_t>(fragment);
  CUTE_UNROLL
  for (int i = 0; i < kRows / 16; ++i) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                     first + i * (16 * box_row_bytes)),
                 "r"(registers(4 * i)), "r"(registers(4 * i + 1)), "r"(registers(4 * i + 2)),
                 "r"(registers(4 * i + 3))
                 : "memory");
  }
}

// dS of a tile, by all threads of a warpgroup, added to the sums of a bias that is shared.
template <int kRows, int kKeys, class Element>
CUTE_DEVICE void add_bias_tile(BiasGradient const& dbias, BiasParams const& bias,
                               Element const* tile, int sequence, int head, int query_begin,
                               int key_begin, int thread) {
  constexpr int chunk = 8;
  float* sums = static_cast<float*>(dbias.data) + sequence * dbias.batch_stride +
                head * dbias.head_stride + key_begin;
  CUTE_UNROLL
  for (int begin = 0; begin < kKeys; begin += box_keys) {
    CUTE_NO_UNROLL
    for (int i = thread; i < kRows * (box_keys / chunk); i += warpgroup_threads) {
      const int row = i / (box_keys / chunk);
      const int place = i % (box_keys / chunk);
      const int key = begin + place * chunk;
      if (query_begin + row >= bias.rows || key_begin + key >= bias.columns) continue;
      const auto eight = *reinterpret_cast<cutlass::AlignedArray<Element, chunk> const*>(
          tile + begin * kRows + row * box_keys + (place ^ row % 8) * chunk);
      float* target = sums + (query_begin + row) * dbias.row_stride + key;
      CUTE_UNROLL
      for (int j = 0; j < chunk; j += 4) {
        asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(target + j),
                     "f"(static_cast<float>(eight[j])), "f"(static_cast<float>(eight[j + 1])),
                     "f"(static_cast<float>(eight[j + 2])), "f"(static_cast<float>(eight[j + 3]))
                     : "memory");
      }
    }
  }
}

}  // namespace flash_attn_cuda::sm90
