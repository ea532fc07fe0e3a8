"""Dropout: the mask is the one that seed and offset stand for, in both passes, and random."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_attn_cuda import flash_attn_func, flash_attn_varlen_func
from flash_attn_cuda.cpu.philox import keep_mask as package_keep_mask
from flash_attn_cuda.functions.interface import _flash_attn_backward, _flash_attn_forward
from tests import reference
from tests.cases.attention import Alibi, AttentionCase, Layout, VarlenCase
from tests.cases.harness import (
    DEVICE,
    Check,
    assert_same_bits,
    attend,
    bits,
    drawn_rng_state,
    expected_keep_mask,
    make_case,
    make_varlen_case,
    run_forward_backward,
    scaled,
    skip_without_row,
)
from tests.cases.matrix import inputs_of

pytestmark = pytest.mark.gpu

PROBABILITIES = (0.001, 0.1, 0.5, 0.9)


def dmask_of(case: AttentionCase | VarlenCase) -> tuple[Any, Tensor]:
    """(inputs, S_dmask) of the public function."""
    inputs = case.make_inputs()
    return inputs, attend(case, inputs, inputs.q, inputs.k, inputs.v)[2]


def visible_of(case: AttentionCase) -> Tensor:
    return reference.visible_keys(
        case.seqlen_q, case.seqlen_k, causal=case.causal, window=case.window, device=DEVICE
    )


# -- the mask --------------------------------------------------------------------------------------


@pytest.mark.parametrize("p", [0.001, 0.1, 1 / 3, 0.5, 0.9, 0.999])
def test_the_mask_is_that_of_seed_and_offset(p: float) -> None:
    """By two programs of its own, the package's Philox and the reference's."""
    case = make_case(seqlen_q=77, seqlen_k=190, num_heads_k=2, dropout_p=p)
    skip_without_row(case, backward=False)
    inputs, dmask = dmask_of(case)
    rng_state = drawn_rng_state(case, inputs)
    kept = expected_keep_mask(case, rng_state)
    ranges = (range(case.batch), range(case.num_heads_q), case.num_heads_q)
    assert torch.equal(
        package_keep_mask(rng_state, p, *ranges, range(77), range(190)).to(DEVICE), kept
    )
    assert dmask.shape == kept.shape
    assert torch.equal(~torch.signbit(dmask), kept)


def test_the_mask_does_not_depend_on_tiles() -> None:
    """Head dims and dtypes choose other kernels, layouts other addresses: all drop the same."""
    base = make_case(seqlen_q=150, seqlen_k=201, dropout_p=0.3, num_heads_k=2)
    cases = [replace(base, head_dim=d) for d in (8, 32, 59, 64, 96, 128, 192, 256, 512)]
    cases += [replace(base, layout=layout) for layout in (Layout.packed, Layout.misaligned)]
    cases += [replace(base, dtype=torch.float16), replace(base, num_heads_k=1)]
    cases += [replace(base, deterministic=True), replace(base, softcap=3.0)]
    masks = []
    for case in cases:
        inputs = inputs_of(case, backward=False)
        torch.manual_seed(99)
        *_, dmask = flash_attn_func(
            *(inputs.q, inputs.k, inputs.v),
            **case.arguments(),
            return_attn_probs=True,
        )
        masks.append(torch.signbit(dmask))
    for case, mask in zip(cases, masks, strict=True):
        assert torch.equal(mask, masks[0]), str(case)


def test_the_mask_of_a_sequence_counts_within_it() -> None:
    """Packed sequences drop what they would drop in a dense batch, wherever their rows lie."""
    dense = make_case(batch=3, seqlen_q=40, seqlen_k=40, num_heads_k=2, dropout_p=0.3)
    packed = make_varlen_case(lengths_q=(40, 0, 17, 33), num_heads_k=2, dropout_p=0.3)
    skip_without_row(dense, backward=False)
    masks = []
    for case in (dense, packed):
        inputs = case.make_inputs()
        torch.manual_seed(7)
        lengths = inputs.lengths() if case is packed else {}
        most = {"max_seqlen_q": 40, "max_seqlen_k": 40} if case is packed else {}
        function = flash_attn_varlen_func if case is packed else flash_attn_func
        *_, dmask = function(
            *(inputs.q, inputs.k, inputs.v),
            **{**lengths, **most},
            dropout_p=0.3,
            return_attn_probs=True,
        )
        masks.append(torch.signbit(dmask))
    assert masks[1].shape == (4, 4, 40, 40)
    for b, n in ((0, 40), (2, 17)):
        assert torch.equal(masks[0][b, :, :n, :n], masks[1][b, :, :n, :n]), f"sequence {b}"


def test_lse_does_not_see_dropout() -> None:
    plain = make_case(seqlen_q=140, seqlen_k=201)
    case = replace(plain, dropout_p=0.6)
    inputs = inputs_of(case, backward=False)
    lse = [attend(each, inputs, inputs.q, inputs.k, inputs.v)[1] for each in (plain, case)]
    torch.testing.assert_close(lse[0], lse[1], rtol=2.0**-20, atol=2.0**-20)


# -- the generator ---------------------------------------------------------------------------------


def draw(p: float = 0.5) -> tuple[Tensor, Tensor]:
    """(mask, rng_state) of one small call."""
    q = torch.zeros(1, 32, 2, 32, dtype=torch.bfloat16, device=DEVICE)
    _, _, dmask, rng_state = _flash_attn_forward(
        q, q, q, p, 1.0, False, -1, -1, 0.0, None, return_softmax=True
    )
    return torch.signbit(dmask), rng_state


def test_seeds_and_calls() -> None:
    """The same seed the same masks; each call, each seed others."""
    runs = []
    for seed in (0, 0, 1, 2**62 - 1):
        torch.manual_seed(seed)
        runs.append([draw() for _ in range(3)])
    for (x, state_x), (y, state_y) in zip(runs[0], runs[1], strict=True):
        assert torch.equal(x, y) and torch.equal(state_x, state_y)
    states = {tuple(state.tolist()) for run in runs[1:] for _, state in run}
    masks = {tuple(mask.flatten().tolist()) for run in runs[1:] for mask, _ in run}
    assert len(states) == len(masks) == 9
    for _, state in runs[0]:
        assert state.dtype == torch.int64 and state.shape == (2,) and state.device.type == DEVICE


def test_calls_without_dropout_leave_the_generator_alone() -> None:
    torch.manual_seed(4)
    expected, _ = draw()
    torch.manual_seed(4)
    q = torch.zeros(1, 32, 2, 32, dtype=torch.bfloat16, device=DEVICE)
    flash_attn_func(q, q, q)
    _, _, dmask, rng_state = _flash_attn_forward(q, q, q, 0.0, 1.0, False, -1, -1, 0.0, None, False)
    assert dmask.numel() == rng_state.numel() == 0
    assert torch.equal(draw()[0], expected)


@pytest.mark.cuda_only
def test_the_generator_of_the_tensors_device_is_used() -> None:
    """Neither the CPU's generator is read nor moved."""
    torch.manual_seed(4)
    before = torch.get_rng_state()
    draw()
    assert torch.equal(torch.get_rng_state(), before)
    state = torch.cuda.get_rng_state()
    first, _ = draw()
    torch.cuda.set_rng_state(state)
    assert torch.equal(draw()[0], first)


