// The backward's fixed order of additions to dQ: that the key tiles which visit a query tile are
// the ones that its turns count, and that nobody waits for a CTA that may not have started.
#include "shared/schedule/turns.h"

#include <algorithm>
#include <deque>
#include <map>
#include <random>
#include <set>
#include <string>

#include "check.h"
#include "fixtures.h"
#include "host/normalize_window.h"
#include "host/plan.h"
#include "host/plan_steps.h"
#include "no_driver.h"
#include "shared/mask/block_lists.h"
#include "shared/schedule/tile_work.h"

using namespace host_tests;

namespace {

// Of the plans below.
constexpr int block_m = 16;
constexpr int block_n = 32;

// A tile of the main kernel: the additions to dQ that its CTA makes, in order.
struct Addition {
  std::int64_t counter;  // of all heads and query tiles
  int turn;
};
using Program = std::vector<Addition>;

Program program_of(const BackwardPlan& plan, const BackwardParams& params,
                   const SequenceTable& table, const DqTurns& turns, int ticket) {
  TileWork work;
  if (!find_work(plan.schedule, table, params, ticket, work)) return {};
  const AttentionShape& shape = params.shape;
  const Window window = normalize_window(params.window, shape);
  const Sequence& sequence = work.sequence;
  const int first_q_tile = plan.table.used() ? sequence.first_q_tile
                                             : sequence.index * ceil_div(shape.seqlen_q, block_m);
  const Reach range = visited_tiles<block_m, block_n>(window, sequence, work.tile);
  const int heads = shape.num_heads_q / shape.num_heads_k / plan.dkdv_splits;
  Program program;
  for (int head = work.head * heads; head < (work.head + 1) * heads; ++head) {
    for (int step = 0; step < range.end - range.begin; ++step) {
      const int tile = turns.tiles_descend ? range.begin + step : range.end - 1 - step;
      const BlockRange adders = adders_of<block_m, block_n>(window, sequence, tile);
      program.push_back({std::int64_t{head} * plan.q_tiles + first_q_tile + tile,
                         turns.turn_of(adders, work.tile)});
    }
  }
  return program;
}

std::vector<Program> programs_of(const BackwardPlan& plan, const BackwardParams& params,
                                 const SequenceTable& table = {}) {
  static int counters;  // never written here
  const DqTurns turns{.counters = &counters, .tiles_descend = plan.tiles_descend};
  std::vector<Program> programs;
  for (int ticket = 0; ticket < plan.schedule.grid_size(); ++ticket)
    programs.push_back(program_of(plan, params, table, turns, ticket));
  return programs;
}

// Whether every counter sees its turns 0, 1, 2, .. once each, in the order of tickets.
bool turns_follow_tickets(const std::vector<Program>& programs) {
  std::map<std::int64_t, int> next;
  for (const Program& program : programs) {
    for (const Addition& addition : program) {
      if (addition.turn != next[addition.counter]++) return false;
    }
  }
  return true;
}

// The tickets that a CTA has drawn and not done, and its additions for the first of them.
struct Cta {
  std::deque<std::size_t> tickets;
  std::size_t steps = 0;
};

// Rounds until all tickets are done by `resident` CTAs, each of which holds up to `held` of them:
// two where it draws the next one before it is done. In a round each adds once, if it is its turn.
// -1: nobody could go on.
int rounds_of(const std::vector<Program>& programs, int resident, std::size_t held = 1) {
  std::map<std::int64_t, int> done;
  std::vector<Cta> ctas(std::min<std::size_t>(resident, programs.size()));
  std::size_t next_ticket = 0;
  int rounds = 0;
  for (;;) {
    bool is_done = true;
    for (Cta& cta : ctas) {
      if (!cta.tickets.empty() && cta.steps == programs[cta.tickets.front()].size()) {
        cta.tickets.pop_front();
        cta.steps = 0;
      }
      for (; cta.tickets.size() < held && next_ticket < programs.size(); ++next_ticket) {
        if (!programs[next_ticket].empty()) cta.tickets.push_back(next_ticket);
      }
      is_done = is_done && cta.tickets.empty();
    }
    if (is_done) return rounds;
    std::vector<std::int64_t> passed_on;
    for (Cta& cta : ctas) {
      if (cta.tickets.empty()) continue;
      const Addition& addition = programs[cta.tickets.front()][cta.steps];
      if (done[addition.counter] != addition.turn) continue;
      passed_on.push_back(addition.counter);
      ++cta.steps;
    }
    if (passed_on.empty()) return -1;
    for (const std::int64_t counter : passed_on) ++done[counter];
    ++rounds;
  }
}

// Whether any number of CTAs gets through.
bool never_stalls(const std::vector<Program>& programs) {
  for (const int resident : {1, 2, 3, 7, 1000}) {
    for (const std::size_t held : {1, 2}) {
      if (rounds_of(programs, resident, held) < 0) return false;
    }
  }
  return true;
}

int longest_of(const std::vector<Program>& programs) {
  std::size_t longest = 0;
  for (const Program& program : programs) longest = std::max(longest, program.size());
  return static_cast<int>(longest);
}

constexpr Window left_alone{.left = 70, .right = Window::unbounded};
constexpr Window windows[] = {{},
                              causal,
                              left_alone,
                              {.left = Window::unbounded, .right = 150},
                              {.left = 100, .right = 0},
                              {.left = 40, .right = 300},
                              {.left = 0, .right = 0}};

BackwardParams deterministic_call(const AttentionShape& shape, Window window, bool is_packed) {
  auto params =
      is_packed ? packed_call<BackwardParams>(shape, window) : call<BackwardParams>(shape, window);
  params.deterministic = true;
  return params;
}

const InstanceList<BackwardInstance>& small_tiles() {
  static const InstanceList<BackwardInstance> table(
      {backward_instance("small", 64, MaskKind::windowed, block_m, block_n)});
  return table;
}

// What sequence_table.cu makes of these lengths: sequences in any order, their tiles together.
class HostTable {
 public:
  HostTable(const BackwardPlan& plan, const std::vector<std::pair<int, int>>& lengths,
            std::mt19937& random) {
    int first_q_tile = 0, row_q = 0, row_k = 0;
    for (const auto& [seqlen_q, seqlen_k] : lengths) {
      const int index = static_cast<int>(sequences_.size());
      // The last rows may be there and not attend.
      const int used_q = static_cast<int>(random() % 2 ? seqlen_q : random() % (seqlen_q + 1));
      const int used_k = static_cast<int>(random() % 2 ? seqlen_k : random() % (seqlen_k + 1));
      sequences_.push_back({.index = index,
                            .batch_q = 0,
                            .batch_k = 0,
                            .row_q = row_q,
                            .row_k = row_k,
                            .seqlen_q = used_q,
                            .rows_q = seqlen_q,
                            .seqlen_k = used_k,
                            .rows_k = seqlen_k,
                            .first_q_tile = first_q_tile,
                            .shift = used_k - used_q,
                            .stream = 0,
                            .first_q = 0,
                            .first_k = 0});
      first_q_tile += ceil_div(seqlen_q, plan.table.q_tile_rows);
      row_q += seqlen_q;
      row_k += seqlen_k;
    }
    std::vector<Sequence> order = sequences_;
    std::shuffle(order.begin(), order.end(), random);
    for (const Sequence& sequence : order) {
      const int count = ceil_div(sequence.rows_k, plan.table.tile_rows);
      for (int i = 0; i < count; ++i)
        tiles_.push_back({sequence.index, plan.table.tiles_descend ? count - 1 - i : i});
    }
    counts_[0] = static_cast<int>(tiles_.size());
    counts_[1] = first_q_tile;
  }

