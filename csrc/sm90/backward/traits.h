// Everything a backward kernel derives from its row of the kernel table (kernel_table/).
#pragma once

#include "shared/mask/block_lists.h"
#include "shared/mask/block_range.h"
#include "shared/schedule/tile_parts.h"
#include "shared/schedule/tile_work.h"
#include "shared/scores/score_modifiers.h"
#include "sm90/isa/barriers.h"
#include "sm90/isa/copy.h"
#include "sm90/isa/cta.h"
#include "sm90/isa/gemm.h"
#include "sm90/scores/bias.h"

namespace flash_attn_cuda::sm90 {

// A tile of work: a key tile, and the steps that it takes, each a query tile of one of the query
// heads that share the key head.
struct BackwardWorkItem {
  TileWork work;
  int split;  // of the query heads
  int head_k;
  int first_head;  // of the query heads
  int end_head;
  BlockRange range;  // the query tiles that it visits
  int first_tile;    // in this order
  int last_tile;
  int direction;
  bool half_starts_later;  // the window hides the first query tile from the second half of the keys
  Reach added_before;      // query tiles to whose dQ key tiles before this one have added
  Reach added_after;       // those to whose dQ later ones will; all, where the order is unknown
  int part;                // of the tile's steps, where CTAs share it
  int parts;
  int first_place;  // of their sums
  int first_sum;    // of dQ of first_head, tile 0: which tile of dq_accum
  int sums_per_head;

  CUTE_DEVICE int steps() const { return (end_head - first_head) * (range.end - range.begin); }
};

// A tile of work in a kernel for block-sparse masks.
struct SparseBackwardWorkItem : BackwardWorkItem {
  int first_step;  // of all that the tile takes, if this is a part of them
  int num_steps;

  CUTE_DEVICE int steps() const { return num_steps; }
};

// How the steps of a tile follow one another, for warpgroups that keep it in registers.
struct StepOrder {
  int first_tile;
  int last_tile;
  int direction;

  CUTE_DEVICE explicit StepOrder(BackwardWorkItem const& item)
      : first_tile(item.first_tile), last_tile(item.last_tile), direction(item.direction) {}
};

// One of the steps of a tile: a query tile of one query head. They follow one another.
struct Step {
  int head;
  int tile;

  CUTE_DEVICE static Step first(BackwardWorkItem const& item) {
    return {item.first_head, item.first_tile};
  }
  template <class Order>
  CUTE_DEVICE void advance(Order const& order) {
    const bool next_head = tile == order.last_tile;
    head += next_head ? 1 : 0;
    tile = next_head ? order.first_tile : tile + order.direction;
  }

  // The tile of dq_accum to which the step adds dQ, or the counter of such additions.
  CUTE_DEVICE std::int64_t sum(BackwardWorkItem const& item) const {
    return item.first_sum + std::int64_t{head - item.first_head} * item.sums_per_head + tile;
  }
};

// A step as the producer tells the key warpgroups of it, with the queries.
struct VisitedQueries {
  Step step;
  Pieces pieces;      // what a list says
  bool is_in_window;  // which hides no pair
};

template <class Tag>
struct BackwardTraits {
  static constexpr BackwardConfig config = Tag::config;
  static constexpr Sm90BackwardConfig own = Tag::own;
  static constexpr int block_m = config.block_m;
  static constexpr int block_n = config.block_n;
  static constexpr int head_dim = config.head_dim;
  static constexpr int head_dim_v = config.head_dim_v;
  static constexpr int key_warps = config.num_warps;  // warps that hold dK and dV
  static constexpr int key_warpgroups = key_warps / 4;
  // A CTA of a pair holds half of a tile's keys and multiplies half of dQ's columns of all of them
  // (sm90/isa/cta_pair.h), so that dQ is added half as often.
  static constexpr int ctas_per_tile = config.ctas_per_tile;
  static constexpr bool in_pairs = ctas_per_tile == 2;
  static constexpr int cta_keys = block_n / ctas_per_tile;
  static constexpr int cta_columns = head_dim / ctas_per_tile;
  static constexpr int key_parts = cta_keys / 64;
  // One warpgroup holds dV, another dK of the same 64 keys; else each both of its own.
  static constexpr bool separate = own.separate_keys;
  static_assert(separate == (key_parts < key_warpgroups));
  static constexpr int dq_warps = 4;
  static constexpr int dout_stages = own.stages_do;
  static constexpr int threads = warpgroup_threads * (2 + key_warpgroups);

