// Partial results of attention over splits of the keys become one:
//   lse = log sum_s exp(lse_s), out = sum_s exp(lse_s - lse) out_s.
// A row is one query and head. It is read by the fewest lanes that cover it with 16 bytes each.
//
// Splits are summed in four classes, split s in class s % 4, and the classes in pairs: four warps
// can share a row that way, or one warp take all of it, with the same bits. Splits that hold
// nothing add nothing, so their number does not show either.
#include <cmath>

#include "auxiliary/vector_types.h"
#include "flash_attn/api.h"
#include "shared/kernel_order.h"
#include "shared/launch.h"
#include "shared/out_rounding.h"

namespace flash_attn_cuda {
namespace {

constexpr int threads = 128;
constexpr int classes = 4;
static_assert(threads == classes * 32, "a warp for every class");

struct CombineArguments {
  CombineParams params;
  int lanes_per_row;      // a power of two, 1 to 32
  bool warps_share_rows;  // a warp for every class, else a warp for every group of rows
};

template <int kVector>
struct alignas(4 * kVector) Columns {
  float values[kVector];
};

template <class Output, int kVector>
__device__ void store_columns(Output* target, const Columns<kVector>& columns) {
  if constexpr (std::is_same_v<Output, float>) {
    *reinterpret_cast<Columns<kVector>*>(target) = columns;
  } else if constexpr (kVector == 1) {
    target[0] = static_cast<Output>(columns.values[0]);
  } else {
    static_assert(kVector == 4);
    Vector<Output> converted;
    converted.set_pair(0, {columns.values[0], columns.values[1]});
    converted.set_pair(1, {columns.values[2], columns.values[3]});
    *reinterpret_cast<uint2*>(target) = *reinterpret_cast<const uint2*>(&converted);
  }
}

// What the weights of a row's splits are made of.
struct RowScale {
  float reference;  // the largest lse, 0 where that is infinite
  float inverse;    // 1 / sum of exp(lse_s - reference)
  float lse;