  SequenceTable view() const {
    return {.counts = counts_,
            .sequences = sequences_.data(),
            .tiles = tiles_.data(),
            .q_tiles = nullptr};
  }

 private:
  int counts_[2];
  std::vector<Sequence> sequences_;
  std::vector<TileEntry> tiles_;
};

// Of random lengths and windows: that a query tile's adders are the key tiles that visit it.
template <int kBlockM, int kBlockN>
void check_adders() {
  std::mt19937 random(5);
  const auto below = [&](int limit) { return static_cast<int>(random() % limit); };
  for (int round = 0; round < 3000; ++round) {
    Sequence sequence{};
    sequence.seqlen_q = below(40);
    sequence.seqlen_k = below(40);
    // Normalised by bounds that the shape gives, which other sequences may have filled.
    const AttentionShape bounds{.seqlen_q = sequence.seqlen_q + below(30),
                                .seqlen_k = sequence.seqlen_k + below(30)};
    // Of parts of a longer sequence the window may be anywhere.
    static const int origin[4] = {};
    const bool is_part = below(2) == 1;
    sequence.shift = is_part ? below(161) - 80 : sequence.seqlen_k - sequence.seqlen_q;
    const Window window = normalize_window({.left = below(45) - 1, .right = below(45) - 1}, bounds,
                                           {.origin = is_part ? origin : nullptr});
    std::map<int, std::set<int>> visitors;
    // Beyond seqlen_k there can be tiles of rows that do not attend.
    for (int tile = 0; tile * kBlockN < sequence.seqlen_k + 20; ++tile) {
      const Reach range = visited_tiles<kBlockM, kBlockN>(window, sequence, tile);
      for (int query_tile = range.begin; query_tile < range.end; ++query_tile)
        visitors[query_tile].insert(tile);
    }
    for (int query_tile = 0; query_tile * kBlockM < sequence.seqlen_q + 20; ++query_tile) {
      const BlockRange adders = adders_of<kBlockM, kBlockN>(window, sequence, query_tile);
      std::set<int> counted;
      for (int tile = adders.begin; tile < adders.end; ++tile) {
        counted.insert(tile);
        // Its neighbours tell whether it is the first or the last one.
        const auto adds = [&](int neighbour) {
          return visited_tiles<kBlockM, kBlockN>(window, sequence, neighbour).holds(query_tile);
        };
        CHECK(adds(tile));
        CHECK_EQ(adds(tile - 1), tile > adders.begin);
        CHECK_EQ(adds(tile + 1), tile + 1 < adders.end);
      }
      CHECK(counted == visitors[query_tile]);
    }
  }
}

// Rows of lists of as many key tiles of 128 that visit as many query tiles, of every head: such as
// there are, or any contents.
std::vector<int> random_lists(int heads, int tiles, int others, bool are_lists,
                              std::mt19937& random) {
  std::vector<int> data;
  for (int row = 0; row < heads * tiles; ++row) {
    std::vector<int> entries;
    const unsigned sparsity = random() % 4;
    for (int other = 0; other < others; ++other) {
      if (random() % 3 >= sparsity) entries.push_back(other * 256 + 1);
    }
    data.push_back(static_cast<int>(entries.size()));
    data.push_back(static_cast<int>(random() % tiles));
    entries.resize(others);
    data.insert(data.end(), entries.begin(), entries.end());
  }
  if (!are_lists) {
    for (int& number : data) number = random() % 2 ? static_cast<int>(random()) : number;
  }
  return data;
}

// A CTA of a kernel with lists (sm80/backward/own_turns.h): it marks what it skips, adds to what it
// visits, one after the other, and marks all.
struct MarkingCta {
  int tile;
  Sequence sequence;
  std::vector<std::int64_t> skipped;
  std::vector<std::pair<std::int64_t, int>> visits;  // counter and query tile
  std::vector<std::int64_t> all;
  std::size_t done = 0;
};

MarkingCta marking_cta(const BackwardPlan& plan, const BackwardParams& params, int ticket) {
  TileWork work;
  CHECK(find_work(plan.schedule, {}, params, ticket, work));
  const Sequence& sequence = work.sequence;
  const int q_tiles = ceil_div(params.shape.seqlen_q, block_m);
  const int key = work.tile * block_n;
  const BlockRange range = tiles_that_see<block_m>(params.window, sequence, key,
                                                   std::min(key + block_n, sequence.seqlen_k) - 1);
  const int heads = params.shape.num_heads_q / params.shape.num_heads_k / plan.dkdv_splits;
  const int first_head = work.head * heads;
  const HeadVisits<block_m> visits{.lists = params.sparsity.lists,
                                   .sequence = sequence.index,
                                   .tile = work.tile * block_n / list_tile,
                                   .range = range,
                                   .end_head = first_head + heads};
  const auto counter = [&](int head, int query_tile) {
    return std::int64_t{head} * plan.q_tiles + sequence.index * q_tiles + query_tile;
  };
  MarkingCta cta{.tile = work.tile, .sequence = sequence, .skipped = {}, .visits = {}, .all = {}};
  for (int head = first_head; head < first_head + heads; ++head) {
    for (int query_tile = range.begin; query_tile < range.end; ++query_tile) {
      cta.all.push_back(counter(head, query_tile));
      if (!visits.has(head, query_tile)) cta.skipped.push_back(cta.all.back());
    }
  }
  auto step = visits.first(first_head);
  for (int steps = visits.count(first_head); steps > 0; --steps) {
    cta.visits.push_back({counter(step.head, step.visit.block), step.visit.block});
    step = visits.next(step);
  }
  return cta;
}

// The key tiles that each counter's additions are of, in their order, by `resident` CTAs that take
// tickets one after the other; none, if nobody could go on.
using Order = std::map<std::int64_t, std::vector<int>>;
Order order_of_additions(const BackwardPlan& plan, const BackwardParams& params, int resident,
                         std::mt19937& random) {
  const DqTurns turns{.tiles_descend = plan.tiles_descend, .words = plan.turn_words};
  std::vector<unsigned> marks(plan.additions.count);
  const auto mark = [&](std::int64_t counter, int tile) {
    marks.at(counter * turns.words + tile / 32) |= 1u << tile % 32;
  };
  Order order;
  std::vector<MarkingCta> ctas;
  for (int ticket = 0;;) {
    for (; std::ssize(ctas) < resident && ticket < plan.schedule.grid_size(); ++ticket) {
      ctas.push_back(marking_cta(plan, params, ticket));
      for (const std::int64_t counter : ctas.back().skipped) mark(counter, ctas.back().tile);
    }
    if (ctas.empty()) return order;
    std::shuffle(ctas.begin(), ctas.end(), random);
    bool moves = false;
    for (MarkingCta& cta : ctas) {
      if (cta.done == cta.visits.size()) continue;
      const auto [counter, query_tile] = cta.visits[cta.done];
      const Reach before = turns.before(
          adders_of<block_m, block_n>(params.window, cta.sequence, query_tile), cta.tile);
      bool is_next = true;
      for (int word = before.begin / 32; 32 * word < before.end; ++word) {
        const unsigned wanted = DqTurns::bits_of(before, word);
        is_next = is_next && (marks.at(counter * turns.words + word) & wanted) == wanted;
      }
      if (!is_next) continue;
      moves = true;
      ++cta.done;
      order[counter].push_back(cta.tile);
      mark(counter, cta.tile);
    }
    const auto ended = std::ranges::partition(
        ctas, [](const MarkingCta& cta) { return cta.done < cta.visits.size(); });
    for (const MarkingCta& cta : ended) {
      for (const std::int64_t counter : cta.all) mark(counter, cta.tile);
    }
    if (!moves && ended.empty()) return {};
    ctas.erase(ended.begin(), ended.end());
  }
}

}  // namespace

