"""What the tests of the Hopper kernels share: where they run, and what they go over."""

from __future__ import annotations

import os
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_attn_cuda.installed import build_info
from tests.cases import families
from tests.cases.attention import AttentionCase, VarlenCase
from tests.cases.harness import (
    DEVICE,
    ON_CPU,
    bits,
    built_row,
    make_case,
    make_varlen_case,
    skip_without_row,
)
from tests.cases.masked import MaskedCase
from tests.cases.masked_harness import run_masked
from tests.cases.matrix import inputs_of

LIMITS = ("FLASH_ATTN_CUDA_CAPABILITY_LIMIT", "FLASH_ATTN_CUDA_SMEM_LIMIT")
HEAD_DIMS = families.HEAD_DIMS
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
EVERY_HEAD_DIM = pytest.mark.parametrize("head_dim", HEAD_DIMS)
CAUSAL = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
MASKS: list[dict[str, Any]] = [
    {},
    {"causal": True},
    *({"window": window} for window in ((0, 0), (5, -1), (-1, 7), (100, 50), (64, 0))),
]


@pytest.fixture(autouse=True)
def runs_sm90_kernels() -> None:
    if ON_CPU:
        return
    capability = torch.cuda.get_device_capability()
    if capability != (9, 0):
        pytest.skip(f"needs compute capability 9.0, this is {capability[0]}.{capability[1]}")
    for variable in LIMITS:
        if variable in os.environ:
            pytest.skip(f"{variable} is set")
    if not any(row.family == "sm90" for row in build_info.compiled_rows()):
        pytest.skip("this build has no sm90 rows")


def multiprocessors(on_cpu: int) -> int:
    """Of the GPU, or so many where the CPU backend stands in."""
    return on_cpu if ON_CPU else torch.cuda.get_device_properties("cuda").multi_processor_count


def assert_row(case: AttentionCase | VarlenCase, name: str) -> None:
    """That the forward is planned with the row of this name."""
    if not ON_CPU:
        assert families.planned(case)["instance"] == name, str(case)


def assert_shares_heads(case: AttentionCase | VarlenCase, **further: bool) -> None:
    """That CTAs share a key head in the backward, and sum partial gradients."""
    if not ON_CPU:
        assert families.planned(case, "backward", **further)["dkdv_splits"] > 1, str(case)


def row_name(
    head_dim: int,
    variant: str = "",
    family: str = "sm90",
    dtype: str = "bf16",
    kernel_pass: str = "fwd",
) -> str:
    parts = [kernel_pass, family, dtype, f"hd{head_dim}", "windowed", variant]
    return built_row("_".join(filter(None, parts)))


def most_short_seqlen(head_dim: int = 64, variant: str = "short", *, causal: bool) -> int:
    """Of a row for short sequences."""
    rows = {row.name: row for row in build_info.compiled_rows()}
    field = "most_causal_seqlen" if causal else "most_full_seqlen"
    return rows[row_name(head_dim, variant)].config[field]


def kernels_run(function: Callable[[], Any], pass_name: str) -> list[str]:
    """The rows whose kernels `function` runs, one after the other, by the names that a profiler
    sees.
    """
    rows = {row.name for row in build_info.compiled_rows() if row.pass_name == pass_name}
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        function()
        torch.cuda.synchronize()
    events = sorted(profile.events(), key=lambda event: event.time_range.start)
    if not events:
        pytest.skip("the profiler sees no kernels here")
    # The kernel that ends a backward carries the same row in its name.
    names = [event.name for event in events if "convert_dq" not in event.name]
    words = (word for name in names for word in re.findall(r"(?:fwd|bwd)_[a-z0-9_]+", name))
    return [word for word in words if word in rows]


def check_launches(
    calls: Sequence[tuple[object, Callable[[], object], str]], pass_name: str
) -> None:
    """What calls are named, how they run, and the row of each, whose kernel is the only one of the
    pass.
    """

    def run() -> None:
        for _, call, _ in calls:
            call()

    seen = kernels_run(run, pass_name)
    found = [f"{name}: {row}" for (name, *_), row in zip(calls, seen, strict=False)]
    assert found == [f"{name}: {row}" for name, _, row in calls]
    assert seen[len(calls) :] == []


