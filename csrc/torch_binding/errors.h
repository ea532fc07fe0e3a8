// The record, one per device, in which kernels note bad lengths and indices that no host check
// could see (flash_attn/device_errors.h).
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <optional>
#include <string>
#include <tuple>

#include "flash_attn/api.h"
#include "torch_binding/call.h"

namespace flash_attn_cuda::binding {

// The record lies in device memory, is zero when it is handed out first, and is never freed.
DeviceErrors* device_record(c10::DeviceIndex device);

// With FLASH_ATTN_CUDA_CHECK=1 waits for the stream and raises ValueError for what its kernels
// noted; does nothing without, or while the stream is captured. For the end of a call that has
// device contents.
void raise_if_checking(c10::DeviceIndex device, Stream stream, const ArgumentNames& names = {});

// (check, index, value, limit) of the first error since the last call, or none. Waits for the
// device and clears the record.
using FoundError = std::tuple<std::string, std::int64_t, std::int64_t, std::int64_t>;
std::optional<FoundError> device_errors(std::optional<std::int64_t> device);

// Notes an error of key_lists as kernels do. found: int32 (4) on a CUDA device, whether there is
// one and the other fields of DeviceErrors. Does not wait, unless each call is checked.
void note_key_lists(const at::Tensor& found);

}  // namespace flash_attn_cuda::binding
