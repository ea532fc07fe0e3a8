// A word of the workspace that the CTAs of a call count in, though nobody has zeroed it, which
// would take a launch. A count is valid only beside the mark of the call. Each CTA writes the mark,
// with a count of 0, if it does not find it, before it counts. The last CTA resets the word, so
// that the same launch, replayed from a graph with the same mark, starts anew.
#pragma once

#include <atomic>
#include <cstdint>
#include <cute/config.hpp>

namespace flash_attn_cuda {

// The upper bits of a word: a NaN in bf16, fp16, fp32 and fp64, which data hardly are, and the
// number of the call. What memory held by chance passes for a mark once in 2^32 words.
inline constexpr int count_bits = 32;
inline constexpr std::uint64_t count_mask = (std::uint64_t{1} << count_bits) - 1;

inline std::uint64_t mark_of_next_call() {
  static std::atomic<std::uint16_t> calls{0};
  const std::uint16_t number = calls.fetch_add(1, std::memory_order_relaxed);
  return std::uint64_t{0x7ff5} << 48 | std::uint64_t{number} << count_bits;
}

// For one thread of each CTA.
class MarkedCounter {
 public:
  CUTE_DEVICE explicit MarkedCounter(unsigned long long* word) : word_(word) {}

  CUTE_DEVICE bool exists() const { return word_ != nullptr; }

  // look() starts the load of the word, mark() uses it: work in between hides the latency.
  CUTE_DEVICE void look() {
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(found_) : "l"(word_) : "memory");
  }
  CUTE_DEVICE void mark(unsigned long long mark) const {
    // If this fails, another CTA has marked the word since.
    if ((found_ & ~count_mask) != mark) atomicCAS(word_, found_, mark);
  }

  // Takes a ticket: adds one, and returns the count before.
  CUTE_DEVICE int draw() const {
    unsigned long long before;
    asm volatile("atom.relaxed.gpu.global.add.u64 %0, [%1], 1;"
                 : "=l"(before)
                 : "l"(word_)
                 : "memory");
    return static_cast<int>(before & count_mask);
  }
  // draw(), released and acquired: CTAs that arrive later see, after a barrier, what this CTA has
  // written before one.
  CUTE_DEVICE int arrive() const {
    unsigned long long before;
    asm volatile("atom.acq_rel.gpu.global.add.u64 %0, [%1], 1;"
                 : "=l"(before)
                 : "l"(word_)
                 : "memory");
    return static_cast<int>(before & count_mask);
  }
  CUTE_DEVICE void reset() const { *word_ = 0; }

 private:
  unsigned long long* word_;
  unsigned long long found_ = 0;
};

}  // namespace flash_attn_cuda