def fill_free_memory(value: float) -> None:
    """What torch allocates next holds `value`: 1 GiB of large tensors, 64 MiB of small ones."""
    if ON_CPU:
        return
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    small = [torch.full((1 << 18,), value, device=DEVICE) for _ in range(64)]
    large = torch.full((1 << 28,), value, device=DEVICE)
    del small, large


# -- cases -----------------------------------------------------------------------------------------


def random_lengths(seed: int, count: int, most: int) -> tuple[int, ...]:
    """Many short ones, some long ones, some empty."""
    generator = random.Random(seed)
    return tuple(
        generator.choice((0, generator.randint(1, 70), generator.randint(1, most)))
        for _ in range(count)
    )


def many_sequences(
    head_dim: int, count: int, most: int, heads: tuple[int, int], *, causal: bool
) -> VarlenCase:
    """Packed, `count` of random_lengths up to `most`; `heads` of queries and keys."""
    return make_varlen_case(
        lengths_q=random_lengths(head_dim, count, most),
        lengths_k=random_lengths(head_dim + 1, count, most),
        num_heads_q=heads[0],
        num_heads_k=heads[1],
        head_dim=head_dim,
        causal=causal,
    )


def far_apart(case: AttentionCase, names: Sequence[str], far: str) -> dict[str, Tensor]:
    """Tensors of the case's query_shape, interleaved in one buffer of 4 GiB, with more than 2^31
    elements from the first to the last of a dimension: batch, row or head. Skips where there is no
    room.
    """
    if torch.cuda.mem_get_info()[0] < 12 << 30:
        pytest.skip("needs 12 GiB of free memory")
    batch, seqlen, heads, head_dim = case.query_shape
    near = {"batch": seqlen * heads, "row": heads, "head": 1}
    if far == "row":
        near["batch"] = heads
        near["row"] = batch * heads
    if far == "head":
        near |= {"batch": seqlen, "row": 1, "head": batch * seqlen}
    strides = {dim: step * head_dim * len(names) for dim, step in near.items()}
    sizes = {"batch": batch, "row": seqlen, "head": heads}
    strides[far] = -(-(1 << 31) // (sizes[far] - 1) // 8) * 8 + 8
    last = sum((sizes[dim] - 1) * strides[dim] for dim in sizes)
    assert (sizes[far] - 1) * strides[far] > 1 << 31 and last < 3 << 30
    buffer = torch.empty(last + (len(names) + 1) * head_dim, dtype=case.dtype, device=DEVICE)
    steps = (strides["batch"], strides["row"], strides["head"], 1)
    return {
        name: buffer.as_strided(case.query_shape, steps, index * head_dim)
        for index, name in enumerate(names)
    }


def check_neighbours(case: MaskedCase, names: tuple[str, ...]) -> None:
    """Where all sequences but one are NaN, with what a bias has of their own: the bits of that
    one's results of these names are the same.
    """
    of = case.of
    assert isinstance(of, VarlenCase)
    inputs = inputs_of(case)
    expected = run_masked(case, inputs)
    starts_q, starts_k = ([0, *accumulate(lengths)] for lengths in (of.lengths_q, of.keys))
    for index in range(of.batch):
        rows, keys = (slice(*starts[index : index + 2]) for starts in (starts_q, starts_k))
        dirty = {}
        for name, kept in (("q", rows), ("dout", rows), ("k", keys), ("v", keys)):
            x = getattr(inputs.of, name)
            dirty[name] = torch.full_like(x, torch.nan)
            dirty[name][kept] = x[kept]
        bias = inputs.bias
        if bias is not None and len(bias) > 1:
            bias = torch.full_like(bias, torch.nan)
            bias[index] = inputs.bias[index]
        given = replace(inputs, of=replace(inputs.of, **dirty), bias=bias)
        result = run_masked(case, given)
        places = {"lse": (slice(None), rows), "dk": keys, "dv": keys, "dbias": index}
        for name in names:
            at = places.get(name, rows)
            x, y = (each.tensors()[name][at] for each in (result, expected))
            assert torch.equal(bits(x), bits(y)), f"{name} of sequence {index}"


def shared_case(**fields: Any) -> AttentionCase:
    """Every CTA has a tile, and a few tiles are left over; on a CPU something like it."""
    heads = multiprocessors(3) + 2
    case = make_case(**{"batch": 1, "num_heads_q": heads, "num_heads_k": heads, **fields})
    skip_without_row(case)
    if not ON_CPU:
        assert families.planned(case, "backward")["tile_parts"] > 1, str(case)
    return case