std::span<const BackwardInstance* const> flash_attn_cuda::backward_instances() {
  return backward_table();
}

TEST(the_key_tiles_that_visit_a_query_tile_are_its_adders) {
  check_adders<1, 1>();
  check_adders<1, 8>();
  check_adders<2, 3>();
  check_adders<4, 4>();
  check_adders<4, 8>();
  check_adders<7, 2>();
  check_adders<8, 4>();
  check_adders<9, 9>();
}

TEST(turns_number_the_adders_from_the_first_that_starts) {
  const BlockRange adders{.begin = 3, .end = 7, .interior_begin = 3, .interior_end = 3};
  const DqTurns up{.tiles_descend = false}, down{.tiles_descend = true};
  for (int tile = 3; tile < 7; ++tile) {
    CHECK_EQ(up.turn_of(adders, tile), tile - 3);
    CHECK_EQ(down.turn_of(adders, tile), 6 - tile);
  }
}

TEST(additions_are_counted_in_turns_when_asked_for_and_there_are_queries) {
  auto params = deterministic_call(sizes(3, 100, 100, 4, 2, 64), left_alone, false);
  BackwardPlan plan = plan_backward(params, h200, small_tiles());
  CHECK(plan.takes_turns);
  CHECK(plan.tiles_descend);
  alignas(256) static char workspace[1];
  CHECK_EQ(reinterpret_cast<char*>(plan.additions.in(workspace)) - workspace,
           static_cast<std::ptrdiff_t>(plan.additions.offset));
  params.deterministic = false;
  plan = plan_backward(params, h200, small_tiles());
  CHECK(!plan.takes_turns && plan.additions.in(workspace) == nullptr);
  params.deterministic = true;
  params.shape.seqlen_q = 0;  // nobody zeroes the counters, and nobody adds
  CHECK(plan_backward(params, h200, small_tiles()).additions.in(workspace) == nullptr);
}

