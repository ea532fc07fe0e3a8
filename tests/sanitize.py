"""A small grid of calls for compute-sanitizer: every compiled row that this GPU runs, what prepares
and follows it, odd shapes, and every bad input.

    compute-sanitizer --tool memcheck  python tests/sanitize.py
    compute-sanitizer --tool racecheck python tests/sanitize.py
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool initcheck python tests/sanitize.py

memcheck and initcheck see single tensors only if torch does not carve them out of one large
allocation, hence the variable (good for memcheck too). None of the tools sees what TMA reads and
writes: initcheck takes out, dk and dv of Hopper kernels for uninitialised. Inputs come from the
CPU and results go back there to be compared, so that nearly every kernel the sanitizer watches is
this package's. Exit status 1 if a result is wrong; add --error-exitcode 1 for the sanitizer's
findings.

On a Hopper GPU FLASH_ATTN_CUDA_CAPABILITY_LIMIT=80 in the environment brings the rows of other
GPUs, and FLASH_ATTN_CUDA_SMEM_LIMIT those for less shared memory.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import bad_input  # noqa: E402
from cases import (  # noqa: E402
    DTYPE_NAMES,
    Alibi,
    AttentionCase,
    KvCacheCase,
    Layout,
    VarlenCase,
    arrange,
)
from harness import (  # noqa: E402
    DEVICE,
    ON_CPU,
    Case,
    assert_cache_close,
    attend_over_cache,
    drawn_rng_state,
    missing_row,
    run_forward,
    run_forward_backward,
    run_reference,
)
from tolerance import compare  # noqa: E402

from flash_attn_cuda import (  # noqa: E402
    build_info,
    check_device_errors,
    cuda_unavailable_reason,
    flash_attn_combine,
)

DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
EVERYTHING: dict[str, Any] = {"softcap": 5.0, "alibi": Alibi.per_batch, "window": (40, 10)}
TRAINING: dict[str, Any] = {**EVERYTHING, "dropout_p": 0.2, "deterministic": True}

# A call: its name, what runs it and returns what is wrong, and why this build cannot.
Call = tuple[str, Callable[[int], list[str]], str | None]


# -- cases -----------------------------------------------------------------------------------------


def row_cases() -> Iterator[Case]:
    """For every dtype and head dim that has rows: plain ones, ones with every feature, dense,
    packed, over caches; ragged, with shared key heads and partly used head dims.
    """
    rows = {(row.dtype, row.head_dim) for row in build_info.compiled_rows()}
    if ON_CPU:
        rows = {("bf16", 32)}
    for dtype, head_dim in sorted(rows):
        common: dict[str, Any] = {"dtype": DTYPES[dtype], "head_dim": head_dim, "num_heads_q": 2}
        dense = AttentionCase(**common, batch=1, seqlen_q=150, seqlen_k=70, num_heads_k=1)
        yield dense
        yield replace(
            dense, seqlen_q=70, seqlen_k=150, num_heads_k=2, head_dim=head_dim - 8, causal=True
        )
        yield replace(dense, seqlen_q=70, seqlen_k=150, **TRAINING)
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


def many_tile_cases() -> Iterator[Case]:
    """For the kernels whose CTAs stay for many tiles: more tiles than any GPU has SMs, in one key
    block or several, with tiles that see no key between others, packed, with features; the row for
    longer causal sequences, and a cache with enough queries.
    """
    rows = [row for row in build_info.compiled_rows() if row.family == "sm90"]
    head_dims = [32] if ON_CPU else sorted({row.head_dim for row in rows})
    longest = max((row.config.get("most_causal_queries", 0) for row in rows), default=0)
    for head_dim, dtype in zip(head_dims, cycle(("bf16", "fp16")), strict=False):
        common: dict[str, Any] = {"dtype": DTYPES[dtype], "head_dim": head_dim}
        many = AttentionCase(
            **common, batch=1, seqlen_q=70, seqlen_k=150, num_heads_q=280, num_heads_k=140
        )
        yield many
        yield replace(many, window=(20, -1), seqlen_k=60)
        yield replace(many, causal=True, seqlen_q=150, seqlen_k=20)
        yield replace(many, **TRAINING)
        yield replace(
            many, causal=True, seqlen_q=longest + 10, seqlen_k=140, num_heads_q=2, num_heads_k=1
        )
        packed = VarlenCase(
            **common,
            lengths_q=(20, 0, 9, 150) * 10,
            lengths_k=(33, 5, 0, 140) * 10,
            num_heads_q=6,
            num_heads_k=2,
        )
        yield packed
        yield replace(packed, causal=True, used_q=(19, 0, 9, 40) * 10)
        yield replace(packed, **TRAINING, leftpad=(1, 5, 0, 130) * 10)
        yield KvCacheCase(
            **common, num_heads_q=6, cached=(150, 0, 37), seqlens_q=40, seqlens_new=20, causal=True
        )


def odd_cases() -> Iterator[Case]:
    """Rows without keys, single rows, copied layouts, shared key heads, padded head dims, nothing
    at all.
    """
    base = AttentionCase(
        batch=1, seqlen_q=40, seqlen_k=40, num_heads_q=2, num_heads_k=2, causal=True
    )
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
    yield replace(cache, seqlens_q=(3, 0, 70), seqlens_new=(1, 0, 20), page_size=7, causal=True)
    yield replace(cache, batch_idx=(3, 0, 2), entries=5, leftpad=(90, 0, 1))
    yield replace(cache, cached=(192, 192), seqlens_new=None, num_heads_q=40, num_heads_k=1)


# -- running them ----------------------------------------------------------------------------------


def moved(inputs: Any, case: Case) -> Any:
    """`inputs` on the device, in memory of the case's layout."""
    tensors = {
        field.name: getattr(inputs, field.name).to(DEVICE)
        for field in fields(inputs)
        if isinstance(getattr(inputs, field.name), torch.Tensor)
    }
    if isinstance(case, AttentionCase):
        for name in ("q", "k", "v", "dout"):
            tensors[name] = arrange(tensors[name], case.layout)
    return replace(inputs, **tensors)


