"""The kernel table's entries of sm90, Hopper's own."""

from __future__ import annotations

from kernel_table.features import (
    ALIBI,
    BIAS,
    CACHE_MODIFIERS,
    DROPOUT,
    E4M3_CACHE,
    E4M3_LATENT,
    E4M3_PRODUCTS,
    LATENT,
    LISTS,
    MODIFIERS,
    OF_A_CACHE,
    ORDERED,
)
from kernel_table.row import NO_FEATURES, Feature, Kernel, Kind, entry, tile

# sm90 forward ------------------------------------------------------------------------------------
# A warp multiplies 16 queries, of two to four warpgroups. Stages: as many as fit, up to 4; the
# next tile's queries get a buffer before keys get a third, and a bias its two before either.
#
# drawing_registers: up to head dim 128 a warpgroup of its own draws dropout's decisions; above, the
# products have no registers to give, and consumers that draw for themselves are faster. The variant
# "alibi" is without those warps, and so is "long_modifiers"; in tiles of 128 queries a softcap is
# no faster without them.
# drops_turns: where something is dropped narrow heads are better off without turns, under a softcap
# alone with them.
# curves_in_softmax: the softmax applies the curve itself; above head dim 128 that gained nothing.
# alternates_probabilities: rows with modified scores gain nothing by it, or find no room (C7514 in
# pages), nor do short sequences, whose tiles have few steps (with one P instead of two the code is
# half as long), and at head dim 256 only those over pages gain.
# "tall": where lengths fill tiles of 256 queries better than those of 192 (Kind.tall).
# "cache": in pages whose size is a multiple of 8, or with keys split; at head dim 64 also for lower
# tiles. With the code for modified scores plain calls take 2 to 9 % longer.

