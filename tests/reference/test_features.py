"""The reference's features, packed form and cache against formulas for one number at a time;
the cases that go with them.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.cases.attention import Alibi, AttentionCase, KvCacheCase, VarlenCase
from tests.cases.pairwise import pairwise
from tests.reference import (
    AttentionOptions,
    attention,
    attention_with_gradients,
    kvcache_reference,
    low_precision,
    rotate,
    varlen_attention,
    varlen_attention_with_gradients,
    varlen_low_precision,
    visible_keys,
)
from tests.reference.tolerance import assert_close


def fp64_case(**fields: Any) -> AttentionCase:
    sizes = {"seqlen_q": 4, "seqlen_k": 6, "num_heads_k": 2, "head_dim": 3}
    return AttentionCase(**{"dtype": torch.float64, "device": "cpu", **sizes, **fields})


def by_hand(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> tuple[Tensor, Tensor]:
    """Attention of every query of every head, number by number."""
    (batch, seqlen_q, heads, dim), seqlen_k = q.shape, k.shape[1]
    out, lse = torch.zeros_like(q), torch.full((batch, heads, seqlen_q), -math.inf).double()
    pairs = (batch, heads, seqlen_q, seqlen_k)
    visible = visible_keys(seqlen_q, seqlen_k, causal=options.causal, window=options.window)
    for b in range(batch):
        for h in range(heads):
            head_k = h * k.shape[2] // heads
            for i in range(seqlen_q):
                exponentials = {}
                for j in range(seqlen_k):
                    score = options.scale(dim) * float(q[b, i, h] @ k[b, j, head_k])
                    if options.softcap > 0.0:
                        score = options.softcap * math.tanh(score / options.softcap)
                    if options.alibi_slopes is not None:
                        slope = options.alibi_slopes.expand(batch, heads)[b, h]
                        score -= float(slope) * abs(i + seqlen_k - seqlen_q - j)
                    if options.bias is not None:
                        score += float(options.bias.expand(pairs)[b, h, i, j])
                    masked = options.mask is not None and not options.mask.expand(pairs)[b, h, i, j]
                    if visible[i, j] and not masked and score != -math.inf:
                        exponentials[j] = math.exp(score)
                total = sum(exponentials.values())
                if options.sink is not None:
                    total += math.exp(options.sink[h])
                if total == 0.0:
                    continue
                lse[b, h, i] = math.log(total)
                for j, x in exponentials.items():
                    keep = 1.0
                    if options.keep_mask is not None:
                        keep = float(options.keep_mask[b, h, i, j]) * options.keep_scale()
                    out[b, i, h] += keep * x / total * v[b, j, head_k]
    return out, lse


AXES = {
    "causal": [False, True],
    "window": [(-1, -1), (1, -1), (2, 1)],
    "softcap": [0.0, -1.0, 1.5],
    "alibi": [None, *Alibi],
    "dropout_p": [0.0, 0.25],
    "seqlen_q": [4, 9],
    "mask": [None, "bhq", "q", "b"],
    "bias": [None, "bhq", "h", "q"],
    "sink": [False, True],
}


def shared(own: str | None, case: AttentionCase) -> tuple[int, int, int, int] | None:
    """The shape of a mask or bias that differs by sequence (b), head (h) and query (q)."""
    if own is None:
        return None
    sizes = zip("bhq", (case.batch, case.num_heads_q, case.seqlen_q), strict=True)
    return *(size if letter in own else 1 for letter, size in sizes), case.seqlen_k


@pytest.mark.parametrize("row", pairwise(AXES), ids=str)
def test_features_by_hand(row: dict[str, Any]) -> None:
    row = dict(row)
    own_mask, own_bias, has_sink = (row.pop(name) for name in ("mask", "bias", "sink"))
    case = fp64_case(**row)
    inputs = case.make_inputs(1)
    keep = mask = bias = sink = None
    if case.dropout_p > 0.0:
        keep = torch.rand(case.batch, 4, case.seqlen_q, 6) >= case.dropout_p
    if own_mask is not None:
        mask = torch.rand(shared(own_mask, case)) < 0.4
    if own_bias is not None:
        bias = torch.randn(shared(own_bias, case), dtype=torch.float64)
        bias.masked_fill_(torch.rand(bias.shape) < 0.2, -math.inf)
    if has_sink:
        sink = torch.randn(4, dtype=torch.float64)
    options = replace(case.options(inputs.alibi_slopes, keep), mask=mask, bias=bias, sink=sink)
    expected = by_hand(inputs.q, inputs.k, inputs.v, options)
    actual = attention(inputs.q, inputs.k, inputs.v, options=options)
    torch.testing.assert_close(actual, expected)

    further = {"bias": bias, "sink": sink}
    further = {name: x for name, x in further.items() if x is not None}
    leaves = [x.requires_grad_() for x in (inputs.q, inputs.k, inputs.v, *further.values())]

    def function(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        features = dict(zip(further, tensors[3:], strict=True))
        out, lse = attention(*tensors[:3], options=options, **features)
        return out, lse.masked_fill(lse == -math.inf, 0.0)

    # Differences of a bias of -inf are no numbers: by formula alone, in the other function.
    if bias is None or bias.isfinite().all():
        assert torch.autograd.gradcheck(function, leaves, fast_mode=True)
    gradients = torch.autograd.grad(function(*leaves), leaves, [inputs.dout, inputs.dlse])
    result = attention_with_gradients(
        *(x.detach() for x in leaves[:3]), inputs.dout, inputs.dlse, options=options
    )
    for name, gradient in zip(("q", "k", "v", *further), gradients, strict=True):
        torch.testing.assert_close(getattr(result, f"d{name}"), gradient)


def test_keyword_arguments_override_options() -> None:
    inputs = fp64_case().make_inputs()
    tensors = (inputs.q, inputs.k, inputs.v)
    base = AttentionOptions(softcap=2.0, causal=True)
    expected = attention(*tensors, softcap=2.0, causal=False, window=(1, 1))
    actual = attention(*tensors, options=base, causal=False, window=(1, 1))
    torch.testing.assert_close(actual, expected)


def test_dropout_needs_a_mask() -> None:
    inputs = fp64_case().make_inputs()
    with pytest.raises(ValueError, match="keep_mask"):
        attention(inputs.q, inputs.k, inputs.v, dropout_p=0.5)


def test_keep_scale_counts_in_steps() -> None:
    assert AttentionOptions(dropout_p=0.5).keep_scale() == 2.0
    assert AttentionOptions(dropout_p=0.1).keep_scale() == 65536 / (65536 - 6554)
    assert AttentionOptions(dropout_p=1 - 2**-20).keep_scale() == 65536.0


def test_distant_keys_do_not_spoil_the_naive_result() -> None:
    """Every key is 200 and more away from the queries: biases of -60 that bf16 rounds by 0.25."""
    case = fp64_case(
        seqlen_q=212, seqlen_k=12, alibi=Alibi.per_head, dtype=torch.bfloat16, head_dim=32
    )
    inputs = case.make_inputs()
    tensors = (inputs.q, inputs.k, inputs.v, inputs.dout, inputs.dlse)
    options = case.options(inputs.alibi_slopes)
    exact, naive = (
        attention_with_gradients(*tensors, options=options),
        low_precision(*tensors, options=options),
    )
    assert (naive.out - exact.out).abs().max() < 0.05
    assert (naive.lse - exact.lse).abs().max() < 0.5


# -- packed sequences ----------------------------------------------------------------------------

PACKED = VarlenCase(
    lengths_q=(5, 0, 9),
    lengths_k=(7, 3, 8),
    used_q=(5, 0, 6),
    used_k=(6, 3, 8),
    leftpad=(2, 3, 0),
    num_heads_k=2,
    head_dim=4,
    dtype=torch.float64,
    causal=True,
    alibi=Alibi.per_batch,
    device="cpu",
)


def test_packed_sequences_one_by_one() -> None:
    inputs = PACKED.make_inputs(3)
    options = PACKED.options(inputs.alibi_slopes)
    tensors = (inputs.q, inputs.k, inputs.v, inputs.dout, inputs.dlse)
    result = varlen_attention_with_gradients(*tensors, **inputs.lengths(), options=options)
    rows_q, rows_k = slice(5, 11), slice(10, 18)  # of the last sequence
    alone = attention_with_gradients(
        *(
            x[None, rows]
            for x, rows in zip(tensors[:4], (rows_q, rows_k, rows_k, rows_q), strict=True)
        ),
        inputs.dlse[None, :, rows_q],
        causal=True,
        alibi_slopes=inputs.alibi_slopes[2],
    )
    torch.testing.assert_close(result.out[rows_q], alone.out[0])
    torch.testing.assert_close(result.lse[:, rows_q], alone.lse[0])
    torch.testing.assert_close(result.dq[rows_q], alone.dq[0])
    torch.testing.assert_close(result.dk[rows_k], alone.dk[0])
    torch.testing.assert_close(result.dv[rows_k], alone.dv[0])
    assert all(x.isfinite().all() for x in (result.out, result.dq, result.dk, result.dv))
    for x in (result.out, result.dq):
        assert not x[11:].any()
    assert (result.lse[:, 11:] == -math.inf).all()
    for x in (result.dk, result.dv):
        assert not x[:2].any() and not x[6:10].any()
    assert_close(
        result, result, varlen_low_precision(*tensors, **inputs.lengths(), options=options)
    )
    out, lse = varlen_attention(*tensors[:3], **inputs.lengths(), options=options)
    torch.testing.assert_close((out, lse), (result.out, result.lse))


def test_masks_of_packed_sequences() -> None:
    """Row i and column j are query i and key j of each sequence, which may be shorter than them."""
    inputs = PACKED.make_inputs(3)
    mask, bias = torch.rand(3, 4, 9, 8) < 0.6, torch.randn(3, 1, 9, 8, dtype=torch.float64)
    shared_bias, sink = bias[:1, :, :1], torch.randn(4, dtype=torch.float64)
    tensors = (inputs.q, inputs.k, inputs.v, inputs.dout, inputs.dlse)
    features = {"mask": mask, "bias": bias, "sink": sink}
    result = varlen_attention_with_gradients(*tensors, **inputs.lengths(), **features)
    shared_result = varlen_attention_with_gradients(
        *tensors, **inputs.lengths(), **{**features, "bias": shared_bias}
    )
    dsink, dshared = torch.zeros_like(sink), torch.zeros_like(shared_bias)
    for index, rows_q, rows_k in ((0, slice(0, 5), slice(2, 6)), (2, slice(5, 11), slice(10, 18))):
        q, k, v, dout = (
            x[None, rows]
            for x, rows in zip(tensors[:4], (rows_q, rows_k, rows_k, rows_q), strict=True)
        )
        part = (slice(index, index + 1), slice(None), slice(q.shape[1]), slice(k.shape[1]))
        own = {"mask": mask[part], "bias": bias[part], "sink": sink}
        dlse = inputs.dlse[None, :, rows_q]
        alone = attention_with_gradients(q, k, v, dout, dlse, **own)
        torch.testing.assert_close(result.out[rows_q], alone.out[0])
        torch.testing.assert_close(result.dk[rows_k], alone.dk[0])
        torch.testing.assert_close(result.dbias[part], alone.dbias)
        dsink += alone.dsink
        shared_part = shared_bias[..., : k.shape[1]]
        alone = attention_with_gradients(q, k, v, dout, dlse, **{**own, "bias": shared_part})
        dshared[..., : k.shape[1]] += alone.dbias
    torch.testing.assert_close(result.dsink, dsink)
    torch.testing.assert_close(shared_result.dbias, dshared)
    assert not result.dbias[1].any() and not result.dbias[0, :, 5:].any()


def test_rows_outside_packed_sequences_are_nan() -> None:
    inputs = PACKED.make_inputs()
    inside_q = [*range(5), *range(5, 11)]
    inside_k = [*range(2, 6), *range(10, 18)]
    for x, inside in (
        (inputs.q, inside_q),
        (inputs.dout, inside_q),
        (inputs.dlse.T, inside_q),
        (inputs.k, inside_k),
        (inputs.v, inside_k),
    ):
        rows = x.flatten(1).isfinite().all(-1).nonzero().flatten().tolist()
        assert rows == inside
        assert x.flatten(1).isnan().all(-1).sum() == len(x) - len(inside)
    assert inputs.cu_seqlens_k.tolist() == [0, 7, 10, 18]


def test_packed_cases_have_names_of_their_own() -> None:
    many = VarlenCase(lengths_q=(3,) * 1000, dropout_p=0.1, window=(4, 0), deterministic=True)
    assert str(many) == (
        "b1000-q3..3(3000)k3..3(3000)-h4/4-d64-bf16-full-window4,0-dropout0.1-deterministic"
    )
    assert "used_k6+3+8-leftpad2+3+0" in str(PACKED)
    with pytest.raises(ValueError, match="used_q: must have 2 entries"):
        VarlenCase(lengths_q=(1, 2), used_q=(1,))


# -- KV cache ------------------------------------------------------------------------------------


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotation_by_hand(interleaved: bool) -> None:
    angle = torch.tensor([[0.0, 0.0], [0.3, -1.0], [0.5, 2.0]], dtype=torch.float64)
    x = torch.arange(1.0, 6.0, dtype=torch.float64).view(1, 1, 5)
    turned = rotate(x, angle.cos(), angle.sin(), torch.tensor([2]), interleaved)[0, 0]
    first, second = ((0, 1), (2, 3)) if interleaved else ((0, 2), (1, 3))
    for (real, imaginary), phi in ((first, 0.5), (second, 2.0)):
        z = complex(x[0, 0, real], x[0, 0, imaginary]) * complex(math.cos(phi), math.sin(phi))
        assert complex(turned[real], turned[imaginary]) == pytest.approx(z)
    assert turned[4] == 5.0


@pytest.mark.parametrize("page_size", [None, 3])
def test_cache_holds_what_was_appended(page_size: int | None) -> None:
    """The cache's contents, made dense by hand, attended to by the plain reference."""
    case = KvCacheCase(
        cached=(4, 0),
        seqlens_q=2,
        seqlens_new=3,
        capacity=9,
        page_size=page_size,
        leftpad=(1, 0),
        head_dim=4,
        dtype=torch.float64,
        causal=True,
        device="cpu",
    )
    inputs = case.make_inputs()
    before = inputs.k_cache.clone()
    result = kvcache_reference(**inputs.arguments(), options=case.options())
    assert torch.equal(before.isnan(), inputs.k_cache.isnan())
    caches = [result.k_cache, result.v_cache]
    if page_size is not None:
        caches = [x[inputs.block_table.long()].flatten(1, 2) for x in caches]
    for index, (begin, end) in enumerate([(1, 7), (0, 3)]):
        keys, values = (x[index, begin:end] for x in caches)
        assert torch.equal(keys[-3:], inputs.k[index])
        assert caches[0][index, end:].isnan().all() and caches[0][index, :begin].isnan().all()
        out, lse = attention(inputs.q[index][None], keys[None], values[None], causal=True)
        torch.testing.assert_close(result.expected.out[index], out[0])
        torch.testing.assert_close(result.expected.lse[index], lse[0])
    assert result.appended.sum() == 6


