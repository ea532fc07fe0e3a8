#include "torch_binding/errors.h"

#include <ATen/ops/from_blob.h>
#include <ATen/ops/where.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include <array>
#include <atomic>
#include <cstdlib>
#include <mutex>
#include <string_view>

namespace flash_attn_cuda::binding {
namespace {

std::array<std::atomic<DeviceErrors*>, C10_COMPILE_TIME_MAX_GPUS> records_of_devices{};

bool is_captured(Stream stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  C10_CUDA_CHECK(cudaStreamIsCapturing(stream, &status));
  return status != cudaStreamCaptureStatusNone;
}

// Not from torch's allocator where the device has memory left, and zeroed on a stream of its own:
// the first call may be one that a CUDA graph captures, whose memory and whose memset would belong
// to the graph.
DeviceErrors* create_record(c10::DeviceIndex device) {
  const c10::cuda::CUDAGuard guard(device);
  const c10::cuda::CUDAStreamCaptureModeGuard allow_allocation(cudaStreamCaptureModeRelaxed);
  void* record = nullptr;
  cudaStream_t stream = nullptr;
  cudaError_t status = cudaMalloc(&record, sizeof(DeviceErrors));
  const c10::cuda::CUDAStream current = c10::cuda::getCurrentCUDAStream();
  if (status == cudaErrorMemoryAllocation && !is_captured(current)) {
    static_cast<void>(cudaGetLastError());
    // Of what torch keeps and does not use. It is not given back to the device, as a graph that is
    // captured on another stream may use it. Kernels that did may still run.
    record = c10::cuda::CUDACachingAllocator::raw_alloc(sizeof(DeviceErrors));
    status = cudaStreamSynchronize(current);
  }
  C10_CUDA_CHECK(status);
  C10_CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  C10_CUDA_CHECK(cudaMemsetAsync(record, 0, sizeof(DeviceErrors), stream));
  C10_CUDA_CHECK(cudaStreamSynchronize(stream));
  C10_CUDA_CHECK(cudaStreamDestroy(stream));
  return static_cast<DeviceErrors*>(record);
}

// Read when the extension is loaded: calls hold no lock that keeps others from changing it.
const bool is_checking = [] {
  const char* const value = std::getenv("FLASH_ATTN_CUDA_CHECK");
  return value != nullptr && std::string_view(value) == "1";
}();

// Waits for the stream.
DeviceErrors take_record(DeviceErrors* record, Stream stream) {
  DeviceErrors found{};
  C10_CUDA_CHECK(cudaMemcpyAsync(&found, record, sizeof(found), cudaMemcpyDeviceToHost, stream));
  C10_CUDA_CHECK(cudaStreamSynchronize(stream));
  if (found.check != 0) {
    C10_CUDA_CHECK(cudaMemsetAsync(record, 0, sizeof(found), stream));
    C10_CUDA_CHECK(cudaStreamSynchronize(stream));
  }
  return found;
}

struct Rule {
  const char* argument;
  const char* rule;
};

Rule rule_of(DeviceCheck check, const ArgumentNames& names) {
  switch (check) {
    case DeviceCheck::cu_seqlens_q:
      return {"cu_seqlens_q", "must start at 0, not decrease and end within the rows of q"};
    case DeviceCheck::cu_seqlens_k:
      return {"cu_seqlens_k", "must start at 0, not decrease and end within the rows of k"};
    case DeviceCheck::seqused_q:
      return {"seqused_q", "must be from 0 to the sequence's length"};
    case DeviceCheck::seqused_k:
      return {names.seqused_k, "must be from 0 to what the sequence or its cache holds"};
    case DeviceCheck::leftpad_k:
      return {names.leftpad_k, "must be from 0 to the sequence's length"};
    case DeviceCheck::cache_batch_idx:
      return {"cache_batch_idx", "must be an entry of the cache"};
    case DeviceCheck::block_table:
      return {"block_table", "must be a page of the pool"};
    case DeviceCheck::append_capacity:
      return {names.seqused_k, "must leave room for the new keys"};
    case DeviceCheck::cu_seqlens_k_new:
      return {"cu_seqlens_k_new", "must start at 0, not decrease and end within the rows of k"};
    case DeviceCheck::rotary_position:
      return {"rotary_cos", "must have a row for every position"};
    case DeviceCheck::origin:
      return {"origin", "must have multiples of 16, from 0 to 2^30, as first_q and first_k"};
    case DeviceCheck::key_lists:
      return {"key_lists", "must be a key of the sequence, or a block of its keys, or -1"};
    case DeviceCheck::tree_mask:
      return {"tree_mask", "must have a column for every query of a sequence"};
    case DeviceCheck::none:
      break;
  }
  return {"lengths", "must be in range"};
}

// The enumerator, which Python spells out.
const char* name_of(DeviceCheck check) {
  switch (check) {
    case DeviceCheck::append_capacity:
      return "append_capacity";
    case DeviceCheck::rotary_position:
      return "rotary_position";
    default:
      return rule_of(check, {}).argument;
  }
}

}  // namespace

DeviceErrors* device_record(c10::DeviceIndex device) {
  std::atomic<DeviceErrors*>& slot = records_of_devices.at(static_cast<std::size_t>(device));
  if (DeviceErrors* const record = slot.load(std::memory_order_acquire)) return record;
  static std::mutex mutex;
  const std::lock_guard<std::mutex> lock(mutex);
  DeviceErrors* record = slot.load(std::memory_order_relaxed);
  if (record == nullptr) {
    record = create_record(device);
    slot.store(record, std::memory_order_release);
  }
  return record;
}

void raise_if_checking(c10::DeviceIndex device, Stream stream, const ArgumentNames& names) {
  if (!is_checking || is_captured(stream)) return;
  const DeviceErrors found = take_record(device_record(device), stream);
  if (found.check == 0) return;
  const Rule rule = rule_of(static_cast<DeviceCheck>(found.check), names);
  TORCH_CHECK_VALUE(false, rule.argument, ": ", rule.rule, ", got ", found.value, " at index ",
                    found.index, " (limit ", found.limit, ")");
}

std::optional<FoundError> device_errors(std::optional<std::int64_t> device) {
  const std::int64_t count = c10::cuda::device_count();
  const std::int64_t index = device.has_value() ? *device : c10::cuda::current_device();
  TORCH_CHECK_VALUE(index >= 0 && index < count, "device: must be from 0 to ", count - 1, ", got ",
                    index);
  DeviceErrors* const record = records_of_devices.at(static_cast<std::size_t>(index)).load();
  if (record == nullptr) return std::nullopt;  // no call of that device has read such contents
  const c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(index));
  const Stream stream = c10::cuda::getCurrentCUDAStream().stream();
  TORCH_CHECK(!is_captured(stream), "device_errors: must not be called while a CUDA graph is ",
              "captured, as it waits for the device");
  C10_CUDA_CHECK(cudaDeviceSynchronize());
  const DeviceErrors found = take_record(record, stream);
  if (found.check == 0) return std::nullopt;
  return FoundError{name_of(static_cast<DeviceCheck>(found.check)), found.index, found.value,
                    found.limit};
}

void note_key_lists(const at::Tensor& found) {
  const c10::cuda::CUDAGuard guard(found.device());
  const c10::DeviceIndex device = guard.current_device().index();
  at::Tensor held = at::from_blob(device_record(device), {4}, found.options());
  const at::Tensor is_first = held.select(0, 0).eq(0).logical_and_(found.select(0, 0).ne(0));
  const at::Tensor record = found.clone();
  record.select(0, 0).fill_(static_cast<int>(DeviceCheck::key_lists));
  held.copy_(at::where(is_first, record, held));
  raise_if_checking(device, c10::cuda::getCurrentCUDAStream().stream());
}

}  // namespace flash_attn_cuda::binding