# fmt: off
SM90_FORWARD = (
    entry(
        Kernel.sm90_forward, 64,
        block_m=128, block_n=128, num_warps=8, stages_q=2, stages_kv=4,
        producer_registers=40, consumer_registers=232, curves_in_softmax=True,
        tiles=(
            # A narrow head and few keys a step leave room for a second CTA on the SM.
            tile({"short": NO_FEATURES}, block_n=64, stages_kv=3, ctas_per_sm=2,
                 producer_registers=32, consumer_registers=104,
                 most_causal_seqlen=1088, most_full_seqlen=256),
            tile({"tall": NO_FEATURES}, kind=Kind.tall, block_m=256, block_n=64, num_warps=16,
                 producer_registers=32, consumer_registers=112),
            # Three consumer warpgroups leave the producer 32 registers.
            tile({"": NO_FEATURES}, block_m=192, num_warps=12,
                 producer_registers=32, consumer_registers=160),
            tile({"long_modifiers": MODIFIERS}, block_m=192, num_warps=12,
                 producer_registers=32, consumer_registers=160,
                 least_keys_full=1024, least_keys_windowed=1024),
            tile({"alibi": ALIBI}),
            tile({"dropout": MODIFIERS | DROPOUT},
                 consumer_registers=200, drawing_registers=72, drops_turns=True),
            tile({"cache": OF_A_CACHE}, alternates_probabilities=True),
            tile({"cache_modifiers": CACHE_MODIFIERS}),
            tile({"sparse": LISTS, "bias": BIAS}, alternates_probabilities=True),
            tile({"e4m3": E4M3_CACHE}, producer_registers=88, consumer_registers=208),
        ),
    ),
    entry(
        Kernel.sm90_forward, 96,
        block_m=128, block_n=128, num_warps=8, stages_q=2, stages_kv=3,
        producer_registers=40, consumer_registers=232, curves_in_softmax=True,
        tiles=(
            tile({"long": NO_FEATURES, "long_modifiers": MODIFIERS},
                 block_m=192, block_n=96, num_warps=12,
                 producer_registers=32, consumer_registers=160,
                 least_keys_full=1536, least_keys_windowed=1024),
            tile({"": NO_FEATURES}, alternates_probabilities=True),
            tile({"alibi": ALIBI}),
            tile({"dropout": MODIFIERS | DROPOUT}, consumer_registers=200, drawing_registers=72),
        ),
    ),
    entry(
        Kernel.sm90_forward, 128,
        block_m=128, block_n=128, num_warps=8, stages_q=2, stages_kv=2,
        producer_registers=40, consumer_registers=232, curves_in_softmax=True,
        tiles=(
            tile({"few_steps": NO_FEATURES}, most_causal_seqlen=512, most_full_seqlen=512),
            # Of higher tiles K and V are loaded less often, and there is less work between products
            # a pair, for less energy; and where tiles are long their coarser grid does not count.
            tile({"long": NO_FEATURES}, block_m=192, block_n=80, num_warps=12,
                 producer_registers=32, consumer_registers=160,
                 least_keys_full=8192, least_keys_windowed=4096),
            tile({"": NO_FEATURES}, alternates_probabilities=True),
            tile({"alibi": ALIBI}),
            tile({"dropout": MODIFIERS | DROPOUT}, consumer_registers=200, drawing_registers=72),
            tile({"cache": OF_A_CACHE}, alternates_probabilities=True),
            tile({"cache_modifiers": CACHE_MODIFIERS}),
            tile({"sparse": LISTS}, alternates_probabilities=True),
            tile({"bias": BIAS}, stages_q=1, alternates_probabilities=True),
            tile({"e4m3": E4M3_CACHE}, stages_q=1,
                 producer_registers=88, consumer_registers=208),
            tile({"fp8": E4M3_PRODUCTS}, block_n=96, stages_kv=4, alternates_probabilities=True),
            tile({"fp8_cache": E4M3_PRODUCTS | Feature.paged_kv}, block_n=96, stages_kv=4,
                 alternates_probabilities=True),
        ),
    ),
    # Multi-head latent attention's: O has the registers of head dim 128.
    entry(
        Kernel.sm90_forward, (192, 128),
        block_m=128, block_n=128, num_warps=8, stages_q=1, stages_kv=2,
        producer_registers=40, consumer_registers=232,
        tiles=(
            tile({"": NO_FEATURES}, alternates_probabilities=True),
            tile({"fp8": E4M3_PRODUCTS}, block_n=96, stages_kv=4, alternates_probabilities=True),
        ),
    ),
    entry(
        Kernel.sm90_forward, 192,
        block_m=128, block_n=96, num_warps=8, stages_q=1, stages_kv=2,
        producer_registers=40, consumer_registers=232,
        tiles=(
            tile({"": NO_FEATURES}, alternates_probabilities=True),
            tile({"dropout": MODIFIERS | DROPOUT}),
        ),
    ),
    entry(
        Kernel.sm90_forward, 256,
        block_m=128, block_n=64, num_warps=8, stages_q=1, stages_kv=2,
        producer_registers=40, consumer_registers=232,
        tiles=(
            tile({"": NO_FEATURES, "dropout": MODIFIERS | DROPOUT}),
            tile({"cache": OF_A_CACHE}, alternates_probabilities=True),
            tile({"cache_modifiers": CACHE_MODIFIERS}),
            tile({"e4m3": E4M3_CACHE}, producer_registers=56, consumer_registers=224),
        ),
    ),
    entry(
        Kernel.sm90_wide_forward, 512,
        block_m=64, block_n=64, num_warps=8, stages_kv=4,
        producer_registers=24, consumer_registers=240,
        tiles=(tile({"": NO_FEATURES, "modifiers": MODIFIERS}),),
    ),
)
# fmt: on

# sm90 latent -------------------------------------------------------------------------------------
# Of the rows that fit the smallest one runs: of more rows a product takes longer, and the ring is
# shorter. Stages: as many as fit, for two warpgroups whole blocks. One warpgroup has the registers
# that the launch gives. Of e4m3 two more convert keys, and a block's bytes take 42 KB of the ring.

