"""Calls drawn at random: sizes, features and memory layouts that no list of tests has together.

A call comes from (seed, number) alone, so that one that failed can be run again.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch

from tests.cases.attention import (
    BUCKET_HEAD_DIMS,
    AttentionCase,
    KvCacheCase,
    Layout,
    VarlenCase,
)
from tests.cases.fp8_cache import FORMS as SCALE_FORMS
from tests.cases.fp8_cache import STRIDES, Fp8Case
from tests.cases.fp8_harness import LATENT_FORMS, V4_ROWS
from tests.cases.kvcache import MASKS, TREES
from tests.cases.layouts import DRAWN
from tests.cases.masked import OWN, MaskedCase, RandomBias, RandomMask
from tests.cases.second_order import LEAVES, SECOND_ORDER, DerivativeCase, Transform, jvp

HEADS = ((1, 1), (3, 3), (8, 8), (4, 2), (6, 2), (9, 3), (8, 1), (16, 1), (32, 2), (40, 1))
HEADS_OF_LATENT = ((1, 1), (8, 1), (12, 1), (16, 1), (17, 1), (40, 1), (64, 1), (128, 1), (32, 2))
HEADS_OF_LARGE = ((8, 8), (12, 4), (16, 4), (32, 32))
DTYPES = (torch.bfloat16, torch.float16)
PAGE_SIZES = (None, 1, 7, 16, 64, 100, 256)
MOST_HEAD_DIM = 512
LONGEST = 4500  # tokens of a sequence
MOST_PAIRS = 4e7  # of queries and keys, of all heads of a call
# Of large calls, with many tiles for every multiprocessor, for which some kernels are. They are
# few, as one takes as long as ten others.
PAIRS_OF_LARGE, SHARE_OF_LARGE = 2.5e8, 0.08
OF_TRAINING = ("dropout_p", "max_logits")  # features that no call over a cache has
MOST_PAIRS_OF_DROPOUT = 1e6  # whose decisions the reference draws on the host


@dataclass(frozen=True)
class DerivativeCall:
    """A DerivativeCase and the kind of derivative."""

    case: DerivativeCase
    transform: Transform

    def __str__(self) -> str:
        return f"{self.transform.__name__} of {self.case}"


@dataclass(frozen=True)
class CacheCall:
    """A case over a cache, and how many parts its keys are split into, 0 for the plan's choice."""

    case: KvCacheCase | Fp8Case
    num_splits: int

    def __str__(self) -> str:
        return f"{self.case}-splits{self.num_splits}"

    @property
    def cache(self) -> KvCacheCase:
        return self.case.cache if isinstance(self.case, Fp8Case) else self.case

    def on(self, device: str) -> CacheCall:
        cache = replace(self.cache, device=device)
        is_fp8 = isinstance(self.case, Fp8Case)
        return replace(self, case=replace(self.case, cache=cache) if is_fp8 else cache)


RandomCall: TypeAlias = MaskedCase | CacheCall | DerivativeCall