# -- cases ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [(-1, -1), (0, 0), (2, -1), (-1, 3), (1, 2), (50, 50)])
@pytest.mark.parametrize("lengths", [(4, 4), (3, 8), (8, 3), (5, 1), (1, 5), (0, 4), (4, 0)])
def test_visible_pairs_counts_windows(
    lengths: tuple[int, int], window: tuple[int, int], causal: bool
) -> None:
    case = AttentionCase(seqlen_q=lengths[0], seqlen_k=lengths[1], causal=causal, window=window)
    assert case.visible_pairs() == visible_keys(*lengths, causal=causal, window=window).sum()


def test_slopes_do_not_change_the_other_inputs() -> None:
    plain, with_slopes = fp64_case().make_inputs(), fp64_case(alibi=Alibi.per_batch).make_inputs()
    assert plain.alibi_slopes is None and with_slopes.alibi_slopes.shape == (2, 4)
    assert torch.equal(plain.q, with_slopes.q) and torch.equal(plain.dlse, with_slopes.dlse)


def test_pairwise_has_every_pair() -> None:
    axes = {"a": [1, 2, 3], "b": "xyz", "c": [True, False], "d": [{}, {"k": 1}]}
    rows = pairwise(axes)
    for one in axes:
        for other in axes:
            pairs = [(row[one], row[other]) for row in rows]
            if one != other:
                assert all((x, y) in pairs for x in axes[one] for y in axes[other])
    assert rows == pairwise(axes)
    assert len(rows) < 3 * 3 * 2
