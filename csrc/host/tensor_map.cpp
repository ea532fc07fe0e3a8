#include "host/tensor_map.h"

#include <cudaTypedefs.h>
#include <cuda_runtime_api.h>
#include <limits>

#include <array>

#include "host/error.h"
#include "shared/launch.h"

namespace flash_attn_cuda {
namespace {

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

// A tensor with its outermost dimension last; strides in bytes, of all but the innermost.
template <std::size_t kRank>
struct MapSpec {
  char* base;
  Dtype dtype;
  std::array<cuuint64_t, kRank> sizes;
  std::array<cuuint64_t, kRank - 1> strides;
  std::array<cuuint32_t, kRank> box;
  CUtensorMapL2promotion promotion = CU_TENSOR_MAP_L2_PROMOTION_L2_256B;
};

// A row of a box that TMA loads fills a row of the swizzle, or is 16 bytes and needs none.
CUtensorMapSwizzle swizzle_of(cuuint32_t box_columns, Dtype dtype) {
  switch (box_columns * bytes_of(dtype)) {
    case 128:
      return CU_TENSOR_MAP_SWIZZLE_128B;
    case 64:
      return CU_TENSOR_MAP_SWIZZLE_64B;
    case 32:
      return CU_TENSOR_MAP_SWIZZLE_32B;
    default:
      return CU_TENSOR_MAP_SWIZZLE_NONE;
  }
}

CUtensorMapDataType type_of(Dtype dtype) {
  switch (dtype) {
    case Dtype::fp16:
      return CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    case Dtype::bf16:
      return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    case Dtype::e4m3:
      return CU_TENSOR_MAP_DATA_TYPE_UINT8;
  }
  return CU_TENSOR_MAP_DATA_TYPE_UINT8;
}

template <std::size_t kRank>
CUtensorMap encode_map(const MapSpec<kRank>& spec) {
  static const PFN_cuTensorMapEncodeTiled_v12000 encode = find_encode();
  CUtensorMap map{};
  std::array<cuuint32_t, kRank> element_strides;
  element_strides.fill(1);
  const auto swizzle = swizzle_of(spec.box[0], spec.dtype);
  const auto try_encode = [&] {
    return encode(&map, type_of(spec.dtype), kRank, spec.base, spec.sizes.data(),
                  spec.strides.data(), spec.box.data(), element_strides.data(),
                  CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, spec.promotion,
                  CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  };
  CUresult status = try_encode();
  if (status == CUDA_ERROR_INVALID_CONTEXT) {
    // A thread that has not used the runtime yet, as one of autograd's.
    int device = 0;
    check_cuda(cudaGetDevice(&device), "current device");
    check_cuda(cudaSetDevice(device), "current device");
    status = try_encode();
  }
  if (status != CUDA_SUCCESS)
    throw_error("cuTensorMapEncodeTiled failed with ", static_cast<int>(status));
  return map;
}

cuuint64_t dim(std::int64_t size) { return static_cast<cuuint64_t>(size); }

bool is_aligned(const void* data) {
  return reinterpret_cast<std::uintptr_t>(data) % tma_alignment == 0;
}

// A stride that is never stepped along may be anything; TMA wants a valid one.
std::int64_t stride_bytes(std::int64_t stride, int extent, Dtype dtype) {
  return extent > 1 ? stride * bytes_of(dtype) : tma_alignment;
}

bool is_valid(std::int64_t stride, int extent, Dtype dtype) {
  const std::int64_t bytes = stride_bytes(stride, extent, dtype);
  return bytes > 0 && bytes < tma_max_stride && bytes % tma_alignment == 0;
}

}  // namespace

TensorExtents tensor_extents(const AttentionShape& shape, const SequenceParams& sequences,
                             const PagedKvParams& paged) {
  const bool is_packed_q = sequences.cu_seqlens_q != nullptr;
  const bool is_packed_k = sequences.cu_seqlens_k != nullptr;
  const int entries = sequences.num_kv_batches > 0 ? sequences.num_kv_batches : shape.batch_size;
  TensorExtents extents;
  extents.q = extents.out = {.batch_size = is_packed_q ? 1 : shape.batch_size,
                             .rows = shape.seqlen_q,
                             .num_heads = shape.num_heads_q,
                             .head_dim = shape.head_dim};
  extents.k = {.batch_size = is_packed_k ? 1 : entries,
               .rows = shape.seqlen_k,
               .num_heads = shape.num_heads_k,
               .head_dim = shape.head_dim};
  if (paged.block_table != nullptr) {
    extents.k.batch_size = paged.num_pages;
    extents.k.rows = paged.page_size;
  }
  extents.v = extents.k;
  extents.out.head_dim = extents.v.head_dim = shape.head_dim_v;
  return extents;
}

bool has_near_rows(const TensorView& view, Dtype dtype, const TensorExtent& extent) {
  const std::int64_t last = (extent.batch_size - std::int64_t{1}) * view.batch_stride +
                            (extent.rows - std::int64_t{1}) * view.row_stride +
                            (extent.num_heads - std::int64_t{1}) * view.head_stride;
  return last / elements_of_vector(dtype) <= std::numeric_limits<std::uint32_t>::max();
}

bool has_boxes(const PagedKvParams& paged, const SequenceParams& sequences) {
  constexpr int swizzled_rows = 8;
  return paged.block_table == nullptr ||
         (paged.page_size % swizzled_rows == 0 && sequences.leftpad_k == nullptr);
}

bool tma_can_move(const TensorView& view, Dtype dtype, const TensorExtent& extent) {
  return is_aligned(view.data) && is_valid(view.batch_stride, extent.batch_size, dtype) &&
         is_valid(view.row_stride, extent.rows, dtype) &&
         is_valid(view.head_stride, extent.num_heads, dtype);
}

CUtensorMap make_tensor_map(const TensorView& view, Dtype dtype, const TensorExtent& extent,
                            const TensorBox& box) {
  if (extent.batch_size == 0 || extent.rows == 0) return {};
  const auto bytes = [&](std::int64_t stride, int size) {
    return dim(stride_bytes(stride, size, dtype));
  };
  const auto row_stride = bytes(view.row_stride, extent.rows);
  return encode_map<5>(
      {.base = static_cast<char*>(view.data) - row_stride * box.rows,
       .dtype = dtype,
       .sizes = {dim(extent.head_dim), dim(box.rows), dim(std::int64_t{extent.rows} + 1),
                 dim(extent.num_heads), dim(extent.batch_size)},
       .strides = {row_stride, row_stride, bytes(view.head_stride, extent.num_heads),
                   bytes(view.batch_stride, extent.batch_size)},
       .box = {static_cast<cuuint32_t>(box.columns), static_cast<cuuint32_t>(box.rows), 1, 1, 1},
       .promotion = box.is_narrow_in_l2 ? CU_TENSOR_MAP_L2_PROMOTION_L2_128B
                                        : CU_TENSOR_MAP_L2_PROMOTION_L2_256B});
}

CUtensorMap make_heads_map(const TensorView& view, Dtype dtype, const TensorExtent& extent,
                           const TensorBox& box) {
  return make_pair_map({.data = view.data,
                        .dtype = dtype,
                        .batch_size = extent.batch_size,
                        .num_heads = extent.rows,
                        .rows = extent.num_heads,
                        .columns = extent.head_dim,
                        .batch_stride = view.batch_stride,
                        .head_stride = view.row_stride,
                        .row_stride = view.head_stride},
                       box);
}

PairTensor pair_tensor(const BiasParams& bias, Dtype dtype, const AttentionShape& shape) {
  return {.data = bias.data,
          .dtype = dtype,
          .batch_size = bias.batch_stride == 0 ? 1 : shape.batch_size,
          .num_heads = bias.head_stride == 0 ? 1 : shape.num_heads_q,
          .rows = bias.rows,
          .columns = bias.columns,
          .batch_stride = bias.batch_stride,
          .head_stride = bias.head_stride,
          .row_stride = bias.row_stride};
}

PairTensor pair_tensor(const BiasGradient& dbias, const BiasParams& bias, Dtype dtype,
                       const AttentionShape& shape) {
  return pair_tensor({.data = dbias.data,
                      .batch_stride = dbias.batch_stride,
                      .head_stride = dbias.head_stride,
                      .row_stride = dbias.row_stride,
                      .rows = bias.rows,
                      .columns = bias.columns},
                     dtype, shape);
}

PairTensor pair_tensor(const PairBits& bits, const AttentionShape& shape) {
  constexpr Dtype dtype = Dtype::bf16;
  constexpr int elements = sizeof(std::uint32_t) / bytes_of(dtype);  // of a word
  return pair_tensor({.data = bits.data,
                      .batch_stride = elements * bits.batch_stride,
                      .head_stride = elements * bits.head_stride,
                      .row_stride = elements * bits.row_stride,
                      .rows = bits.rows,
                      .columns = elements * bits.words},
                     dtype, shape);
}

bool tma_can_move(const PairTensor& tensor) {
  return tensor.rows > 0 && tensor.columns > 0 && is_aligned(tensor.data) &&
         is_valid(tensor.batch_stride, tensor.batch_size, tensor.dtype) &&
         is_valid(tensor.head_stride, tensor.num_heads, tensor.dtype) &&
         is_valid(tensor.row_stride, tensor.rows, tensor.dtype);
}

bool tma_can_load_bias(const BiasParams& bias, Dtype dtype, const AttentionShape& shape) {
  return bias.data == nullptr ||
         (!bias.is_fp32 && !bias.is_relative() && tma_can_move(pair_tensor(bias, dtype, shape)));
}

bool tma_can_load_bits(const PairBits& bits, const AttentionShape& shape) {
  return bits.data == nullptr || tma_can_move(pair_tensor(bits, shape));
}

CUtensorMap make_pair_map(const PairTensor& tensor, const TensorBox& box) {
  if (tensor.batch_size == 0 || tensor.rows == 0 || tensor.columns == 0) return {};
  const auto bytes = [&](std::int64_t stride, int size) {
    return dim(stride_bytes(stride, size, tensor.dtype));
  };
  return encode_map<4>(
      {.base = static_cast<char*>(const_cast<void*>(tensor.data)),
       .dtype = tensor.dtype,
       .sizes = {dim(tensor.columns), dim(tensor.rows), dim(tensor.num_heads),
                 dim(tensor.batch_size)},
       .strides = {bytes(tensor.row_stride, tensor.rows),
                   bytes(tensor.head_stride, tensor.num_heads),
                   bytes(tensor.batch_stride, tensor.batch_size)},
       .box = {static_cast<cuuint32_t>(box.columns), static_cast<cuuint32_t>(box.rows), 1, 1}});
}

}  // namespace flash_attn_cuda
