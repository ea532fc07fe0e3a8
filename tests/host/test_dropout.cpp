// Philox against known answers and an implementation of its own, and dropout's decisions against
// their formula, pair by pair.
#include "shared/dropout.h"

#include <array>
#include <cmath>
#include <map>
#include <random>
#include <tuple>

#include "check.h"
#include "sm90/dropout_bits.h"

using namespace flash_attn_cuda;

namespace {

using Words = std::array<std::uint32_t, 4>;

// Philox4x32 as its paper writes it: a round multiplies, swaps halves and adds the round's key.
Words reference_philox(const Words& counter, std::array<std::uint32_t, 2> key, int rounds) {
  const std::uint64_t multipliers[2] = {0xD2511F53, 0xCD9E8D57};
  const std::uint32_t weyl[2] = {0x9E3779B9, 0xBB67AE85};
  Words right_left = counter;  // R0, L0, R1, L1
  for (int round = 0; round < rounds; ++round) {
    Words next{};
    for (int half = 0; half < 2; ++half) {
      const std::uint64_t product = multipliers[half] * right_left[2 * half];
      const int other = 2 - 2 * half;
      const std::uint32_t round_key = key[1 - half] + weyl[1 - half] * std::uint32_t(round);
      next[other] = std::uint32_t(product >> 32) ^ right_left[other + 1] ^ round_key;
      next[other + 1] = std::uint32_t(product % (std::uint64_t{1} << 32));
    }
    // The high half of product 0 goes with the last two words, whose key is the second; that of
    // product 1 with the first two.
    right_left = next;
  }
  return right_left;
}

struct KnownAnswer {
  Words counter;
  std::array<std::uint32_t, 2> key;
  int rounds;
  Words words;
};

// Published with Random123.
constexpr KnownAnswer known_answers[] = {
    {{0, 0, 0, 0}, {0, 0}, 7, {0x5f6fb709, 0x0d893f64, 0x4f121f81, 0x4f730a48}},
    {{0, 0, 0, 0}, {0, 0}, 10, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
    {{~0u, ~0u, ~0u, ~0u}, {~0u, ~0u}, 7, {0x5207ddc2, 0x45165e59, 0x4d8ee751, 0x8c52f662}},
    {{~0u, ~0u, ~0u, ~0u}, {~0u, ~0u}, 10, {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
    {{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344},
     {0xa4093822, 0x299f31d0},
     7,
     {0x4dfccaba, 0x190a87f0, 0xc47362ba, 0xb6b5242a}},
    {{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344},
     {0xa4093822, 0x299f31d0},
     10,
     {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}},
};

Words words_of(const PhiloxBlock& block) {
  return {block.words[0], block.words[1], block.words[2], block.words[3]};
}

// One call's random numbers.
struct Draw {
  std::uint64_t seed = 1;
  std::uint64_t offset = 2;
  double p_dropout = 0.5;
  int sequence = 0;
  int num_heads = 4;
  int head = 0;

  DropoutMask mask() const {
    return DropoutMask::of({seed, offset}, dropout_threshold(p_dropout), sequence, num_heads, head);
  }

  // The 16 random bits of a pair.
  std::uint32_t bits(int query, int key) const {
    const auto i = std::uint32_t(query), j = std::uint32_t(key);
    const auto low = [](std::uint64_t x) { return std::uint32_t(x & 0xffff'ffff); };
    const auto high = [](std::uint64_t x) { return std::uint32_t(x >> 32); };
    const std::uint32_t stream = std::uint32_t(sequence) * std::uint32_t(num_heads) + head;
    const Words words =
        reference_philox({(j / 16) * 4 + (j % 8) / 2, (i / 16) * 8 + i % 8, stream, low(offset)},
                         {low(seed), high(seed) ^ high(offset)}, 7);
    const std::uint32_t lane = ((i / 8) % 2) * 4 + ((j / 8) % 2) * 2 + j % 2;
    return (words[lane / 2] >> (16 * (lane % 2))) & 0xffff;
  }

  bool keeps(int query, int key) const {
    const auto threshold = std::uint32_t(std::min(65535l, std::lround(p_dropout * 65536.0)));
    return bits(query, key) >= threshold;
  }
};

Draw random_draw(std::mt19937_64& random) {
  const int num_heads = 1 + int(random() % 200);
  return {.seed = random(),
          .offset = random(),
          .p_dropout = double(random() % 1000) / 1000.0,
          .sequence = int(random() % 100'000),
          .num_heads = num_heads,
          .head = int(random() % num_heads)};
}

}  // namespace

TEST(the_reference_gives_the_known_answers) {
  for (const KnownAnswer& known : known_answers)
    CHECK(reference_philox(known.counter, known.key, known.rounds) == known.words);
}

TEST(philox_gives_the_known_answers) {
  for (const KnownAnswer& known : known_answers) {
    const Words& c = known.counter;
    const PhiloxBlock block = philox({{c[0], c[1], c[2], c[3]}}, {known.key[0], known.key[1]});
    CHECK_EQ(words_of(block) == known.words, known.rounds == 7);
  }
}

TEST(philox_equals_the_reference) {
  std::mt19937 random(1);
  const auto word = [&] { return std::uint32_t(random()); };
  for (int round = 0; round < 10'000; ++round) {
    const Words counter{word(), word(), word(), word()};
    const PhiloxKey key{word(), word()};
    const PhiloxBlock block = philox({{counter[0], counter[1], counter[2], counter[3]}}, key);
    CHECK(words_of(block) == reference_philox(counter, {key.low, key.high}, 7));
  }
}

TEST(decisions_follow_their_formula) {
  std::mt19937_64 random(2);
  for (int round = 0; round < 300; ++round) {
    const Draw draw = random_draw(random);
    const DropoutMask mask = draw.mask();
    for (int pair = 0; pair < 50; ++pair) {
      const int longest = 1 << (1 + random() % 30);
      const int query = int(random() % longest), key = int(random() % longest);
      CHECK_EQ(mask.keeps(query, key), draw.keeps(query, key));
    }
  }
}

// What a thread of an m16n8 product holds of two neighbouring accumulators, whatever the tile: for
// lane l rows l / 4 and l / 4 + 8, and columns 2 * (l % 4), the next one, and both 8 further on.
TEST(blocks_decide_about_every_pair_once_and_as_the_formula_says) {
  std::mt19937_64 random(3);
  for (const auto& [query_begin, key_begin] : {std::pair{0, 0}, {16, 48}, {1'000'000, 64}}) {
    const Draw draw = random_draw(random);
    const DropoutMask mask = draw.mask();
    constexpr int rows = 32, columns = 48;
    std::map<std::pair<int, int>, int> visits;
    std::map<std::tuple<std::uint32_t, std::uint32_t>, int> blocks;
    for (int row = 0; row < rows; row += 16) {
      for (int column = 0; column < columns; column += 16) {
        for (int lane = 0; lane < 32; ++lane) {
          const int query = query_begin + row + lane / 4;
          const int key = key_begin + column + 2 * (lane % 4);
          const PhiloxBlock block = mask.block(query, key);
          ++blocks[{block.words[0], block.words[1]}];
          for (int decision = 0; decision < 8; ++decision) {
            const int i = query + decision / 4 * 8;
            const int j = key + decision / 2 % 2 * 8 + decision % 2;
            ++visits[{i, j}];
            CHECK_EQ(mask.keeps(block, decision), draw.keeps(i, j));
          }
        }
      }
    }
    CHECK_EQ(int(visits.size()), rows * columns);
    CHECK_EQ(int(blocks.size()), rows * columns / 8);  // no block serves twice
    for (const auto& [pair, count] : visits) {
      CHECK_EQ(count, 1);
      CHECK(pair.first >= query_begin && pair.first < query_begin + rows);
      CHECK(pair.second >= key_begin && pair.second < key_begin + columns);
    }
  }
}

// Every half of a word against every threshold that there is.
TEST(both_halves_of_a_word_are_compared_at_once) {
  std::mt19937 random(5);
  for (std::uint32_t threshold = 1; threshold < 65536; ++threshold) {
    const auto halves = sm90::HalvesThreshold::of(threshold);
    const std::uint32_t edges[] = {
        0,      1,      threshold - 1,          threshold, threshold + 1, 0x7fff,
        0x8000, 0xffff, std::uint32_t(random())};
    for (const std::uint32_t low : edges) {
      for (const std::uint32_t high : edges) {
        const std::uint32_t word = (low & 0xffff) | high << 16;
        const std::uint32_t passes = halves.top_bits(word);
        CHECK_EQ((passes >> 15 & 1) != 0, (word & 0xffff) >= threshold);
        CHECK_EQ(passes >> 31 != 0, word >> 16 >= threshold);
      }
    }
  }
  for (const std::uint32_t threshold : {1u, 6554u, 32767u, 32768u, 32769u, 65535u}) {
    const auto halves = sm90::HalvesThreshold::of(threshold);
    for (std::uint32_t x = 0; x < 65536; ++x) {
      const std::uint32_t passes = halves.top_bits(x | (65535 - x) << 16);
      CHECK_EQ((passes >> 15 & 1) != 0, x >= threshold);
      CHECK_EQ(passes >> 31 != 0, 65535 - x >= threshold);
    }
  }
}

// The words of a warp's threads for 16 rows of a tile, by thread and word, and what their bits say
// of every pair, by the formula.
template <int kColumns>
void check_words(const Draw& draw, int query_begin, int key_begin) {
  using Layout = sm90::WordLayout<kColumns>;
  const DropoutMask mask = draw.mask();
  const auto threshold = sm90::HalvesThreshold::of(mask.threshold);
  std::map<std::pair<int, int>, int> visits;
  for (int word = 0; word < Layout::words; ++word) {
    for (int lane = 0; lane < 32; ++lane) {
      const int key = key_begin + word * Layout::columns_per_word + 2 * (lane % 4);
      const auto columns = sm90::WordColumns<Layout::blocks_per_word>::of(mask, key);
      const std::uint32_t kept = columns.draw(mask, threshold, query_begin + lane / 4);
      for (int bit = 0; bit < 32; ++bit) {
        if (!Layout::is_used(bit)) continue;
        // The accumulator's thread `lane`: rows 8 apart, columns two of every eight.
        const int column = Layout::column_of(word, bit);
        const int i = query_begin + lane / 4 + 8 * Layout::row_of(bit);
        const int j = key_begin + 2 * (lane % 4) + column / 2 * 8 + column % 2;
        ++visits[{i, j}];
        CHECK_EQ((kept >> bit & 1) != 0, draw.keeps(i, j));
      }
    }
  }
  CHECK_EQ(int(visits.size()), 16 * kColumns);
  for (const auto& [pair, count] : visits) CHECK_EQ(count, 1);
}

TEST(words_of_bits_decide_about_every_pair_of_a_tile_once_and_as_the_formula_says) {
  std::mt19937_64 random(6);
  for (int round = 0; round < 40; ++round) {
    const Draw draw = random_draw(random);
    if (draw.mask().threshold == 0) continue;  // without dropout nobody draws
    const int query_begin = 16 * int(random() % (1 << 20));
    const int block = int(random() % (1 << 16));
    check_words<64>(draw, query_begin, 64 * block);
    check_words<96>(draw, query_begin, 96 * block);
    check_words<128>(draw, query_begin, 128 * block);
    check_words<32>(draw, query_begin, 32 * block);
    check_words<16>(draw, query_begin, 16 * block);
  }
}

template <int kDrawingWarps, int kWords>
void check_shares() {
  using Share = sm90::WordShare<kDrawingWarps, kWords>;
  std::map<std::pair<int, int>, int> draws;  // of (word, warp)
  for (int drawing_warp = 0; drawing_warp < kDrawingWarps; ++drawing_warp) {
    const auto share = Share::of(drawing_warp);
    for (int warp = share.first_warp; warp < 4; warp += Share::step) ++draws[{share.word, warp}];
  }
  for (int word = 0; word < kWords; ++word) {
    for (int warp = 0; warp < 4; ++warp) {
      const int count = draws[{word, warp}];
      CHECK_EQ(count, 1);
    }
  }
  CHECK_EQ(int(draws.size()), 4 * kWords);
}

TEST(drawing_warps_share_the_words_of_a_warpgroup) {
  check_shares<2, 1>();
  check_shares<2, 2>();
  check_shares<4, 1>();
  check_shares<4, 2>();
}

TEST(sequences_heads_seeds_and_offsets_have_their_own_bits) {
  const Draw base;
  std::vector<Draw> others(6, base);
  others[0].seed = 2;
  others[1].seed = base.seed + (std::uint64_t{1} << 32);
  others[2].offset = 3;
  others[3].offset = base.offset + (std::uint64_t{1} << 32);
  others[4].sequence = 1;
  others[5].head = 1;
  for (const Draw& other : others) {
    int same = 0;
    for (int pair = 0; pair < 64 * 64; ++pair)
      same += base.mask().keeps(pair / 64, pair % 64) == other.mask().keeps(pair / 64, pair % 64);
    CHECK(same > 1850 && same < 2250);  // 2048 and six standard deviations of 32
  }
}

TEST(the_threshold_is_the_nearest_of_65536_steps) {
  CHECK_EQ(dropout_threshold(0.0), 0u);
  CHECK_EQ(dropout_threshold(0.5), 32768u);
  CHECK_EQ(dropout_threshold(0.1), 6554u);
  CHECK_EQ(dropout_threshold(0.499 / 65536), 0u);
  CHECK_EQ(dropout_threshold(0.5 / 65536), 1u);  // half a step: away from zero
  CHECK_EQ(dropout_threshold(std::nextafter(1.0, 0.0)), 65535u);
  std::mt19937 random(4);
  std::uniform_real_distribution<double> uniform(0.0, 1.0);
  for (int round = 0; round < 100'000; ++round) {
    const double p = uniform(random);
    CHECK_EQ(long{dropout_threshold(p)}, std::min(std::lround(p * 65536.0), 65535l));
  }
}

TEST(what_is_kept_is_exact) {
  for (std::uint32_t threshold = 0; threshold < 65536; ++threshold)
    CHECK_EQ(double{keep_probability(threshold)}, (65536.0 - threshold) / 65536.0);
}

TEST(no_dropout_keeps_everything_and_the_most_drops_nearly_everything) {
  const DropoutMask none = Draw{.p_dropout = 0.0}.mask();
  const DropoutMask most = Draw{.p_dropout = 0.999999}.mask();
  int kept = 0;
  for (int pair = 0; pair < 1 << 16; ++pair) {
    CHECK(none.keeps(pair / 256, pair % 256));
    kept += most.keeps(pair / 256, pair % 256);
  }
  CHECK(kept < 10);
}

TEST(random_numbers_come_from_values_or_from_device_memory) {
  const RngSource values{.seed = 5, .offset = 6, .offset_in_graph = 100};
  CHECK_EQ(read_rng(values).seed, std::uint64_t{5});
  CHECK_EQ(read_rng(values).offset, std::uint64_t{6});
  const std::int64_t seed = -1, offset = 40;
  const RngSource memory{.seed = 5,
                         .offset = 6,
                         .seed_pointer = &seed,
                         .offset_pointer = &offset,
                         .offset_in_graph = 2};
  CHECK_EQ(read_rng(memory).seed, ~std::uint64_t{0});
  CHECK_EQ(read_rng(memory).offset, std::uint64_t{42});
}

TEST(one_thread_writes_the_state_that_was_used) {
  std::int64_t state[2] = {-5, -5};
  const std::int64_t seed = 11, offset = 13;
  DropoutParams params{
      .threshold = 1,
      .rng = {.seed_pointer = &seed, .offset_pointer = &offset, .offset_in_graph = 4},
      .rng_state = state};
  publish_rng(params, 0, 1);
  publish_rng(params, 1, 0);
  CHECK_EQ(state[0], std::int64_t{-5});
  publish_rng(params, 0, 0);
  CHECK_EQ(state[0], std::int64_t{11});
  CHECK_EQ(state[1], std::int64_t{17});
  params.rng_state = nullptr;
  publish_rng(params, 0, 0);
}
