// Buffers behind each other in one workspace.
#pragma once

#include <cstddef>
#include <cstdint>

namespace flash_attn_cuda {

class WorkspaceLayout {
 public:
  // The offset of the new buffer.
  std::size_t add_bytes(std::size_t bytes) {
    constexpr std::size_t alignment = 256;
    const std::size_t offset = end_;
    end_ += (bytes + alignment - 1) / alignment * alignment;
    return offset;
  }
  std::size_t add_floats(std::int64_t floats) {
    return add_bytes(static_cast<std::size_t>(floats) * sizeof(float));
  }
  std::size_t bytes() const { return end_; }

 private:
  std::size_t end_ = 0;
};

}  // namespace flash_attn_cuda
