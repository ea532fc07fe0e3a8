"""The kernels of Hopper GPUs touch nothing but their sequences, wherever those end."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from flash_attn_cuda.installed import build_info
from tests.cases import binding
from tests.cases.attention import AttentionCase, AttentionInputs, Layout, arrange
from tests.cases.bad_input import Guard
from tests.cases.harness import (
    Check,
    assert_same_bits,
    check_rows_behind,
    make_case,
    make_varlen_case,
    run_forward,
    run_forward_backward,
    run_reference,
    skip_without_row,
)
from tests.cases.masked import MaskedCase
from tests.cases.matrix import BOTH, Call, check_calls, each, grid, inputs_of
from tests.hopper.sm90 import (
    CAUSAL,
    EVERY_HEAD_DIM,
    HEAD_DIMS,
    check_neighbours,
    far_apart,
    fill_free_memory,
    runs_sm90_kernels,
)
from tests.reference import AttentionResult
from tests.reference.tolerance import assert_close

__all__ = ["runs_sm90_kernels"]  # pytest finds it here

pytestmark = pytest.mark.gpu

GRADIENTS = ("dq", "dk", "dv")
PACKED = {"lengths_q": (70, 0, 1, 129, 200), "lengths_k": (130, 20, 0, 65, 333)}


def differentiate(
    case: AttentionCase, inputs: AttentionInputs, into: dict[str, Tensor]
) -> AttentionResult:
    """The forward, then dq, dk and dv into the given tensors."""
    result = run_forward(case, inputs)
    binding.backward(
        *(build_info.extension, inputs.q, inputs.k, inputs.v),
        dout=inputs.dout,
        results=(result.out, result.lse),
        incoming={"dlse": inputs.dlse, **{name: into[name] for name in GRADIENTS}},
        causal=case.causal,
        window_size_left=case.window[0],
        window_size_right=case.window[1],
        deterministic=case.deterministic,
    )
    return replace(result, **{name: into[name] for name in GRADIENTS})


@pytest.mark.cuda_only
@CAUSAL
@EVERY_HEAD_DIM
@pytest.mark.parametrize("unused", [0, 8], ids=["whole", "part"])
def test_last_key_tile(head_dim: int, unused: int, causal: bool) -> None:
    """NaN around all tensors: nothing around dq, dk and dv is written, all of them is. Short ones
    have several CTAs a key head.
    """
    for keys in (1, 2, 63, 64, 65, 129, 130, 191, 192, 193):
        case = make_case(
            seqlen_q=200,
            seqlen_k=keys,
            num_heads_k=2,
            head_dim=head_dim - unused,
            causal=causal,
            layout=Layout.surrounded,
        )
        inputs = inputs_of(case)
        wanted = zip(GRADIENTS, (inputs.q, inputs.k, inputs.v), strict=True)
        into = {name: arrange(torch.full_like(x, torch.nan), case.layout) for name, x in wanted}
        result = differentiate(case, inputs, into)
        assert_close(result, *run_reference(case, inputs))
        for name, x in into.items():
            around = x._base
            assert around is not None
            x.fill_(torch.nan)
            assert around.isnan().all(), f"{name} of {case}: written around it"


@pytest.mark.cuda_only
@EVERY_HEAD_DIM
@pytest.mark.parametrize("unused", [0, 8], ids=["whole", "part"])
def test_packed_results_into_given_tensors(head_dim: int, unused: int) -> None:
    """NaN before and behind the rows of all tensors, and in the rows that are not used: nothing
    around the results is written, all of them is. A part of the row's head dim, or all of it.
    """
    padded = make_varlen_case(
        **PACKED,
        used_q=(70, 0, 1, 40, 199),
        used_k=(130, 0, 0, 64, 200),
        leftpad=(1, 0, 0, 63, 100),
        num_heads_k=2,
        head_dim=head_dim - unused,
        causal=True,
    )
    # Of so many heads a CTA takes all key tiles of a short sequence.
    swept = replace(padded, num_heads_q=264, num_heads_k=264)
    for case in (padded, replace(padded, leftpad=None), swept):
        inputs = inputs_of(case)
        tensors = {name: getattr(inputs, name) for name in ("dout", "q", "k", "v")}
        results = (("out", "q"), *((f"d{name}", name) for name in "qkv"))
        tensors |= {name: torch.full_like(tensors[of], torch.nan) for name, of in results}
        guards = {name: Guard(name, x, margin=200) for name, x in tensors.items()}
        given = {name: guard.tensor for name, guard in guards.items()}
        described = {
            **{name: given[name] for name in "qkv"},
            **{name: x for name, x in inputs.lengths().items() if x is not None},
            **{"max_seqlen_q": case.max_seqlen_q, "max_seqlen_k": case.max_seqlen_k},
            "causal": True,
        }
        out, lse, *_ = binding.forward(build_info.extension, out=given["out"], **described)
        binding.backward(
            build_info.extension,
            dout=given["dout"],
            results=(out, lse),
            incoming={"dlse": inputs.dlse, **{name: given[name] for name in GRADIENTS}},
            **described,
        )
        for guard in guards.values():
            guard.check()
        assert out.data_ptr() == given["out"].data_ptr()
        gradients = {name: given[name] for name in GRADIENTS}
        result = AttentionResult(given["out"], lse, **gradients)
        assert_close(result, *run_reference(case, inputs))


@EVERY_HEAD_DIM
@pytest.mark.parametrize("held", [math.nan, 0.0], ids=["nan", "zeros"])
def test_whatever_memory_held(check: Check, head_dim: int, held: float) -> None:
    """Sums, counts of additions and dq are set by the call wherever it needs them: of sequences
    with one key tile and with several, of queries that see no key, of rows that are not used.
    """
    shape = {"num_heads_k": 2, "head_dim": head_dim}
    for case in (
        make_case(seqlen_q=300, seqlen_k=60, **shape),
        make_case(seqlen_q=300, seqlen_k=60, causal=True, **shape),
        make_case(seqlen_q=300, seqlen_k=290, window=(20, 30), **shape),
        make_case(seqlen_q=600, seqlen_k=290, causal=True, **shape),
        make_case(seqlen_q=300, seqlen_k=600, window=(-1, -200), **shape),
        make_varlen_case(
            lengths_q=(200, 70, 0, 1, 129, 200),
            lengths_k=(333, 60, 20, 0, 65, 130),
            used_q=(200, 1, 0, 1, 0, 120),
            causal=True,
            **shape,
        ),
        make_varlen_case(
            lengths_q=(200, 70, 0, 1, 129, 150),
            lengths_k=(190, 60, 20, 0, 65, 200),
            used_q=(200, 1, 0, 1, 0, 120),
            causal=True,
            num_heads_q=400,
            num_heads_k=400,
            head_dim=head_dim,
        ),
    ):
        fill_free_memory(held)
        check(case)


@CAUSAL
@EVERY_HEAD_DIM
def test_a_sequence_does_not_see_its_neighbours(head_dim: int, causal: bool) -> None:
    of = make_varlen_case(
        **PACKED, num_heads_k=2, head_dim=head_dim, causal=causal, deterministic=True
    )
    check_neighbours(MaskedCase(of), ("out", "lse", *GRADIENTS))


@EVERY_HEAD_DIM
@pytest.mark.parametrize("rows", [(1, 1), (300, 200)], ids=str)
def test_rows_behind_the_last_sequence(head_dim: int, rows: tuple[int, int]) -> None:
    case = make_varlen_case(**PACKED, num_heads_k=2, head_dim=head_dim, causal=True)
    skip_without_row(case)
    check_rows_behind(case, *rows)


TABLE: dict[str, list[Call]] = {
    # Dimensions of one element, whose strides are nobody's.
    "one query or one key": grid(
        batch=1, head_dim=[*HEAD_DIMS], causal=BOTH, backward=False,
        of=[
            {"lengths": (130, 1), "heads": (1, 1)},
            {"lengths": (1, 130), "heads": (20, 1)},
            {"lengths": (1, 1), "heads": (20, 1)},
        ],
    ),
    # Rows that hold no key are NaN. Enough queries for these kernels, and keys appended before.
    "caches": grid(
        head_dim=[*HEAD_DIMS],
        places=[
            {"capacity": 700, "cached": (600, 0, 333)},
            {"leftpad": (90, 0, 30), "cached": (150, 70, 192)},
            {"batch_idx": (3, 0, 2), "entries": 5, "cached": (100, 0, 37)},
        ],
        of=[
            *({"seqlens_q": 70}, {"seqlens_q": 70, "num_heads_q": 6, "causal": True}),
            {"queries": (40, 30), "capacity": 700, "causal": True},
        ],
    ),
}  # fmt: skip


@each(TABLE)
def test_ends(check: Check, calls: list[Call]) -> None:
    check_calls(check, calls)


@pytest.mark.cuda_only
@pytest.mark.parametrize("far", ["batch", "row", "head"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_strides_past_two_to_the_31_elements(head_dim: int, far: str) -> None:
    case = make_case(
        seqlen_q=260, seqlen_k=260, num_heads_q=3, num_heads_k=3, head_dim=head_dim, causal=True
    )
    inputs = inputs_of(case)
    names = ("q", "k", "v", "dout")
    moved = far_apart(case, (*names, *GRADIENTS), far)
    for name in names:
        moved[name].copy_(getattr(inputs, name))
    far_inputs = replace(inputs, **{name: moved[name] for name in names})
    result = differentiate(case, far_inputs, moved)
    assert_same_bits(result, run_forward_backward(case, inputs, keep_rounding=False), far)
    del moved, far_inputs, result
    torch.cuda.empty_cache()