TEST(dense_turns_follow_tickets_and_never_wait_for_a_later_one) {
  for (const Window& window : windows) {
    for (const auto& [seqlen_q, seqlen_k] :
         {std::pair{250, 250}, {64, 400}, {400, 64}, {33, 31}, {1, 100}}) {
      for (const int num_heads_k : {1, 2, 4}) {
        const AttentionShape shape = sizes(2, seqlen_q, seqlen_k, 4, num_heads_k, 64);
        const BackwardParams params = deterministic_call(shape, window, false);
        DeviceInfo device = h200;
        for (const std::int64_t l2_bytes : {std::int64_t{1}, h200.l2_bytes}) {
          device.l2_bytes = l2_bytes;  // sections of one group of heads, or of all
          device.num_sms = l2_bytes == 1 ? 1 : 132;
          const BackwardPlan plan = plan_backward(params, device, small_tiles());
          const std::vector<Program> programs = programs_of(plan, params);
          CHECK(turns_follow_tickets(programs));
          CHECK(never_stalls(programs));
        }
      }
    }
  }
}

TEST(lengths_on_the_device_change_nothing_about_it) {
  const int seqused_q[] = {250, 0, 17, 100}, seqused_k[] = {9, 250, 0, 180};
  const int leftpad_k[] = {8, 33, 0, 100};
  const AttentionShape shape = sizes(4, 250, 250, 2, 1, 64);
  for (const Window& window : windows) {
    BackwardParams params = deterministic_call(shape, window, false);
    params.sequences.seqused_q = seqused_q;
    params.sequences.seqused_k = seqused_k;
    params.sequences.leftpad_k = leftpad_k;
    const BackwardPlan plan = plan_backward(params, h200, small_tiles());
    const std::vector<Program> programs = programs_of(plan, params);
    CHECK(longest_of(programs) > 0);
    CHECK(turns_follow_tickets(programs));
    CHECK(never_stalls(programs));
  }
}

