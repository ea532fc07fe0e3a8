"""Sequences that are parts of longer ones (AttentionCall.origin) and results in fp32, on a GPU: as
test_origin.py, by kernels of every kind.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_attn_cuda import check_device_errors
from flash_attn_cuda.call.fields import AttentionCall, Incoming
from flash_attn_cuda.cpu.philox import keep_mask
from flash_attn_cuda.installed import build_info
from flash_attn_cuda.operators.attention import run_backward_operator
from flash_attn_cuda.operators.derivatives import run_gradients_operator, run_operator
from tests.cases.attention import Alibi
from tests.cases.bad_input import INT_MAX, INT_MIN, Guard
from tests.cases.harness import DEVICE, ON_CPU, bits, make_varlen_case, skip_without_row
from tests.cases.operators import incoming_of
from tests.cases.pairwise import pairwise
from tests.cases.parts import (
    Documents,
    Inputs,
    Results,
    part_call,
    run_parts,
    run_whole,
    worse_than,
)
from tests.gpu.limits import run_limited

pytestmark = pytest.mark.gpu

DOCUMENTS = {
    "one": Documents((517,), (517,), (160, 320), (128, 400)),
    "several": Documents((300, 0, 517, 33), (400, 20, 517, 33), (144, 320), (208, 400)),
    "fewer keys": Documents((640,), (200,), (256, 512), (64, 144)),
    "short": Documents((5, 1, 9), (300, 17, 64), (), (16, 64)),
}
MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window_size_left": 100, "window_size_right": 30},
    "left": {"window_size_left": 40},
    "right": {"window_size_right": 170},
    "diagonal": {"window_size_left": 0, "window_size_right": 0},
}
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "deterministic": {"deterministic": True},
    "alibi": {"alibi": True},
    "softcap": {"softcap": 3.0},
    "dropout": {"dropout_p": 0.2},
    "all": {"alibi": True, "softcap": 3.0, "dropout_p": 0.2, "deterministic": True},
}
AXES = {
    "documents": list(DOCUMENTS),
    "mask": list(MASKS),
    "features": list(FEATURES),
    "head_dims": [
        (64, 64),
        (128, 128),
        (32, 32),
        (96, 96),
        (256, 256),
        (192, 128),
        (72, 72),
        (512, 512),
    ],
    "heads": [(4, 4), (4, 2), (8, 1)],
    "dtype": [torch.bfloat16, torch.float16],
}


def options_of(mask: str, features: str, heads: int) -> dict[str, Any]:
    """Of an AttentionCall."""
    options = {**MASKS[mask], **FEATURES[features]}
    if options.pop("alibi", False):
        slopes = torch.linspace(0.5, 0.01, heads, dtype=torch.float32)
        options["alibi_slopes"] = slopes.to(DEVICE)
    return options


def on_cpu(options: dict[str, Any]) -> dict[str, Any]:
    return {name: x.cpu() if isinstance(x, Tensor) else x for name, x in options.items()}


def skip_without(inputs: Inputs, options: dict[str, Any]) -> None:
    """Skip where the build has no row for calls with these options."""
    skip_without_row(
        make_varlen_case(
            lengths_q=(inputs.q.shape[0],),
            num_heads_q=inputs.q.shape[1],
            num_heads_k=inputs.k.shape[1],
            head_dim=inputs.q.shape[-1],
            head_dim_v=inputs.v.shape[-1],
            dtype=inputs.q.dtype,
            causal=True,
            softcap=options.get("softcap", 0.0),
            alibi=Alibi.per_head if "alibi_slopes" in options else None,
            dropout_p=options.get("dropout_p", 0.0),
            deterministic=options.get("deterministic", False),
        )
    )


def check_parts(documents: Documents, inputs: Inputs, options: dict[str, Any]) -> Results:
    skip_without(inputs, options)
    whole, rng_state = run_whole(documents, inputs, **options)
    drops = options.get("dropout_p", 0.0) > 0.0
    state = {"rng_state": rng_state.cpu()} if drops else {}
    exact, _ = run_whole(documents, inputs.exact(), **on_cpu(options), **state)
    parts = run_parts(documents, inputs, rng_state if drops else None, **options)
    assert not worse_than(parts, whole, exact)
    return parts


@pytest.mark.parametrize("case", pairwise(AXES), ids=str)
def test_parts_give_the_whole(case: dict[str, Any]) -> None:
    documents = DOCUMENTS[case["documents"]]
    head_dim, head_dim_v = case["head_dims"]
    inputs = Inputs.random(
        documents, case["heads"], head_dim, case["dtype"], DEVICE, head_dim_v=head_dim_v
    )
    check_parts(documents, inputs, options_of(case["mask"], case["features"], case["heads"][0]))


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("head_dim", [64, 128, 256, 512])
def test_cuts_anywhere(head_dim: int, mask: str) -> None:
    """Without dropout they need not be at multiples of 16."""
    documents = Documents((301, 77, 450), (333, 77, 450), (13, 131, 299), (7, 129, 331))
    inputs = Inputs.random(documents, (4, 2), head_dim, torch.bfloat16, DEVICE)
    check_parts(documents, inputs, options_of(mask, "plain", 4))


@pytest.mark.parametrize("mask", ["full", "causal", "window"])
def test_many_cuts(mask: str) -> None:
    """Tiles of all kinds in calls of one tile or two."""
    cuts = tuple(range(48, 700, 48))
    documents = Documents((700, 129), (700, 250), cuts, cuts)
    inputs = Inputs.random(documents, (2, 1), 64, torch.float16, DEVICE)
    check_parts(documents, inputs, options_of(mask, "plain", 2))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("deterministic", [False, True])
def test_long_parts(deterministic: bool, causal: bool) -> None:
    """As many tiles as SMs and more, in warps that finish dq beside the products; without a mask of
    pairs of CTAs.
    """
    documents = Documents((4000, 3000), (4000, 3000), (2048,), (2048,))
    inputs = Inputs.random(documents, (8, 8), 128, torch.bfloat16, DEVICE)
    if ON_CPU:
        documents = Documents((400, 300), (400, 300), (208,), (208,))
        inputs = Inputs.random(documents, (2, 2), 32, torch.bfloat16, DEVICE)
    options = {"causal": causal, "deterministic": deterministic}
    parts = check_parts(documents, inputs, options)
    if deterministic:
        again = run_parts(documents, inputs, None, **options)
        for name, x in parts.named().items():
            assert torch.equal(x, again.named()[name]), name


@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_origin_of_a_whole_changes_no_bit(head_dim: int, mask: str, features: str) -> None:
    """And results in fp32 are what those in 16 bits are rounded from."""
    whole = replace(DOCUMENTS["several"], cuts_q=(), cuts_k=())
    inputs = Inputs.random(whole, (4, 2), head_dim, torch.bfloat16, DEVICE)
    options = options_of(mask, features, 4)
    skip_without(inputs, options)
    options["deterministic"] = True
    expected, rng_state = run_whole(whole, inputs, **options)
    state = rng_state if "dropout_p" in options else None
    of_q, of_k = next(whole.parts())
    for fp32_results in (False, True):
        call, _, _ = part_call(
            whole, inputs, of_q, of_k, state, **options, fp32_results=fp32_results
        )
        out, lse, *_ = run_operator(call)
        incoming = Incoming(inputs.dout, inputs.dlse, expected.out, expected.lse, rng_state)
        gradients = list(run_gradients_operator(call, incoming)[:3])
        for name, x in Results(out, lse, gradients).named().items():
            y = expected.named()[name]
            assert x.dtype == (torch.float32 if fp32_results else y.dtype)
            assert torch.equal(x.to(y.dtype), y), name


@pytest.mark.parametrize(
    "place", [(0, 0, 0), (3, 160, 48), (-7, 16, 1 << 20), (1 << 30, 1 << 30, 0)]
)
@pytest.mark.parametrize("head_dim", [64, 128, 256, 512])
def test_dropout_of_a_part_is_that_of_its_place(head_dim: int, place: tuple[int, ...]) -> None:
    """Decision by decision, through values that are rows of the identity."""
    seqlen_q, seqlen_k, p = 200, head_dim - 8, 0.4
    q = torch.zeros(seqlen_q, 2, head_dim, dtype=torch.bfloat16, device=DEVICE)
    k = torch.zeros(seqlen_k, 2, head_dim, dtype=torch.bfloat16, device=DEVICE)
    v = torch.eye(seqlen_k, head_dim, dtype=torch.bfloat16, device=DEVICE)[:, None].repeat(1, 2, 1)
    rng_state = torch.tensor([12345, 678], device=DEVICE)
    stream, first_q, first_k = place
    call = AttentionCall(
        *(q, k, v),
        dropout_p=p,
        rng_state=rng_state,
        cu_seqlens_q=torch.tensor([0, seqlen_q], dtype=torch.int32, device=DEVICE),
        cu_seqlens_k=torch.tensor([0, seqlen_k], dtype=torch.int32, device=DEVICE),
        max_seqlen_q=seqlen_q,
        max_seqlen_k=seqlen_k,
        origin=torch.tensor([[*place, 0]], dtype=torch.int32, device=DEVICE),
        fp32_results=True,
    )
    inputs = Inputs(q, k, v, torch.zeros_like(q), torch.zeros(2, seqlen_q, device=DEVICE))
    skip_without(inputs, {"dropout_p": p})
    found = run_operator(call)
    out = found.out
    assert torch.equal(found.rng_state, rng_state)
    kept = keep_mask(
        *(rng_state.cpu(), p, range(1), range(stream, stream + 2), 2),
        rows=range(first_q, first_q + seqlen_q),
        cols=range(first_k, first_k + seqlen_k),
    )[0].to(DEVICE)
    assert torch.equal(out.transpose(0, 1)[..., :seqlen_k] != 0, kept)
    # dV is the sum of what a key keeps: with the identity for dO, whose queries keep it.
    dout = torch.zeros_like(q)
    dout[:head_dim] = torch.eye(min(seqlen_q, head_dim), head_dim, device=DEVICE)[:, None]
    dv = run_gradients_operator(call, incoming_of(found, dout)).dv
    rows = min(seqlen_q, head_dim)
    assert torch.equal(dv.permute(1, 2, 0)[:, :rows] != 0, kept[:, :rows])


@pytest.mark.parametrize("shift", [INT_MIN, -(2**30), -5000, 5000, 2**30, INT_MAX])
@pytest.mark.parametrize("mask", ["causal", "left", "window", "diagonal"])
@pytest.mark.parametrize("head_dim", [64, 128, 256, 512])
def test_windows_that_do_not_reach(head_dim: int, mask: str, shift: int) -> None:
    """Zeros, and nothing of the tensors' neighbours."""
    documents = Documents((300, 33), (270, 20), (), ())
    inputs = Inputs.random(documents, (4, 2), head_dim, torch.bfloat16, DEVICE)
    skip_without(inputs, {})
    of_q, of_k = next(documents.parts())
    call, _, _ = part_call(documents, inputs, of_q, of_k, **MASKS[mask])
    assert call.origin is not None
    call.origin[:, 3] = shift
    out, lse, *_ = run_operator(call)
    incoming = Incoming(inputs.dout, None, inputs.dout, inputs.dlse, None)
    gradients = run_gradients_operator(call, incoming)[:3]
    if shift > 0 if mask == "causal" else mask == "left" and shift < 0:  # all is visible
        whole, _ = run_whole(documents, inputs)  # perhaps by a kernel with other tiles
        torch.testing.assert_close(lse, whole.lse, rtol=0, atol=1e-5)
        torch.testing.assert_close(out.to(whole.out.dtype), whole.out, rtol=2.0**-6, atol=2.0**-7)
        assert all(x.isfinite().all() for x in gradients)
    else:
        assert not out.any() and torch.equal(lse, torch.full_like(lse, -torch.inf))
        assert not any(x.any() for x in gradients)


