"""The kernel table: every attention kernel this package compiles, one row each.

Order is meaning: of the rows that cover a request the first one runs, so smaller head dims, of
values too, come before larger ones, and rows without a feature's code before those with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from build_tools.kernel_row import (
    NO_FEATURES,
    BackwardRow,
    Family,
    Feature,
    ForwardRow,
    KernelRow,
    Kind,
    Mask,
    expand,
)


# One mask for the whole sm80 family: on an H200, kernels compiled for the full mask were within 2 %
# of the windowed ones run on full attention (docs/forward_sm80.md).
def sm80_forward(head_dim: int, **options: Any) -> Iterator[ForwardRow]:
    masks = (Mask.windowed,)
    return expand(ForwardRow, family=Family.sm80, head_dim=head_dim, masks=masks, **options)


def sm80_backward(head_dim: int, **options: Any) -> Iterator[BackwardRow]:
    masks = (Mask.windowed,)
    return expand(BackwardRow, family=Family.sm80, head_dim=head_dim, masks=masks, **options)


# A kernel is slower with a feature's code in it even where a call does not use it, so rows with
# features come behind those without (docs/features_sm80.md). Dropout draws for every tile, whether
# or not the scores are modified as well. What rows may spill: spill_allowances.json.
FORWARD_MODIFIERS = Feature.softcap | Feature.alibi | Feature.paged_kv | Feature.split_kv
FORWARD_DROPOUT = Feature.softcap | Feature.alibi | Feature.dropout
DECODE_FEATURES = (
    Feature.softcap | Feature.alibi | Feature.paged_kv | Feature.split_kv | Feature.packed_gqa
)
BACKWARD_MODIFIERS = Feature.softcap | Feature.alibi | Feature.deterministic
BACKWARD_DROPOUT = BACKWARD_MODIFIERS | Feature.dropout
# Lists of blocks, a bias, and whatever comes with them.
MASKED = Feature.softcap | Feature.alibi | Feature.dropout | Feature.block_sparse | Feature.bias


def sm80_forward_rows(head_dim: int, **options: Any) -> Iterator[ForwardRow]:
    """A tile without features, with modified scores and a KV cache's, and with dropout."""
    names = {"": NO_FEATURES, "modifiers": FORWARD_MODIFIERS, "dropout": FORWARD_DROPOUT}
    for variant, features in names.items():
        yield from sm80_forward(head_dim, **options, features=features, variant=variant)


def sm80_decode(
    head_dim: int, *, block_n: int, num_warps: int, variant: str = "decode"
) -> Iterator[ForwardRow]:
    return sm80_forward(
        head_dim,
        kind=Kind.decode,
        block_m=16,
        block_n=block_n,
        num_warps=num_warps,
        features=DECODE_FEATURES,
        variant=variant,
    )


def sm90_forward(
    head_dim: int, *, block_m: int, block_n: int, variant: str = "", **options: Any
) -> Iterator[ForwardRow]:
    """A tile of wgmma kernels, of which each warp multiplies 16 query rows."""
    return expand(
        ForwardRow,
        family=Family.sm90,
        masks=(Mask.windowed,),
        head_dim=head_dim,
        block_m=block_m,
        block_n=block_n,
        num_warps=block_m // 16,
        variant=variant,
        **options,
    )


def sm90_alibi(head_dim: int, **options: Any) -> Iterator[ForwardRow]:
    """Without the warps that draw for dropout; softcap is no faster without them."""
    return sm90_forward(
        head_dim, block_m=128, block_n=128, variant="alibi", features=Feature.alibi, **options
    )


def sm90_dropout(head_dim: int, *, block_n: int, **options: Any) -> Iterator[ForwardRow]:
    return sm90_forward(
        head_dim,
        block_m=128,
        block_n=block_n,
        variant="dropout",
        features=FORWARD_DROPOUT,
        **options,
    )