  static constexpr bool has(FeatureSet features) { return (config.features & features) != 0; }
  static constexpr bool has_score_modifiers = has(modifier_features);
  static constexpr bool has_dropout = has(feature::dropout);
  // A curve's slope makes weights of their own of P (scores.h).
  static constexpr bool has_weights = has(curve_features);

  static constexpr bool is_sparse = has(feature::block_sparse);
  static constexpr bool writes_fp32 = can_write_fp32(config.features);
  static_assert(!is_sparse ||
                (!separate && !has_score_modifiers && !has_dropout && block_n == list_tile));
  static constexpr bool has_bias = has(feature::bias);
  static_assert(!has_bias || (!separate && !has_score_modifiers && !has_dropout && !is_sparse));
  // The producer tells the key warpgroups of every step, for which they have no registers.
  static constexpr bool announces = is_sparse || has_bias;
  using WorkItem = std::conditional_t<is_sparse, SparseBackwardWorkItem, BackwardWorkItem>;

  // The kernel writes dq where no other key tile adds to it any more; with lists that is not known
  // without reading them all. Its idle warps may convert sums of dQ to dq (finish.h).
  static constexpr bool writes_dq = !is_sparse;
  static constexpr bool finishes_dq = config.finishes_dq;
  // A CTA may take all key tiles of a head.
  static constexpr bool sweeps = writes_dq && !in_pairs;
  CUTE_HOST_DEVICE static bool has_one_key_tile(Sequence const& sequence) {
    return writes_dq && sequence.seqlen_k <= block_n;
  }

  static constexpr bool shares_tiles = config.shares_tiles;

  // Where a step has no more queries than half the tile has keys, a diagonal leaves one of the two
  // key warpgroups nothing to do in the first.
  static constexpr bool skips_hidden_half =
      !is_sparse && !has_bias && !in_pairs && key_parts == 2 && block_m == 64;

  // Dropout makes P negative where it drops, for dS, and then zero for dV.
  static constexpr bool marks_dropped = has(feature::dropout) && !has_weights;

  // dK starts before dS is handed to the others. Elsewhere that gained nothing
  // (benchmarks/results/experiments.md), and with lists or a bias nobody has tried.
  static constexpr bool starts_dk_first =
      block_m == 64 && !separate && !has_weights && !has_dropout && !announces;
  // What a step would read from shared memory on its way waits in registers. Elsewhere there are
  // none for it, or it gained nothing.
  static constexpr bool reads_ahead = starts_dk_first && in_pairs && config.dtype == Dtype::bf16;

  // P stays in registers for dV while dS is made.
  static constexpr bool keeps_probabilities = own.keeps_probabilities;

  // Two pairs of dS an instruction, for one more rounding. Not in fp16, whose callers want its bits
  // and whose range a difference may leave.
  static constexpr bool rounds_differences = own.rounds_differences && config.dtype == Dtype::bf16;
  static_assert(!rounds_differences || !has(feature::dropout), "its marks are signs of P");

  static constexpr int launch_registers = launch_registers_of(threads);
  static constexpr int producer_registers = own.producer_registers;
  static constexpr int dq_registers = own.dq_registers;
  static constexpr int key_registers = own.key_registers;
  static constexpr int value_registers =
      own.value_registers > 0 ? own.value_registers : key_registers;