# fmt: off
LATENT_OF_E4M3 = (
    tile({"rows16_e4m3": E4M3_LATENT}, block_m=16, stages_kv=20,
         producer_registers=112, consumer_registers=144),
    tile({"rows32_e4m3": E4M3_LATENT}, block_m=32, stages_kv=17,
         producer_registers=88, consumer_registers=232),
)
SM90_LATENT = tuple(
    entry(
        Kernel.sm90_latent, (64, latent),
        block_n=64, num_warps=4, producer_registers=0, consumer_registers=0,
        tiles=(
            tile({"rows16": LATENT}, block_m=16, stages_kv=stages[0]),
            tile({"rows32": LATENT}, block_m=32, stages_kv=stages[1]),
            tile({"rows64": LATENT}, block_m=64, stages_kv=stages[2], num_warps=8,
                 producer_registers=56, consumer_registers=224),
            *of_e4m3,
        ),
    )
    for latent, stages, of_e4m3 in (
        (256, (26, 24, 20), ()), (512, (25, 22, 18), LATENT_OF_E4M3),
    )
)
# fmt: on

# sm90 backward -----------------------------------------------------------------------------------
# Two warpgroups hold dK and dV. A CTA of a pair (sm90/isa/cta_pair.h) holds half of a tile's keys
# and multiplies half of dQ's columns of all of them, so that dQ is added half as often. Of wide
# heads one of the warpgroups holds dK, the other dV of the same keys (separate_keys).
#
# Registers: of the 128 that the launch gives every thread. 96 columns of dQ, all or a CTA's half,
# take more for dQ.
# stages_kv: two at head dim 64, so that the next tile's keys are there when this one ends. At 96
# they cost 2 %, beside lists they spill, and at 128 the dQ warpgroup has no registers for their
# addresses.
# stores_tiles: where there is room, which is up to head dim 128, not beside a bias or in pairs.
# holds_keys: S of 64 queries reads as much of K as of Q from shared memory; K in registers is read
# once a tile. Where a warpgroup has them: not at head dim 256, nor with dropout, nor for V.
# keeps_probabilities: not where there are no registers for P, beside a softcap's weights unless the
# head is narrow, and beside a bias at head dim 128. Beside the code for ALiBi alone, or for
# dropout, ptxas serializes the products then (C7512).
# rounds_differences: where key warpgroups wait for instructions more than for products, which is at
# head dim 64, plain and with ALiBi, and where it gained 2 % or more.
# finishes_dq, shares_tiles: those with issue slots, L2 and registers to spare. The few warps that
# finish keep up where a query sees so many keys; below, a kernel that follows is faster, as it is
# at head dim 64 under a mask (docs/backward_sm90.md). Beside lists they always do.
#
# Up to head dim 128 a softcap has rows of its own: its weights take registers that make the others
# slower, and decisions about dropout make it slower even where none are wanted.

NEVER = 2**31 - 1  # more keys than a sequence can have