def test_the_backward_uses_the_state_that_it_is_given() -> None:
    """Any (seed, offset), 64 bits of each: dV of ones is the column sum of what the mask leaves."""
    q = torch.zeros(2, 40, 2, 32, dtype=torch.bfloat16, device=DEVICE)
    ones = torch.ones_like(q)
    out, lse, _, _ = _flash_attn_forward(q, q, q, 0.25, 1.0, False, -1, -1, 0.0, None, False)
    for seed, offset in ((1, 0), (2**63 - 1, 7), (3, 2**40 + 5), (-1, 2**62), (2**32, 2**32 - 1)):
        rng_state = torch.tensor([seed, offset], device=DEVICE)
        dv = torch.full_like(q, torch.nan)
        _flash_attn_backward(
            *(ones, q, q, q, out, lse, None, None, dv),
            *(0.25, 1.0, False, -1, -1, 0.0, None, False, rng_state),
        )
        kept = reference.keep_mask(seed, offset, 0.25, 2, 2, 40, 40).to(DEVICE)
        expected = kept.sum(-2).transpose(1, 2)[..., None] / 40 / 0.75
        torch.testing.assert_close(dv.float(), expected.expand(q.shape).float(), rtol=1e-2, atol=0)


@pytest.mark.parametrize("p", [1e-6, 2.0**-18])
def test_probabilities_too_small_to_drop_anything(check: Check, p: float) -> None:
    case = make_case(seqlen_q=64, seqlen_k=64, dropout_p=p)
    skip_without_row(case)
    inputs, dmask = dmask_of(case)
    kept = expected_keep_mask(case, drawn_rng_state(case, inputs))
    assert kept.all() and torch.equal(~torch.signbit(dmask), kept)
    check(case)


