// Buffers one after the other in one workspace.
#pragma once

#include "flash_attn/api.h"

namespace flash_attn_cuda {

class WorkspaceLayout {
 public:
  // A buffer after those so far, at a multiple of `alignment` bytes.
  template <class T>
  Buffer<T> add(std::int64_t count, std::size_t alignment = usual_alignment) {
    const std::size_t offset = rounded_up(alignment);
    end_ = offset + static_cast<std::size_t>(count) * sizeof(T);
    return {.offset = offset, .count = count};
  }
  std::size_t bytes() const { return rounded_up(usual_alignment); }

 private:
  static constexpr std::size_t usual_alignment = 256;

  std::size_t rounded_up(std::size_t alignment) const {
    return (end_ + alignment - 1) / alignment * alignment;
  }

  std::size_t end_ = 0;
};

}  // namespace flash_attn_cuda
