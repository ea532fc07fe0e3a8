// Tensors as TMA sees them, against a driver that keeps what it is asked to encode.
#include "host/tensor_map.h"

#include <cudaTypedefs.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "check.h"
#include "fixtures.h"

using namespace host_tests;

namespace {

constexpr int rank = 5;

// What the last map was encoded from.
struct Encoded {
  CUtensorMapDataType type;
  cuuint32_t rank;
  std::int64_t base;
  std::vector<std::int64_t> sizes;
  std::vector<std::int64_t> strides;  // bytes; 2 of the innermost one, which is not given
  std::vector<std::int64_t> box;
  std::vector<std::int64_t> steps;
  CUtensorMapInterleave interleave;
  CUtensorMapSwizzle swizzle;
  CUtensorMapFloatOOBfill fill;
};

Encoded encoded;
int encodings = 0;
CUresult encode_result = CUDA_SUCCESS;
bool thread_has_context = true;
bool has_driver = false;
std::string asked_for;
unsigned asked_version = 0;

template <class Integer>
std::vector<std::int64_t> numbers(const Integer* values, int count) {
  return {values, values + count};
}

CUresult CUDAAPI encode(CUtensorMap*, CUtensorMapDataType type, cuuint32_t given_rank, void* base,
                        const cuuint64_t* sizes, const cuuint64_t* strides, const cuuint32_t* box,
                        const cuuint32_t* steps, CUtensorMapInterleave interleave,
                        CUtensorMapSwizzle swizzle, CUtensorMapL2promotion,
                        CUtensorMapFloatOOBfill fill) {
  ++encodings;
  encoded = {.type = type,
             .rank = given_rank,
             .base = reinterpret_cast<std::int64_t>(base),
             .sizes = numbers(sizes, given_rank),
             .strides = numbers(strides, given_rank - 1),
             .box = numbers(box, given_rank),
             .steps = numbers(steps, given_rank),
             .interleave = interleave,
             .swizzle = swizzle,
             .fill = fill};
  encoded.strides.insert(encoded.strides.begin(), 2);
  return thread_has_context ? encode_result : CUDA_ERROR_INVALID_CONTEXT;
}

const Encoded& map_of(const TensorView& view, const TensorExtent& extent, const TensorBox& box,
                      Dtype dtype = Dtype::bf16) {
  make_tensor_map(view, dtype, extent, box);
  return encoded;
}

// The address of an element of the map, or -1 beyond it.
std::int64_t address(const Encoded& map, const std::vector<std::int64_t>& coordinates) {
  std::int64_t at = map.base;
  for (int dim = 0; dim < rank; ++dim) {
    if (coordinates[dim] < 0 || coordinates[dim] >= map.sizes[dim]) return -1;
    at += coordinates[dim] * map.strides[dim];
  }
  return at;
}

constexpr TensorExtent extent{.batch_size = 3, .rows = 200, .num_heads = 5, .head_dim = 72};

TensorView view_of(const TensorExtent& shape) {
  return contiguous_view(shape.rows, shape.num_heads, shape.head_dim);
}

// How sm90/isa/copy.h loads `rows` rows from `row` on: checks that each lands where it belongs, and
// that what lies beyond them, or beyond head_dim, is not read.
void check_load(const TensorView& view, const TensorExtent& shape, const TensorBox& box, int row,
                int rows, int head, int batch) {
  const Encoded& map = map_of(view, shape, box);
  const auto first = reinterpret_cast<std::int64_t>(view.data);
  int wrong = 0;
  for (int box_row = 0; box_row < box.rows; ++box_row) {
    for (int column = 0; column < 2 * box.columns; column += box.columns / 4) {
      const std::int64_t actual =
          address(map, {column, std::int64_t{box.rows} - rows + box_row, row + rows, head, batch});
      const bool exists = box_row < rows && column < shape.head_dim;
      const std::int64_t elements = batch * view.batch_stride + head * view.head_stride +
                                    (row + box_row) * view.row_stride + column;
      wrong += actual != (exists ? first + 2 * elements : -1);
    }
  }
  CHECK_EQ(wrong, 0);
}

void check_extent(const TensorExtent& extent, int batch_size, int rows, int num_heads,
                  int head_dim) {
  CHECK_EQ(extent.batch_size, batch_size);
  CHECK_EQ(extent.rows, rows);
  CHECK_EQ(extent.num_heads, num_heads);
  CHECK_EQ(extent.head_dim, head_dim);
}

}  // namespace

