#include "torch_binding/rng.h"

#include <ATen/cuda/CUDAGeneratorImpl.h>

#include <mutex>

namespace flash_attn_cuda::binding {

RngSource draw_rng(c10::DeviceIndex device) {
  // Two calls need two offsets, no more: the rest of the counter is the pair's place.
  constexpr std::uint64_t increment = 4;  // the least that torch's generator counts in
  at::Generator generator = at::cuda::detail::getDefaultCUDAGenerator(device);
  const std::lock_guard<std::mutex> lock(generator.mutex());
  const at::PhiloxCudaState state =
      generator.get<at::CUDAGeneratorImpl>()->philox_cuda_state(increment);
  if (!state.captured_) return {.seed = state.seed_.val, .offset = state.offset_.val};
  return {.seed_pointer = state.seed_.ptr,
          .offset_pointer = state.offset_.ptr,
          .offset_in_graph = state.offset_intragraph_};
}

RngSource rng_of_state(const at::Tensor& rng_state) {
  const std::int64_t* const data = rng_state.const_data_ptr<std::int64_t>();
  return {.seed_pointer = data, .offset_pointer = data + 1};
}

}  // namespace flash_attn_cuda::binding