@pytest.mark.parametrize("features", ["plain", "deterministic", "dropout"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("head_dim", [64, 128, 256, 512])
def test_rows_that_are_no_sequences(head_dim: int, mask: str, features: str) -> None:
    """Gaps hold NaN before, and zeros in fp32 afterwards; nothing is written around the results."""
    documents = Documents((200, 33), (270, 20), (), ())
    inputs = Inputs.random(documents, (4, 2), head_dim, torch.bfloat16, DEVICE)
    options = options_of(mask, features, 4)
    skip_without(inputs, options)
    of_q, of_k = next(documents.parts())
    state = torch.tensor([3, 4], device=DEVICE)
    expected, _, _ = part_call(documents, inputs, of_q, of_k, state, **options)
    gap = 150

    def with_gap(x: Tensor) -> Tensor:
        filled = torch.full((gap, *x.shape[1:]), torch.nan, dtype=x.dtype, device=x.device)
        return torch.cat((x, filled))

    call = replace(expected, q=with_gap(inputs.q), k=with_gap(inputs.k), v=with_gap(inputs.v))
    of_rows = {"out": call.q, "dq": call.q, "dk": call.k, "dv": call.v}
    guards = {
        name: Guard(name, torch.full_like(x, torch.nan, dtype=torch.float32), margin=64)
        for name, x in of_rows.items()
    }
    results = run_operator(call)
    out, lse = results.out, results.softmax_lse
    if not ON_CPU:
        with torch.no_grad():
            build_info.extension.forward(replace(call, out=guards["out"].tensor))
        assert torch.equal(bits(guards["out"].tensor), bits(out))
    rounded = with_gap(out[:-gap].bfloat16())
    dlse = torch.cat((inputs.dlse, inputs.dlse.new_full((4, gap), torch.nan)), 1)
    targets = {name: guards[name].tensor for name in ("dq", "dk", "dv")}
    results = results._replace(out=rounded)
    run_backward_operator(call, incoming_of(results, with_gap(inputs.dout), dlse, **targets))
    small_out, small_lse, *_ = run_operator(expected)
    assert torch.equal(out[:-gap], small_out) and torch.equal(lse[:, :-gap], small_lse)
    assert not out[-gap:].any() and bool((lse[:, -gap:] == -torch.inf).all())
    for name, x in targets.items():
        assert x.isfinite().all(), name
        assert not x[-gap:].any(), name
    for guard in guards.values():
        guard.check()


def test_garbage_stays_inside() -> None:
    """Whatever an origin holds, results are finite, and the next call is right."""
    documents = DOCUMENTS["several"]
    inputs = Inputs.random(documents, (4, 2), 128, torch.bfloat16, DEVICE)
    options = options_of("window", "all", 4)
    skip_without(inputs, options)
    of_q, of_k = next(documents.parts())
    random = torch.Generator().manual_seed(0)
    state = torch.tensor([3, 4], device=DEVICE)
    for _ in range(20):
        call, rows, _ = part_call(documents, inputs, of_q, of_k, state, **options)
        garbage = torch.randint(INT_MIN, INT_MAX, (4, 4), generator=random).to(torch.int32)
        garbage[:, 1:3] &= ~15
        garbage[:, 1:3] %= 1 << 30
        call.origin = garbage.to(DEVICE)
        out, lse, *_ = run_operator(call)
        rounded = out.bfloat16()
        incoming = Incoming(inputs.dout[rows], inputs.dlse[:, rows], rounded, lse, state)
        for x in (out, *run_gradients_operator(call, incoming)[:3]):
            assert x.isfinite().all()
    check_device_errors()
    check_parts(documents, inputs, options)


@pytest.mark.cuda_only
def test_autograd_of_a_part() -> None:
    """By the extension's node and by the operator's formula, which agree."""
    documents = DOCUMENTS["several"]
    inputs = Inputs.random(documents, (4, 2), 64, torch.bfloat16, DEVICE)
    options = {"causal": True, "deterministic": True}
    skip_without(inputs, options)
    of_q, of_k = list(documents.parts())[4]
    call, rows, _ = part_call(documents, inputs, of_q, of_k, **options, fp32_results=False)
    call.keeps_rounding = True
    leaves = [x.requires_grad_() for x in (call.q, call.k, call.v)]
    results = []
    for run in (run_operator, build_info.extension.forward):
        out, lse = run(call)[:2]
        results.append(
            torch.autograd.grad([out, lse], leaves, [inputs.dout[rows], inputs.dlse[:, rows]])
        )
    for x, y in zip(*results, strict=True):
        assert torch.equal(x, y)
    with pytest.raises(NotImplementedError, match=r"^fp32_results: must be False"):
        build_info.extension.forward(replace(call, fp32_results=True))


EXTENSION_REFUSES = {
    "shape": ({"origin": (2, 3)}, "origin: must have shape"),
    "strides": ({"origin": None}, "origin: must be contiguous"),
    "probabilities": ({"return_softmax": True, "dropout_p": 0.5}, "origin: must be None with"),
}


@pytest.mark.cuda_only
@pytest.mark.parametrize("name", EXTENSION_REFUSES)
def test_what_the_extension_refuses(name: str) -> None:
    changes, match = EXTENSION_REFUSES[name]
    documents = Documents((40, 30), (48, 32), (), ())
    inputs = Inputs.random(documents, (4, 2), 64, torch.bfloat16, DEVICE)
    of_q, of_k = next(documents.parts())
    call, _, _ = part_call(documents, inputs, of_q, of_k)
    given: dict[str, Any] = dict(changes)
    if "origin" in given:
        shape = given["origin"]
        bad = torch.zeros(4, 2, dtype=torch.int32, device=DEVICE).T if shape is None else None
        given["origin"] = (
            torch.zeros(shape, dtype=torch.int32, device=DEVICE) if bad is None else bad
        )
    with pytest.raises((ValueError, NotImplementedError), match=f"^{match}"):
        build_info.extension.forward(replace(call, **given))


# -- kernels of both families ----------------------------------------------------------------------

FAMILY_CASES = [
    (d, mask, features)
    for d in (64, 128, 256)
    for mask, features in (
        ("causal", "plain"),
        ("window", "dropout"),
        ("full", "alibi"),
        ("left", "softcap"),
    )
]


def family_results() -> list[dict[str, Tensor]]:
    """Of calls that both families have rows for, by the one that runs here."""
    documents, made = DOCUMENTS["several"], []
    for head_dim, mask, features in FAMILY_CASES:
        inputs = Inputs.random(documents, (4, 2), head_dim, torch.bfloat16, DEVICE)
        state = torch.tensor([3, 4], device=DEVICE)
        made.append(run_parts(documents, inputs, state, **options_of(mask, features, 4)).named())
    return made


@pytest.mark.cuda_only
def test_kernels_for_other_gpus_agree(tmp_path: Path) -> None:
    documents = DOCUMENTS["several"]
    for head_dim, mask, features in FAMILY_CASES:
        inputs = Inputs.random(documents, (4, 2), head_dim, torch.bfloat16, DEVICE)
        skip_without(inputs, options_of(mask, features, 4))
    file = tmp_path / "results.pt"
    ran = run_limited("-m", "tests.gpu.test_origin", str(file), capability=80)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    theirs = torch.load(file, map_location=DEVICE)
    for case, ours, other in zip(FAMILY_CASES, family_results(), theirs, strict=True):
        for name, x in ours.items():
            y = other[name]
            largest = float(x[x.isfinite()].abs().max())
            assert torch.equal(x == -torch.inf, y == -torch.inf), (case, name)
            close = torch.isclose(x, y, rtol=2.0**-6, atol=2.0**-7 * largest)
            assert bool((close | (x == y)).all()), (case, name)


if __name__ == "__main__":
    import sys

    torch.save(family_results(), sys.argv[1])
