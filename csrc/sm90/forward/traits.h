// Everything a forward kernel derives from its row of the kernel table (kernel_table/).
#pragma once

#include "sm90/scores/bias.h"
#include "sm90/scores/dropout_bits.h"
#include "sm90/scores/mask_bits.h"
#include "sm90/tile/traits.h"

namespace flash_attn_cuda::sm90 {

template <class Tag>
struct ForwardTraits : TileTraits<Tag> {
  using Base = TileTraits<Tag>;
  using Base::config, Base::own, Base::has, Base::block_m, Base::block_n, Base::head_dim,
      Base::head_dim_v, Base::consumers, Base::work_stages, Base::producer_registers,
      Base::consumer_registers;
  using Base::has_score_modifiers, Base::has_bias, Base::has_dropout, Base::is_sparse,
      Base::is_paged, Base::can_split, Base::is_e4m3, Base::converts_e4m3, Base::multiplies_e4m3;
  using typename Base::Stored, typename Base::Element;

  static_assert(!can_split || (!is_sparse && !has_dropout));
  static_assert(!has_dropout || !is_sparse, "decisions are drawn for blocks in their order");
  static_assert(!has_bias || (!has_score_modifiers && block_n % box_keys == 0));
  static_assert(!is_sparse || !has_score_modifiers, "a curve may be left to the softmax");
  static constexpr bool leaves_curve = has(curve_features) && own.curves_in_softmax;

  // A warpgroup of its own draws dropout's decisions, a warp on each of the SM's schedulers
  // (dropout.h), unless consumers draw for themselves.
  static constexpr bool draws_ahead = own.drawing_registers > 0;
  static constexpr int drawing_warps = 4;
  // Products of e4m3 take so little time that nobody waits for a turn.
  static constexpr bool goes_without_turns = multiplies_e4m3;
  static constexpr bool drops_turns = own.drops_turns || goes_without_turns;
  static_assert(has_dropout || !draws_ahead);
  static_assert(draws_ahead || !own.drops_turns, "consumers that draw for themselves take turns");
  static constexpr int warpgroups = 1 + consumers + (draws_ahead ? 1 : 0);
  static constexpr int threads = warpgroup_threads * warpgroups;

  // A second CTA on the SM multiplies while the first begins or ends a tile. It takes the registers
  // in which a warpgroup would hold the scores of one step beside the probabilities of another:
  // here products and softmax alternate.
  static constexpr int ctas_per_sm = config.ctas_per_sm;
  static constexpr bool overlaps_softmax = ctas_per_sm == 1;
  static_assert(ctas_per_sm == 1 || ctas_per_sm == 2);

  // There sequences are short and their ends count: if the last block has no more keys than these,
  // it is a narrow step, and a warp without queries leaves scores alone.
  static constexpr int narrow_keys = narrow_step_keys;

  // All of the producer's warps load e4m3 that becomes fp16, and one of their threads finds the
  // tiles. Elsewhere a thread of its own finds them for the producer where that takes long, with
  // lists, where tiles are short, or whole warps load; but where e4m3 is multiplied no warp is left
  // for it.
  static constexpr int e4m3_writers = 2;  // warps of a tile of keys, and of one of values
  static constexpr bool has_finder = !is_e4m3 && (is_sparse || is_paged || ctas_per_sm == 2);
  static constexpr int loaders = converts_e4m3 ? 2 * e4m3_writers : is_paged ? 2 : 1;  // warps
  // Those of the producer's that do not load tiles: wgmma reads e4m3 along the sum alone, which of
  // P V are the keys, so these warps transpose V (transposer.h).
  static constexpr int transposers = !multiplies_e4m3 ? 0 : is_paged ? 2 : 3;
  // The producer's warps that read of the tiles and do not find them.
  static constexpr int told_warps =
      transposers + (has_finder || converts_e4m3 || is_paged ? loaders : 0);

  // A warpgroup leaves out the blocks at either end of a tile's that only others of its queries
  // see. Where it has more to do with scores, or K and V come in pages, it costs more than it
  // saves.
  static constexpr bool drops_blocks =
      !is_sparse && !is_paged && !has_bias && !has_score_modifiers && !has_dropout;
  static_assert(overlaps_softmax || drops_blocks, "short steps are those of plain rows");
  // In pages, and over caches whose trees such rows read, one without any query does, where there
  // are registers for it.
  static constexpr bool drops_without_queries = is_paged && !is_e4m3 && !has_score_modifiers;

  // Without a spill in the kernel ptxas lets the blocks that a drawing warp has in hand overlap.
  static constexpr int launch_registers = launch_registers_of(threads, ctas_per_sm);
  static constexpr int drawing_registers = own.drawing_registers;

  // With registers for two P the next one is made while P V still reads this one, and the code of a
  // step is there twice.
  static constexpr bool alternates_probabilities = own.alternates_probabilities;
  static_assert(overlaps_softmax || !alternates_probabilities);

  using ScoresMma = SharedMma<Element, block_n, head_dim>;
  using NarrowScoresMma = SharedMma<Element, narrow_keys, head_dim>;
  using OutputMma = RegisterMma<Element, head_dim_v, block_n>;

