"""Sequences of one length by tables: shapes, features, masks, biases and sinks, forward and
backward, against the fp64 reference.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from tests.cases.attention import (
    ALL_HEAD_DIMS,
    BUCKET_HEAD_DIMS,
    HEAD_RATIOS,
    LONG_SEQLENS,
    ODD_SEQLENS,
    Alibi,
    Layout,
)
from tests.cases.harness import Check, scaled
from tests.cases.masked import OWN, RandomBias, RandomMask
from tests.cases.matrix import BOTH, DTYPES, Call, check_calls, each, grid, pairs

pytestmark = pytest.mark.gpu

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
BUCKETS = [32, 96, 128, 192, 256, 512]  # beside 64
# Of q and k, of v: with rows of their own; where a forward has boxes without values, and its
# backward runs sm80 kernels; where it has none; wider values; what is padded in Python.
NARROW = [(192, 128), (128, 64)]
VALUES = [
    *((192, 128), (160, 72), (128, 64), (96, 32), (96, 64), (256, 128), (64, 40), (128, 80)),
    *((96, 72), (64, 128), (512, 256), (256, 512), (320, 512), (59, 33), (64, 33), (59, 64)),
]


def partners(seed: int) -> list[tuple[int, int]]:
    """Every one of ODD_SEQLENS with another."""
    return list(zip(ODD_SEQLENS, random.Random(seed).sample(ODD_SEQLENS, 16), strict=True))


SHAPES: dict[str, list[Call]] = {
    "head dims": grid(
        lengths=(197, 263), num_heads_k=2, head_dim=[*ALL_HEAD_DIMS, 512], causal=BOTH
    ),
    "head dims in fp16": grid(
        lengths=(260, 190), num_heads_k=2, dtype=FP16, causal=BOTH,
        head_dim=[*BUCKET_HEAD_DIMS, 8, 40, 111, 200],
    ),
    # Grouped heads, so that dk and dv are sums, too.
    "value dims": grid(
        lengths=(197, 333), num_heads_k=2, head_dims=VALUES, dtype=DTYPES, causal=BOTH
    ),
    "lengths": grid(seqlen_q=[*ODD_SEQLENS], seqlen_k=[*ODD_SEQLENS], num_heads_k=2, causal=BOTH),
    "lengths in every bucket": [
        call for d in BUCKETS for call in grid(lengths=partners(d), head_dim=d, causal=BOTH)
    ],
    # From one query, which decode kernels take, to many tiles.
    "lengths of narrow values": grid(
        lengths=[
            *((1, 1), (1, 300), (300, 1), (17, 40), (63, 65), (64, 64), (65, 127)),
            *((128, 128), (129, 127), (257, 511), (1000, 777), (100, 0), (100, 40)),
        ],
        num_heads_k=2, head_dims=NARROW, causal=BOTH,
    ),
    "long lengths": grid(
        batch=1, lengths=[*LONG_SEQLENS], heads=(2, 1), head_dim=[64, 128, 256, 512], causal=BOTH
    ),
    # Few key heads let thread blocks share one and add up fp32 partial sums; many do not.
    "heads": grid(
        batch=[1, 5], lengths=(67, 201), heads=[*HEAD_RATIOS], causal=BOTH,
        of=[{"head_dim": 64}, {"head_dim": 128, "dtype": FP16}],
    ),
    "values of shared key heads": grid(
        batch=1, lengths=(600, 200), heads=[(16, 1), (9, 3), (32, 2)], causal=True,
        head_dims=[*NARROW, (64, 40)],
    ),
    # More thread blocks than a GPU runs at a time, so that the order of the grid matters.
    "many key heads": grid(
        batch=4, lengths=(520, 520), heads=(48, 24), head_dim=[*BUCKET_HEAD_DIMS], causal=True
    ),
    # Buffers of K and V go round, with more than a tile for each of them.
    "many tiles of narrow values": grid(
        batch=4, lengths=(1100, 1300), heads=(16, 8), head_dims=(192, 128), causal=BOTH
    ),
    # 65,535 is the limit of a grid's second and third dimension.
    "more than a grid dimension": grid(
        lengths=(5, 7), head_dim=8, causal=True,
        of=[{"batch": n, "heads": (h, h)} for n, h in ((70_000, 1), (1, 70_000), (300, 300))],
    ),
    # NaN in every gap, next to the columns of values as well.
    "layouts of narrow values": grid(
        lengths=(150, 190), num_heads_k=2, head_dims=NARROW,
        layout=[
            *(Layout.heads_first, Layout.packed, Layout.sliced_head_dim, Layout.misaligned),
            Layout.surrounded,
        ],
    ),
    "scales": grid(
        lengths=(130, 150), causal=BOTH,
        softmax_scale=[0.0, -0.0, 0.125, -0.3, 1e-6, 5.0, 100.0, -100.0],
    ),
    "scales in every bucket": grid(
        lengths=(130, 100), head_dim=[64, 96, 128, 192, 256],
        range=[{}, {"causal": True}, {"window": (64, 0)}],
        scale=[
            *({"softmax_scale": scale} for scale in (0.0, -0.0, 5.0, -0.3)),
            *({"softmax_scale": scale, "backward": False} for scale in (1e-6, 100.0)),
        ],
    ),
    "gradients without lse": grid(
        lengths=(150, 170), head_dim=[64, 128, 192], causal=BOTH, use_dlse=False
    ),
}  # fmt: skip

LENGTHS = [(130, 130), (70, 201), (201, 70), (1, 150), (150, 1)]
FEATURES: dict[str, list[Call]] = {
    "windows": grid(
        batch=1, heads=(2, 2), lengths=LENGTHS, causal=BOTH,
        window=[
            *((0, 0), (0, -1), (-1, 0), (5, -1), (-1, 5), (63, -1), (-1, 64), (1, 0), (17, 33)),
            *((100, 3), (64, 64)),
            *((500, 1), (1, 500), (500, 500)),  # wider than the keys on one side, then on both
            *((2**31 - 1, 0), (2**31 - 1, 2**31 - 1)),
            (-7, 2),  # any negative bound is none
        ],
    ),
    "windows in every bucket": grid(
        batch=1, num_heads_k=2, head_dim=BUCKETS,
        of=[
            {"lengths": (257, 300), "window": (40, 2)},
            {"lengths": (300, 140), "window": (-1, 70)},
            {"lengths": (140, 300), "window": (70, -1)},
        ],
    ),
    # Tiles left out on both sides, Sq above and below Sk.
    "windows over many tiles": grid(
        batch=1, lengths=[(1500, 1000), (1000, 1500)], heads=(2, 1),
        window=[(200, 0), (0, 130), (300, 300), (-1, 700), (700, -1)],
    ),
    "windows of narrow values": grid(
        lengths=(300, 333), head_dims=NARROW,
        window=[(0, 0), (5, -1), (-1, 7), (100, 50), (64, 0)],
    ),
    "softcap": [
        *grid(lengths=(140, 170), num_heads_k=2, softcap=[0.1, 1.0, 30.0, 1e4], causal=BOTH),
        *grid(lengths=(140, 170), num_heads_k=2, softcap=5.0, head_dim=BUCKETS),
    ],
    "ALiBi": [
        *grid(
            lengths=LENGTHS, heads=(6, 2), alibi=[*Alibi],
            of=[
                *({"head_dim": 64}, {"head_dim": 64, "causal": True}, {"head_dim": 128}),
                {"head_dim": 40, "causal": True},
            ],
        ),
        *grid(lengths=(140, 170), head_dim=BUCKETS, alibi=Alibi.per_batch),
    ],
    # With the reference's own decisions; rows of one length whose counters pass 16 bits.
    "dropout": [
        *grid(
            lengths=(140, 201), heads=[(4, 4), (6, 2), (4, 1)], head_dim=[*BUCKET_HEAD_DIMS],
            of=[{"dropout_p": 0.17}, {"dropout_p": 0.5, "causal": True}],
        ),
        *grid(lengths=(64, 130), dropout_p=0.99),
        *grid(batch=3, lengths=(20, 5000), heads=(12, 2), head_dim=32, dropout_p=0.4),
    ],
    "all at once": grid(
        lengths=(140, 201), num_heads_k=2, head_dim=[64, 128, 111], softcap=4.0,
        alibi=Alibi.per_batch, window=(50, 7), dropout_p=0.3,
    ),
    "narrow values": grid(
        lengths=(200, 301), num_heads_k=2, head_dims=NARROW,
        of=[
            *({"dropout_p": 0.2}, {"softcap": 3.0}, {"alibi": Alibi.per_batch}),
            {"dropout_p": 0.5, "softcap": 5.0, "alibi": Alibi.per_head, "causal": True},
            *({"softmax_scale": -0.3, "causal": True}, {"deterministic": True, "causal": True}),
        ],
    ),
    "scales": grid(
        lengths=(100, 130), softmax_scale=[0.0, -0.3, 1e-6, 5.0, -100.0],
        of=[
            *({"softcap": 3.0}, {"alibi": Alibi.per_head}, {"window": (30, 4)}),
            {"softcap": 3.0, "alibi": Alibi.per_batch},
            {"softcap": 3.0, "alibi": Alibi.per_head, "window": (30, 4), "dropout_p": 0.2},
        ],
    ),
    "fixed order": grid(
        lengths=(300, 333), head_dim=[*BUCKET_HEAD_DIMS], deterministic=True,
        of=[{"causal": True}, {"num_heads_k": 1}],
    ),
    "pairs": pairs(
        dtype=DTYPES,
        head_dims=[
            *((d, None) for d in (32, 64, 80, 96, 111, 128, 160, 192, 256, 320, 512)),
            *((192, 128), (64, 128), (59, 33)),
        ],
        heads=[(4, 4), (6, 2), (4, 1)],
        lengths=[(130, 130), (70, 201), (201, 70), (1, 150), (113, 64), (257, 129)],
        range=[
            *({}, {"causal": True}, {"window": (33, -1)}, {"window": (-1, 21)}),
            *({"window": (0, 0)}, {"window": (60, 9)}, {"window": (40, 5), "causal": True}),
        ],
        softcap=[0.0, 4.0],
        alibi=[None, *Alibi],
        dropout_p=[0.0, 0.2],
        deterministic=BOTH,
        softmax_scale=[None, -0.2],
        layout=[Layout.contiguous, Layout.packed, Layout.odd_stride],
    ),
}  # fmt: skip

MASKS: dict[str, list[Call]] = {
    # Heads with lists of their own; with few visits there are rows and tiles that see nothing.
    "densities": grid(
        batch=1, lengths=(700, 901), num_heads_k=2, head_dim=[64, 128],
        mask=[
            RandomMask(density, size, "hq", "sparsity")
            for density in (0.0, 0.01, 0.1, 0.5, 1.0) for size in (1, 64, 128)
        ],
        of=[{}, {"causal": True, "dtype": FP16}],
    ),
    "what shares one": grid(
        batch=3, lengths=(200, 333), num_heads_k=2,
        mask=[
            RandomMask(0.4, size, own, given)
            for given, size in (("attn_mask", 1), ("sparsity", 64), ("blocks", 128)) for own in OWN
        ],
    ),
    "lists": grid(
        batch=2, lengths=[(200, 333), (130, 70)], heads=[(4, 2), (8, 1)], head_dim=[64, 128],
        of=[
            {"mask": RandomMask(0.4, block, "bhq", "key_lists", queries), "causal": causal}
            for block, queries, causal in
            ((1, 1, False), (16, 1, True), (64, 1, False), (64, 64, True), (128, 64, False))
        ],
    ),
    # Which kernels read as they are, those of less than 16 keys in calls without a gradient.
    "lists of queries": pairs(
        batch=2, dtype=DTYPES, lengths=[(130, 200), (300, 64), (70, 333)],
        heads=[(1, 1), (4, 1), (6, 2), (16, 1), (32, 1)],
        head_dims=[(40, None), (64, None), (128, None), (192, 128), (192, None), (256, None)],
        range=[{}, {"causal": True}, {"window": (33, -1)}, {"window": (60, 9)}],
        softcap=[0.0, 4.0], softmax_scale=[None, -0.2], sink=[None, FP32], deterministic=BOTH,
        layout=[Layout.contiguous, Layout.packed, Layout.odd_stride],
        mask=[
            RandomMask(density, block, "bhq", "key_lists")
            for density, block in ((0.4, 64), (0.1, 64), (0.5, 128), (0.3, 32), (0.4, 16), (0.3, 1))
        ],
    ),
    "a block that many queries list": grid(
        batch=1, lengths=(scaled(5000, 300), 64), heads=[(1, 1), (16, 1)], head_dim=[64, 128],
        mask=[RandomMask(1.0, block, "bhq", "key_lists") for block in (16, 64)],
        deterministic=BOTH,
    ),
    "head dims": grid(
        batch=1, lengths=(211, 300), num_heads_k=2,
        head_dim=[8, 32, 40, 59, 72, 96, 111, 160, 192, 200, 256, 512],
        of=[
            {"mask": RandomMask(0.4, size, own, "sparsity"), "causal": own == "q"}
            for size in (1, 64) for own in ("hq", "q")
        ],
    ),
    "lengths": grid(
        batch=1, heads=(2, 1), head_dim=[64, 128], causal=BOTH,
        lengths=[
            *((1, 1), (1, 300), (300, 1), (3, 64), (64, 64), (65, 63), (127, 129), (128, 128)),
            *((129, 127), (255, 257), (256, 256), (321, 65), (64, 513), (500, 33)),
        ],
        mask=[RandomMask(0.6, size, "hq", "sparsity") for size in (1, 64, 128)],
    ),
    # Lists of any length, from none to all of the tiles, and many of them for every CTA.
    "many tiles": grid(
        batch=1, lengths=(4200, 3900), num_heads_k=2, head_dim=[64, 128], causal=BOTH,
        mask=[
            RandomMask(density, *of)
            for density in (0.03, 0.3) for of in ((128, "hq", "blocks"), (1, "q", "sparsity"))
        ],
    ),
    # Query heads of one key head, each with lists of its own.
    "heads": grid(
        lengths=(140, 270), heads=[*HEAD_RATIOS],
        of=[
            {"mask": RandomMask(0.5, 64, "bhq", "sparsity")},
            {"mask": RandomMask(0.5, 1, "h", "attn_mask"), "head_dim": 128},
        ],
    ),
    "layouts": grid(
        lengths=(140, 270), num_heads_k=2, head_dim=[64, 128], layout=[*Layout], causal=True,
        mask=RandomMask(0.5, 64, "q", "sparsity"),
    ),
    "features": grid(
        lengths=(200, 333), num_heads_k=2, head_dim=[64, 128],
        mask=[RandomMask(0.5, size, own, "sparsity") for size, own in ((1, "bq"), (128, "hq"))],
        of=[
            *({"window": (70, -1)}, {"window": (-1, 40)}, {"window": (33, 20)}, {"softcap": 3.0}),
            *({"alibi": Alibi.per_head}, {"alibi": Alibi.per_batch, "causal": True}),
            *({"dropout_p": 0.17}, {"softmax_scale": -0.3}),
            {"dropout_p": 0.5, "softcap": 3.0, "alibi": Alibi.per_head, "window": (90, 5)},
            {"softmax_scale": 0.0, "causal": True},
        ],
    ),
    "biases": grid(
        lengths=(200, 333), num_heads_k=2, head_dim=[64, 128], causal=True,
        mask=[RandomMask(0.5, 1, "hq", "sparsity"), RandomMask(0.5, 128, "bq", "blocks")],
        bias=[RandomBias(own) for own in ("bhq", "q", "h")],
    ),
    "fixed order": grid(
        lengths=(300, 500), heads=[(4, 4), (4, 1)], head_dim=[64, 128, 256, 320, 512],
        deterministic=True,
        mask=[RandomMask(0.4, 1, "bh", "sparsity"), RandomMask(0.3, 128, "hq", "blocks")],
        of=[{}, {"causal": True}, {"window": (90, -1), "dropout_p": 0.2}],
    ),
}  # fmt: skip

EVERY_BIAS = [RandomBias(own, fp32) for own in OWN for fp32 in BOTH]
BIASES: dict[str, list[Call]] = {
    # The gradient is the sum over what it is shared by: sequences, heads, queries.
    "what shares one": grid(
        batch=3, lengths=(200, 333), num_heads_k=2, head_dim=[64, 128], bias=EVERY_BIAS,
        of=[{}, {"causal": True, "dtype": FP16}],
    ),
    "by distance": grid(
        heads=(4, 2), head_dim=[64, 128], causal=BOTH,
        lengths=[(1, 1), (1, 300), (300, 1), (129, 127), (321, 65), (200, 700)],
        bias=[
            *(RandomBias(reach=0), RandomBias(reach=33, hidden=0.2), RandomBias(reach=1000)),
            {"bias": RandomBias(fp32=True, reach=128), "mask": RandomMask(0.5, 64, "q", "blocks")},
        ],
    ),
    # Odd numbers of keys too, where rows of a bias start on no boundary.
    "lengths": grid(
        heads=(2, 1), causal=BOTH,
        lengths=[
            *((1, 1), (1, 300), (300, 1), (3, 64), (65, 63), (127, 129), (128, 128), (129, 127)),
            *((255, 257), (321, 65), (64, 513), (500, 33)),
        ],
        of=[
            {"head_dim": d, "bias": RandomBias(own, fp32)}
            for d, own in ((64, "hq"), (128, "bhq"), (128, "h")) for fp32 in BOTH
        ],
    ),
    "head dims": grid(
        batch=1, lengths=(211, 300), num_heads_k=2, head_dim=[8, 40, 59, 96, 160, 192, 256, 512],
        of=[{"bias": RandomBias("hq")}, {"bias": RandomBias("bhq", fp32=True), "causal": True}],
    ),
    "many tiles": grid(
        lengths=(1500, 1700), num_heads_k=1, head_dim=[64, 128], causal=True,
        bias=[x for x in EVERY_BIAS if x.own in ("bhq", "q", "")],
    ),
    "features": grid(
        lengths=(200, 333), num_heads_k=2, head_dim=[64, 128],
        bias=[
            *({"bias": RandomBias("bhq")}, {"bias": RandomBias("h"), "sink": FP32}),
            {"bias": RandomBias(reach=60)},
        ],
        of=[
            *({"window": (70, -1)}, {"window": (33, 20), "causal": True}, {"dropout_p": 0.3}),
            *({"alibi": Alibi.per_batch}, {"softmax_scale": -0.3}, {"softmax_scale": 0.0}),
            {"dropout_p": 0.17, "alibi": Alibi.per_head, "window": (90, 5)},
        ],
    ),
    # The cap does not see the bias.
    "softcap": grid(
        lengths=(200, 333), num_heads_k=2, softcap=[0.5, 20.0], head_dim=[64, 128, 256, 512],
        of=[{"causal": True}, {"dropout_p": 0.2}],
        bias=[RandomBias("hq"), RandomBias("b"), RandomBias(reach=60)],
    ),
    # Sums that no order changes, and those of pairs.
    "fixed order": grid(
        batch=3, lengths=(200, 333), num_heads_k=2, deterministic=True, head_dim=[64, 128, 256],
        bias=[*EVERY_BIAS, RandomBias(reach=60)], of=[{}, {"causal": True, "softcap": 5.0}],
    ),
    # -inf hides up to whole tiles, and there are rows that see nothing.
    "hidden": grid(
        lengths=(200, 333), num_heads_k=2, sink=[None, FP32],
        of=[
            {"head_dim": d, "bias": RandomBias(own, fp32, hidden)}
            for d, own in ((64, "bhq"), (128, "h"))
            for fp32 in BOTH for hidden in (0.1, 0.7, 0.99, 1.0)
        ],
    ),
}  # fmt: skip

SINKS: dict[str, list[Call]] = {
    # More queries than keys: under a causal mask some see the sink alone.
    "head dims": grid(
        lengths=(211, 150), num_heads_k=2, causal=BOTH,
        head_dim=[8, 16, 32, 40, 59, 64, 96, 128, 192, 256, 512],
        of=[{"sink": FP32}, {"sink": FP16, "dtype": FP16}, {"sink": BF16}],
    ),
    "lengths": grid(
        lengths=[(1, 1), (1, 300), (300, 1), (127, 129), (128, 128), (64, 513), (1000, 1000)],
        num_heads_k=1, head_dim=[64, 128], causal=BOTH, sink=FP32,
    ),
    "heads": grid(lengths=(130, 150), heads=[*HEAD_RATIOS], sink=FP32),
    # More heads than a thread block adds shares of.
    "many heads": grid(
        batch=1, lengths=(3, 5), heads=(300, 300), head_dim=[8, 64, 128, 256, 512], sink=FP32
    ),
    "features": grid(
        lengths=(200, 333), num_heads_k=2, head_dim=[64, 128], sink=FP32,
        of=[
            *({"window": (70, 0)}, {"window": (-1, 40)}, {"softcap": 3.0}, {"dropout_p": 0.3}),
            *({"alibi": Alibi.per_batch}, {"softmax_scale": -0.3}),
            {"dropout_p": 0.17, "softcap": 3.0, "alibi": Alibi.per_head, "window": (90, 5)},
            {"deterministic": True, "causal": True},
        ],
    ),
    "narrow values": grid(
        lengths=(200, 264), num_heads_k=2, causal=True,
        head_dims=[*NARROW, (128, 72), (64, 40), (59, 33)],
        of=[
            *({"mask": RandomMask(size=64, own="hq")}, {"bias": RandomBias("bhq")}),
            {"mask": RandomMask(given="sparsity"), "bias": RandomBias("h")},
            *({"bias": RandomBias("q", fp32=True), "sink": FP32}, {"sink": BF16}),
        ],
    ),
}  # fmt: skip

# Every row of a table of kernels that writes them: of short, usual and long sequences, of tall
# tiles, of modified scores, dropout, lists and biases, and what runs sm80 kernels on any GPU.
MAX_LOGITS: dict[str, list[Call]] = {
    "head dims": grid(
        lengths=[(1, 150), (197, 333), (600, 70)], heads=(6, 2), dtype=DTYPES, causal=BOTH,
        head_dims=[*((d, None) for d in (40, 64, 96, 128, 192, 256, 512)), (192, 128)],
        max_logits=True,
    ),
    "many tiles": grid(
        lengths=(1300, 1700), heads=(8, 4), head_dim=[64, 96, 128, 192, 256, 512], causal=BOTH,
        max_logits=True,
    ),
    "other tiles": grid(
        batch=1, max_logits=True, backward=False,
        of=[
            *({"lengths": (n, n), "heads": (64, 64)} for n in (577, 640)),
            {"lengths": (190, 8300), "heads": (134, 1), "head_dim": 128},
            {"lengths": (190, 1700), "heads": (134, 1), "head_dim": 96},
            *(
                {"lengths": (190, 1700), "heads": (134, 1), "head_dim": d} | modifier
                for d in (64, 96) for modifier in ({"softcap": 20.0}, {"alibi": Alibi.per_head})
            ),
        ],
    ),
    "features": grid(
        lengths=(200, 333), num_heads_k=2, head_dim=[64, 128, 256, 512], max_logits=True,
        of=[
            *({"softcap": 3.0}, {"softcap": 50.0, "causal": True}, {"dropout_p": 0.3}),
            *({"alibi": Alibi.per_head}, {"alibi": Alibi.per_batch, "softcap": 5.0}),
            *({"window": (33, 20)}, {"window": (0, 0)}, {"softmax_scale": -0.3}),
            *({"softmax_scale": 0.0}, {"sink": FP32}, {"layout": Layout.expanded_batch}),
            *({"mask": RandomMask(0.1, size, "hq", "sparsity")} for size in (1, 64)),
            {"mask": RandomMask(0.0, 128, "q", "blocks"), "sink": FP32},
            {"mask": RandomMask(0.4, 1, "bhq", "sparsity"), "alibi": Alibi.per_head},
            *({"bias": RandomBias("bhq", fp32, 0.3)} for fp32 in BOTH),
            {"bias": RandomBias("h"), "dropout_p": 0.2, "window": (90, 5)},
        ],
    ),
}  # fmt: skip

SCORES: dict[str, Any] = {
    "dtype": DTYPES,
    "softcap": [0.0, 4.0],
    "deterministic": BOTH,
    "head_dim": [40, 64, 96, 128, 256, 320, 512],
    "heads": [(4, 4), (6, 2), (4, 1)],
    "lengths": [(130, 130), (70, 201), (201, 70), (1, 150), (113, 64), (257, 129)],
    "range": [{}, {"causal": True}, {"window": (33, -1)}, {"window": (60, 9)}],
    "alibi": [None, *Alibi],
    "dropout_p": [0.0, 0.2],
    "softmax_scale": [None, -0.2],
    "sink": [None, FP32],
}
PAIRS = {
    "masks": pairs(
        **SCORES,
        mask=[
            *(RandomMask(0.5, 1, "bhq", "attn_mask"), RandomMask(0.5, 64, "hq", "sparsity")),
            *(RandomMask(0.5, 128, "bq", "blocks"), RandomMask(0.5, 1, "b", "sparsity")),
        ],
    ),
    "biases": pairs(
        **SCORES,
        bias=[RandomBias(own, own in ("q", "bh")) for own in OWN],
        mask=[None, RandomMask(0.5, 1, "bhq", "sparsity"), RandomMask(0.5, 64, "h", "blocks")],
    ),
}


@each(SHAPES)
def test_shapes(check: Check, calls: list[Call]) -> None:
    check_calls(check, calls)


@each(FEATURES)
def test_features(check: Check, calls: list[Call]) -> None:
    check_calls(check, calls)


@each(MASKS)
def test_masks(check: Check, calls: list[Call]) -> None:
    check_calls(check, calls)


@each(BIASES)
def test_biases(check: Check, calls: list[Call]) -> None:
    check_calls(check, calls)


@each(SINKS)
def test_sinks(check: Check, calls: list[Call]) -> None:
    check_calls(check, calls)


@each(MAX_LOGITS)
def test_max_logits(check: Check, calls: list[Call]) -> None:
    check_calls(check, calls)


@each(PAIRS)
def test_pairs(check: Check, calls: list[Call]) -> None:
    check_calls(check, calls)