TEST(packed_turns_follow_tickets_and_never_wait_for_a_later_one) {
  std::mt19937 random(6);
  for (int round = 0; round < 60; ++round) {
    std::vector<std::pair<int, int>> lengths(1 + random() % 6);
    AttentionShape shape{.batch_size = static_cast<int>(lengths.size()),
                         .num_heads_q = 4,
                         .num_heads_k = 1 << random() % 3,
                         .head_dim = 64,
                         .head_dim_v = 64};
    for (auto& [seqlen_q, seqlen_k] : lengths) {
      shape.seqlen_q += seqlen_q = static_cast<int>(random() % 200);
      shape.seqlen_k += seqlen_k = static_cast<int>(random() % 300);
    }
    const BackwardParams params = deterministic_call(shape, windows[round % 7], true);
    const BackwardPlan plan = plan_backward(params, h200, small_tiles());
    const HostTable table(plan, lengths, random);
    CHECK(table.view().counts[0] <= plan.table.tiles.count);
    CHECK(table.view().counts[1] <= plan.q_tiles);
    const std::vector<Program> programs = programs_of(plan, params, table.view());
    CHECK(turns_follow_tickets(programs));
    CHECK(never_stalls(programs));
  }
}

// Waiting in line costs at most a step for each key tile: the walk runs towards where the ranges
// of the key tiles end, not towards what all of them share.
TEST(key_tiles_follow_each_other_closely) {
  for (const Window& window : windows) {
    const AttentionShape shape = sizes(1, 1024, 1024, 1, 1, 64);
    const BackwardParams params = deterministic_call(shape, window, false);
    const BackwardPlan plan = plan_backward(params, h200, small_tiles());
    const std::vector<Program> programs = programs_of(plan, params);
    const int rounds = rounds_of(programs, 1000);
    CHECK(rounds >= longest_of(programs));
    CHECK(rounds <= longest_of(programs) + plan.schedule.num_tiles);
  }
}

