// What rounding takes from O, in eight bits: the number is there again to 2^-16, and what rounding
// leaves alone stays as it is. flash_attn_cuda/call/rounding.py does the same.
#include <cmath>
#include <cstdint>
#include <random>

#include "check.h"
#include "shared/out_rounding.h"

using namespace flash_attn_cuda;

namespace {

template <Dtype kDtype>
float again(float x) {
  const std::uint16_t kept = OutRounding<kDtype>::of({x, -x});
  const float2 near = OutRounding<kDtype>::rounded({x, -x});
  const float first = OutRounding<kDtype>::exact(near.x, static_cast<std::int8_t>(kept & 0xff));
  const float second = OutRounding<kDtype>::exact(near.y, static_cast<std::int8_t>(kept >> 8));
  CHECK_EQ(first, -second);
  return first;
}

template <Dtype kDtype>
void check(float last_place) {
  std::mt19937 random(1);
  int beyond = 0;
  constexpr int count = 100'000;
  for (int i = 0; i < count; ++i) {
    const float x =
        std::ldexp(1.f + (random() >> 9) * 0x1p-23f, static_cast<int>(random() % 20) - 10);
    const float error = std::fabs(again<kDtype>(x) - x) / x;
    beyond += error > last_place;
    CHECK(error <= 2 * last_place);
  }
  CHECK(beyond < count / 100);
  for (int i = 0; i < 128; ++i) {
    const float whole = 1.f + i * 0x1p-7f;  // of either dtype
    CHECK_EQ(again<kDtype>(whole), whole);
    // A tie, which goes to the even one.
    const float tie = whole + 256 * last_place;
    CHECK(std::fabs(again<kDtype>(tie) - tie) <= 2 * last_place);
  }
  CHECK_EQ(again<kDtype>(0.f), 0.f);
}

}  // namespace

TEST(bf16_keeps_sixteen_bits) { check<Dtype::bf16>(0x1p-16f); }

TEST(fp16_keeps_nineteen_bits) { check<Dtype::fp16>(0x1p-19f); }

TEST(subnormal_numbers_of_fp16_mislead_nobody) {
  for (int i = 0; i < 4096; ++i) {
    const float x = (i + 0.37f) * 0x1p-36f;
    const float near = OutRounding<Dtype::fp16>::rounded({x, x}).x;
    CHECK(std::fabs(again<Dtype::fp16>(x) - x) <= std::fabs(near - x) + x * 0x1p-19f);
  }
}