  using Element = ElementOf<config.dtype>;
  using ScoresMma = SharedMma<Element, block_m, head_dim>;  // S^T = K Q^T and dP^T = V dO^T
  static constexpr bool holds_keys = own.holds_keys;
  using HeldScoresMma = HeldMma<Element, block_m, head_dim>;
  // dV = P^T dO and dK = dS^T Q; in halves where a whole row's accumulator is all the registers
  // that the launch gives, because that is as many as an instruction may name.
  static constexpr int accumulator_registers(int columns) {
    return 64 * columns / warpgroup_threads;
  }
  template <int kColumns>
  using GradientMma =
      RegisterMma<Element,
                  accumulator_registers(kColumns) < launch_registers ? kColumns : kColumns / 2,
                  block_m>;
  using KeyGradientMma = GradientMma<head_dim>;
  using ValueGradientMma = GradientMma<head_dim_v>;
  // Columns at a time, for dQ's registers: the fewer, the more often dS is read.
  static constexpr int dq_columns = own.dq_columns;
  // dQ = dS K, of dS^T as it lies in registers, or of dS, which is the bias's gradient as well.
  using DqMma = std::conditional_t<has_bias, RowsMma<Element, dq_columns, 64>,
                                   TransposedMma<Element, dq_columns, 64>>;
  static_assert(cta_columns % dq_columns == 0);

  static constexpr int key_bytes =
      cta_keys * (head_dim + (in_pairs ? cta_columns : 0)) * int(sizeof(Element));
  static constexpr int value_bytes = cta_keys * head_dim_v * int(sizeof(Element));
  static constexpr int row_bytes = block_m * int(sizeof(float));
  static constexpr int bias_bytes = has_bias ? block_m * block_n * int(sizeof(Element)) : 0;
  // Number of a stage's tile of the `part`'th 64 keys, in a buffer of tiles of 64 keys.
  CUTE_HOST_DEVICE static constexpr int part_tile(int stage, int part) {
    return stage * key_parts + part;
  }
  // part_tile() of dS; where dK and dV leave through its buffers, tiles of the same keys lie side
  // by side and are as many bytes as the keys' dK.
  CUTE_HOST_DEVICE static constexpr int ds_tile(int stage, int part) {
    return stores_in_ds ? part * ds_stages + stage : part_tile(stage, part);
  }
  static constexpr bool stores_in_ds = in_pairs && !separate;
  static constexpr int stages = own.stages_q;  // and of a bias
  static constexpr int ds_stages = 2;          // of dS, and of P between warpgroups
  // With lists the tile in hand and the next; else up to three tiles of a step each, and the one
  // that is being taken (dispatcher.h).
  static constexpr int work_stages = is_sparse ? 2 : 4;
  static constexpr int added_stages = 4;  // steps of which dQ has been added
  static constexpr int drawn_stages = 2;  // tickets that one CTA of a pair takes for the other
  static constexpr int key_stages = own.stages_kv;  // of K and V
  // dK and dV leave through shared memory of their own, while the next tile begins.
  static constexpr bool stores_tiles = own.stores_tiles;
  // K lies in boxes of which a CTA's columns of dQ are whole ones.
  static constexpr int key_box_columns = box_columns<cta_columns>;
  using KeyLayout = TileLayout<Element, 64, head_dim, key_stages * key_parts, key_box_columns>;
  using PeerKeyLayout = TileLayout<Element, 64, cta_columns, key_parts>;
  using ValueLayout = TileLayout<Element, 64, head_dim_v, key_stages * key_parts>;
  using QueryLayout = TileLayout<Element, block_m, head_dim, stages>;
  using OutputLayout = TileLayout<Element, block_m, head_dim_v, dout_stages>;  // of dO
  using ScoresLayout =
      std::conditional_t<has_bias, TileLayout<Element, block_m, 64, ds_stages * key_parts>,
                         TileLayout<Element, 64, block_m, ds_stages * key_parts>>;

  // The alignment of a tile that TMA copies, or of the few elements in place of a missing one.
  static constexpr int tile_alignment(bool exists) { return exists ? 1024 : 16; }