  // Buffers: as many as the row says, which have to fit.
  static constexpr int query_bytes = block_m * head_dim * int(sizeof(Element));
  static constexpr int key_bytes = block_n * head_dim * int(sizeof(Element));
  static constexpr int value_bytes = block_n * head_dim_v * int(sizeof(Element));
  static constexpr int stage_bytes = key_bytes + value_bytes;
  static constexpr int smem_limit = smem_limit_of(ctas_per_sm);
  // Barriers and work; a mask's bits fit beside. What tokens' scales take is not in it: the last
  // assertion below counts them.
  static constexpr int smem_reserved = 2048;
  static constexpr int least_stages = 2;  // of K and V: one fills while the other is read
  static constexpr int bias_bytes = block_m * block_n * int(sizeof(Element));
  static constexpr int bias_stages = 2;
  static constexpr int smem_for_tiles =
      smem_limit - smem_reserved - (has_bias ? bias_stages * bias_bytes : 0);
  static constexpr int q_stages = own.stages_q;
  static constexpr int stages = own.stages_kv;
  static constexpr int tile_bytes = q_stages * query_bytes + stages * stage_bytes;
  static_assert(tile_bytes <= smem_for_tiles);
  // Of e4m3 the bytes of a block wait for their place in 16 bits (e4m3_producer.h), or values to be
  // transposed, of two blocks where there is room.
  static constexpr int value_row_stages = !multiplies_e4m3                                 ? 1
                                          : tile_bytes + 2 * value_bytes <= smem_for_tiles ? 2
                                                                                           : 1;
  static constexpr int waiting_bytes = multiplies_e4m3 ? value_row_stages * value_bytes
                                       : is_e4m3       ? block_n * (head_dim + head_dim_v)
                                                       : 0;
  // O of e4m3 is a sum of parts of so many steps (output_parts.h).
  static constexpr int steps_of_part = multiplies_e4m3 ? 256 / block_n : 0;
  // O goes through shared memory of its own where there is room.
  static constexpr int output_bytes = block_m * head_dim_v * int(sizeof(Stored));
  static constexpr bool stores_tiles = tile_bytes + waiting_bytes + output_bytes <= smem_for_tiles;
  // Rows that a thread stores: a warpgroup's, or a warp's, which then waits for nobody. Where tiles
  // are long the fewer stores are the cheaper ones.
  static constexpr int stored_rows = ctas_per_sm == 2 ? 16 : 64;
  CUTE_DEVICE static bool stores(int thread) { return thread % (2 * stored_rows) == 0; }

  // Dropout's decisions about a step, words of bits for every thread of a consumer warpgroup. One
  // buffer is enough: consumers take their words when a step's scores are there, and the next ones
  // are wanted a whole step later.
  using Words = WordLayout<draws_ahead ? block_n : 128>;  // of no use where nobody draws ahead
  static constexpr int word_stages = 1;
  struct DropoutWords {
    Ring<word_stages> ring[consumers];  // each warpgroup is at a step of its own
    std::uint32_t words[consumers][word_stages][Words::words][warpgroup_threads];
  };
  struct Nothing {};

  // One buffer for bits: the next ones are wanted a step later at the earliest.
  static_assert(!is_sparse || (block_m == list_tile && block_n == list_tile));
  struct SparseBlocks {
    MaskBits bits[consumers];
    Ring<1> bits_ring[consumers];  // each warpgroup is at a step of its own
    VisitedKeys visited[stages];   // of the blocks in k
  };

  using QueryLayout = TileLayout<Element, 64, head_dim, q_stages * consumers>;
  using KeyLayout = TileLayout<Element, block_n, head_dim, stages>;
  using ValueRows =
      TileLayout<Element, block_n, head_dim_v, multiplies_e4m3 ? value_row_stages : stages>;
  using ValueLayout =
      std::conditional_t<multiplies_e4m3, TileLayout<Element, head_dim_v, block_n, stages>,
                         ValueRows>;

  struct SharedStorage {
    alignas(1024) Element q[q_stages * block_m * head_dim];
    alignas(1024) Element k[stages * block_n * head_dim];
    alignas(1024) Element v[stages * block_n * head_dim_v];
    alignas(1024) Stored o[stores_tiles ? block_m * head_dim_v : 8];
    alignas(1024) Element bias[has_bias ? bias_stages * block_m * block_n : 8];
    alignas(multiplies_e4m3 ? 1024 : 16) uint4 bytes[is_e4m3 ? waiting_bytes / 16 : 1];
    Ring<q_stages> q_ring;
    Ring<stages> k_ring;
    Ring<stages> v_ring;
    Ring<value_row_stages> value_rows_ring;  // of values to be transposed
    Ring<bias_stages> bias_ring;
    Ring<work_stages> work_ring;
    std::uint64_t tile_wanted;  // the producer has little left to load: for the thread that finds
    std::conditional_t<is_sparse, SparseWorkItem<block_n>, WorkItem> work[work_stages];
    // Of tokens, of the blocks in k and in v.
    alignas(is_e4m3 ? 8
                    : 4) float key_scales[converts_e4m3 ? stages : 1][converts_e4m3 ? block_n : 1];
    alignas(is_e4m3
                ? 8
                : 4) float value_scales[converts_e4m3 ? stages : 1][converts_e4m3 ? block_n : 1];
    // Of the blocks in k, of each writer's keys: pages are not in the table.
    bool misses_keys[is_paged ? stages : 1][converts_e4m3 ? e4m3_writers : 1];
    std::conditional_t<is_sparse, SparseBlocks, Nothing> sparse;
    std::conditional_t<draws_ahead, DropoutWords, Nothing> dropout;
  };

  static_assert(block_m == 64 * consumers && consumers >= 2 && consumers <= most_consumers);
  static_assert(instruction_columns<ScoresMma> == block_n, "instructions as wide as a step");
  static_assert(producer_registers + consumers * consumer_registers + drawing_registers <=
                warpgroups * launch_registers);
  static_assert(stages >= least_stages);
  static_assert(sizeof(SharedStorage) <= smem_limit);
};

}  // namespace flash_attn_cuda::sm90