TEST(with_lists_key_tiles_add_in_the_order_in_which_they_start) {
  static const InstanceList<BackwardInstance> table(
      {backward_instance("sparse", 64, MaskKind::windowed, block_m, block_n, any_mask)});
  std::mt19937 random(7);
  const int seqused_q[] = {600, 0}, seqused_k[] = {1200, 333};
  for (int round = 0; round < 60; ++round) {
    const bool are_lists = round % 4 != 0;
    BackwardParams params = deterministic_call(
        sizes(2, 1 + random() % 600, 1 + random() % 1200, 4, 1 << random() % 3, 64),
        windows[round % 7], false);
    if (round % 3 == 0) {
      params.sequences.seqused_q = seqused_q;
      params.sequences.seqused_k = seqused_k;
    }
    const int heads = round % 2 ? 4 : 1;
    const int tiles = ceil_div(params.shape.seqlen_k, list_tile);
    const int others = ceil_div(params.shape.seqlen_q, list_tile);
    const std::vector<int> lists = random_lists(heads, tiles, others, are_lists, random);
    params.sparsity.lists = {.data = lists.data(),
                             .batch_stride = 0,
                             .head_stride = heads == 1 ? 0 : tiles * (2 + others),
                             .tiles = tiles,
                             .others = others};
    const BackwardPlan plan = plan_backward(params, h200, table);
    params.window = plan.window;
    const int tickets = static_cast<int>(plan.schedule.grid_size());
    std::size_t visits = 0;
    for (int ticket = 0; ticket < tickets; ++ticket)
      visits += marking_cta(plan, params, ticket).visits.size();
    for (const int resident : {1, 3, 1000}) {
      const Order order = order_of_additions(plan, params, resident, random);
      std::size_t additions = 0;
      for (const auto& [counter, key_tiles] : order) {
        additions += key_tiles.size();
        if (are_lists)
          CHECK(std::ranges::is_sorted(
              key_tiles, [&](int a, int b) { return plan.tiles_descend ? a > b : a < b; }));
      }
      CHECK_EQ(additions, visits);
    }
  }
}