def run_case(case: Case, seed: int) -> list[str]:
    """One forward and, where wanted and compiled, one backward; returns what is wrong."""
    host_case = replace(case, device="cpu")
    if isinstance(host_case, AttentionCase):
        host_case = replace(host_case, layout=Layout.contiguous)
    inputs = host_case.make_inputs(seed)
    on_device = moved(inputs, case)
    if isinstance(host_case, KvCacheCase):
        return run_cache(host_case, inputs, on_device)
    with_backward = missing_row(case, backward=True) is None
    result = (run_forward_backward if with_backward else run_forward)(case, on_device)
    rng_state = drawn_rng_state(case, on_device).cpu() if case.dropout_p > 0.0 else None
    reference = run_reference(host_case, inputs, use_dlse=with_backward, rng_state=rng_state)
    return [str(item) for item in compare(result.to("cpu"), *reference) if not item.passes]


def run_cache(host_case: KvCacheCase, inputs: Any, on_device: Any) -> list[str]:
    """The case with splits chosen, fixed, and independent of the batch."""
    problems = []
    for changes in ({}, {"num_splits": 3}, {"batch_invariant": True}):
        result, *caches = attend_over_cache(host_case, on_device, **changes)
        try:
            assert_cache_close(host_case, inputs, result.to("cpu"), *(x.cpu() for x in caches))
        except AssertionError as error:
            problems.append(f"{changes}: {error}")
    return problems


def run_combine(seed: int) -> list[str]:
    """Odd sizes, and a part without keys whose output is not to be read."""
    generator = torch.Generator().manual_seed(seed)
    out_partial = torch.randn(5, 2, 7, 3, 59, generator=generator)
    lse_partial = torch.randn(5, 2, 7, 3, generator=generator)
    out_partial[1], lse_partial[1] = torch.nan, -torch.inf
    weights = lse_partial.double().softmax(0)[..., None]
    expected = (weights * out_partial.double().nan_to_num(0.0)).sum(0)
    out, _ = flash_attn_combine(out_partial.to(DEVICE), lse_partial.to(DEVICE))
    worst = (out.cpu().double() - expected).abs().max().item()
    return [] if worst < 1e-5 else [f"out: off by {worst}"]


def run_bad_content(case: bad_input.BadContent, seed: int) -> list[str]:
    """Clamped and flagged; the CPU backend refuses the call instead."""
    prepared = case.prepare()
    results: bad_input.Results = {}
    try:
        results |= prepared.call()
        check_device_errors()
    except ValueError as error:
        if not re.search(case.match, str(error)):
            return [f"raised {error}"]
        if not results:
            return []
    else:
        return ["nothing was flagged"]
    return [] if prepared.expected is None else bad_input.differences(results, prepared.expected())


def calls() -> Iterator[Call]:
    for case in (*row_cases(), *odd_cases()):
        case = replace(case, device=DEVICE)
        yield str(case), partial(run_case, case), missing_row(case, backward=False)
    for case in many_tile_cases():
        case = replace(case, device=DEVICE)
        yield f"many tiles: {case}", partial(run_case, case), missing_row(case, backward=False)
    yield "combine", run_combine, None
    lacking = missing_row(AttentionCase(causal=True), backward=True)
    for bad in bad_input.bad_content_cases():
        yield f"bad input: {bad.name}", partial(run_bad_content, bad), lacking


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="run only calls whose name contains this text")
    options = parser.parse_args()
    reason = None if ON_CPU else cuda_unavailable_reason()
    if reason is not None:
        print(f"sanitize: cannot run: {reason}", file=sys.stderr)
        return 2
    bad_input.margins = 0
    started = time.monotonic()
    ran, wrong = 0, 0
    for name, run, lacking in calls():
        if options.only not in name or lacking is not None:
            continue
        problems = run(ran)
        ran += 1
        wrong += bool(problems)
        print(f"{name}: {'; '.join(problems) or 'right'}", flush=True)
    seconds = time.monotonic() - started
    rows = len(build_info.compiled_rows())
    print(
        f"sanitize: {ran} calls on {DEVICE}, {rows} compiled rows, {wrong} wrong, {seconds:.0f} s"
    )
    return 1 if wrong or ran == 0 else 0


if __name__ == "__main__":
    sys.exit(main())
