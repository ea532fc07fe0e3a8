"""What sanitize.py runs without masks: cases by the rows that a build has, and odd ones."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle
from typing import Any

import torch

from flash_attn_cuda.installed import build_info
from tests.cases import families
from tests.cases.accumulate import HEAD_DIMS, WHATS, SumCase, sum_cases
from tests.cases.attention import DTYPE_NAMES, Alibi, AttentionCase, KvCacheCase, Layout, VarlenCase
from tests.cases.bands import BandCase
from tests.cases.fp8_cache import Fp8Case
from tests.cases.fp8_harness import LATENT_FORMS, V4_ROWS
from tests.cases.harness import ON_CPU, Case
from tests.cases.latent import LATENT
from tests.cases.masked import (
    RandomBias,
    RandomMask,
    masked_dense,
    masked_varlen,
)
from tests.cases.rotary import RotaryCase, rotary_cases
from tests.cases.second_order import DerivativeCase

# With which rows other than those of the GPU are planned.
LIMITS = {"FLASH_ATTN_CUDA_CAPABILITY_LIMIT", "FLASH_ATTN_CUDA_SMEM_LIMIT"}
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
EVERYTHING: dict[str, Any] = {"softcap": 5.0, "alibi": Alibi.per_batch, "window": (40, 10)}
TRAINING: dict[str, Any] = {**EVERYTHING, "dropout_p": 0.2, "deterministic": True}


def row_kinds(feature: str | None = None) -> list[tuple[torch.dtype, int]]:
    """(dtype, head_dim) of the compiled rows, or of those that have a feature."""
    if ON_CPU:
        return [(torch.bfloat16, 32)]
    rows = build_info.compiled_rows()
    kinds = {(x.dtype, x.head_dim) for x in rows if feature is None or feature in x.features}
    return [(DTYPES[dtype], head_dim) for dtype, head_dim in sorted(kinds)]


def each_head_dim(head_dims: list[int]) -> Iterator[dict[str, Any]]:
    """Fields of a case for each, in either dtype by turns."""
    for head_dim, dtype in zip(head_dims, cycle((torch.bfloat16, torch.float16)), strict=False):
        yield {"dtype": dtype, "head_dim": head_dim}


# -- calls without a mask --------------------------------------------------------------------------


def dense_case(
    batch: int, seqlens: tuple[int, int], heads: tuple[int, int], **fields: Any
) -> AttentionCase:
    """Sequences, (Sq, Sk), (Hq, Hk)."""
    return AttentionCase(
        batch=batch,
        seqlen_q=seqlens[0],
        seqlen_k=seqlens[1],
        num_heads_q=heads[0],
        num_heads_k=heads[1],
        **fields,
    )


def row_cases() -> Iterator[Case]:
    """For every dtype and head dim that has rows: plain ones, ones with every feature, dense,
    packed, over caches; ragged, with shared key heads and partly used head dims.
    """
    for dtype, head_dim in row_kinds():
        common: dict[str, Any] = {"dtype": dtype, "head_dim": head_dim, "num_heads_q": 2}
        dense = AttentionCase(**common, batch=1, seqlen_q=150, seqlen_k=70, num_heads_k=1)
        yield dense
        yield replace(
            dense, seqlen_q=70, seqlen_k=150, num_heads_k=2, head_dim=head_dim - 8, causal=True
        )
        yield replace(dense, seqlen_q=70, seqlen_k=150, **TRAINING)
        # A softcap has rows of its own in some backwards.
        yield replace(dense, dropout_p=0.2, alibi=Alibi.per_head, causal=True)
        yield replace(dense, seqlen_q=300, seqlen_k=300, alibi=Alibi.per_head)
        packed = VarlenCase(
            **common, lengths_q=(70, 0, 1), lengths_k=(33, 5, 140), num_heads_k=1, causal=True
        )
        yield packed
        yield replace(packed, **TRAINING, causal=False, used_k=(30, 0, 140), leftpad=(0, 0, 9))
        yield replace(packed, deterministic=True, used_q=(60, 0, 0))
        decode = KvCacheCase(**{**common, "num_heads_q": 6}, cached=(150, 0, 37), seqlens_new=1)
        yield decode
        yield replace(decode, page_size=16, **EVERYTHING)
        prefill = replace(decode, seqlens_q=20, seqlens_new=20, causal=True)
        yield replace(prefill, head_dim=head_dim - 5, rotary_dim=16, leftpad=(9, 0, 37))
        yield replace(prefill, page_size=7, **EVERYTHING, rotary_dim=16, rotary_interleaved=False)
        yield replace(decode, sink=torch.float32)
        yield replace(prefill, page_size=7, **EVERYTHING, sink=torch.bfloat16)
        for of_scores in ({"mask": "bool-bq"}, {"mask": "fp32-bh"}, {"reach": 9}):
            # Slices of rows begin in the left padding.
            odd = {"head_dim": head_dim - 5, "leftpad": (9, 0, 37)}
            yield replace(decode, page_size=7, **odd, **of_scores)
            yield replace(prefill, page_size=16, seqlens_q=70, **of_scores)


def spare_row_cases() -> Iterator[VarlenCase]:
    """With slopes for each sequence, of which those rows have none."""
    lengths = {"lengths_q": (70, 0, 1), "lengths_k": (33, 5, 140)}
    fields: dict[str, Any] = {**lengths, "num_heads_q": 2, "num_heads_k": 1}
    for dtype, head_dim in row_kinds():
        kind = {"dtype": dtype, "head_dim": head_dim}
        yield VarlenCase(**kind, **fields, causal=True, alibi=Alibi.per_batch)


def part_cases() -> Iterator[VarlenCase]:
    """For every dtype and head dim that has rows: documents to be cut into parts."""
    lengths = {"lengths_q": (70, 1, 40), "lengths_k": (90, 5, 40)}
    fields: dict[str, Any] = {**lengths, "num_heads_q": 2, "num_heads_k": 1}
    for dtype, head_dim in row_kinds():
        case = VarlenCase(**fields, dtype=dtype, head_dim=head_dim, causal=True)
        yield case
        yield replace(case, **TRAINING, causal=False)


def band_cases() -> Iterator[BandCase]:
    """For every dtype and head dim that has rows: bands on either side of the diagonal and empty
    ones, in every layout.
    """
    many = ((70, 33), (0, 5), (1, 140), (33, 70))
    for dtype, head_dim in row_kinds():
        common: dict[str, Any] = {"dtype": dtype, "head_dim": head_dim, "heads": (2, 1)}
        yield BandCase("dense", ((150, 70),), (None, -20), **common)
        yield BandCase("dense", ((70, 150),), (-20, 90), has_sink=True, **common)
        yield BandCase("packed", many, (30, -9), deterministic=True, **common)
        yield BandCase("used", many, (-9, None), has_sink=True, **common)
        yield BandCase("packed", many, (-9, 3), **common)
        yield BandCase("origin", many, (-9, 40), **common)
        yield BandCase("pages", many, (None, -9), **common)
        yield BandCase("pages", many, (-9, 40), has_sink=True, **common)


def sanitized_sum_cases(device: str) -> Iterator[SumCase]:
    """Those of one head dim after the other, by turns, without the long one."""
    of_each = len(WHATS)
    every = list(sum_cases(device))
    for index in range(of_each):
        case = every[index % len(HEAD_DIMS) * of_each + index]
        if max(case.lengths_q) <= 600:
            yield case


def many_tile_cases() -> Iterator[Case]:
    """For the kernels whose CTAs stay for many tiles: more tiles than any GPU has SMs, in one key
    block or several, with tiles that see no key between others, packed, with features; the rows for
    longer sequences, and a cache with enough queries.
    """
    rows = [row for row in build_info.compiled_rows() if row.family == "sm90"]
    longest, longest_full = (
        max((row.config.get(field, 0) for row in rows), default=0)
        for field in ("most_causal_seqlen", "most_full_seqlen")
    )
    for common in each_head_dim([32] if ON_CPU else sorted({row.head_dim for row in rows})):
        many = dense_case(1, (70, 150), (280, 140), **common)
        yield many
        yield replace(many, window=(20, -1), seqlen_k=60)
        yield replace(many, causal=True, seqlen_q=150, seqlen_k=20)
        yield replace(many, **TRAINING)
        yield dense_case(1, (longest + 10, 140), (2, 1), **common, causal=True)
        yield replace(many, seqlen_q=longest_full + 10, num_heads_q=100, num_heads_k=100)
        # The plain row at head_dim 64 as well, of whose steps these leave nothing empty.
        yield replace(many, seqlen_q=380, seqlen_k=256, num_heads_q=100, num_heads_k=100)
        sms = 4 if ON_CPU else torch.cuda.get_device_properties("cuda").multi_processor_count
        if common["head_dim"] == 64:  # tall tiles, in two rounds instead of three
            heads = 3 * sms // 4
            yield replace(many, seqlen_q=450, seqlen_k=190, num_heads_q=heads, num_heads_k=heads)
        # Backward: idle warps finish dq, and CTAs share the last tiles.
        yield replace(many, seqlen_q=400, seqlen_k=800, num_heads_q=40, num_heads_k=20)
        # Backward: a CTA takes all key tiles of a head, and then of another.
        swept = replace(many, batch=2, num_heads_q=sms, num_heads_k=sms, seqlen_k=300)
        yield swept
        yield replace(swept, window=(90, 0))
        # The same of packed sequences, beside longer ones of which it takes a tile.
        yield VarlenCase(
            **common,
            lengths_q=(150, 140, 130, 0, 145) * 16 + (300,),
            lengths_k=(150, 130, 140, 20, 145) * 16 + (300,),
            num_heads_q=12,
            num_heads_k=12,
            causal=True,
        )
        packed = many_packed(common)
        yield packed
        yield replace(packed, causal=True, used_q=(19, 0, 9, 40) * 10)
        yield replace(packed, **TRAINING, leftpad=(1, 5, 0, 130) * 10)
        yield KvCacheCase(
            **common, num_heads_q=6, cached=(150, 0, 37), seqlens_q=40, seqlens_new=20, causal=True
        )


def long_cases() -> Iterator[Case]:
    """For the rows that are for queries which see many keys: few queries with so many; in a forward
    of so many heads that lower tiles would need another round of the device. On a limited GPU,
    which plans other rows, of few heads.
    """
    is_limited = bool(LIMITS & os.environ.keys())
    few_sms = ON_CPU or is_limited
    sms = 4 if few_sms else torch.cuda.get_device_properties("cuda").multi_processor_count
    rows = [row for row in build_info.compiled_rows() if row.config.get("least_keys_full")]
    for row in rows:
        forward = row.pass_name == "forward"
        seqlens = (150 if forward else 100, row.config["least_keys_full"] + 70)
        case = dense_case(
            1,
            seqlens,
            (sms + 2, 1) if forward else (4, 2),
            dtype=DTYPES[row.dtype],
            head_dim=row.head_dim,
            softcap=30.0 if "softcap" in row.features else 0.0,
        )
        windowed = row.config["least_keys_windowed"] + 330
        causal = replace(case, seqlen_k=windowed, causal=True, head_dim=row.head_dim - 8)
        if "alibi" in row.features:
            causal = replace(causal, softcap=0.0, alibi=Alibi.per_batch)
        for each in (case, causal):
            if not is_limited:
                assert families.planned(each, row.pass_name)["instance"] == row.name, str(each)
            yield each
        if not forward:
            packed = VarlenCase(
                dtype=case.dtype,
                head_dim=case.head_dim,
                num_heads_q=2,
                num_heads_k=1,
                lengths_q=(70, 0, 130),
                lengths_k=(windowed, windowed + 64, windowed - 129),
                causal=True,
            )
            yield packed
            yield replace(packed, used_k=(windowed, 1, 900), leftpad=(5, 0, 129))


def with_most_heads(case: Case, most: int | None) -> Case:
    """The case with about `most` query heads, or one group, where it has more."""
    if most is None or case.num_heads_q <= most:
        return case
    group = case.num_heads_q // case.num_heads_k
    heads_k = max(1, most // group)
    return replace(case, num_heads_q=heads_k * group, num_heads_k=heads_k)


def many_packed(common: dict[str, Any]) -> VarlenCase:
    return VarlenCase(
        **common,
        lengths_q=(20, 0, 9, 150) * 10,
        lengths_k=(33, 5, 0, 140) * 10,
        num_heads_q=6,
        num_heads_k=2,
    )


def value_cases() -> Iterator[Case]:
    """Values narrower than the row by some columns and by whole boxes of TMA, and wider ones."""
    for head_dim, head_dim_v in ((192, 128), (160, 72), (128, 64), (96, 32), (64, 128)):
        dense = dense_case(1, (70, 150), (280, 140), head_dim=head_dim, head_dim_v=head_dim_v)
        yield dense
        yield replace(dense, causal=True, num_heads_q=6, num_heads_k=2, **TRAINING)
        packed = many_packed({"head_dim": head_dim, "head_dim_v": head_dim_v})
        yield replace(packed, causal=True, used_q=(19, 0, 9, 40) * 10, leftpad=(1, 5, 0, 130) * 10)
    cache = KvCacheCase(cached=(100, 0, 37), seqlens_q=3, seqlens_new=3, causal=True)
    yield replace(cache, head_dim=192, head_dim_v=128, rotary_dim=64, page_size=16)
    yield replace(cache, head_dim=59, head_dim_v=33)


def odd_cases() -> Iterator[Case]:
    """Rows without keys, single rows, copied layouts, shared key heads, padded head dims, nothing
    at all.
    """
    base = dense_case(1, (40, 40), (2, 2), causal=True)
    yield replace(base, seqlen_q=200, seqlen_k=60)
    yield replace(base, seqlen_q=1, seqlen_k=1, head_dim=8)
    yield replace(base, seqlen_q=1, seqlen_k=300)
    yield replace(base, num_heads_q=8, num_heads_k=1, head_dim=128)
    yield replace(base, batch=3, head_dim=59)
    yield replace(base, layout=Layout.surrounded, head_dim=40, causal=False)
    yield replace(base, layout=Layout.misaligned)
    yield VarlenCase(lengths_q=(0, 0), lengths_k=(3, 0))
    yield VarlenCase(lengths_q=(1,) * 70, causal=True)
    yield VarlenCase(lengths_q=(), lengths_k=())
    cache = KvCacheCase(cached=(100, 0, 37), seqlens_new=1)
    yield replace(cache, head_dim=1, page_size=1)
    yield replace(cache, head_dim=111, page_size=300)
    # More rows than decoding takes, few tiles: TMA loads pages, smaller than a tile, larger and
    # neither, and CTAs share keys.
    yield replace(
        cache, cached=(1900, 0, 37), seqlens_q=(80, 3, 1), seqlens_new=None, capacity=2048
    )
    for head_dim, page_size in ((64, 8), (128, 48), (104, 256), (256, 16)):
        yield replace(
            cache,
            cached=(700, 0, 37),
            seqlens_q=(80, 3, 1),
            seqlens_new=(80, 3, 1),
            capacity=800,
            head_dim=head_dim,
            page_size=page_size,
            causal=True,
        )
    yield replace(cache, seqlens_q=(3, 0, 70), seqlens_new=(1, 0, 20), page_size=7, causal=True)
    yield replace(cache, batch_idx=(3, 0, 2), entries=5, leftpad=(90, 0, 1))
    yield replace(cache, cached=(192, 192), seqlens_new=None, num_heads_q=40, num_heads_k=1)


def latent_cases() -> Iterator[KvCacheCase]:
    """Of every row of absorbed latent attention: CTAs that share keys and that do not, boxes of
    pages and of heads of each size, and what TMA cannot load.
    """
    base = KvCacheCase(cached=(1900, 0, 37), capacity=2048, causal=True, **LATENT)
    yield replace(base, num_heads_q=16, page_size=64)
    yield replace(base, num_heads_q=17, page_size=16, seqlens_q=(3, 0, 2), softcap=5.0)
    yield replace(base, num_heads_q=12, head_dim_v=200, window=(100, 3), sink=torch.float32)
    yield replace(base, num_heads_q=64, head_dim_v=256, head_dim=32, page_size=48)
    append: dict[str, Any] = {"seqlens_q": 2, "seqlens_new": 2, "rotary_dim": 32}
    yield replace(base, num_heads_q=128, dtype=torch.float16, page_size=256, **append)
    yield replace(base, num_heads_q=8, cached=(200, 0, 37), page_size=1, leftpad=(10, 0, 37))
    yield replace(base, num_heads_q=16, page_size=64, keys_per_list=700)
    yield replace(base, num_heads_q=17, page_size=1, seqlens_q=(3, 0, 2), keys_per_list=90)
    yield replace(base, num_heads_q=128, head_dim_v=200, seqlens_q=2, keys_per_list=100)


def derivative_cases(device: str) -> Iterator[DerivativeCase]:
    """Of the rows for tangents: plain calls of many tiles, packed ones, ones with every feature."""
    for fields in each_head_dim([8] if ON_CPU else [64, 96, 128, 192, 256, 512, 40, 72]):
        common = {**fields, "device": device, "num_heads_q": 2, "num_heads_k": 1}
        yield DerivativeCase(masked_dense(**common, seqlen_q=150, seqlen_k=170, causal=True))
        packed = masked_varlen(**common, lengths_q=(70, 0, 33), lengths_k=(90, 5, 20))
        yield DerivativeCase(packed, ("q", "v"))
        masked = {"mask": RandomMask(0.5, 1, "hq", "sparsity"), "sink": torch.float32}
        yield DerivativeCase(
            masked_dense(**common, **masked, **TRAINING, seqlen_q=150, seqlen_k=140)
        )
        bias = RandomBias("bhq")
        yield DerivativeCase(masked_dense(**common, bias=bias, seqlen_q=70, seqlen_k=90))


def of_one_head(case: DerivativeCase) -> DerivativeCase:
    """Of one batch entry too, where sequences have one length."""
    of = replace(case.of.of, num_heads_q=1, num_heads_k=1)
    if isinstance(of, AttentionCase):
        of = replace(of, batch=1)
    return replace(case, of=replace(case.of, of=of))


def fp8_cases(device: str) -> Iterator[Fp8Case]:
    """Of the rows for keys and values of e4m3, and of both ways to append them."""
    for fields in each_head_dim([16] if ON_CPU else [64, 128, 256, 512, 80, 192]):
        cache = KvCacheCase(**fields, device=device, cached=(150, 0, 37), page_size=16, causal=True)
        yield Fp8Case(
            replace(cache, seqlens_new=1, rotary_dim=16), "token", "token", quantize="token"
        )
        yield Fp8Case(replace(cache, seqlens_q=90, seqlens_new=20), "batch", "token", "strided")
        plain = replace(cache, page_size=None, leftpad=(10, 0, 37), softcap=5.0)
        yield Fp8Case(replace(plain, seqlens_q=(3, 1, 70)), "number", "head", q_is_fp8=True)
        yield Fp8Case(replace(plain, seqlens_q=4, seqlens_new=4), "head", "batch", "expanded")
    base = KvCacheCase(cached=(150, 0, 37), device=device, num_heads_q=8, causal=True, **LATENT)
    append = replace(base, page_size=16, seqlens_q=2, seqlens_new=2, rotary_dim=32)
    yield Fp8Case(append, **LATENT_FORMS["rows"], quantize="token")
    yield Fp8Case(replace(base, leftpad=(10, 0, 37)), **LATENT_FORMS["batch"])
    append = replace(append, head_dim_v=448)
    yield Fp8Case(append, **LATENT_FORMS[V4_ROWS], quantize="token", group=64)


def sanitized_rotary_cases(device: str) -> Iterator[RotaryCase]:
    """Those of every dtype, and positions without a row, which the CPU refuses."""
    yield from rotary_cases(device)
    if not ON_CPU:
        short: dict[str, Any] = {"packed": True, "index_dtype": torch.int64, "device": device}
        for head_dim in (59, 64):
            yield RotaryCase(lengths=(5, 5, 5), offsets=(38, -3, 2**62), head_dim=head_dim, **short)
            yield RotaryCase(lengths=(5, 5), offsets=(38, 40), head_dim=head_dim, device=device)