def test_a_probability_of_nearly_one() -> None:
    """The most that is kept is 2^-16 of it, at 65,536 times its value."""
    inputs = make_case(seqlen_q=64, seqlen_k=130).make_inputs()
    out = flash_attn_func(inputs.q, inputs.k, inputs.v, dropout_p=1.0 - 2.0**-20)
    assert out.isfinite().all()


# -- statistics ------------------------------------------------------------------------------------


def large_mask(p: float, seed: int) -> Tensor:
    """(2, 4, S, S) booleans: dropped."""
    seqlen = scaled(1024, 256)
    q = torch.zeros(2, seqlen, 4, 8, dtype=torch.bfloat16, device=DEVICE)
    torch.manual_seed(seed)
    return torch.signbit(flash_attn_func(q, q, q, dropout_p=p, return_attn_probs=True)[2])


@pytest.mark.parametrize("p", PROBABILITIES)
def test_the_share_that_is_dropped(p: float) -> None:
    """Within five standard deviations: in all, and by head and by place in a tile."""
    skip_without_row(make_case(head_dim=8, dropout_p=p), backward=False)
    mask = large_mask(p, seed=21).float()
    tiles = mask.unflatten(2, (-1, 64)).unflatten(4, (-1, 64))
    for name, shares in (
        ("all", mask.mean()[None]),
        ("heads", mask.mean((2, 3)).flatten()),
        ("place in a tile", tiles.mean((0, 1, 2, 4)).flatten()),
    ):
        samples = mask.numel() / shares.numel()
        sigma = math.sqrt(p * (1 - p) / samples)
        allowed = 5.5 * sigma + 2.0**-17
        worst = (shares - p).abs().max().item()
        assert worst <= max(allowed, 16 / samples), f"{name}: {worst} from {p}, {sigma=}"


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_neighbours_are_independent(p: float) -> None:
    """Correlation with a copy shifted along keys, queries, heads, batches, or of another seed."""
    skip_without_row(make_case(head_dim=8, dropout_p=p), backward=False)
    dropped = large_mask(p, seed=22)
    mask = (dropped.float() - p) / math.sqrt(p * (1 - p))
    other = (large_mask(p, seed=23).float() - p) / math.sqrt(p * (1 - p))
    shifts = [(3, n) for n in (1, 2, 4, 7, 8, 16, 64)] + [(2, n) for n in (1, 2, 7, 8, 16, 64)]
    shifts += [(1, 1), (0, 1)]
    limit = 5 / math.sqrt(mask.numel() / 2)
    for dim, shift in shifts:
        correlation = (mask * mask.roll(shift, dim)).mean().item()
        assert abs(correlation) < limit, f"dimension {dim}, {shift} apart: {correlation}"
    assert abs((mask * other).mean().item()) < limit


@pytest.mark.parametrize("p", PROBABILITIES)
def test_the_mean_is_kept(p: float) -> None:
    """Of equal values the output is that value on average: what is kept is scaled exactly.

    Few dropped keys leave few different outputs, which all rows round alike: every column has a
    value of its own, in fp16, so that roundings up and down meet.
    """
    rows, keys, heads = scaled(2048, 512), 512, 8
    skip_without_row(make_case(head_dim=8, dtype=torch.float16, dropout_p=p), backward=False)
    q = torch.zeros(1, rows, heads, 8, dtype=torch.float16, device=DEVICE)
    k = torch.zeros(1, keys, heads, 8, dtype=torch.float16, device=DEVICE)
    values = 1.0 + torch.arange(heads * 8, device=DEVICE).view(heads, 8) / (heads * 8)
    out = flash_attn_func(q, k, (k + values).half(), dropout_p=p).float() / values
    sigma = math.sqrt(p / (1 - p) / keys / (rows * heads))
    assert abs(out.mean().item() - 1.0) <= 5 * sigma + 2.0**-12
    spread = out.mean(-1).std().item() / math.sqrt(p / (1 - p) / keys)
    assert 0.8 < spread < 1.25


