#include "host/tensor_map.h"

#include <cudaTypedefs.h>
#include <cuda_runtime_api.h>

#include <algorithm>

#include "host/error.h"
#include "shared/launch.h"

namespace flash_attn_cuda {
namespace {

constexpr std::int64_t element_bytes = 2;
constexpr std::int64_t tma_alignment = 16;  // bytes, of the address and of strides
constexpr std::int64_t tma_max_stride = std::int64_t{1} << 40;

// From the driver that is loaded anyway, so that nothing links to libcuda.
PFN_cuTensorMapEncodeTiled_v12000 find_encode() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found{};
  constexpr const char* name = "cuTensorMapEncodeTiled";
#if CUDART_VERSION >= 12050
  constexpr unsigned cuda_12_0 = 12000;
  const cudaError_t status =
      cudaGetDriverEntryPointByVersion(name, &function, cuda_12_0, cudaEnableDefault, &found);
#else
  const cudaError_t status = cudaGetDriverEntryPoint(name, &function, cudaEnableDefault, &found);
#endif
  check_cuda(status, name);
  if (found != cudaDriverEntryPointSuccess || function == nullptr)
    throw_error("the driver has no cuTensorMapEncodeTiled, which needs CUDA 12.0");
  return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(function);
}

// A stride that is never stepped along may be anything; TMA wants a valid one.
std::int64_t stride_bytes(std::int64_t stride, int extent) {
  return extent > 1 ? stride * element_bytes : tma_alignment;
}

}  // namespace

TensorExtent query_extent(const AttentionShape& shape, const SequenceParams& sequences) {
  const bool is_packed = sequences.cu_seqlens_q != nullptr;
  return {.batch_size = is_packed ? 1 : shape.batch_size,
          .rows = shape.seqlen_q,
          .num_heads = shape.num_heads_q,
          .head_dim = shape.head_dim};
}

TensorExtent key_extent(const AttentionShape& shape, const SequenceParams& sequences) {
  const bool is_packed = sequences.cu_seqlens_k != nullptr;
  const int entries = sequences.num_kv_batches > 0 ? sequences.num_kv_batches : shape.batch_size;
  return {.batch_size = is_packed ? 1 : entries,
          .rows = shape.seqlen_k,
          .num_heads = shape.num_heads_k,
          .head_dim = shape.head_dim};
}

bool tma_can_move(const TensorView& view, const TensorExtent& extent) {
  const auto is_valid = [](std::int64_t stride, int count) {
    const std::int64_t bytes = stride_bytes(stride, count);
    return bytes > 0 && bytes < tma_max_stride && bytes % tma_alignment == 0;
  };
  return reinterpret_cast<std::uintptr_t>(view.data) % tma_alignment == 0 &&
         is_valid(view.batch_stride, extent.batch_size) && is_valid(view.row_stride, extent.rows) &&
         is_valid(view.head_stride, extent.num_heads);
}

CUtensorMap make_tensor_map(const TensorView& view, Dtype dtype, const TensorExtent& extent,
                            const TensorBox& box) {
  CUtensorMap map{};
  if (extent.batch_size == 0 || extent.rows == 0) return map;
  static const PFN_cuTensorMapEncodeTiled_v12000 encode = find_encode();

  constexpr cuuint32_t rank = 5;
  const auto row_stride = static_cast<cuuint64_t>(stride_bytes(view.row_stride, extent.rows));
  char* base = static_cast<char*>(view.data) - row_stride * box.rows;
  const auto dim = [](std::int64_t size) { return static_cast<cuuint64_t>(size); };
  const cuuint64_t sizes[rank] = {dim(extent.head_dim), dim(box.rows),
                                  dim(std::int64_t{extent.rows} + 1), dim(extent.num_heads),
                                  dim(extent.batch_size)};
  const cuuint64_t strides[rank - 1] = {row_stride, row_stride,
                                        dim(stride_bytes(view.head_stride, extent.num_heads)),
                                        dim(stride_bytes(view.batch_stride, extent.batch_size))};
  const cuuint32_t box_sizes[rank] = {static_cast<cuuint32_t>(box.columns),
                                      static_cast<cuuint32_t>(box.rows), 1, 1, 1};
  const cuuint32_t element_strides[rank] = {1, 1, 1, 1, 1};
  constexpr int columns_of_128_bytes = 64;
  const auto encode_map = [&] {
    return encode(
        &map,
        dtype == Dtype::bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        rank, base, sizes, strides, box_sizes, element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE,
        box.columns == columns_of_128_bytes ? CU_TENSOR_MAP_SWIZZLE_128B
                                            : CU_TENSOR_MAP_SWIZZLE_64B,
        CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  };
  CUresult status = encode_map();
  if (status == CUDA_ERROR_INVALID_CONTEXT) {
    // A thread that has not used the runtime yet, as one of autograd's.
    int device = 0;
    check_cuda(cudaGetDevice(&device), "current device");
    check_cuda(cudaSetDevice(device), "current device");
    status = encode_map();
  }
  if (status != CUDA_SUCCESS)
    throw_error("cuTensorMapEncodeTiled failed with ", static_cast<int>(status));
  return map;
}

}  // namespace flash_attn_cuda