  static constexpr int weight_vectors =
      block_m * 64 * int(sizeof(Element)) / warpgroup_threads / 16;
  static constexpr int weight_threads = separate ? warpgroup_threads : 1;

  // What a CTA of a pair has of the other one.
  struct FromPeer {
    alignas(1024) Element k[cta_keys * cta_columns];           // its keys, this CTA's columns of dQ
    alignas(1024) Element ds[ds_stages * cta_keys * block_m];  // of its keys
    Ring<drawn_stages> drawn_ring;  // "full" of the CTA that reads, "empty" of the one that takes
    std::uint32_t drawn[drawn_stages];
  };
  struct Nothing {};

  struct SharedStorage {
    alignas(1024) Element k[key_stages * cta_keys * head_dim];
    alignas(1024) Element v[key_stages * cta_keys * head_dim_v];
    alignas(1024) Element q[stages * block_m * head_dim];
    alignas(1024) Element dout[dout_stages * block_m * head_dim_v];
    alignas(1024) Element ds[ds_stages * cta_keys * block_m];  // dS^T: keys x queries, or dS
    // dK and dV on their way out.
    alignas(tile_alignment(stores_tiles)) Element dk[stores_tiles ? block_n * head_dim : 8];
    alignas(tile_alignment(stores_tiles)) Element dv[stores_tiles ? block_n * head_dim_v : 8];
    alignas(128) float lse_log2[stages][block_m];
    alignas(128) float softmax_d[dout_stages][block_m];
    alignas(tile_alignment(has_bias)) Element bias[has_bias ? stages * block_n * block_m : 8];
    alignas(separate ? 128 : 16)
        uint4 weights[separate ? ds_stages : 1][separate ? weight_vectors : 1][weight_threads];
    Ring<key_stages> key_ring;    // K, and what says that K and V are read
    Ring<key_stages> value_ring;  // V
    Ring<stages> q_ring;          // with lse_log2 and bias
    Ring<dout_stages> dout_ring;  // with softmax_d
    Ring<ds_stages> ds_ring;
    Ring<ds_stages> weights_ring;
    Ring<work_stages> work_ring;
    WorkItem work[work_stages];
    Ring<added_stages> added_ring;  // holds nothing but the event
    std::uint64_t tile_wanted;      // with lists: the producer has little left to load
    int has_loads;                  // 0 when the producer has ended
    VisitedQueries visited[announces ? stages : 1];  // of the tiles in q
    Step ds_steps[is_sparse ? ds_stages : 1];        // of those in ds
    int parts_done[key_warpgroups];                  // of the tile, those before this one
    [[no_unique_address]] std::conditional_t<in_pairs, FromPeer, Nothing> from_peer;
  };

  static_assert(block_m % 64 == 0 && key_warpgroups == 2 && (key_parts == 1 || key_parts == 2));
  static_assert(!separate || in_pairs, "nobody has needed one without the other");
  static_assert(!separate || stages == ds_stages, "one place for Q, P and dS of a step");
  static_assert(!in_pairs || (key_stages == 1 && block_m == 64));
  static_assert(!in_pairs || !has_bias, "the bias of a CTA's keys alone would have to be loaded");
  static_assert(!stores_in_ds || (head_dim == ds_stages * block_m && head_dim_v == head_dim),
                "dK and dV of a part in place of its dS");
  static_assert(!stores_in_ds || !stores_tiles, "one place for them");
  static_assert(producer_registers + dq_registers + value_registers + key_registers <=
                (2 + key_warpgroups) * launch_registers);
  static_assert(!holds_keys || separate, "keys.h has no registers for K");
  static_assert(!shares_tiles || !separate, "keys.h joins the parts");
  static_assert(!separate || !marks_dropped, "dV there is made of P as it is");
  static_assert((block_m & (block_m - 1)) == 0, "the preprocess kernel shifts by it");
  static_assert(instruction_columns<ScoresMma> == block_m, "instructions as wide as a step");
  static_assert(sizeof(SharedStorage) <= smem_limit_of(1));
};

}  // namespace flash_attn_cuda::sm90