  __device__ float weight(float lse_split) const { return expf(lse_split - reference) * inverse; }
};

// lse: of the row's first split; the next is `stride` further on. All lanes of the warp call it.
__device__ RowScale row_scale(const float* lse, std::int64_t stride, int splits, int lane,
                              int lanes) {
  float largest = -INFINITY;
  for (int split = lane; split < splits; split += lanes)
    largest = fmaxf(largest, lse[split * stride]);
  for (int step = lanes / 2; step > 0; step /= 2)
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, step));
  const float reference = isinf(largest) ? 0.0f : largest;
  float sum = 0.0f;
  for (int split = lane; split < splits; split += lanes)
    sum += expf(lse[split * stride] - reference);
  for (int step = lanes / 2; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
  return {reference, sum == 0.0f ? 0.0f : 1.0f / sum, reference + logf(sum)};
}

// The sum over splits `first`, first + classes, ..; a split whose lse is -inf is not read.
template <int kVector>
__device__ Columns<kVector> sum_class(const float* out, std::int64_t out_stride, const float* lse,
                                      std::int64_t stride, int splits, int first,
                                      const RowScale& scale) {
  constexpr int in_flight = 4;
  Columns<kVector> sum{};
  for (int begin = first; begin < splits; begin += in_flight * classes) {
    float lses[in_flight];
    Columns<kVector> parts[in_flight];
#pragma unroll
    for (int i = 0; i < in_flight; ++i) {
      const int split = begin + i * classes;
      lses[i] = split < splits ? lse[split * stride] : -INFINITY;
    }
#pragma unroll
    for (int i = 0; i < in_flight; ++i) {
      parts[i] = {};
      if (lses[i] != -INFINITY) {
        parts[i] =
            *reinterpret_cast<const Columns<kVector>*>(out + (begin + i * classes) * out_stride);
      }
    }
#pragma unroll
    for (int i = 0; i < in_flight; ++i) {
      const float weight = lses[i] == -INFINITY ? 0.0f : scale.weight(lses[i]);
#pragma unroll
      for (int j = 0; j < kVector; ++j) sum.values[j] += weight * parts[i].values[j];
    }
  }
  return sum;
}

template <int kVector>
__device__ Columns<kVector> operator+(const Columns<kVector>& a, const Columns<kVector>& b) {
  Columns<kVector> sum;
#pragma unroll
  for (int i = 0; i < kVector; ++i) sum.values[i] = a.values[i] + b.values[i];
  return sum;
}

template <class Output, int kVector>
__global__ void __launch_bounds__(threads)
    combine_kernel(const __grid_constant__ CombineArguments args) {
  const CombineParams& params = args.params;
  __shared__ Columns<kVector> shared_sums[classes][32];
  const int warp = threadIdx.x / 32;
  const int lane_of_warp = threadIdx.x % 32;
  const int lanes = args.lanes_per_row;
  const int lane = lane_of_warp % lanes;
  const int rows_per_warp = 32 / lanes;
  const std::int64_t warp_index =
      args.warps_share_rows ? std::int64_t{blockIdx.x} : std::int64_t{blockIdx.x} * classes + warp;
  const std::int64_t rows = params.rows * params.num_heads;  // of one split
  const std::int64_t index = warp_index * rows_per_warp + lane_of_warp / lanes;
  const bool exists = index < rows;

  wait_for_earlier_kernels();
  const float* lse = params.lse_partial + (exists ? index : 0);
  const int splits = exists ? params.num_splits : 0;
  const RowScale scale = row_scale(lse, rows, splits, lane, lanes);

  const std::int64_t row = index / params.num_heads;
  const int head = static_cast<int>(index - row * params.num_heads);
  const std::int64_t batch = row / params.rows_per_batch;
  const std::int64_t row_of_batch = row - batch * params.rows_per_batch;
  const bool writes = exists && (!args.warps_share_rows || warp == 0);
  if (writes && lane == 0 && params.lse.data != nullptr) {
    params.lse
        .data[batch * params.lse.batch_stride + head * params.lse.head_stride + row_of_batch] =
        scale.lse;
  }
  Output* out = static_cast<Output*>(params.out) + batch * params.out_batch_stride +
                row_of_batch * params.out_row_stride + head * params.out_head_stride;
  const TensorView& rounding = params.out_rounding;
  auto* kept = static_cast<std::int8_t*>(rounding.data) + batch * rounding.batch_stride +
               row_of_batch * rounding.row_stride + head * rounding.head_stride;

  for (int first = 0; first < params.head_dim; first += lanes * kVector) {
    const int column = first + lane * kVector;
    const int own_splits = column < params.head_dim ? splits : 0;
    const float* source = params.out_partial + index * params.head_dim + column;
    Columns<kVector> sums[classes];
#pragma unroll
    for (int i = 0; i < classes; ++i) {
      sums[i] = {};
      if (args.warps_share_rows && i != warp) continue;
      sums[i] = sum_class<kVector>(source, rows * params.head_dim, lse, rows, own_splits, i, scale);
      if (args.warps_share_rows) shared_sums[i][lane_of_warp] = sums[i];
    }
    if (args.warps_share_rows) {
      __syncthreads();
#pragma unroll
      for (int i = 0; i < classes; ++i) sums[i] = shared_sums[i][lane_of_warp];
      __syncthreads();
    }
    if (!writes || column >= params.head_dim) continue;
    const Columns<kVector> sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    store_columns<Output, kVector>(out + column, sum);
    if constexpr (kVector == 4 && !std::is_same_v<Output, float>) {
      constexpr Dtype dtype = std::is_same_v<Output, __half> ? Dtype::fp16 : Dtype::bf16;
      if (rounding.data != nullptr) store_rounding<dtype>(kept + column, sum.values);
    }
  }
}

template <int kVector>
void launch_combine(const CombineParams& params, Stream stream) {
  int lanes = 1;
  while (lanes < 32 && lanes * kVector < params.head_dim) lanes *= 2;
  const std::int64_t rows_per_warp = 32 / lanes;
  const std::int64_t warps = (params.rows * params.num_heads + rows_per_warp - 1) / rows_per_warp;
  // Few rows are a matter of latency: more loads under way. Many are one of bandwidth.
  constexpr std::int64_t few = 4096;
  const bool share = params.num_splits > 2 && warps <= few;
  const CombineArguments arguments{
      .params = params, .lanes_per_row = lanes, .warps_share_rows = share};
  const std::int64_t grid = share ? warps : (warps + classes - 1) / classes;
  if (params.out_fp32) {
    launch_early<&combine_kernel<float, kVector>>(grid, threads, 0, stream, arguments);
    return;
  }
  dispatch_dtype(params.out_dtype, [&](auto element) {
    launch_early<&combine_kernel<decltype(element), kVector>>(grid, threads, 0, stream, arguments);
  });
}

// Four columns at a time.
bool has_vectors(const CombineParams& params) {
  constexpr int columns = 4;
  const std::size_t out_bytes =
      columns * (params.out_fp32 ? sizeof(float) : bytes_of(params.out_dtype));
  return params.head_dim % columns == 0 && params.out_batch_stride % columns == 0 &&
         params.out_row_stride % columns == 0 && params.out_head_stride % columns == 0 &&
         reinterpret_cast<std::uintptr_t>(params.out_partial) % (columns * sizeof(float)) == 0 &&
         reinterpret_cast<std::uintptr_t>(params.out) % out_bytes == 0;
}

}  // namespace

void run_combine(const CombineParams& params, Stream stream) {
  if (has_vectors(params))
    launch_combine<4>(params, stream);
  else
    launch_combine<1>(params, stream);
}

}  // namespace flash_attn_cuda