# -- S_dmask ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "features",
    [
        {},
        {"causal": True},
        {"window": (20, 3)},
        {"softcap": 2.0, "alibi": Alibi.per_batch, "softmax_scale": 0.3},
    ],
    ids=str,
)
def test_s_dmask_holds_probabilities(features: dict[str, Any]) -> None:
    """Before dropout, 0 where masked, negative where dropped, -0.0 for a dropped 0."""
    case = make_case(seqlen_q=77, seqlen_k=60, num_heads_k=2, dropout_p=0.3, **features)
    skip_without_row(case, backward=False)
    inputs, dmask = dmask_of(case)
    options = replace(case.options(inputs.alibi_slopes), dropout_p=0.0)
    probs = _probabilities(case, inputs, options)
    assert dmask.dtype == case.dtype and dmask.shape == probs.shape
    torch.testing.assert_close(dmask.double().abs(), probs, rtol=2.0**-7, atol=2.0**-12)
    visible = visible_of(case)
    assert not dmask.masked_fill(visible, 0.0).any()
    kept = expected_keep_mask(case, drawn_rng_state(case, inputs))
    assert torch.equal(torch.signbit(dmask) & visible, ~kept & visible)


def _probabilities(case: AttentionCase, inputs: Any, options: Any) -> Tensor:
    """(B, Hq, Sq, Sk) in fp64, one head_dim of keys at a time through the reference's values."""
    parts = []
    for begin in range(0, case.seqlen_k, case.head_dim):
        values = torch.zeros(case.key_shape, dtype=torch.float64, device=DEVICE)
        for column in range(min(case.head_dim, case.seqlen_k - begin)):
            values[:, begin + column, :, column] = 1.0
        out, _ = reference.attention(inputs.q.double(), inputs.k.double(), values, options=options)
        parts.append(out.transpose(1, 2))
    return torch.cat(parts, -1)[..., : case.seqlen_k]


def test_s_dmask_of_packed_sequences() -> None:
    """(B, Hq, longest, longest); the totals stand in for lengths that are no int."""
    case = make_varlen_case(lengths_q=(30, 0, 17), lengths_k=(40, 9, 5), dropout_p=0.2)
    skip_without_row(case, backward=False)
    inputs, dmask = dmask_of(case)
    kept = expected_keep_mask(case, drawn_rng_state(case, inputs))
    assert dmask.shape == (3, 4, 30, 40)
    for b, (n, m) in enumerate(zip(case.lengths_q, case.keys, strict=True)):
        inside = dmask[b, :, :n, :m]
        assert torch.equal(~torch.signbit(inside), kept[b, :, :n, :m]), f"sequence {b}"
        torch.testing.assert_close(
            inside.float().abs().sum(-1), torch.ones(4, n, device=DEVICE), rtol=0, atol=2e-2
        )
        outside = dmask[b].float().clone()
        outside[:, :n, :m] = 0.0
        assert not outside.any(), f"sequence {b}"
    *_, unknown = flash_attn_varlen_func(
        *(inputs.q, inputs.k, inputs.v, inputs.cu_seqlens_q, inputs.cu_seqlens_k, None, None),
        dropout_p=0.2,
        return_attn_probs=True,
    )
    assert unknown.shape == (3, 4, case.total_q, case.total_k)


def test_s_dmask_is_empty_without_dropout() -> None:
    case = make_case(seqlen_q=33, seqlen_k=40)
    skip_without_row(case, backward=False)
    _, dmask = dmask_of(case)
    assert dmask.numel() == 0 and dmask.dtype == case.dtype


def test_asking_for_s_dmask_changes_nothing_else() -> None:
    case = make_case(seqlen_q=77, seqlen_k=90, dropout_p=0.3)
    inputs = inputs_of(case)
    torch.manual_seed(3)
    out = flash_attn_func(inputs.q, inputs.k, inputs.v, dropout_p=0.3)
    torch.manual_seed(3)
    again = flash_attn_func(inputs.q, inputs.k, inputs.v, dropout_p=0.3, return_attn_probs=True)[0]
    assert torch.equal(bits(out), bits(again))
    first = run_forward_backward(case, inputs)
    assert_same_bits(run_forward_backward(case, inputs), first)