def sm80_masked_forward(head_dim: int, *, block_m: int) -> Iterator[ForwardRow]:
    """A tile whose sides divide the 128 of a list's tiles."""
    return sm80_forward(
        head_dim,
        block_m=block_m,
        block_n=64,
        num_warps=4,
        features=MASKED,
        variant="masked",
    )


def sm90_sparse_forward(head_dim: int, **options: Any) -> Iterator[ForwardRow]:
    return sm90_forward(
        head_dim,
        block_m=128,
        block_n=128,
        variant="sparse",
        features=Feature.block_sparse,
        **options,
    )


def sm90_cache_forward(head_dim: int, *, block_n: int) -> Iterator[ForwardRow]:
    """Over a cache: in pages whose size is a multiple of 8, or with its keys split; at head_dim 64
    also for lower tiles. With the code for modified scores plain calls take 2 to 9 % longer.
    """
    of_a_cache = Feature.paged_kv | Feature.split_kv
    for variant, features in {"cache": of_a_cache, "cache_modifiers": FORWARD_MODIFIERS}.items():
        yield from sm90_forward(
            head_dim, block_m=128, block_n=block_n, variant=variant, features=features
        )


def sm90_bias_forward(head_dim: int, **options: Any) -> Iterator[ForwardRow]:
    return sm90_forward(
        head_dim, block_m=128, block_n=128, variant="bias", features=Feature.bias, **options
    )


# The sm90 family comes first: where it runs it is the faster one. Of the sm80 family, four warps of
# 32 query rows up to head_dim 128, of 16 above: what O and S leave of 255 registers.
FORWARD_ROWS: tuple[ForwardRow, ...] = (
    # Two CTAs an SM.
    *sm90_forward(
        64,
        block_m=128,
        block_n=64,
        variant="short",
        most_causal_seqlen=1088,
        most_full_seqlen=256,
    ),
    # Its producer warp spills: three consumer warpgroups leave it 32 registers.
    *sm90_forward(64, block_m=192, block_n=128),
    *sm90_alibi(64),
    *sm90_dropout(64, block_n=128),
    *sm90_cache_forward(64, block_n=128),
    *sm90_forward(96, block_m=128, block_n=128),
    *sm90_alibi(96),
    *sm90_dropout(96, block_n=128),
    # One P instead of two, which halves the code: it counts for tiles of few steps.
    *sm90_forward(
        128,
        block_m=128,
        block_n=128,
        variant="few_steps",
        most_causal_seqlen=512,
        most_full_seqlen=512,
    ),
    *sm90_forward(128, block_m=128, block_n=128),
    *sm90_alibi(128),
    *sm90_dropout(128, block_n=128),
    *sm90_cache_forward(128, block_n=128),
    # Multi-head latent attention's: O has the registers of head_dim 128.
    *sm90_forward(192, head_dim_v=128, block_m=128, block_n=128),
    *sm90_forward(192, block_m=128, block_n=96),
    *sm90_dropout(192, block_n=96),
    *sm90_forward(256, block_m=128, block_n=64),
    *sm90_dropout(256, block_n=64),
    *sm90_cache_forward(256, block_n=64),
    *sm90_sparse_forward(64),
    *sm90_sparse_forward(128),
    *sm90_bias_forward(64),
    *sm90_bias_forward(128),
    *sm80_forward_rows(32, block_m=128, block_n=128, num_warps=4),
    *sm80_forward_rows(64, block_m=128, block_n=96, num_warps=4),
    *sm80_forward_rows(96, block_m=128, block_n=64, num_warps=4),
    *sm80_forward_rows(128, block_m=128, block_n=64, num_warps=4),
    *sm80_forward_rows(192, block_m=64, block_n=64, num_warps=4),
    *sm80_forward_rows(256, block_m=64, block_n=64, num_warps=4),
    *sm80_decode(32, block_n=32, num_warps=4),
    *sm80_decode(64, block_n=32, num_warps=4),
    *sm80_decode(96, block_n=16, num_warps=4),
    *sm80_decode(128, block_n=16, num_warps=4),
    *sm80_decode(192, block_n=16, num_warps=4),
    *sm80_decode(256, block_n=16, num_warps=2),
    *sm80_decode(256, block_n=16, num_warps=1, variant="decode_smem99k"),
    *sm80_masked_forward(64, block_m=128),
    *sm80_masked_forward(128, block_m=128),
    *sm80_masked_forward(256, block_m=64),
)

