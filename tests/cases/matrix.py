"""Tables of calls and what judges them: a row of a table says what varies in its calls, each of
which is compared with the fp64 reference, forward and backward.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, TypeAlias

import pytest
import torch

from tests.cases.attention import AttentionCase, KvCacheCase, VarlenCase
from tests.cases.fp8_cache import Fp8Case, check_fp8
from tests.cases.fp8_harness import FORMS, LATENT_FORMS, V4_ROWS, skip_without_fp8_row
from tests.cases.harness import DEVICE, ON_CPU, Check, check_cache, skip_without_row
from tests.cases.masked import MaskedCase, MaskedInputs
from tests.cases.masked_harness import check_masked, skip_without_masked_row
from tests.cases.pairwise import pairwise
from tests.reference.tolerance import Closeness

AnyCase: TypeAlias = AttentionCase | VarlenCase | MaskedCase | KvCacheCase | Fp8Case

# What one name of a row gives several fields of a case.
TOGETHER = {
    "lengths": ("seqlen_q", "seqlen_k"),
    "queries": ("seqlens_q", "seqlens_new"),
    "heads": ("num_heads_q", "num_heads_k"),
    "head_dims": ("head_dim", "head_dim_v"),
    "rotary": ("rotary_dim", "rotary_interleaved"),
}
OF_MASKS = ("mask", "bias", "sink")
OF_FP8 = ("form", "strides", "quantize", "q_is_fp8", "group")
OF_JUDGE = ("backward", "use_dlse", "num_splits", "batch_invariant")
TESTS_OF_ROW = 24  # at most
CALLS_ON_CPU = 8  # of a row, where the CPU backend stands in
BOTH = [False, True]
DTYPES = [torch.bfloat16, torch.float16]


@dataclass(frozen=True)
class Call:
    """A case and the options of `judge`."""

    case: MaskedCase | KvCacheCase | Fp8Case
    options: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        return "-".join([str(self.case), *(f"{name}{value}" for name, value in self.options)])


def call_of(**given: Any) -> Call:
    """The call of these fields, on the device under test: over a cache if `cached` is one of them,
    packed if `lengths_q` is, else dense. A dict stands for the fields in it. What no call may have
    together is left out of it.
    """
    fields = {"device": DEVICE, **_spread(given)}
    options = tuple((name, fields.pop(name)) for name in OF_JUDGE if name in fields)
    if "cached" in fields:
        return Call(_over_cache(fields), options)
    masks = {name: fields.pop(name, None) for name in OF_MASKS}
    mask, bias = masks["mask"], masks["bias"]
    if bias is not None and mask is not None and mask.given == "attn_mask":
        masks["mask"] = replace(mask, given="sparsity")
    if "lengths_q" in fields:
        return Call(MaskedCase(VarlenCase(**fields), **masks), options)
    return Call(MaskedCase(AttentionCase(**_cut(fields)), **masks), options)


def _spread(given: Mapping[str, Any]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for name, value in given.items():
        if isinstance(value, dict):
            fields |= _spread(value)
        elif name in TOGETHER:
            fields |= dict(zip(TOGETHER[name], value, strict=True))
        else:
            fields[name] = value
    return fields


def _over_cache(fields: dict[str, Any]) -> KvCacheCase | Fp8Case:
    """Only what is appended is rotated or quantized, which makes scales of every token."""
    fp8 = {name: fields.pop(name) for name in OF_FP8 if name in fields}
    if fields.get("seqlens_new") is None:
        fields.pop("rotary_dim", None)
        fp8.pop("quantize", None)
    case = KvCacheCase(**fields)
    if not fp8:
        return case
    form = fp8.pop("form", "token")
    if fp8.get("quantize") is not None and form != V4_ROWS:
        form = "rows" if case.has_qv else "token"
    return Fp8Case(case, **(LATENT_FORMS if case.has_qv else FORMS)[form] | fp8)


def _cut(fields: dict[str, Any]) -> dict[str, Any]:
    """Smaller where the CPU backend stands in."""
    if not ON_CPU:
        return fields
    cut = {name: min(n, 100 + n % 50) for name in TOGETHER["lengths"] if (n := fields.get(name, 0))}
    if fields.get("num_heads_q", 0) > 16:
        cut |= {"num_heads_q": fields["num_heads_q"] // fields["num_heads_k"], "num_heads_k": 1}
    return fields | cut | {"batch": min(fields.get("batch", 2), 3)}


def grid(**axes: Any) -> list[Call]:
    """A call for every combination. A list is an axis, whatever else is a field of all."""
    lists = [value if isinstance(value, list) else [value] for value in axes.values()]
    return [call_of(**dict(zip(axes, choice, strict=True))) for choice in product(*lists)]


def pairs(seed: int = 0, **axes: Any) -> list[Call]:
    """Calls in which every pair of two axes' values meets."""
    lists = {name: value if isinstance(value, list) else [value] for name, value in axes.items()}
    return [call_of(**choice) for choice in pairwise(lists, seed)]


