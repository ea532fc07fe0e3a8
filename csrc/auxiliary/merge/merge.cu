// Attention over some keys takes in attention over others: Dao, "FlashAttention-2", 2023, section
// 3.1.1, between calls. Bound by memory: each number is read once and written once.
#include "auxiliary/auxiliary.h"
#include "auxiliary/vector_types.h"
#include "flash_attn/merge.h"
#include "shared/launch.h"
#include "shared/out_rounding.h"

namespace flash_attn_cuda {
namespace {

constexpr int threads = 256;
constexpr int lanes = 16;  // of a warp, for a row of a head
constexpr int rows_per_block = threads / lanes;
constexpr int columns_per_load = 4;

struct Shares {
  float own, others, lse;
};

__device__ Shares shares_of(float lse, float part_lse) {
  if (lse == -INFINITY && part_lse == -INFINITY) return {0.f, 0.f, -INFINITY};
  const float largest = fmaxf(lse, part_lse);  // of a NaN and a number the number: the sum has NaN
  const float own = expf(lse - largest);
  const float others = expf(part_lse - largest);
  const float sum = own + others;
  return {own / sum, others / sum, largest + logf(sum)};
}

// The sum leaves out what has weight 0, for want of keys or because its scores are too small.
__device__ float sum_of(float own_share, float own, float others_share, float others) {
  return (own_share == 0.f ? 0.f : own_share * own) +
         (others_share == 0.f ? 0.f : others_share * others);
}

// The sum in 16 bits and, where it is wanted, what that takes from it.
template <class Element>
__device__ void store_narrow(const MergeParams& params, std::int64_t row, int head, int column,
                             float4 sum) {
  struct alignas(4 * sizeof(Element)) Narrow {
    Element values[4];
  };
  const auto place = [&](const TensorView& view) {
    return row * view.row_stride + head * view.head_stride + column;
  };
  Element* target = static_cast<Element*>(params.result.data) + place(params.result);
  *reinterpret_cast<Narrow*>(target) = {
      {Element(sum.x), Element(sum.y), Element(sum.z), Element(sum.w)}};
  if (params.rounding.data == nullptr) return;
  const float exact[4] = {sum.x, sum.y, sum.z, sum.w};
  store_rounding<std::is_same_v<Element, __half> ? Dtype::fp16 : Dtype::bf16>(
      static_cast<std::int8_t*>(params.rounding.data) + place(params.rounding), exact);
}

template <class Element>
__global__ void __launch_bounds__(threads)
    merge_kernel(const __grid_constant__ MergeParams params) {
  // Neighbours are rows of one head, whose lse lie side by side.
  const int blocks_per_head = static_cast<int>(gridDim.x) / params.num_heads;
  const int head = static_cast<int>(blockIdx.x) / blocks_per_head;
  const std::int64_t row =
      std::int64_t(static_cast<int>(blockIdx.x) - head * blocks_per_head) * rows_per_block +
      static_cast<int>(threadIdx.x) / lanes;
  const bool exists = row < params.rows;
  float* lse = params.lse.data + head * params.lse.head_stride + row;
  Shares shares{};
  if (exists) {
    shares = shares_of(*lse, params.part_lse.data[head * params.part_lse.head_stride + row]);
  }
  __syncwarp();
  const int lane = static_cast<int>(threadIdx.x) % lanes;
  if (!exists) return;
  if (lane == 0) *lse = shares.lse;

  float* out = static_cast<float*>(params.out.data) + row * params.out.row_stride +
               head * params.out.head_stride;
  const float* part = static_cast<const float*>(params.part.data) + row * params.part.row_stride +
                      head * params.part.head_stride;
  for (int column = lane * columns_per_load; column < params.head_dim;
       column += lanes * columns_per_load) {
    const float4 own = *reinterpret_cast<const float4*>(out + column);
    const float4 others = *reinterpret_cast<const float4*>(part + column);
    const float4 sum{sum_of(shares.own, own.x, shares.others, others.x),
                     sum_of(shares.own, own.y, shares.others, others.y),
                     sum_of(shares.own, own.z, shares.others, others.z),
                     sum_of(shares.own, own.w, shares.others, others.w)};
    if (params.result.data == nullptr) {
      *reinterpret_cast<float4*>(out + column) = sum;
    } else {
      store_narrow<Element>(params, row, head, column, sum);
    }
  }
}

}  // namespace

void run_merge(const MergeParams& params, Stream stream) {
  const std::int64_t blocks_per_head = (params.rows + rows_per_block - 1) / rows_per_block;
  dispatch_dtype(params.result_dtype, [&](auto element) {
    launch_kernel<&merge_kernel<decltype(element)>>(blocks_per_head * params.num_heads, threads, 0,
                                                    stream, params);
  });
}

}  // namespace flash_attn_cuda