# How the backward's eight warps lie over its products: scores along queries, dK and dV along keys,
# dQ along queries. Each product wants the most square share of its own shape.
WARPS_2_4_4: dict[str, Any] = {
    "num_warps": 8,
    "warps_m_scores": 2,
    "warps_n_dkdv": 4,
    "warps_m_dq": 4,
}
WARPS_2_4_2: dict[str, Any] = {
    "num_warps": 8,
    "warps_m_scores": 2,
    "warps_n_dkdv": 4,
    "warps_m_dq": 2,
}
WARPS_4_2_2: dict[str, Any] = {
    "num_warps": 8,
    "warps_m_scores": 4,
    "warps_n_dkdv": 2,
    "warps_m_dq": 2,
}
FOUR_WARPS: dict[str, Any] = {
    "num_warps": 4,
    "warps_m_scores": 2,
    "warps_n_dkdv": 2,
    "warps_m_dq": 2,
}
DOUBLE_BUFFERED: dict[str, Any] = {"stages_q": 2, "stages_do": 2}
SINGLE_BUFFERED: dict[str, Any] = {"stages_q": 1, "stages_do": 1}


def sm80_backward_rows(head_dim: int, **options: Any) -> Iterator[BackwardRow]:
    """A tile for what most calls ask for, with modified scores, and with dropout.

    The code of a fixed order costs a plain kernel nothing at head_dim 128, 2.5 % at 64 and 6 % at
    256, which have a row of their own for it; elsewhere the row of modified scores serves it.
    """
    names = {
        "": Feature.deterministic if head_dim == 128 else NO_FEATURES,
        "ordered": Feature.deterministic,
        "modifiers": BACKWARD_MODIFIERS,
        "dropout": BACKWARD_DROPOUT,
    }
    if head_dim not in (64, 256):
        del names["ordered"]
    return sm80_backward_variants(head_dim, names, **options)


def sm80_backward_small(head_dim: int, *, smem: str, **options: Any) -> Iterator[BackwardRow]:
    """A tile for less shared memory: plain, and with everything, to compile less."""
    names = {smem: NO_FEATURES, f"dropout_{smem}": BACKWARD_DROPOUT}
    return sm80_backward_variants(head_dim, names, **options)


def sm80_masked_backward(head_dim: int, *, smem: str = "", **options: Any) -> Iterator[BackwardRow]:
    variant = f"masked_{smem}" if smem else "masked"
    return sm80_backward_variants(head_dim, {variant: MASKED}, **options)


def sm90_backward(head_dim: int, **options: Any) -> Iterator[BackwardRow]:
    return expand(
        BackwardRow,
        family=Family.sm90,
        masks=(Mask.windowed,),
        head_dim=head_dim,
        num_warps=8,
        **options,
    )


def sm90_masked_backward(head_dim: int, variant: str, features: Feature) -> Iterator[BackwardRow]:
    return sm90_backward(
        head_dim,
        block_m=64,
        block_n=128,
        features=features,
        variant=variant,
    )


def sm80_backward_variants(
    head_dim: int, names: dict[str, Feature], **options: Any
) -> Iterator[BackwardRow]:
    for variant, features in names.items():
        yield from sm80_backward(head_dim, **options, features=features, variant=variant)


