"""Calls whose index tensors hold what they must not, for gpu/test_bad_input.py and sanitize.py.

On CUDA such a call must do what its `expected` says, leave the memory around its tensors alone and
leave a record that check_device_errors raises; on the CPU it must raise at once. Every case breaks
one rule in one entry, so that the error to be raised is known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from flash_attn_cuda import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from flash_attn_cuda.call.fields import AttentionCall
from flash_attn_cuda.operators.derivatives import run_gradients_operator, run_operator
from tests.cases import harness
from tests.cases.operators import incoming_of

HEADS_Q, HEADS_K, HEAD_DIM = 4, 2, 64
INT_MAX, INT_MIN = 2**31 - 1, -(2**31)

# Without a GPU its tests are collected, and then skipped.
DEVICE = harness.DEVICE if harness.ON_CPU or torch.cuda.is_available() else "cpu"

# 0 for compute-sanitizer, which sees the bounds of allocations alone.
margins = 1

Results = dict[str, Tensor]
Span = tuple[int, int]


# By element size, a NaN that neither torch nor arithmetic on a GPU makes: theirs end in zeros or in
# ones alone. That of 16 bits is one in bf16 as well as in fp16.
PAYLOADS = {2: 0x7FAB, 4: 0x7FABCDEF}


class Guard:
    """A tensor with NaN before and behind it in memory, which nothing may change or use."""

    def __init__(self, name: str, inside: Tensor, margin: int) -> None:
        self.name = name
        margin *= margins
        shape = (inside.shape[0] + 2 * margin, *inside.shape[1:])
        self._buffer = torch.empty(shape, dtype=inside.dtype, device=inside.device)
        self._payload = PAYLOADS[inside.element_size()]
        harness.bits(self._buffer).fill_(self._payload)
        self._outside = (self._buffer[:margin], self._buffer[margin + inside.shape[0] :])
        self.tensor = self._buffer[margin : margin + inside.shape[0]].copy_(inside)

    def check(self) -> None:
        """Bit by bit, as what is written may be NaN."""
        for where, x in zip(("before", "behind"), self._outside, strict=True):
            written = int((harness.bits(x) != self._payload).sum())
            assert written == 0, f"{self.name}: {written} elements {where} it were written"


@dataclass
class Prepared:
    """A call on tensors of its own; `expected` is what clamping makes of it, None: unspecified."""

    call: Callable[[], Results]
    expected: Callable[[], Results] | None = None
    guards: list[Guard] = field(default_factory=list)


@dataclass(frozen=True)
class BadContent:
    name: str
    match: str  # of the ValueError
    prepare: Callable[[], Prepared]

    def __str__(self) -> str:
        return self.name.replace(" ", "_")


def int32(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def error_pattern(argument: str, value: int, index: int | None = None) -> str:
    at = rf".*\b{index}\b" if index is not None else ""
    return rf"^({argument}): must .*got {value}\b{at}"


# -- packed sequences ------------------------------------------------------------------------------

TOTAL = 40
GOOD_Q, GOOD_K = (0, 10, 25, 40), (0, 12, 20, 40)

BAD_CU_SEQLENS = {
    # name: (contents, index of the bad entry)
    "start above 0": ((3, 10, 25, 40), 0),
    "start below 0": ((-4, 10, 25, 40), 0),
    "decreasing": ((0, 25, 10, 40), 2),
    "negative inside": ((0, -5, 25, 40), 1),
    "end past the tensor": ((0, 10, 25, 47), 3),
    "end far past the tensor": ((0, 10, 25, INT_MAX), 3),
    "very negative inside": ((0, 10, INT_MIN, 40), 2),
    "very large inside": ((0, INT_MAX, INT_MAX, INT_MAX), None),
}


def repaired(cu_seqlens: tuple[int, ...], total: int) -> list[Span]:
    """Spans of the sequences: the running maximum, clamped to the tensor."""
    bounds, highest = [], 0
    for entry in cu_seqlens:
        highest = max(highest, entry)
        bounds.append(min(highest, total))
    return list(pairwise(bounds))


def varlen_inputs() -> list[Guard]:
    shapes = {"q": HEADS_Q, "k": HEADS_K, "v": HEADS_K}
    return [
        Guard(name, normal(TOTAL, heads, HEAD_DIM, seed=seed), margin=16)
        for seed, (name, heads) in enumerate(shapes.items())
    ]


def varlen_call(guards: list[Guard], cu_q: Any, cu_k: Any, **options: Any) -> Results:
    """Forward and backward of the packed call, causal."""
    leaves = [guard.tensor.detach().requires_grad_() for guard in guards]
    out, lse, _ = flash_attn_varlen_func(
        *(*leaves, int32(cu_q), int32(cu_k), *options.pop("max_seqlens", (None, None))),
        causal=True,
        return_attn_probs=True,
        **options,
    )
    dout, dlse = normal(*out.shape, seed=7), normal(*lse.shape, seed=8, dtype=torch.float32)
    gradients = torch.autograd.grad([out, lse], leaves, [dout, dlse])
    return dict(zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *gradients), strict=True))


def sequence_by_sequence(guards: list[Guard], spans_q: list[Span], spans_k: list[Span]) -> Results:
    """What the spans say, each by the function for dense tensors; nothing elsewhere."""
    q, k, v = (guard.tensor.detach() for guard in guards)
    dout = normal(*q.shape, seed=7)
    dlse = normal(HEADS_Q, TOTAL, seed=8, dtype=torch.float32)
    results = {name: torch.zeros_like(x) for name, x in zip(("out", "dq"), (q, q), strict=True)}
    results |= {"dk": torch.zeros_like(k), "dv": torch.zeros_like(v)}
    results["lse"] = torch.full_like(dlse, -torch.inf)
    for (q_begin, q_end), (k_begin, k_end) in zip(spans_q, spans_k, strict=True):
        rows, keys = slice(q_begin, q_end), slice(k_begin, k_end)
        leaves = [x[None].detach().requires_grad_() for x in (q[rows], k[keys], v[keys])]
        out, lse, _ = flash_attn_func(*leaves, causal=True, return_attn_probs=True)
        gradients = torch.autograd.grad([out, lse], leaves, [dout[None, rows], dlse[None, :, rows]])
        results["out"][rows], results["lse"][:, rows] = out[0], lse[0]
        for name, at, gradient in zip(
            ("dq", "dk", "dv"), (rows, keys, keys), gradients, strict=True
        ):
            results[name][at] = gradient[0]
    return results


def bad_varlen(
    cu_q: Any, cu_k: Any, spans_q: list[Span], spans_k: list[Span], **options: Any
) -> Callable[[], Prepared]:
    def prepare() -> Prepared:
        guards = varlen_inputs()
        device_options = {name: int32(values) for name, values in options.items()}
        return Prepared(
            call=lambda: varlen_call(guards, cu_q, cu_k, **device_options),
            expected=lambda: sequence_by_sequence(guards, spans_q, spans_k),
            guards=guards,
        )

    return prepare


def origin_call(guards: list[Guard], origin: list[list[int]]) -> Results:
    """Forward and backward of parts of sequences, causal and with dropout, in fp32."""
    q, k, v = (guard.tensor for guard in guards)
    call = AttentionCall(
        *(q, k, v),
        dropout_p=0.3,
        causal=True,
        rng_state=torch.tensor([7, 4], device=DEVICE),
        cu_seqlens_q=int32(GOOD_Q),
        cu_seqlens_k=int32(GOOD_K),
        max_seqlen_q=TOTAL,
        max_seqlen_k=TOTAL,
        origin=int32(origin),
        fp32_results=True,
    )
    found = run_operator(call)
    out, lse = found.out, found.softmax_lse
    dout, dlse = normal(*out.shape, seed=7), normal(*lse.shape, seed=8, dtype=torch.float32)
    gradients = run_gradients_operator(call, incoming_of(found, dout, dlse))[:3]
    return dict(zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *gradients), strict=True))


def origin_cases() -> Iterator[BadContent]:
    """Places that dropout cannot count from are rounded down; shifts and streams may be any."""

    def rows(first_q: int, first_k: int) -> list[list[int]]:
        return [[INT_MIN, 0, 0, 1], [-3, first_q, first_k, 4], [INT_MAX, 32, 16, 0]]

    def prepare(bad: tuple[int, int], good: tuple[int, int]) -> Prepared:
        guards = varlen_inputs()
        return Prepared(
            call=lambda: origin_call(guards, rows(*bad)),
            expected=lambda: origin_call(guards, rows(*good)),
            guards=guards,
        )

    for bad, good in (
        ((17, 48), (16, 48)),
        ((32, -16), (32, 0)),
        ((INT_MAX, 0), (2**30, 0)),
        ((0, INT_MIN), (0, 0)),
    ):
        value = next(x for x, y in zip(bad, good, strict=True) if x != y)
        match = error_pattern("origin", value, 1)
        yield BadContent(f"origin {value}", match, partial(prepare, bad, good))


def varlen_cases() -> Iterator[BadContent]:
    for name, (contents, index) in BAD_CU_SEQLENS.items():
        value = INT_MAX if index is None else contents[index]
        for argument in ("cu_seqlens_q", "cu_seqlens_k"):
            is_q = argument == "cu_seqlens_q"
            cu_q, cu_k = (contents, GOOD_K) if is_q else (GOOD_Q, contents)
            spans = repaired(cu_q, TOTAL), repaired(cu_k, TOTAL)
            match = error_pattern(argument, value, index)
            yield BadContent(f"{argument} {name}", match, bad_varlen(cu_q, cu_k, *spans))

    good = repaired(GOOD_Q, TOTAL), repaired(GOOD_K, TOTAL)
    for used, clamped in (((10, 16, 15), (10, 15, 15)), ((10, -1, 3), (10, 0, 3))):
        spans = [(begin, begin + n) for (begin, _), n in zip(good[0], clamped, strict=True)]
        match = error_pattern("seqused_q", used[1], 1)
        prepare = bad_varlen(GOOD_Q, GOOD_K, spans, good[1], seqused_q=used)
        yield BadContent(f"seqused_q {used[1]}", match, prepare)
    for used, clamped in (((12, 8, 21), (12, 8, 20)), ((12, 8, INT_MIN), (12, 8, 0))):
        spans = [(begin, begin + n) for (begin, _), n in zip(good[1], clamped, strict=True)]
        match = error_pattern("seqused_k", used[2], 2)
        prepare = bad_varlen(GOOD_Q, GOOD_K, good[0], spans, seqused_k=used)
        yield BadContent(f"seqused_k {used[2]}", match, prepare)
    for leftpad, clamped in (((0, 9, 3), (0, 8, 3)), ((-1, 2, 3), (0, 2, 3))):
        index = 1 if leftpad[1] == 9 else 0
        spans = [(begin + n, end) for (begin, end), n in zip(good[1], clamped, strict=True)]
        match = error_pattern("leftpad_k", leftpad[index], index)
        prepare = bad_varlen(GOOD_Q, GOOD_K, good[0], spans, leftpad_k=leftpad)
        yield BadContent(f"leftpad_k {leftpad[index]}", match, prepare)


def tree_cases() -> Iterator[BadContent]:
    """A mask with fewer columns than a sequence has queries shows none of the keys behind them, nor
    what lies there in memory.
    """
    mask = torch.ones(TOTAL, TOTAL, dtype=torch.bool, device=DEVICE)

    def call(guards: list[Guard], tree: Tensor) -> Results:
        out, lse, _ = flash_attn_varlen_func(
            *(*(guard.tensor for guard in guards), int32(GOOD_Q), int32(GOOD_K), None, None),
            tree_mask=tree,
            return_attn_probs=True,
        )
        return {"out": out, "lse": lse}

    def prepare() -> Prepared:
        guards, wider = varlen_inputs(), mask.clone()
        wider[:, 12:] = False
        return Prepared(
            call=lambda: call(guards, mask[:, :12]),
            expected=lambda: call(guards, wider),
            guards=guards,
        )

    yield BadContent("tree_mask 15", r"^tree_mask: .*must .*got 15\b", prepare)


# -- caches ----------------------------------------------------------------------------------------

BATCH, CAPACITY, PAGE_SIZE, NEW = 3, 21, 7, 4
TABLE = ((4, 1, 7), (0, 2, 8), (3, 6, 5))  # pages of a pool of 9


@dataclass
class Cache:
    """A dense cache (3, 21, Hk, D), or a pool of 9 pages of 7 and its block table."""

    paged: bool
    table: tuple[tuple[int, ...], ...] = TABLE

    def __post_init__(self) -> None:
        shape = (9, PAGE_SIZE) if self.paged else (BATCH, CAPACITY)
        self.guards = [
            Guard(name, normal(*shape, HEADS_K, HEAD_DIM, seed=seed), margin=2)
            for seed, name in enumerate(("k_cache", "v_cache"), 20)
        ]
        self.q = normal(BATCH, 2, HEADS_Q, HEAD_DIM, seed=30)
        self.new = [normal(BATCH, NEW, HEADS_K, HEAD_DIM, seed=seed) for seed in (31, 32)]
        self.before = [guard.tensor.clone() for guard in self.guards]

    def rows(self, x: Tensor, entry: int) -> Tensor:
        """What is in the cache for one of its entries, without the pages that are not there."""
        if not self.paged:
            return x[entry]
        pages = [page for page in self.table[entry] if 0 <= page < 9]
        return x[pages].flatten(0, 1)

    def call(self, *, append: bool = False, **options: Any) -> Results:
        if self.paged:
            options["block_table"] = int32(self.table)
        if append:
            options |= dict(zip("kv", self.new, strict=True))
        caches = [guard.tensor for guard in self.guards]
        out, lse = flash_attn_with_kvcache(self.q, *caches, return_softmax_lse=True, **options)
        return {"out": out, "lse": lse, "k_cache": caches[0], "v_cache": caches[1]}

    def attend(self, keys: list[tuple[int, list[int]] | None], after: list[Tensor]) -> Results:
        """Query rows of sequence b over rows keys[b] = (entry, rows) of the caches `after`."""
        outs, lses = [], []
        for b, where in enumerate(keys):
            entry, rows = (0, []) if where is None else where
            k, v = (self.rows(x, entry)[rows][None] for x in after)
            out, lse, _ = flash_attn_func(self.q[b : b + 1], k, v, return_attn_probs=True)
            outs.append(out)
            lses.append(lse)
        return {
            "out": torch.cat(outs),
            "lse": torch.cat(lses),
            "k_cache": after[0],
            "v_cache": after[1],
        }

    def appended(self, writes: list[tuple[int, int, int]]) -> list[Tensor]:
        """The caches after new row t of sequence b went to row r, for each (b, t, r)."""
        after = [x.clone() for x in self.before]
        for x, new in zip(after, self.new, strict=True):
            for b, t, row in writes:
                if self.paged:
                    x[self.table[b][row // PAGE_SIZE], row % PAGE_SIZE] = new[b, t]
                else:
                    x[b, row] = new[b, t]
        return after


def bad_cache(
    lengths: tuple[int, ...],
    keys: list[tuple[int, range] | None],
    writes: list[tuple[int, int, int]] | None = None,
    *,
    paged: bool = False,
    table: tuple[tuple[int, ...], ...] = TABLE,
    **options: Any,
) -> Callable[[], Prepared]:
    def prepare() -> Prepared:
        cache = Cache(paged, table)
        device_options = {name: int32(values) for name, values in options.items()}
        device_options["cache_seqlens"] = int32(lengths)
        seen = [None if each is None else (each[0], list(each[1])) for each in keys]
        return Prepared(
            call=lambda: cache.call(append=writes is not None, **device_options),
            expected=lambda: cache.attend(seen, cache.appended(writes or [])),
            guards=cache.guards,
        )

    return prepare


def cache_cases() -> Iterator[BadContent]:
    seqlens = "cache_seqlens|seqused_k"
    for paged in (False, True):
        kind = "paged" if paged else "dense"
        for bad, length in ((22, 21), (INT_MAX, 21), (-1, 0), (INT_MIN, 0)):
            keys = [(0, range(5)), (1, range(length)), (2, range(21))]
            prepare = bad_cache((5, bad, 21), keys, paged=paged)
            yield BadContent(f"{kind} cache_seqlens {bad}", error_pattern(seqlens, bad, 1), prepare)
        for bad, first in ((11, 10), (INT_MAX, 10), (-1, 0)):
            keys = [(0, range(2, 10)), (1, range(5)), (2, range(first, 10))]
            prepare = bad_cache((10, 5, 10), keys, paged=paged, cache_leftpad=(2, 0, bad))
            match = error_pattern("(cache_)?leftpad(_k)?", bad, 2)
            yield BadContent(f"{kind} cache_leftpad {bad}", match, prepare)
        for bad in (-1, 3, INT_MAX, INT_MIN):
            keys = [(2, range(8)), None, (0, range(21))]
            prepare = bad_cache((8, 9, 21), keys, paged=paged, cache_batch_idx=(2, bad, 0))
            match = error_pattern("cache_batch_idx", bad, 1)
            yield BadContent(f"{kind} cache_batch_idx {bad}", match, prepare)

        keys = [(0, range(9)), (1, range(21)), (2, range(4))]
        fits = [(0, t, 5 + t) for t in range(NEW)] + [(2, t, t) for t in range(NEW)]
        match = r"^(cache_seqlens|k|append\w*)\b.*must "
        prepare = bad_cache((5, 19, 0), keys, [*fits, (1, 0, 19), (1, 1, 20)], paged=paged)
        yield BadContent(f"{kind} append past the capacity", match, prepare)
        prepare = bad_cache((5, 21, 0), keys, fits, paged=paged)
        yield BadContent(f"{kind} append to a full cache", match, prepare)

    for bad in (-1, 9, INT_MAX, INT_MIN):
        # The second page of sequence 1: its keys are not there, those of the third page are.
        table = (TABLE[0], (0, bad, 8), TABLE[2])
        keys = [(0, range(8)), (1, range(13)), (2, range(21))]
        match = error_pattern("block_table", bad)
        prepare = bad_cache((8, 20, 21), keys, paged=True, table=table)
        yield BadContent(f"block_table {bad}", match, prepare)
        # Rows 12 and 13 would go to the missing page, 14 and 15 go to the third one.
        writes = [(0, t, 4 + t) for t in range(NEW)] + [(2, t, 17 + t) for t in range(NEW)]
        writes += [(1, 2, 14), (1, 3, 15)]
        keys = [(0, range(8)), (1, range(9)), (2, range(21))]
        prepare = bad_cache((4, 12, 17), keys, writes, paged=True, table=table)
        yield BadContent(f"block_table {bad} with an append", match, prepare)


def list_cases() -> Iterator[BadContent]:
    """Lists of keys that name what is no key of the sequence, or lies in no page."""

    def prepare(paged: bool, bad: int, table: Any = TABLE) -> Prepared:
        cache, shape = Cache(paged, table), (BATCH, 2, HEADS_K, 5)
        lists = (normal(*shape, dtype=torch.float32).abs() * 3).int().clamp(max=6)
        options = {"cache_seqlens": int32((21, 8, 21)), "softmax_scale": 0.2}
        options["qv"] = normal(BATCH, 2, HEADS_Q, HEAD_DIM, seed=33)

        def call(entry: int, of: Cache) -> Results:
            lists[1, 0, 1, 2] = entry
            return of.call(key_lists=lists, **options)

        return Prepared(
            call=lambda: call(bad, cache),
            expected=lambda: call(-1, Cache(paged)),
            guards=cache.guards,
        )

    for paged in (False, True):
        kind = "paged" if paged else "dense"
        for bad in (8, INT_MAX):
            match = error_pattern("key_lists", bad, 1)
            yield BadContent(f"{kind} key_lists {bad}", match, partial(prepare, paged, bad))
    for page in (-1, 9):
        table = (TABLE[0], (0, page, 8), TABLE[2])
        match = error_pattern("block_table", page)
        yield BadContent(f"listed page {page}", match, partial(prepare, True, 7, table))


def block_list_cases() -> Iterator[BadContent]:
    """Lists of blocks of keys that name what is no block of the sequence: which kernels read as
    they are, and as a mask.
    """
    lengths = GOOD_K[2] - GOOD_K[1]  # keys of sequence 1

    def prepare(packed: bool, queries: int, block: int, bad: int) -> Prepared:
        shapes = [(BATCH, TOTAL, heads, HEAD_DIM) for heads in (HEADS_Q, HEADS_K, HEADS_K)]
        guards = [Guard(name, normal(*shape), 1) for name, shape in zip("qkv", shapes, strict=True)]
        guards = varlen_inputs() if packed else guards
        rows = (TOTAL,) if packed else (BATCH, -(-TOTAL // queries))
        lists = torch.zeros((*rows, HEADS_K, 3), dtype=torch.int32, device=DEVICE)
        lists[..., 1] = -1

        def call(entry: int) -> Results:
            (lists[GOOD_Q[1] + 2] if packed else lists[1, 0])[1, 2] = entry
            options = {"key_lists": lists, "key_list_block": block}
            if packed:
                return varlen_call(guards, GOOD_Q, GOOD_K, max_seqlens=(TOTAL, TOTAL), **options)
            q, k, v = (guard.tensor for guard in guards)
            return {"out": flash_attn_func(q, k, v, key_list_queries=queries, **options)}

        return Prepared(call=lambda: call(bad), expected=lambda: call(-1), guards=guards)

    for packed, queries, block in ((True, 1, 64), (True, 1, 1), (False, 1, 16), (False, 64, 64)):
        keys = lengths if packed else TOTAL
        for bad in (-(-keys // block), INT_MAX, -2, INT_MIN):
            kind = "packed" if packed else f"lists of {queries}"
            match = error_pattern("key_lists", bad, 1)
            name = f"{kind} key_lists {bad} of {block}"
            yield BadContent(name, match, partial(prepare, packed, queries, block, bad))


def unspecified_cases() -> Iterator[BadContent]:
    """Flagged and safe, but what comes out is nobody's promise."""

    def short_rotary() -> Prepared:
        cache = Cache(paged=False)
        tables = [Guard(name, normal(12, 16, seed=40), margin=16) for name in ("cos", "sin")]

        def call() -> Results:
            return cache.call(
                append=True,
                cache_seqlens=int32((3, 9, 5)),
                rotary_cos=tables[0].tensor,
                rotary_sin=tables[1].tensor,
            )

        return Prepared(call=call, guards=[*cache.guards, *tables])

    yield BadContent(
        "rotary table too short", r"^rotary_(cos|position): .*must .*got 12\b", short_rotary
    )

    def packed_append(cu_q: Any, cu_k_new: Any) -> Callable[[], Prepared]:
        def prepare() -> Prepared:
            cache = Cache(paged=False)
            packed = [x.flatten(0, 1) for x in (cache.q, *cache.new)]

            def call() -> Results:
                out, lse = flash_attn_with_kvcache(
                    *(packed[0], *(guard.tensor for guard in cache.guards), *packed[1:]),
                    cache_seqlens=int32((3, 4, 5)),
                    cu_seqlens_q=int32(cu_q),
                    cu_seqlens_k_new=int32(cu_k_new),
                    return_softmax_lse=True,
                )
                return {"out": out, "lse": lse}

            return Prepared(call=call, guards=cache.guards)

        return prepare

    for name, contents in (("decreasing", (0, 5, 3, 6)), ("past the end", (0, 2, 4, 99))):
        value, index = (3, 2) if name == "decreasing" else (99, 3)
        match = error_pattern("cu_seqlens_q", value, index)
        yield BadContent(
            f"cache cu_seqlens_q {name}", match, packed_append(contents, (0, 4, 8, 12))
        )
        doubled = tuple(2 * x for x in contents)
        match = error_pattern("cu_seqlens_k_new", 2 * value, index)
        yield BadContent(f"cu_seqlens_k_new {name}", match, packed_append((0, 2, 4, 6), doubled))


def bad_content_cases() -> list[BadContent]:
    of_caches = (*cache_cases(), *list_cases())
    return [
        *(*varlen_cases(), *origin_cases(), *tree_cases(), *block_list_cases()),
        *(*of_caches, *unspecified_cases()),
    ]


def differences(actual: Results, expected: Results) -> list[str]:
    """What is not what it must be. Two kernels may differ by a few roundings to 16 bits."""
    problems = []
    for name, y in expected.items():
        x = actual[name]
        loosely_equal = torch.isclose(x.float(), y.float(), rtol=2.0**-5, atol=2.0**-5)
        wrong = int((~loosely_equal & ~(x == y)).sum())
        if wrong:
            problems.append(f"{name}: {wrong} of {x.numel()} elements are wrong")
    return problems