extern "C" {

cudaError_t CUDARTAPI cudaGetDriverEntryPointByVersion(const char* symbol, void** function,
                                                       unsigned version, unsigned long long,
                                                       cudaDriverEntryPointQueryResult* found) {
  asked_for = symbol;
  asked_version = version;
  *function = has_driver ? reinterpret_cast<void*>(&encode) : nullptr;
  *found = has_driver ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}

cudaError_t CUDARTAPI cudaGetDevice(int* device) {
  *device = 3;
  return cudaSuccess;
}

cudaError_t CUDARTAPI cudaSetDevice(int device) {
  CHECK_EQ(device, 3);
  thread_has_context = true;
  return cudaSuccess;
}

cudaError_t CUDARTAPI cudaGetLastError() { return cudaErrorInvalidValue; }
const char* CUDARTAPI cudaGetErrorString(cudaError_t) { return "made-up failure"; }

}  // extern "C"

// Before the driver is found: what is missing now may be there later.
TEST(a_driver_without_the_function_is_an_error_that_is_not_remembered) {
  CHECK_ERROR(map_of(view_of(extent), extent, {128, 64}), "no cuTensorMapEncodeTiled");
  has_driver = true;
  map_of(view_of(extent), extent, {128, 64});
  CHECK_EQ(encodings, 1);
  CHECK_EQ(asked_for, "cuTensorMapEncodeTiled");
  CHECK_EQ(asked_version, 12000u);
}