def each(rows: Mapping[str, Sequence[Call]]) -> pytest.MarkDecorator:
    """A test for each call of a row, or for so many together that a row has TESTS_OF_ROW; calls
    that are in several rows stand once. On the CPU for some of each row.
    """
    seen: set[tuple[Call, str]] = set()
    parameters = []
    for name, row in rows.items():
        keys = dict.fromkeys((call, str(call)) for call in row)  # -0.0 is 0.0, but for its text
        calls = [key[0] for key in keys if key not in seen]
        seen |= keys.keys()
        if ON_CPU:
            calls = random.Random(0).sample(calls, min(len(calls), CALLS_ON_CPU))
        together = max(1, -(-len(calls) // TESTS_OF_ROW))
        for first in range(0, len(calls), together):
            part = calls[first : first + together]
            what = str(part[0]) if together == 1 else f"{first} to {first + len(part) - 1}"
            parameters.append(pytest.param(part, id=f"{name}: {what}"))
    return pytest.mark.parametrize("calls", parameters)


def check_calls(check: Check, calls: Sequence[Call]) -> None:
    """Skips where the build can run none of them."""
    reasons = []
    for call in calls:
        try:
            check(call)
        except pytest.skip.Exception as reason:
            reasons.append(reason)
    if len(reasons) == len(calls) > 0:
        raise reasons[0]


def skip_without_rows(case: AnyCase, *, backward: bool = True) -> None:
    """Skip the test, saying which row the build lacks, where it cannot run this case."""
    if isinstance(case, Fp8Case):
        skip_without_fp8_row(case)
    elif isinstance(case, MaskedCase):
        skip_without_masked_row(case, backward=backward)
    else:
        skip_without_row(case, backward=backward)


def inputs_of(case: AnyCase, *, backward: bool = True) -> Any:
    """The case's inputs, or a skipped test where the build cannot run it."""
    skip_without_rows(case, backward=backward)
    return case.make_inputs()


def judge(
    case: AnyCase, seed: int = 0, *, backward: bool = True, use_dlse: bool = True, **changes: Any
) -> list[Closeness]:
    """Compares with the reference what a call gives with gradients and without; over a cache all
    rows of it, too. `changes` are arguments that must not matter, or `inputs` that are not the
    case's own. Skips where the build lacks a row.
    """
    skip_without_rows(case, backward=backward)
    if isinstance(case, Fp8Case):
        return check_fp8(case, seed, **changes)
    if isinstance(case, KvCacheCase):
        return check_cache(case, seed, **changes)
    if not isinstance(case, MaskedCase):
        case = MaskedCase(case)
        if "inputs" in changes:
            changes["inputs"] = MaskedInputs(changes["inputs"], None, None, None, None)
    return check_masked(case, seed, backward=backward, use_dlse=use_dlse, **changes)