def sm90_backward_rows(
    head_dim: int,
    *,
    block_m: int = 64,
    ctas_per_tile: int = 1,
) -> Iterator[BackwardRow]:
    """A tile for what most calls ask for, and those for what stands between the products.

    Up to head_dim 128 a softcap has rows of its own: its weights take registers that make the
    others slower, and decisions about dropout make it slower even where none are wanted.
    """
    tiles = {"": (block_m, Feature.deterministic)}
    if head_dim <= 128:
        tiles["alibi"] = (block_m, Feature.alibi | Feature.deterministic)
        tiles["dropout"] = (block_m, BACKWARD_DROPOUT & ~Feature.softcap)
        tiles["softcap"] = (64, BACKWARD_MODIFIERS)
        tiles["softcap_dropout"] = (64, BACKWARD_DROPOUT)
    else:
        tiles["dropout"] = (block_m, BACKWARD_DROPOUT)
    for variant, (rows, features) in tiles.items():
        yield from sm90_backward(
            head_dim,
            block_m=rows,
            block_n=128,
            ctas_per_tile=ctas_per_tile,
            features=features,
            variant=variant,
        )


# Of the sm80 family shared memory decides who runs what: the first rows of head_dim 32 to 192 fit
# the 163 KiB of an A100, that of 256 needs a Hopper GPU; the variants serve what has less.
BACKWARD_ROWS: tuple[BackwardRow, ...] = (
    *sm90_backward_rows(64, block_m=128),
    *sm90_backward_rows(96),
    *sm90_backward_rows(128),
    *sm90_backward(
        192,
        head_dim_v=128,
        block_m=64,
        block_n=128,
        ctas_per_tile=2,
        features=Feature.deterministic,
    ),
    *sm90_backward_rows(192, ctas_per_tile=2),
    *sm90_backward_rows(256, ctas_per_tile=2),
    *sm90_masked_backward(64, "sparse", Feature.block_sparse),
    *sm90_masked_backward(128, "sparse", Feature.block_sparse),
    *sm90_masked_backward(64, "bias", Feature.bias),
    *sm90_masked_backward(128, "bias", Feature.bias),
    *sm80_backward_rows(32, block_m=128, block_n=128, **WARPS_2_4_4, **DOUBLE_BUFFERED),
    *sm80_backward_rows(
        64,
        block_m=128,
        block_n=128,
        **WARPS_2_4_4,
        **DOUBLE_BUFFERED,
    ),
    *sm80_backward_small(
        64, smem="smem99k", block_m=64, block_n=128, **WARPS_2_4_2, **SINGLE_BUFFERED
    ),
    *sm80_backward_rows(
        96,
        block_m=64,
        block_n=128,
        **WARPS_2_4_4,
        **DOUBLE_BUFFERED,
    ),
    *sm80_backward_rows(
        128,
        block_m=64,
        block_n=128,
        **WARPS_2_4_2,
        **DOUBLE_BUFFERED,
    ),
    *sm80_backward_small(
        128, smem="smem99k", block_m=64, block_n=64, **WARPS_4_2_2, **SINGLE_BUFFERED
    ),
    *sm80_backward_rows(192, block_m=64, block_n=64, **WARPS_4_2_2, **DOUBLE_BUFFERED),
    *sm80_backward_rows(
        256,
        block_m=64,
        block_n=64,
        **WARPS_4_2_2,
        **DOUBLE_BUFFERED,
    ),
    *sm80_backward_small(
        256,
        smem="smem163k",
        block_m=64,
        block_n=64,
        **WARPS_4_2_2,
        **SINGLE_BUFFERED,
    ),
    *sm80_backward_small(
        256, smem="smem99k", block_m=32, block_n=32, **FOUR_WARPS, **SINGLE_BUFFERED
    ),
    *sm80_masked_backward(64, block_m=64, block_n=128, **WARPS_2_4_2, **DOUBLE_BUFFERED),
    *sm80_masked_backward(128, block_m=64, block_n=128, **WARPS_2_4_2, **DOUBLE_BUFFERED),
    *sm80_masked_backward(
        128, smem="smem99k", block_m=64, block_n=64, **WARPS_4_2_2, **SINGLE_BUFFERED
    ),
    *sm80_masked_backward(
        256,
        smem="smem163k",
        block_m=64,
        block_n=64,
        **WARPS_4_2_2,
        **SINGLE_BUFFERED,
    ),
)

ALL_ROWS: tuple[KernelRow, ...] = (*FORWARD_ROWS, *BACKWARD_ROWS)
