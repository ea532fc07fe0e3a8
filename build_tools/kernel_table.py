"""The kernel table: every attention kernel this package compiles, and all that is decided for it.

One entry for each family, pass and head dim: tile, stages, warps, registers and paths, then the
variants that it comes in and where they differ. csrc/flash_attn/config.h says what each field
means; kernels and planning read them from the row and decide nothing by a head dim of their own.
``python -m build_tools.kernel_table`` prints the rows that come of it.

Of the rows that cover a request the first one runs: see ``in_order`` below.
"""

from __future__ import annotations

import sys
from typing import Any

from build_tools import generate_units
from build_tools.kernel_row import (
    NO_FEATURES,
    BackwardRow,
    Entry,
    Family,
    Feature,
    ForwardRow,
    Kernel,
    KernelRow,
    Kind,
    entry,
    tile,
)

# A kernel is slower with a feature's code in it even where a call does not use it, so rows with
# features come behind those without (docs/kernels.md). Dropout draws for every tile, whether
# or not the scores are modified as well. What rows may spill: spill_allowances.json.
SOFTCAP, ALIBI, DROPOUT = Feature.softcap, Feature.alibi, Feature.dropout
ORDERED = Feature.deterministic
LISTS, BIAS = Feature.block_sparse, Feature.bias
OF_A_CACHE = Feature.paged_kv | Feature.split_kv
MODIFIERS = SOFTCAP | ALIBI
CACHE_MODIFIERS = MODIFIERS | OF_A_CACHE
E4M3_CACHE = OF_A_CACHE | Feature.e4m3_kv
# Lists of blocks, a bias, and whatever comes with them.
MASKED = MODIFIERS | DROPOUT | LISTS | BIAS

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
        ),
    ),
    # Multi-head latent attention's: O has the registers of head dim 128.
    entry(
        Kernel.sm90_forward, (192, 128),
        block_m=128, block_n=128, num_warps=8, stages_q=1, stages_kv=2,
        producer_registers=40, consumer_registers=232,
        tiles=(tile({"": NO_FEATURES}, alternates_probabilities=True),),
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

# sm80 forward ------------------------------------------------------------------------------------
# Four warps of 32 query rows up to head dim 128, of 16 above: what O and S leave of 255 registers.
# keeps_pointers: on an H200 that gained 3 % at head dim 64, and cost 6 % at 128 (causal, seqlen
# 512), where they are spilled. Masked tiles have sides that divide the 128 of a list's tiles. Bytes
# of e4m3 wait beside the tile of 16 bits that is made of them.

E4M3 = MODIFIERS | E4M3_CACHE
PLAIN_AND_FEATURES = {"": NO_FEATURES, "modifiers": CACHE_MODIFIERS, "dropout": MODIFIERS | DROPOUT}

# fmt: off
SM80_FORWARD = (
    entry(
        Kernel.sm80_forward, 32,
        block_m=128, block_n=128, num_warps=4, keeps_pointers=True,
        tiles=(tile(PLAIN_AND_FEATURES),),
    ),
    entry(
        Kernel.sm80_forward, 64,
        block_m=128, block_n=96, num_warps=4, keeps_pointers=True,
        tiles=(tile(PLAIN_AND_FEATURES), tile({"masked": MASKED}, block_n=64)),
    ),
    entry(
        Kernel.sm80_forward, 96,
        block_m=128, block_n=64, num_warps=4,
        tiles=(tile(PLAIN_AND_FEATURES),),
    ),
    entry(
        Kernel.sm80_forward, 128,
        block_m=128, block_n=64, num_warps=4,
        tiles=(tile({**PLAIN_AND_FEATURES, "masked": MASKED, "e4m3": E4M3}),),
    ),
    entry(
        Kernel.sm80_forward, 192,
        block_m=64, block_n=64, num_warps=4,
        tiles=(tile(PLAIN_AND_FEATURES),),
    ),
    entry(
        Kernel.sm80_forward, 256,
        block_m=64, block_n=64, num_warps=4,
        tiles=(
            tile({**PLAIN_AND_FEATURES, "masked": MASKED}),
            tile({"e4m3": E4M3}, block_n=32),
        ),
    ),
    # Two CTAs have half of O's columns each, and S twice. One row for plain and modified scores.
    entry(
        Kernel.sm80_forward, 512,
        block_m=64, block_n=64, num_warps=4, columns_per_cta=256,
        tiles=(
            tile({"": CACHE_MODIFIERS, "dropout": MODIFIERS | DROPOUT, "masked": MASKED}),
            tile({"smem99k": CACHE_MODIFIERS | DROPOUT}, block_n=16),
            tile({"masked_smem99k": MASKED}, block_m=32, block_n=32, num_warps=2),
            tile({"e4m3": E4M3}, block_n=32),
            tile({"e4m3_smem99k": E4M3}, block_m=32, block_n=16, num_warps=2),
        ),
    ),
)

# sm80 decode -------------------------------------------------------------------------------------
# For tiles of 16 rows; block_n: keys that a warp takes at a time. Stages: about 96 KiB of them, as
# two CTAs then share an SM of a Hopper GPU with 128 KiB of loads under way, and one fits the 99 KiB
# of the GPUs that have least; there a single warp's leave room for Q as well. At most 6.
# shares_queries: fragments of Q and O fill the registers up to head dim 192. Conversions bound a
# kernel of e4m3 too: more warps an SM and, up to head dim 256, slices of 32 keys are worth more
# than loads under way.

DECODE = CACHE_MODIFIERS | Feature.packed_gqa
DECODE_E4M3 = DECODE | Feature.e4m3_kv
CONVERTING: dict[str, Any] = {"ctas_per_sm": 2, "shares_queries": True}

# fmt: off
SM80_DECODE = (
    entry(
        Kernel.sm80_decode, 32,
        block_m=16, block_n=32, num_warps=4, stages_kv=6,
        tiles=(tile({"decode": DECODE}),),
    ),
    entry(
        Kernel.sm80_decode, 64,
        block_m=16, block_n=32, num_warps=4,
        tiles=(
            tile({"decode": DECODE}, stages_kv=3),
            tile({"decode_e4m3": DECODE_E4M3}, stages_kv=4, ctas_per_sm=3),
        ),
    ),
    entry(
        Kernel.sm80_decode, 96,
        block_m=16, block_n=16, num_warps=4, stages_kv=4,
        tiles=(tile({"decode": DECODE}),),
    ),
    entry(
        Kernel.sm80_decode, 128,
        block_m=16, num_warps=4,
        tiles=(
            tile({"decode": DECODE}, block_n=16, stages_kv=3),
            tile({"decode_e4m3": DECODE_E4M3}, block_n=32, stages_kv=3, **CONVERTING),
            tile(
                {"decode_e4m3_smem99k": DECODE_E4M3}, block_n=32, stages_kv=2, **CONVERTING,
            ),
        ),
    ),
    entry(
        Kernel.sm80_decode, 192,
        block_m=16, block_n=16, num_warps=4, stages_kv=2,
        tiles=(tile({"decode": DECODE}),),
    ),
    entry(
        Kernel.sm80_decode, 256,
        block_m=16, shares_queries=True,
        tiles=(
            tile({"decode": DECODE}, block_n=16, num_warps=2, stages_kv=3),
            tile({"decode_smem99k": DECODE}, block_n=16, num_warps=1, stages_kv=5),
            tile({"decode_e4m3": DECODE_E4M3}, block_n=32, num_warps=2, stages_kv=2, ctas_per_sm=3),
        ),
    ),
    # Two warps share a slice of keys, with half of its columns each.
    entry(
        Kernel.sm80_decode, 512,
        block_m=16, block_n=16, shares_queries=True, columns_per_warp=256,
        tiles=(
            tile({"decode": DECODE}, num_warps=4, stages_kv=3),
            tile({"decode_smem99k": DECODE}, num_warps=2, stages_kv=2),
            tile({"decode_e4m3": DECODE_E4M3}, num_warps=2, stages_kv=3, ctas_per_sm=3),
        ),
    ),
)

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

# sm80 backward -----------------------------------------------------------------------------------
# Shared memory decides who runs what: the first tiles of head dim 32 to 192 fit the 163 KiB of an
# A100, that of 256 needs a Hopper GPU; the variants named by shared memory serve what has less,
# plain and with everything, to compile less.
#
# The code of a fixed order costs a plain kernel nothing at head dim 128, 2.5 % at 64 and 6 % at
# 256, which have a row of their own for it; elsewhere the row of modified scores serves it.

# How the eight warps lie over the products: scores along queries, dK and dV along keys, dQ along
# queries. Each product wants the most square share of its own shape.
WARPS_2_4_4 = {"num_warps": 8, "warps_m_scores": 2, "warps_n_dkdv": 4, "warps_m_dq": 4}
WARPS_2_4_2 = {"num_warps": 8, "warps_m_scores": 2, "warps_n_dkdv": 4, "warps_m_dq": 2}
WARPS_4_2_2 = {"num_warps": 8, "warps_m_scores": 4, "warps_n_dkdv": 2, "warps_m_dq": 2}
FOUR_WARPS = {"num_warps": 4, "warps_m_scores": 2, "warps_n_dkdv": 2, "warps_m_dq": 2}

EVERYTHING = MODIFIERS | ORDERED | DROPOUT
WITH_FEATURES = {"modifiers": MODIFIERS | ORDERED, "dropout": EVERYTHING}

# fmt: off
SM80_BACKWARD = (
    entry(
        Kernel.sm80_backward, 32,
        block_m=128, block_n=128, **WARPS_2_4_4, stages_q=2, stages_do=2,
        tiles=(tile({"": NO_FEATURES, **WITH_FEATURES}),),
    ),
    entry(
        Kernel.sm80_backward, 64,
        block_m=128, block_n=128, **WARPS_2_4_4, stages_q=2, stages_do=2,
        tiles=(
            tile({"": NO_FEATURES, "ordered": ORDERED, **WITH_FEATURES}),
            tile({"smem99k": NO_FEATURES, "dropout_smem99k": EVERYTHING},
                 block_m=64, **WARPS_2_4_2, stages_q=1, stages_do=1),
            tile({"masked": MASKED}, block_m=64, **WARPS_2_4_2),
        ),
    ),
    entry(
        Kernel.sm80_backward, 96,
        block_m=64, block_n=128, **WARPS_2_4_4, stages_q=2, stages_do=2,
        tiles=(tile({"": NO_FEATURES, **WITH_FEATURES}),),
    ),
    entry(
        Kernel.sm80_backward, 128,
        block_m=64, block_n=128, **WARPS_2_4_2, stages_q=2, stages_do=2,
        tiles=(
            tile({"": ORDERED, **WITH_FEATURES, "masked": MASKED}),
            tile({"smem99k": NO_FEATURES, "dropout_smem99k": EVERYTHING, "masked_smem99k": MASKED},
                 block_n=64, **WARPS_4_2_2, stages_q=1, stages_do=1),
        ),
    ),
    entry(
        Kernel.sm80_backward, 192,
        block_m=64, block_n=64, **WARPS_4_2_2, stages_q=2, stages_do=2,
        tiles=(tile({"": NO_FEATURES, **WITH_FEATURES}),),
    ),
    entry(
        Kernel.sm80_backward, 256,
        block_m=64, block_n=64, **WARPS_4_2_2, stages_q=2, stages_do=2,
        tiles=(
            tile({"": NO_FEATURES, "ordered": ORDERED, **WITH_FEATURES}),
            tile({"smem163k": NO_FEATURES, "dropout_smem163k": EVERYTHING,
                  "masked_smem163k": MASKED},
                 stages_q=1, stages_do=1),
            tile({"smem99k": NO_FEATURES, "dropout_smem99k": EVERYTHING},
                 block_m=32, block_n=32, **FOUR_WARPS, stages_q=1, stages_do=1),
        ),
    ),
    # Several CTAs have some of the columns of dK, dV and dQ each, and S and dP all of them.
    entry(
        Kernel.sm80_backward, 512,
        block_m=32, block_n=64, **WARPS_2_4_2, stages_q=1, stages_do=1, columns_per_cta=256,
        tiles=(
            tile({"": ORDERED, "dropout": EVERYTHING, "masked": MASKED}),
            tile({"smem163k": EVERYTHING, "masked_smem163k": MASKED}, block_n=32, **FOUR_WARPS),
            tile({"smem99k": EVERYTHING}, block_m=16, block_n=32, columns_per_cta=128,
                 num_warps=2, warps_m_scores=1, warps_n_dkdv=2, warps_m_dq=1),
        ),
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

# sm80, derivatives in a direction ----------------------------------------------------------------
# One row for all options, which a call decides about: few calls are such, and each is more products
# than a pass without. A row serves all head dims up to its own.
TANGENT = MASKED | Feature.tangent

# fmt: off
SM80_JVP = (
    entry(
        Kernel.sm80_jvp, 128,
        block_m=64, block_n=64, num_warps=4,
        tiles=(tile({"tangent": TANGENT}),),
    ),
    entry(
        Kernel.sm80_jvp, 512,
        block_m=32, block_n=16, num_warps=2, columns_per_cta=256,
        tiles=(tile({"tangent": TANGENT}),),
    ),
)
SM80_HVP = (
    entry(
        Kernel.sm80_hvp, 128,
        block_m=64, block_n=32, **FOUR_WARPS,
        tiles=(tile({"tangent": TANGENT | ORDERED}),),
    ),
    entry(
        Kernel.sm80_hvp, 256,
        block_m=32, block_n=32, **FOUR_WARPS,
        tiles=(tile({"tangent": TANGENT | ORDERED}),),
    ),
    entry(
        Kernel.sm80_hvp, 512,
        block_m=16, block_n=32, columns_per_cta=128,
        num_warps=2, warps_m_scores=1, warps_n_dkdv=2, warps_m_dq=1,
        tiles=(tile({"tangent": TANGENT | ORDERED}),),
    ),
)
# fmt: on

ENTRIES: tuple[Entry, ...] = (
    *SM90_FORWARD,
    *SM80_FORWARD,
    *SM80_DECODE,
    *SM90_BACKWARD,
    *SM80_BACKWARD,
    *SM90_JVP,
    *SM80_JVP,
    *SM80_HVP,
)


def in_order(entries: tuple[Entry, ...], row_type: type[Any]) -> tuple[Any, ...]:
    """The rows of a pass as selection tries them: those of sm90 first, which are the faster ones
    where they run, and of a family those for lists and a bias last, so that no other call runs
    their code. Else as in the entries: smaller head dims, of values too, before larger ones, and
    the variants of each as they stand there.
    """

    def place(row: KernelRow) -> tuple[bool, bool, bool, bool]:
        is_decode = isinstance(row, ForwardRow) and row.kind is Kind.decode
        has_lists = Feature.block_sparse in row.features
        return (
            row.family is not Family.sm90,
            Feature.bias in row.features and not has_lists,
            has_lists,
            is_decode,
        )

    rows = [row for each in entries for row in each.rows() if isinstance(row, row_type)]
    return tuple(sorted(rows, key=place))


FORWARD_ROWS: tuple[ForwardRow, ...] = in_order(ENTRIES, ForwardRow)
BACKWARD_ROWS: tuple[BackwardRow, ...] = in_order(ENTRIES, BackwardRow)
ALL_ROWS: tuple[KernelRow, ...] = (*FORWARD_ROWS, *BACKWARD_ROWS)


def table_text() -> str:
    """All rows as ``python -m flash_attn_cuda --table`` prints those of a build."""
    from flash_attn_cuda import build_info  # needs torch, which the table itself does not

    records = (generate_units.row_record(row) for row in ALL_ROWS)
    return build_info.table_text([build_info.compiled_row(record) for record in records])


if __name__ == "__main__":
    sys.stdout.write(table_text() + "\n")
