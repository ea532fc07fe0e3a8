// The product with a scale's reciprocal against fp32's quotient, as numbers of e4m3; scales of
// e8m0.
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>

#include "auxiliary/append/e4m3_quotient.h"
#include "check.h"
#include "shared/e8m0.h"

using namespace flash_attn_cuda;

namespace {

using Random = std::mt19937;

float power_of_two(int exponent) { return std::ldexp(1.f, exponent); }

bool agree(const E4m3Quotient& product, float x, float scale) {
  return e4m3_of(product.of(x)) == e4m3_of(x / scale);
}

// Both signs of what is divided, and of the scale.
int disagreements(float x, float scale) {
  int count = 0;
  for (const float divisor : {scale, -scale}) {
    const auto product = E4m3Quotient::by(divisor);
    if (!product.is_exact) ++count;
    count += !agree(product, x, divisor) + !agree(product, -x, divisor);
  }
  return count;
}

float of_bf16(std::uint32_t bits) { return std::bit_cast<float>(bits << 16); }

// Eleven significant bits, which fp16 and, of fewer, bf16 have.
float with_eleven_bits(Random& random, int exponent) {
  return std::ldexp(static_cast<float>(1024 + random() % 1024), exponent - 10);
}

float scale_near(float x, int last_places) {
  return std::bit_cast<float>(std::bit_cast<std::uint32_t>(x) + last_places);
}

}  // namespace

TEST(quotients_of_random_scales) {
  Random random(1);
  int wrong = 0;
  for (int i = 0; i < 200'000; ++i) {
    const int exponent = static_cast<int>(random() % 128) - 64;
    const float scale = std::ldexp(1.f + (random() >> 9) * 0x1p-23f, exponent);
    const auto product = E4m3Quotient::by(scale);
    wrong += !product.is_exact;
    wrong += !agree(product, of_bf16(random() >> 16), scale);
    for (int each = 0; each < 4; ++each) {
      const int place = exponent - 12 + static_cast<int>(random() % 22);
      wrong += !agree(product, with_eleven_bits(random, place), scale);
    }
  }
  CHECK_EQ(wrong, 0);
}

// All numbers of eleven bits, with the scales around those whose quotient is a boundary.
TEST(quotients_next_to_boundaries) {
  int wrong = 0;
  for (int x = 1024; x < 2048; ++x) {
    for (int boundary = 1; boundary < 32; boundary += 2) {
      const float scale = static_cast<float>(x) / static_cast<float>(boundary);
      for (int places = -2; places <= 2; ++places) {
        const float near = scale_near(scale, places);
        const auto product = E4m3Quotient::by(near);
        for (const int exponent : {-14, -10, -6, 0, 3})
          wrong += !agree(product, static_cast<float>(x) * power_of_two(exponent), near);
      }
    }
  }
  CHECK_EQ(wrong, 0);
}

// The one scale whose quotients are next to where fp32 rounds to a boundary.
TEST(quotients_of_the_scale_below_a_power_of_two) {
  int wrong = 0;
  for (const float scale : {scale_near(1.f, -1), scale_near(2.f, -1), scale_near(0x1p-20f, -1)}) {
    for (int exponent = -60; exponent < 60; ++exponent)
      wrong += disagreements(power_of_two(exponent), scale);
  }
  CHECK_EQ(wrong, 0);
}

TEST(quotients_of_every_bf16) {
  constexpr std::array scales = {0x1p-64f, 0x1p-9f, 1.f, 0x1.fffffep0f, 3.f, 448.f, 0x1p64f};
  int wrong = 0;
  for (const float scale : scales) {
    for (std::uint32_t bits = 0; bits < 0x10000; ++bits)
      wrong += disagreements(of_bf16(bits), scale);
  }
  CHECK_EQ(wrong, 0);
}

TEST(scales_that_are_left_to_divisions) {
  constexpr float infinity = std::numeric_limits<float>::infinity();
  constexpr float nan = std::numeric_limits<float>::quiet_NaN();
  for (const float scale : {0.f, -0.f, 0x1p-65f, 0x1.8p64f, -0x1p100f, infinity, nan})
    CHECK(!E4m3Quotient::by(scale).is_exact);
}

TEST(bytes_of_e8m0_are_powers_of_two) {
  CHECK(std::isnan(number_of_scale(std::uint8_t{255})));
  for (int byte = 0; byte < 255; ++byte) {
    const float number = number_of_scale(static_cast<std::uint8_t>(byte));
    CHECK_EQ(number, power_of_two(byte - 127));
    if (byte == 0) continue;  // a subnormal one
    CHECK_EQ(int{next_e8m0(number)}, byte);
    if (byte > 1) CHECK_EQ(int{next_e8m0(scale_near(number, -1))}, byte);
    if (byte < 254) CHECK_EQ(int{next_e8m0(scale_near(number, 1))}, byte + 1);
  }
}
