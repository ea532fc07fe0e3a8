// Sums whose bits do not depend on the order of their numbers.
#include "shared/scores/exact_sum.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "check.h"

using namespace flash_attn_cuda;

namespace {

double value_of(const ExactNumber& number) {
  return std::ldexp(static_cast<double>(number.low), log2_unit(number.word)) +
         std::ldexp(static_cast<double>(number.high), log2_unit(number.word + 1));
}

}  // namespace

TEST(two_words_have_all_of_a_number) {
  std::mt19937 random(3);
  std::vector<float> numbers{0.0f,
                             -0.0f,
                             1.0f,
                             -1.0f,
                             std::numeric_limits<float>::max(),
                             std::numeric_limits<float>::lowest(),
                             std::numeric_limits<float>::min(),
                             std::numeric_limits<float>::denorm_min()};
  while (numbers.size() < 100'000) {
    const float x = std::bit_cast<float>(static_cast<std::uint32_t>(random()));
    if (std::isfinite(x)) numbers.push_back(x);
  }
  for (const float x : numbers) {
    const auto number = ExactNumber::of(std::bit_cast<std::uint32_t>(x));
    CHECK_EQ(value_of(number), static_cast<double>(x));
    CHECK(number.word >= 0 && number.word + 1 < exact_sum_words);
    // 2^31 of them fit.
    CHECK(std::abs(number.low) < std::int64_t{1} << 32);
    CHECK(std::abs(number.high) < std::int64_t{1} << 32);
  }
}