# fmt: off
SM90_BACKWARD = (
    entry(
        Kernel.sm90_backward, 64,
        block_m=64, block_n=128, num_warps=8, stages_q=2, stages_do=2, stages_kv=2,
        producer_registers=32, key_registers=208, dq_registers=64, dq_columns=64,
        stores_tiles=True,
        tiles=(
            tile({"": ORDERED}, block_m=128, keeps_probabilities=True, shares_tiles=True,
                 rounds_differences=True,
                 finishes_dq=True, finish_keys_full=768, finish_keys_windowed=NEVER),
            tile({"alibi": ALIBI | ORDERED}, block_m=128, rounds_differences=True),
            tile({"dropout": ALIBI | DROPOUT | ORDERED}, block_m=128),
            tile({"softcap": MODIFIERS | ORDERED}, keeps_probabilities=True),
            tile({"softcap_dropout": MODIFIERS | DROPOUT | ORDERED}),
            tile({"sparse": LISTS}, stages_kv=1, keeps_probabilities=True, shares_tiles=True,
                 finishes_dq=True),
            tile({"bias": BIAS}, stores_tiles=False, keeps_probabilities=True),
        ),
    ),
    entry(
        Kernel.sm90_backward, 96,
        block_m=64, block_n=128, num_warps=8, stages_q=2, stages_do=2, stages_kv=1,
        producer_registers=32, key_registers=200, dq_registers=80, dq_columns=96,
        stores_tiles=True,
        tiles=(
            tile({"": ORDERED}, keeps_probabilities=True, shares_tiles=True,
                 rounds_differences=True,
                 finishes_dq=True, finish_keys_full=768, finish_keys_windowed=768),
            tile({"alibi": ALIBI | ORDERED, "dropout": ALIBI | DROPOUT | ORDERED}),
            tile({"softcap": MODIFIERS | ORDERED}, keeps_probabilities=True),
            tile({"softcap_dropout": MODIFIERS | DROPOUT | ORDERED}),
        ),
    ),
    entry(
        Kernel.sm90_backward, 128,
        block_m=64, block_n=128, num_warps=8, stages_q=2, stages_do=2, stages_kv=1,
        producer_registers=32, key_registers=208, dq_registers=64, dq_columns=64,
        stores_tiles=True,
        tiles=(
            tile({"pair": ORDERED}, block_n=256, ctas_per_tile=2, stores_tiles=False,
                 keeps_probabilities=True, shares_tiles=True,
                 finishes_dq=True, finish_keys_full=384, finish_keys_windowed=384,
                 least_keys_full=1024, least_keys_windowed=1536),
            tile({"": ORDERED}, keeps_probabilities=True, shares_tiles=True,
                 finishes_dq=True, finish_keys_full=384, finish_keys_windowed=384),
            tile({"alibi": ALIBI | ORDERED, "dropout": ALIBI | DROPOUT | ORDERED}),
            tile({"softcap": MODIFIERS | ORDERED,
                  "softcap_dropout": MODIFIERS | DROPOUT | ORDERED}),
            # What reads lists needs more registers here, at the expense of dQ's columns.
            tile({"sparse": LISTS}, key_registers=216, dq_registers=48, dq_columns=32,
                 keeps_probabilities=True, shares_tiles=True, finishes_dq=True),
            tile({"bias": BIAS}, stores_tiles=False),
        ),
    ),
    entry(
        Kernel.sm90_backward, (192, 128),
        block_m=64, block_n=128, num_warps=8, stages_q=2, stages_do=2, stages_kv=1,
        producer_registers=32, key_registers=200, dq_registers=80, dq_columns=96,
        ctas_per_tile=2, separate_keys=True,
        tiles=(tile({"": ORDERED}, keeps_probabilities=True, holds_keys=True),),
    ),
    entry(
        Kernel.sm90_backward, 192,
        block_m=64, block_n=128, num_warps=8, stages_q=2, stages_do=2, stages_kv=1,
        producer_registers=32, key_registers=200, dq_registers=80, dq_columns=96,
        ctas_per_tile=2, separate_keys=True,
        tiles=(
            tile({"": ORDERED}, keeps_probabilities=True, holds_keys=True,
                 key_registers=176, value_registers=224),
            tile({"dropout": MODIFIERS | DROPOUT | ORDERED}),
        ),
    ),
    # One buffer of dO is all that there is room for. dQ gets eight registers from the producer's
    # warps, to spill less in its loop.
    entry(
        Kernel.sm90_backward, 256,
        block_m=64, block_n=128, num_warps=8, stages_q=2, stages_do=1, stages_kv=1,
        producer_registers=24, key_registers=208, dq_registers=72, dq_columns=64,
        ctas_per_tile=2, separate_keys=True,
        tiles=(
            tile({"": ORDERED}, keeps_probabilities=True, rounds_differences=True),
            tile({"dropout": MODIFIERS | DROPOUT | ORDERED}),
        ),
    ),
    entry(
        Kernel.sm90_wide_backward, 512,
        block_m=64, block_n=64, num_warps=8, stages_kv=4,
        producer_registers=40, key_registers=232,
        tiles=(tile({"": ORDERED}),),
    ),
)
# fmt: on

# sm90, derivatives in a direction ----------------------------------------------------------------
# Calls whose scores nothing changes but a window; others run the sm80 rows.
# The keys of a step are as many as fit shared memory, with their values and the tangents of both.
# fmt: off
SM90_JVP = tuple(
    entry(
        Kernel.sm90_jvp, head_dim,
        block_m=128, block_n=block_n, num_warps=8, stages_kv=stages,
        producer_registers=24, consumer_registers=240,
        tiles=(tile({"tangent": Feature.tangent}),),
    )
    for head_dim, block_n, stages in (
        (64, 128, 2), (96, 128, 1), (128, 128, 1), (192, 64, 1), (256, 32, 1),
    )
)
# fmt: on