@dataclass(frozen=True)
class Draw:
    """Random choices for cases on `device` with up to `pairs` (query, key) pairs of all heads."""

    rng: random.Random
    device: str
    pairs: float

    @property
    def is_large(self) -> bool:
        return self.pairs > MOST_PAIRS

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    def length(self, longest: int = LONGEST) -> int:
        """Any, with the edges of tiles more often than others, and 0 now and then."""
        if self.chance(0.02):
            return 0
        if self.chance(0.4):
            edge = self.rng.choice((16, 64, 80, 128, 176, 192, 256)) * self.rng.choice(
                (1, 1, 2, 3, 5)
            )
            return max(1, min(longest, edge + self.rng.choice((-1, 0, 0, 1))))
        return round(math.exp(self.rng.uniform(0.0, math.log(max(1, longest)))))

    def lengths(self) -> tuple[int, int]:
        """Of queries and of keys; both the same for every other case. Within `pairs`."""
        queries = keys = self.rng.randint(400, LONGEST) if self.is_large else self.length()
        if self.is_large and self.chance(0.3):  # tiles of 256 queries that are nearly full
            queries = keys = 256 * self.rng.randint(2, 8) - self.rng.choice((0, 0, 1, 64))
        elif self.chance(0.5):
            keys = self.rng.randint(400, 2 * LONGEST) if self.is_large else self.length()
        while queries * keys > self.pairs:
            queries, keys = max(1, queries // 2), max(1, keys // 2)
        return queries, keys

    def head_dims(self, step: int = 1) -> dict[str, Any]:
        """head_dim and, seldom, another head_dim_v: multiples of `step`."""

        def one() -> int:
            if self.chance(0.7):
                return self.rng.choice(BUCKET_HEAD_DIMS)
            return self.rng.randrange(step, MOST_HEAD_DIM + 1, step)

        if self.is_large:
            return {"head_dim": self.rng.choice((64, 64, 96, 128, 192, 256))}
        if self.chance(0.08):
            return {"head_dim": 192, "head_dim_v": 128}
        return {"head_dim": one(), "head_dim_v": one() if self.chance(0.1) else None}

    def features(self, *, of_training: bool = True) -> dict[str, Any]:
        """Half of the cases have a window at most, as most calls have."""
        fields: dict[str, Any] = {"dtype": self.rng.choice(DTYPES), "device": self.device}
        fields["causal"] = self.chance(0.5)
        if self.chance(0.25):
            bounds = (-1, 0, self.length(), self.length())
            fields["window"] = (self.rng.choice(bounds), self.rng.choice(bounds))
        if self.chance(0.5):
            return fields
        for name, (often, values) in DRAWN.items():
            if (of_training or name not in OF_TRAINING) and self.chance(often):
                fields[name] = self.rng.choice(values)
        return fields

    def heads(self, queries: int, keys: int) -> tuple[int, dict[str, Any]]:
        """(sequences, numbers of heads) that stay within `pairs`."""
        of_head = max(1, queries * keys)
        every = HEADS_OF_LARGE if self.is_large else HEADS
        fitting = [heads for heads in every if heads[0] * of_head <= self.pairs] or [every[0]]
        heads = self.rng.choice(fitting)
        most = min(40.0, max(1.0, self.pairs / (heads[0] * of_head)))
        batch = round(math.exp(self.rng.uniform(0.0, math.log(most))))
        return batch, {"num_heads_q": heads[0], "num_heads_k": heads[1]}

    def of_scores(self, of: AttentionCase | VarlenCase) -> MaskedCase:
        """The case with a mask, a bias or a sink, or without, as most are."""
        mask = bias = sink = None
        longest = MaskedCase(of).seqlens
        pairs = of.batch * of.num_heads_q * longest[0] * longest[1]
        if pairs > MOST_PAIRS_OF_DROPOUT:
            of = replace(of, dropout_p=0.0)
        is_small = of.batch * of.num_heads_q <= 24 and pairs <= MOST_PAIRS
        if is_small and self.chance(0.12):
            size, given = self.rng.choice(
                (
                    *((1, "attn_mask"), (1, "sparsity"), (64, "sparsity"), (128, "sparsity")),
                    *((64, "blocks"), (128, "blocks")),
                    *((size, "key_lists") for size in (1, 16, 32, 64, 128)),
                )
            )
            share = self.rng.choice((0.0, 0.05, 0.5, 1.0))
            queries = self.rng.choice((1, 1, 64, 128)) if isinstance(of, AttentionCase) else 1
            mask = RandomMask(share, size, self.rng.choice(OWN), given, queries)
        if is_small and self.chance(0.1) and (mask is None or mask.given != "attn_mask"):
            hidden = self.rng.choice((0.0, 0.0, 0.3))
            bias = RandomBias(
                self.rng.choice(OWN),
                self.chance(0.5),
                hidden,
                self.chance(0.7),
                self.rng.choice((None, None, 0, 17, 128, 1000)),
            )
        if self.chance(0.1):
            sink = self.rng.choice((torch.float32, of.dtype))
        chunk = 0
        # Dropout counts within chunks if nothing is given over pairs.
        if self.chance(0.15) and not (mask is bias is None and of.dropout_p > 0.0):
            chunk = self.rng.choice((1, 5, 64, 128, 1 + self.length(), 1 + self.length()))
        return MaskedCase(of, mask, bias, sink, chunk)


def dense(draw: Draw) -> MaskedCase:
    queries, keys = draw.lengths()
    batch, heads = draw.heads(queries, keys)
    layout = draw.rng.choice(list(Layout)) if draw.chance(0.3) else Layout.contiguous
    case = AttentionCase(
        batch=batch,
        seqlen_q=queries,
        seqlen_k=keys,
        layout=layout,
        deterministic=draw.chance(0.15),
        **heads,
        **draw.head_dims(),
        **draw.features(),
    )
    return draw.of_scores(case)


def packed(draw: Draw) -> MaskedCase:
    pairs = [draw.lengths() for _ in range(draw.rng.randint(1, 12))]
    most = draw.pairs / (HEADS_OF_LARGE[0][0] if draw.is_large else 1)
    while sum(q * k for q, k in pairs) > most and len(pairs) > 1:
        pairs.remove(max(pairs))
    _, heads = draw.heads(sum(q for q, _ in pairs), max(k for _, k in pairs))
    fields: dict[str, Any] = {"lengths_q": tuple(q for q, _ in pairs)}
    if draw.chance(0.5):
        fields["lengths_k"] = tuple(k for _, k in pairs)
    keys = fields.get("lengths_k", fields["lengths_q"])
    if draw.chance(0.15):
        fields["used_q"] = tuple(draw.rng.randint(0, n) for n in fields["lengths_q"])
    if draw.chance(0.15):
        fields["used_k"] = tuple(draw.rng.randint(0, n) for n in keys)
    if draw.chance(0.1):
        fields["leftpad"] = tuple(draw.rng.randint(0, n) for n in fields.get("used_k", keys))
    case = VarlenCase(
        **fields,
        deterministic=draw.chance(0.15),
        **heads,
        **draw.head_dims(),
        **draw.features(),
    )
    return draw.of_scores(case)


def cache(draw: Draw) -> RandomCall:
    return CacheCall(_over_cache(draw, draw.head_dims()), _splits(draw))


def latent_cache(draw: Draw) -> RandomCall:
    """Head dims that the rows of latent attention are for, and others."""
    latent = draw.rng.choice((512, 512, 256, draw.rng.randrange(8, 513, 8)))
    return CacheCall(_latent(draw, latent), _splits(draw))


def fp8_latent_cache(draw: Draw) -> RandomCall:
    """Values alone of e4m3, some of them in rows of bytes."""
    group, name = draw.rng.choice((64, 128, 128, 256, 512)), draw.rng.choice([*LATENT_FORMS])
    form = LATENT_FORMS[name]
    has_groups = form["v_form"] == "group"
    most = 448 if name == V4_ROWS else 512  # beside rotary columns
    group = min(group, 256) if name == V4_ROWS else group
    latent = group * draw.rng.randint(1, most // group)
    case = _latent(draw, latent if has_groups else draw.rng.randrange(16, 513, 16))
    may_write = has_groups and form["strides"] != "expanded" and case.seqlens_new is not None
    quantize = "token" if may_write and draw.chance(0.7) else None
    return CacheCall(Fp8Case(case, **form, quantize=quantize, group=group), _splits(draw))


def _latent(draw: Draw, latent: int) -> KvCacheCase:
    rope = draw.rng.choice((64, 64, 32, draw.rng.randrange(8, 65, 8)))
    case = _over_cache(draw, {"head_dim": rope, "head_dim_v": latent})
    heads = draw.rng.choice(HEADS_OF_LATENT)
    scale = draw.rng.choice((192**-0.5, 192**-0.5, 0.3, 0.0, -0.1))
    of_latent: dict[str, Any] = {"has_qv": True, "softmax_scale": scale, "alibi": None}
    of_latent |= {"mask": None, "reach": None}
    of_heads = {"num_heads_q": heads[0], "num_heads_k": heads[1]}
    if draw.chance(0.5):
        of_latent |= {"keys_per_list": draw.length(2100), "tree": None}
    return replace(case, **of_latent, **of_heads)


def fp8_cache(draw: Draw) -> RandomCall:
    case = replace(_over_cache(draw, draw.head_dims(step=16)), mask=None, reach=None)
    forms = [draw.rng.choice(SCALE_FORMS)] * 2
    if draw.chance(0.4):
        forms[1] = draw.rng.choice(SCALE_FORMS)
    strides, quantize = STRIDES, None
    if case.seqlens_new is not None and draw.chance(0.3):  # which writes scales of every token
        forms, strides, quantize = ["token"] * 2, ("plain", "strided"), "token"
    fp8 = Fp8Case(
        case,
        *forms,
        strides=draw.rng.choice(strides),
        powers=draw.chance(0.4),
        quantize=quantize,
        q_is_fp8=case.dtype == torch.bfloat16 and draw.chance(0.2),
    )
    return CacheCall(fp8, _splits(draw))


def _splits(draw: Draw) -> int:
    return draw.rng.choice((0, 0, 0, 1, 2, 5, 17))


def _over_cache(draw: Draw, head_dims: dict[str, Any]) -> KvCacheCase:
    batch = draw.rng.randint(1, 6)
    capacity = max(1, draw.length(3000))
    most_new = min(capacity, 200)
    new: int | tuple[int, ...] | None = None
    queries: int | tuple[int, ...] = 1 if draw.chance(0.4) else draw.length(300)
    if draw.chance(0.3):
        queries = tuple(draw.length(150) for _ in range(batch))
    if draw.chance(0.5):
        new = draw.rng.randint(0, most_new)
        if isinstance(queries, tuple):
            new = tuple(draw.rng.randint(0, most_new) for _ in range(batch))
    added = max(new, default=0) if isinstance(new, tuple) else (new or 0)
    cached = tuple(draw.rng.randint(0, capacity - added) for _ in range(batch))
    fields: dict[str, Any] = {"page_size": draw.rng.choice(PAGE_SIZES)}
    if draw.chance(0.2):
        fields["leftpad"] = tuple(draw.rng.randint(0, n) for n in cached)
    if draw.chance(0.2):
        entries = batch + 2
        fields["entries"] = entries
        fields["batch_idx"] = tuple(draw.rng.sample(range(entries), batch))
    if draw.chance(0.15):
        fields["sink"] = torch.float32
    features = draw.features(of_training=False)
    last = max(cached) + max(queries if isinstance(queries, tuple) else (queries,))
    if (
        new is not None
        and last <= capacity  # where the table of angles ends
        and head_dims["head_dim"] >= 16
        and draw.chance(0.6)
    ):
        fields["rotary_dim"] = draw.rng.randrange(16, min(256, head_dims["head_dim"]) + 1, 16)
        fields["rotary_interleaved"] = draw.chance(0.5)
    heads = draw.rng.choice(HEADS)
    if draw.chance(0.2):
        fields["tree"] = draw.rng.choice(TREES)
        features |= {"causal": False, "window": (features.get("window", (-1, -1))[0], -1)}
    elif draw.chance(0.2):
        fields["mask"] = draw.rng.choice(MASKS)
    elif draw.chance(0.1):
        fields["reach"] = draw.length(1000)
    return KvCacheCase(
        cached,
        queries,
        new,
        capacity,
        num_heads_q=heads[0],
        num_heads_k=heads[1],
        **fields,
        **head_dims,
        **features,
    )


def derivatives(draw: Draw) -> RandomCall:
    """Small ones, since the fp64 reference is differentiated several times."""
    small = Draw(draw.rng, draw.device, min(draw.pairs, 3e5))
    of = packed(small) if draw.chance(0.4) else dense(small)
    if isinstance(of.of, AttentionCase) and of.of.layout is Layout.expanded_batch:
        of = replace(of, of=replace(of.of, layout=Layout.contiguous))  # torch has no duals of it
    moved = {
        draw.rng.choice("qkv"),
        *draw.rng.sample((*LEAVES, "dout", "dlse"), draw.rng.randint(0, 6)),
    }
    transform = jvp if draw.chance(0.4) else draw.rng.choice(SECOND_ORDER)
    return DerivativeCall(DerivativeCase(of, tuple(sorted(moved))), transform)


KINDS: dict[str, Callable[[Draw], RandomCall]] = {
    f.__name__: f
    for f in (dense, packed, cache, latent_cache, fp8_latent_cache, fp8_cache, derivatives)
}


def draw_call(
    kind: str, seed: int, number: int, device: str, most_pairs: float = MOST_PAIRS
) -> RandomCall:
    """The call of this number. Few pairs are as likely as many; with the usual `most_pairs` a
    SHARE_OF_LARGE are large.
    """
    rng = random.Random(f"{kind} {seed} {number}")
    pairs = math.exp(rng.uniform(math.log(100.0), math.log(most_pairs)))
    if most_pairs == MOST_PAIRS and rng.random() < SHARE_OF_LARGE:
        pairs = PAIRS_OF_LARGE
    return KINDS[kind](Draw(rng, device, pairs))
