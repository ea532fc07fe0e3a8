// Throwing an Error whose text is put together only when it is thrown.
#pragma once

#include <sstream>

#include "flash_attn/api.h"

namespace flash_attn_cuda {

// The parts are streamed one after the other.
template <class... Parts>
[[noreturn]] void throw_error(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  throw Error(text.str());
}

}  // namespace flash_attn_cuda
