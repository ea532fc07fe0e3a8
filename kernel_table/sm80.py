"""The kernel table's entries of sm80, whose kernels run on every GPU."""

from __future__ import annotations

from typing import Any

from kernel_table.features import (
    CACHE_MODIFIERS,
    DROPOUT,
    E4M3_CACHE,
    KEY_LISTS,
    LATENT,
    MASKED,
    MODIFIERS,
    ORDERED,
    PAGED_MASKED,
)
from kernel_table.row import NO_FEATURES, Feature, Kernel, entry, tile

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
        tiles=(tile(PLAIN_AND_FEATURES), tile({"masked": PAGED_MASKED}, block_n=64)),
    ),
    entry(
        Kernel.sm80_forward, 96,
        block_m=128, block_n=64, num_warps=4,
        tiles=(tile(PLAIN_AND_FEATURES),),
    ),
    entry(
        Kernel.sm80_forward, 128,
        block_m=128, block_n=64, num_warps=4,
        tiles=(tile({**PLAIN_AND_FEATURES, "masked": PAGED_MASKED, "e4m3": E4M3}),),
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
            tile({**PLAIN_AND_FEATURES, "masked": PAGED_MASKED}),
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
# than loads under way. So are more warps with lists of blocks, whose tiles are many and short.

DECODE_E4M3 = CACHE_MODIFIERS | Feature.packed_gqa | Feature.e4m3_kv
DECODE = CACHE_MODIFIERS | Feature.packed_gqa | Feature.bias
DECODE_LISTS = KEY_LISTS | Feature.split_kv | Feature.packed_gqa
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
        block_m=16, num_warps=4,
        tiles=(
            tile({"decode": DECODE}, block_n=32, stages_kv=3),
            tile({"decode_e4m3": DECODE_E4M3}, block_n=32, stages_kv=4, ctas_per_sm=3),
            tile(
                {"decode_lists": DECODE_LISTS},
                block_n=16, stages_kv=3, ctas_per_sm=3, shares_queries=True,
            ),
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
            tile(
                {"decode_lists": DECODE_LISTS},
                block_n=16, stages_kv=2, ctas_per_sm=3, shares_queries=True,
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
            tile({"decode_lists": DECODE_LISTS}, block_n=16, num_warps=2, stages_kv=2,
                 ctas_per_sm=3),
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
    # Absorbed latent attention. Q, of 576 columns, takes 18 KiB beside the stages.
    entry(
        Kernel.sm80_decode, (64, 512),
        block_m=16, block_n=16, shares_queries=True, columns_per_warp=256,
        tiles=(
            tile({"decode_latent": LATENT}, num_warps=4, stages_kv=3),
            tile({"decode_latent_smem99k": LATENT}, num_warps=2, stages_kv=4),
        ),
    ),
)

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
ANY_MASK = MASKED | ORDERED
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
            tile({"masked": ANY_MASK}, block_m=64, **WARPS_2_4_2),
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
            tile({"": ORDERED, **WITH_FEATURES, "masked": ANY_MASK}),
            tile({"smem99k": NO_FEATURES, "dropout_smem99k": EVERYTHING,
                  "masked_smem99k": ANY_MASK},
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
                  "masked_smem163k": ANY_MASK},
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
            tile({"": ORDERED, "dropout": EVERYTHING, "masked": ANY_MASK}),
            tile({"smem163k": EVERYTHING, "masked_smem163k": ANY_MASK}, block_n=32, **FOUR_WARPS),
            tile({"smem99k": EVERYTHING}, block_m=16, block_n=32, columns_per_cta=128,
                 num_warps=2, warps_m_scores=1, warps_n_dkdv=2, warps_m_dq=1),
        ),
    ),
)
# fmt: on

# Of lists of blocks. A tile is of one block. Two CTAs share an SM of a Hopper GPU, and one fits the
# shared memory of every GPU.

# fmt: off
SM80_LISTED_BACKWARD = (
    entry(
        Kernel.sm80_listed_backward, 64,
        block_m=64, block_n=64, **FOUR_WARPS,
        tiles=(tile({"lists": KEY_LISTS | ORDERED}),),
    ),
    entry(
        Kernel.sm80_listed_backward, 128,
        block_m=64, block_n=64, **FOUR_WARPS,
        tiles=(tile({"lists": KEY_LISTS | ORDERED}),),
    ),
    entry(
        Kernel.sm80_listed_backward, 256,
        block_m=32, block_n=32, **FOUR_WARPS,
        tiles=(tile({"lists": KEY_LISTS | ORDERED}),),
    ),
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
