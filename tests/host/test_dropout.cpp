// Philox against known answers and an implementation of its own, and dropout's decisions against
// their formula, pair by pair.
#include "shared/dropout/dropout.h"

#include <array>
#include <cmath>
#include <map>
#include <random>
#include <tuple>

#include "check.h"
#include "sm90/scores/dropout_bits.h"

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
    return DropoutMask::of({seed, offset}, dropout_threshold(p_dropout), sequence * num_heads,
                           head);
  }

  // The 16 random bits of a pair: eight of its own, and below them eight of its block.
  std::uint32_t bits(int query, int key) const {
    const auto i = std::uint32_t(query), j = std::uint32_t(key);
    const auto low = [](std::uint64_t x) { return std::uint32_t(x & 0xffff'ffff); };
    const auto high = [](std::uint64_t x) { return std::uint32_t(x >> 32); };
    const std::uint32_t stream = std::uint32_t(sequence) * std::uint32_t(num_heads) + head;
    const Words counter{j / 16 * 4 + j % 8 / 2, i / 16 * 4 + i % 8 / 2, stream, low(offset)};
    const std::array<std::uint32_t, 2> random_key{low(seed), high(seed) ^ high(offset)};
    const Words words = reference_philox(counter, random_key, 7);
    const std::uint32_t pair = i % 2 * 8 + j % 2 * 4 + i / 8 % 2 * 2 + j / 8 % 2;
    std::uint32_t own = 0;
    for (int bit = 0; bit < 8; ++bit) own |= (words[bit % 4] >> (bit / 4 * 16 + pair) & 1) << bit;
    const Words after_five = reference_philox(counter, random_key, 5);
    return own << 8 | (after_five[1] ^ after_five[3]) >> 24;
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

TEST(philox_and_the_reference_give_the_known_answers) {
  for (const KnownAnswer& known : known_answers) {
    CHECK(reference_philox(known.counter, known.key, known.rounds) == known.words);
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

// For every 16 x 16 pairs of a tile a block for each two neighbouring rows and columns.
TEST(blocks_decide_about_every_pair_once_and_as_the_formula_says) {
  std::mt19937_64 random(3);
  for (const auto& [query_begin, key_begin] : {std::pair{0, 0}, {16, 48}, {1'000'000, 64}}) {
    const Draw draw = random_draw(random);
    const DropoutMask mask = draw.mask();
    const auto threshold = DropoutThreshold::of(mask.threshold);
    constexpr int rows = 32, columns = 48;
    std::map<std::pair<int, int>, int> visits;
    std::map<std::tuple<std::uint32_t, std::uint32_t>, int> blocks;
    for (int row = 0; row < rows; row += row % 8 == 6 ? 10 : 2) {
      for (int column = 0; column < columns; column += column % 8 == 6 ? 10 : 2) {
        const int query = query_begin + row, key = key_begin + column;
        const DropoutBlock block = mask.block(query, key);
        ++blocks[{block.own.words[0], block.own.words[1]}];
        const std::uint32_t kept = threshold.kept(block, block);
        CHECK_EQ(kept & 0xffff, kept >> 16);
        for (const int down : {0, 1, 8, 9}) {
          for (const int right : {0, 1, 8, 9}) {
            const int i = query + down, j = key + right;
            ++visits[{i, j}];
            CHECK_EQ((kept >> DropoutMask::pair_in_block(i, j) & 1) != 0, draw.keeps(i, j));
          }
        }
      }
    }
    CHECK_EQ(int(visits.size()), rows * columns);
    CHECK_EQ(int(blocks.size()), rows * columns / 16);  // no block serves twice
    for (const auto& [pair, count] : visits) {
      CHECK_EQ(count, 1);
      CHECK(pair.first >= query_begin && pair.first < query_begin + rows);
      CHECK(pair.second >= key_begin && pair.second < key_begin + columns);
    }
  }
}

// Every threshold there is, against numbers about it and others.
TEST(thirty_two_numbers_are_compared_at_once) {
  std::mt19937 random(5);
  for (std::uint32_t threshold = 0; threshold < 65536; ++threshold) {
    DropoutBlock blocks[2];
    std::uint32_t numbers[2][16];
    for (int b = 0; b < 2; ++b) {
      // The shared bits are the threshold's, or beside them, so that the pairs' own may be equal.
      const auto shared = std::uint32_t((threshold + random() % 3 - 1) & 0xff);
      blocks[b] = {.own = {}, .shared = shared << 24 | std::uint32_t(random() & 0xffffff)};
      for (int pair = 0; pair < 16; ++pair) {
        const auto own =
            std::uint32_t((pair % 2 == 0 ? (threshold >> 8) + random() % 3 - 1 : random()) & 0xff);
        numbers[b][pair] = own << 8 | shared;
        for (int bit = 0; bit < 8; ++bit)
          blocks[b].own.words[bit % 4] |= (own >> bit & 1) << (bit / 4 * 16 + pair);
      }
    }
    const std::uint32_t kept = DropoutThreshold::of(threshold).kept(blocks[0], blocks[1]);
    for (int pair = 0; pair < 32; ++pair)
      CHECK_EQ((kept >> pair & 1) != 0, numbers[pair / 16][pair % 16] >= threshold);
  }
}

// The words of a warp's threads for 16 rows of a tile, as the drawing lanes make them for
// themselves and their neighbours, and what their bits say of every pair, by the formula.
TEST(words_of_bits_decide_about_every_pair_of_a_tile_once_and_as_the_formula_says) {
  using Layout = sm90::WordLayout<128>;
  std::mt19937_64 random(6);
  for (int round = 0; round < 40; ++round) {
    const Draw draw = random_draw(random);
    const int query_begin = 16 * int(random() % (1 << 20));
    const int key_begin = 128 * int(random() % (1 << 16));
    const DropoutMask mask = draw.mask();
    const auto threshold = DropoutThreshold::of(mask.threshold);
    std::uint32_t words[Layout::words][32];
    for (int lane = 0; lane < 32; ++lane) {
      const int own = lane / 4 % 2;
      const int key = key_begin + own * Layout::columns_per_word + 2 * (lane % 4);
      const auto drawn =
          sm90::TileColumns::of(mask, key).draw(mask, threshold, query_begin + lane / 4);
      words[own][lane] = drawn.word(own);
      words[own][lane ^ 4] = drawn.word(1 - own);
    }
    std::map<std::pair<int, int>, int> visits;
    for (int word = 0; word < Layout::words; ++word) {
      for (int lane = 0; lane < 32; ++lane) {
        for (int bit = 0; bit < 32; ++bit) {
          // The accumulator's thread `lane`: rows 8 apart, columns two of every eight.
          const int column = Layout::column_of(word, bit);
          const int i = query_begin + lane / 4 + 8 * Layout::row_of(bit);
          const int j = key_begin + 2 * (lane % 4) + column / 2 * 8 + column % 2;
          ++visits[{i, j}];
          CHECK_EQ((words[word][lane] >> bit & 1) != 0, draw.keeps(i, j));
        }
      }
    }
    CHECK_EQ(int(visits.size()), 16 * 128);
    for (const auto& [pair, count] : visits) CHECK_EQ(count, 1);
  }
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
