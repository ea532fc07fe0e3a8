// The last step of a short sequence, of which planning knows as well as the kernels.
#pragma once

namespace flash_attn_cuda {

// Keys of a narrow step, the fewest that P V can multiply: where steps are short, a last block of
// no more is multiplied by instructions as wide.
inline constexpr int narrow_step_keys = 16;

}  // namespace flash_attn_cuda