TEST(the_map_is_that_of_the_tensor_with_its_rows_twice) {
  const TensorView view = view_of(extent);
  const Encoded& map = map_of(view, extent, {128, 64});
  CHECK_EQ(map.rank, 5u);
  CHECK_EQ(map.type, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16);
  CHECK(map.sizes == (std::vector<std::int64_t>{72, 128, 201, 5, 3}));
  CHECK(map.strides == (std::vector<std::int64_t>{2, 720, 720, 144, 144'000}));
  CHECK(map.box == (std::vector<std::int64_t>{64, 128, 1, 1, 1}));
  CHECK(map.steps == (std::vector<std::int64_t>{1, 1, 1, 1, 1}));
  CHECK_EQ(map.base, reinterpret_cast<std::int64_t>(view.data) - 128 * 720);
  CHECK_EQ(map.interleave, CU_TENSOR_MAP_INTERLEAVE_NONE);
  CHECK_EQ(map.fill, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);  // zeros
  CHECK_EQ(map_of(view, extent, {128, 64}, Dtype::fp16).type, CU_TENSOR_MAP_DATA_TYPE_FLOAT16);
}

TEST(a_row_of_a_box_is_as_wide_as_the_swizzle) {
  for (const auto& [columns, swizzle] :
       {std::pair{64, CU_TENSOR_MAP_SWIZZLE_128B}, {32, CU_TENSOR_MAP_SWIZZLE_64B}}) {
    const Encoded& map = map_of(view_of(extent), extent, {80, columns});
    CHECK_EQ(map.swizzle, swizzle);
    CHECK_EQ(map.box[0], columns);
    CHECK_EQ(map.box[1], 80);
  }
}

TEST(bits_of_a_mask_are_rows_of_16_bytes) {
  const AttentionShape shape = sizes(3, 200, 300, 6, 2, 64);
  alignas(16) static std::uint32_t words[4];
  PairBits bits{.data = words,
                .batch_stride = 2400,
                .head_stride = 0,
                .row_stride = 12,
                .rows = 200,
                .words = 12};
  CHECK(tma_can_load_bits(bits, shape));
  make_pair_map(pair_tensor(bits, shape), {64, 8});
  CHECK_EQ(encoded.rank, 4u);
  CHECK_EQ(encoded.swizzle, CU_TENSOR_MAP_SWIZZLE_NONE);
  CHECK(encoded.sizes == (std::vector<std::int64_t>{24, 200, 1, 3}));
  CHECK(encoded.strides == (std::vector<std::int64_t>{2, 48, 16, 9600}));
  CHECK(encoded.box == (std::vector<std::int64_t>{8, 64, 1, 1}));
  bits.row_stride = 0;
  CHECK(!tma_can_load_bits(bits, shape));
  bits.row_stride = -12;
  CHECK(!tma_can_load_bits(bits, shape));
  bits.data = nullptr;
  CHECK(tma_can_load_bits(bits, shape));
}

TEST(a_load_ends_where_its_sequence_ends) {
  const TensorView view = view_of(extent);
  for (const TensorBox& box : {TensorBox{128, 64}, {64, 32}, {80, 64}}) {
    for (const int rows : {1, 2, 63, 64, 65, 79, 80, 127, 128}) {
      if (rows > box.rows) continue;
      for (const int row : {0, 1, 64, 200 - rows}) {
        for (const auto& [head, batch] : {std::pair{0, 0}, {4, 0}, {0, 2}, {3, 1}})
          check_load(view, extent, box, row, rows, head, batch);
      }
    }
  }
}

TEST(a_load_follows_any_strides) {
  const auto data = reinterpret_cast<void*>((std::uintptr_t{1} << 44) + 16);
  for (const TensorView& view :
       {TensorView{.data = data, .batch_stride = 72'000, .row_stride = 72, .head_stride = 14'400},
        TensorView{.data = data, .batch_stride = 360, .row_stride = 1080, .head_stride = 72},
        TensorView{.data = data,
                   .batch_stride = std::int64_t{1} << 33,
                   .row_stride = std::int64_t{1} << 25,
                   .head_stride = 80}}) {
    CHECK(tma_can_move(view, Dtype::bf16, extent));
    for (const int rows : {1, 77, 128}) check_load(view, extent, {128, 64}, 200 - rows, rows, 4, 2);
  }
}

TEST(a_stride_along_a_single_element_does_not_matter) {
  const TensorExtent single{.batch_size = 1, .rows = 1, .num_heads = 1, .head_dim = 64};
  for (const std::int64_t stride : {std::int64_t{0}, std::int64_t{3}, std::int64_t{1} << 50}) {
    const TensorView view{.data = reinterpret_cast<void*>(std::uintptr_t{1} << 44),
                          .batch_stride = stride,
                          .row_stride = stride,
                          .head_stride = stride};
    CHECK(tma_can_move(view, Dtype::bf16, single));
    const Encoded& map = map_of(view, single, {64, 64});
    for (int dim = 1; dim < rank; ++dim) {
      CHECK(map.strides[dim] > 0 && map.strides[dim] < std::int64_t{1} << 40);
      CHECK_EQ(map.strides[dim] % 16, 0);
    }
    // The only element along each dimension: none of the strides counts.
    const TensorView dense{.data = view.data};
    check_load(dense, single, {64, 64}, 0, 1, 0, 0);
  }
}

TEST(tma_moves_whole_vectors_within_its_reach) {
  const TensorView good = view_of(extent);
  CHECK(tma_can_move(good, Dtype::bf16, extent));
  for (const int offset : {1, 2, 4, 8, 15}) {
    TensorView view = good;
    view.data = static_cast<char*>(good.data) + offset;
    CHECK(!tma_can_move(view, Dtype::bf16, extent));
  }
  for (std::int64_t TensorView::* stride :
       {&TensorView::batch_stride, &TensorView::row_stride, &TensorView::head_stride}) {
    const auto with = [&](std::int64_t elements) {
      TensorView view = good;
      view.*stride = elements;
      return tma_can_move(view, Dtype::bf16, extent);
    };
    constexpr std::int64_t too_far = std::int64_t{1} << 39;  // 2^40 bytes
    for (const std::int64_t elements : {std::int64_t{8}, std::int64_t{720}, too_far - 8})
      CHECK(with(elements));
    for (const std::int64_t elements : {0, 1, 4, 7, 9, 12, 727}) CHECK(!with(elements));
    for (const std::int64_t elements : {too_far, too_far + 8, 4 * too_far, std::int64_t{-8}})
      CHECK(!with(elements));
  }
}

TEST(only_along_one_element_may_a_stride_be_zero) {
  const std::pair<std::int64_t TensorView::*, int TensorExtent::*> dims[] = {
      {&TensorView::batch_stride, &TensorExtent::batch_size},
      {&TensorView::row_stride, &TensorExtent::rows},
      {&TensorView::head_stride, &TensorExtent::num_heads}};
  for (const auto& [stride, count] : dims) {
    TensorView view = view_of(extent);
    TensorExtent shape = extent;
    view.*stride = 0;
    for (const auto& [elements, readable] : {std::pair{2, false}, {1, true}, {0, true}}) {
      shape.*count = elements;
      CHECK_EQ(tma_can_move(view, Dtype::bf16, shape), readable);
    }
  }
}

TEST(nothing_is_encoded_of_an_empty_tensor) {
  const int before = encodings;
  for (int TensorExtent::* count : {&TensorExtent::batch_size, &TensorExtent::rows}) {
    TensorExtent empty = extent;
    empty.*count = 0;
    make_tensor_map({}, Dtype::bf16, empty, {128, 64});
  }
  CHECK_EQ(encodings, before);
}

TEST(what_the_driver_refuses_is_an_error) {
  encode_result = CUDA_ERROR_INVALID_VALUE;
  CHECK_ERROR(map_of(view_of(extent), extent, {128, 64}), "cuTensorMapEncodeTiled failed with 1");
  encode_result = CUDA_SUCCESS;
  map_of(view_of(extent), extent, {128, 64});
}

TEST(a_thread_without_a_context_gets_that_of_its_device) {
  thread_has_context = false;
  map_of(view_of(extent), extent, {128, 64});
  CHECK(thread_has_context);
}

// The extents of a call

TEST(a_paged_cache_has_an_entry_for_each_page) {
  const AttentionShape shape = sizes(5, 100, 144, 8, 2, 40, 24);
  const PagedKvParams paged{.block_table = &some_int,
                            .table_stride = 3,
                            .max_pages = 3,
                            .page_size = 48,
                            .num_pages = 11};
  const TensorExtents in_pages = tensor_extents(shape, {}, paged);
  check_extent(in_pages.q, 5, 100, 8, 40);
  check_extent(in_pages.k, 11, 48, 2, 40);
  check_extent(in_pages.v, 11, 48, 2, 24);
}

TEST(packed_tensors_are_one_batch_entry) {
  const AttentionShape shape = sizes(7, 100, 300, 8, 2, 40, 24);
  const auto check = [&](const ForwardParams& params, int batch_q, int batch_k) {
    const TensorExtents extents = tensor_extents(params.shape, params.sequences);
    check_extent(extents.q, batch_q, 100, 8, 40);
    check_extent(extents.k, batch_k, 300, 2, 40);
    check_extent(extents.v, batch_k, 300, 2, 24);
    check_extent(extents.out, batch_q, 100, 8, 24);
  };
  auto params = call<ForwardParams>(shape);
  check(params, 7, 7);
  params.sequences.cu_seqlens_q = &some_int;
  check(params, 1, 7);
  params.sequences.cu_seqlens_k = &some_int;
  check(params, 1, 1);
  auto cached = call<ForwardParams>(shape);
  cached.sequences.kv_batch_idx = &some_int;
  cached.sequences.num_kv_batches = 20;
  check(cached, 7, 20);
  cached.sequences.num_kv_batches = 0;
  check(cached, 7, 7);
}
