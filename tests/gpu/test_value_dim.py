"""Values of another head dim than queries and keys, against the fp64 reference: forward and
backward of every kernel family, dense, packed and over a KV cache.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_attn_cuda import flash_attn_func
from flash_attn_cuda.interface import _flash_attn_backward, _flash_attn_forward
from tests.cases.attention import Alibi, Layout
from tests.cases.harness import (
    Check,
    assert_same_bits,
    check_cache,
    make_cache_case,
    make_case,
    make_varlen_case,
    run_forward_backward,
    run_reference,
    scaled,
    skip_without_row,
)
from tests.cases.masked import MaskedCase, RandomBias, RandomMask
from tests.cases.masked_harness import CheckMask
from tests.reference.tolerance import assert_close

pytestmark = pytest.mark.gpu

# Of q and k, of v: with rows of their own; where a forward has boxes without values, and its
# backward runs sm80 kernels; where it has none; wider values; what is padded in Python.
PAIRS = (
    *((192, 128), (160, 72), (128, 64), (96, 32), (96, 64), (256, 128)),
    *((64, 40), (128, 80), (96, 72), (64, 128), (512, 256), (256, 512), (320, 512)),
)
PADDED_PAIRS = ((59, 33), (64, 33), (59, 64))
BOTH_FAMILIES = ((192, 128), (128, 64))

CAUSAL = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])


def every(pairs: tuple[tuple[int, int], ...]) -> Callable[..., Any]:
    ids = [f"d{head_dim}v{value_dim}" for head_dim, value_dim in pairs]
    return pytest.mark.parametrize(("head_dim", "head_dim_v"), pairs, ids=ids)


# -- sequences of one length -----------------------------------------------------------------------


@CAUSAL
@every((*PAIRS, *PADDED_PAIRS))
def test_head_dims(check: Check, head_dim: int, head_dim_v: int, causal: bool) -> None:
    """Grouped heads, so that dk and dv are sums, too."""
    for dtype in (torch.bfloat16, torch.float16):
        case = make_case(
            seqlen_q=scaled(197, 53),
            seqlen_k=scaled(333, 71),
            num_heads_k=2,
            head_dim=head_dim,
            head_dim_v=head_dim_v,
            dtype=dtype,
            causal=causal,
        )
        check(case)


LENGTHS = (
    *((1, 1), (1, 300), (300, 1), (17, 40), (63, 65), (64, 64), (65, 127)),
    *((128, 128), (129, 127), (257, 511), (1000, 777)),
)


@CAUSAL
@pytest.mark.parametrize("lengths", LENGTHS, ids=lambda n: f"{n[0]}x{n[1]}")
def test_lengths(check: Check, lengths: tuple[int, int], causal: bool) -> None:
    """From one query, which decode kernels take, to many tiles."""
    for head_dim, head_dim_v in BOTH_FAMILIES:
        case = make_case(
            seqlen_q=scaled(lengths[0], min(lengths[0], 130)),
            seqlen_k=scaled(lengths[1], min(lengths[1], 130)),
            num_heads_k=2,
            head_dim=head_dim,
            head_dim_v=head_dim_v,
            causal=causal,
        )
        check(case)


@pytest.mark.parametrize("window", [(0, 0), (5, -1), (-1, 7), (100, 50), (64, 0)], ids=str)
def test_windows(check: Check, window: tuple[int, int]) -> None:
    for head_dim, head_dim_v in BOTH_FAMILIES:
        case = make_case(
            seqlen_q=scaled(300, 70),
            seqlen_k=scaled(333, 77),
            head_dim=head_dim,
            head_dim_v=head_dim_v,
            window=window,
        )
        check(case)


@pytest.mark.parametrize("heads", [(16, 1), (9, 3), (32, 2)], ids=str)
def test_query_heads_that_share_a_key_head(check: Check, heads: tuple[int, int]) -> None:
    """Few key tiles: CTAs share their query heads, and sum partial dk and dv of two widths."""
    for head_dim, head_dim_v in ((192, 128), (128, 64), (64, 40)):
        case = make_case(
            batch=1,
            seqlen_q=scaled(600, 60),
            seqlen_k=scaled(200, 50),
            num_heads_q=heads[0],
            num_heads_k=heads[1],
            head_dim=head_dim,
            head_dim_v=head_dim_v,
            causal=True,
        )
        check(case)


@CAUSAL
def test_many_tiles_for_every_cta(check: Check, causal: bool) -> None:
    """Buffers of K and V go round, with more than a tile for each of them."""
    case = make_case(
        batch=scaled(4, 1),
        seqlen_q=scaled(1100, 130),
        seqlen_k=scaled(1300, 150),
        num_heads_q=scaled(16, 2),
        num_heads_k=scaled(8, 1),
        head_dim=192,
        head_dim_v=128,
        causal=causal,
    )
    check(case)


@pytest.mark.parametrize(
    "layout",
    [
        Layout.heads_first,
        Layout.packed,
        Layout.sliced_head_dim,
        Layout.misaligned,
        Layout.surrounded,
    ],
    ids=lambda layout: layout.value,
)
def test_memory_around_the_tensors(check: Check, layout: Layout) -> None:
    """NaN in every gap, next to the columns of values as well."""
    for head_dim, head_dim_v in BOTH_FAMILIES:
        case = make_case(
            seqlen_q=scaled(150, 50),
            seqlen_k=scaled(190, 60),
            num_heads_k=2,
            head_dim=head_dim,
            head_dim_v=head_dim_v,
            layout=layout,
        )
        check(case)


@every(((192, 128), (128, 64), (96, 32)))
def test_keys_and_values_in_one_tensor(head_dim: int, head_dim_v: int) -> None:
    """As multi-head latent attention projects them: (batch, seqlen, heads, columns of both)."""
    case = make_case(
        seqlen_q=scaled(200, 60),
        seqlen_k=scaled(300, 80),
        num_heads_k=2,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        causal=True,
    )
    skip_without_row(case)
    inputs = case.make_inputs()
    both = torch.cat([inputs.k, inputs.v], -1).requires_grad_()
    k, v = both.split([head_dim, head_dim_v], -1)
    q = inputs.q.detach().requires_grad_()
    out = flash_attn_func(q, k, v, causal=True)
    assert isinstance(out, Tensor)
    dq, dboth = torch.autograd.grad(out, (q, both), inputs.dout)
    same = replace(inputs, dlse=torch.zeros_like(inputs.dlse))
    expected = run_forward_backward(case, same)
    torch.testing.assert_close(out, expected.out, rtol=0, atol=0)
    torch.testing.assert_close(dq, expected.dq, rtol=2**-7, atol=2**-7)
    dk_dv = torch.cat([expected.dk, expected.dv], -1)
    torch.testing.assert_close(dboth, dk_dv, rtol=0, atol=0)


def test_without_keys() -> None:
    for seqlen_k in (0, 40):
        case = make_case(seqlen_q=100, seqlen_k=seqlen_k, head_dim=192, head_dim_v=128, causal=True)
        skip_without_row(case)
        inputs = case.make_inputs()
        actual = run_forward_backward(case, inputs)
        assert actual.out.shape[-1] == 128
        assert not actual.out[:, : 100 - seqlen_k].any()
        assert_close(actual, *run_reference(case, inputs))


@every(BOTH_FAMILIES)
def test_gradients_into_given_tensors(head_dim: int, head_dim_v: int) -> None:
    case = make_case(seqlen_q=100, seqlen_k=70, head_dim=head_dim, head_dim_v=head_dim_v)
    skip_without_row(case)
    inputs = case.make_inputs()
    tensors = (inputs.q, inputs.k, inputs.v)
    out, lse, _, rng_state = _flash_attn_forward(
        *tensors, 0.0, head_dim**-0.5, False, -1, -1, 0.0, None, False
    )
    targets = [torch.full_like(x, torch.nan) for x in tensors]
    _flash_attn_backward(
        *(inputs.dout, *tensors, out, lse, *targets, 0.0, head_dim**-0.5, False),
        *(-1, -1, 0.0, None, False, rng_state),
    )
    _, naive = run_reference(case, inputs, use_dlse=False)
    expected = run_forward_backward(case, inputs, use_dlse=False, keep_rounding=False)
    for target, name in zip(targets, ("dq", "dk", "dv"), strict=True):
        assert target.shape == getattr(naive, name).shape
    dq, dk, dv = targets
    assert_same_bits(replace(expected, dq=dq, dk=dk, dv=dv), expected)


# -- features --------------------------------------------------------------------------------------


@every(BOTH_FAMILIES)
@pytest.mark.parametrize(
    "features",
    [
        {"dropout_p": 0.2},
        {"softcap": 3.0},
        {"alibi": Alibi.per_batch},
        {"dropout_p": 0.5, "softcap": 5.0, "alibi": Alibi.per_head, "causal": True},
        {"softmax_scale": -0.3, "causal": True},
        {"deterministic": True, "causal": True},
    ],
    ids=lambda features: "-".join(features),
)
def test_features(check: Check, features: Any, head_dim: int, head_dim_v: int) -> None:
    case = make_case(
        seqlen_q=scaled(200, 60),
        seqlen_k=scaled(301, 80),
        num_heads_k=2,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        **features,
    )
    check(case)


def test_a_deterministic_backward_repeats() -> None:
    case = make_case(
        seqlen_q=scaled(700, 60),
        seqlen_k=scaled(700, 60),
        head_dim=192,
        head_dim_v=128,
        causal=True,
        deterministic=True,
    )
    skip_without_row(case)
    inputs = case.make_inputs()
    first = run_forward_backward(case, inputs)
    for _ in range(scaled(5, 1)):
        assert_same_bits(run_forward_backward(case, inputs), first, deterministic=True)


@pytest.mark.parametrize(
    ("mask", "bias", "sink"),
    [
        (RandomMask(size=64, own="hq"), None, None),
        (RandomMask(given="sparsity"), RandomBias("h"), None),
        (None, RandomBias("bhq"), None),
        (None, RandomBias("q", fp32=True), torch.float32),
        (None, None, torch.bfloat16),
    ],
    ids=["blocks", "pairs-bias", "bias", "fp32_bias-sink", "sink"],
)
def test_masks_biases_and_sinks(check_mask: CheckMask, mask: Any, bias: Any, sink: Any) -> None:
    for head_dim, head_dim_v in ((192, 128), (128, 64), (128, 72), (64, 40), (59, 33)):
        of = make_case(
            seqlen_q=scaled(200, 70),
            seqlen_k=scaled(264, 72),
            num_heads_k=2,
            head_dim=head_dim,
            head_dim_v=head_dim_v,
            causal=True,
        )
        check_mask(MaskedCase(of, mask, bias, sink))


# -- packed sequences and caches -------------------------------------------------------------------


@CAUSAL
@every((*PAIRS[:6], (59, 33)))
def test_packed_sequences(check: Check, head_dim: int, head_dim_v: int, causal: bool) -> None:
    """NaN behind the rows that are used, before the padding and between sequences."""
    lengths = {"lengths_q": (200, 0, 17, 129, 64), "lengths_k": (150, 30, 0, 300, 64)}
    used = {"used_q": (190, 0, 17, 65, 1), "used_k": (150, 20, 0, 257, 33)}
    for part in ({}, used, {**used, "leftpad": (10, 0, 0, 64, 32)}):
        case = make_varlen_case(
            **lengths,
            **part,
            num_heads_k=2,
            head_dim=head_dim,
            head_dim_v=head_dim_v,
            causal=causal,
        )
        check(case)


@pytest.mark.parametrize("page_size", [None, 16, 7], ids=["dense", "pages", "odd_pages"])
@every(((192, 128), (128, 64), (64, 128), (59, 33), (64, 33)))
def test_caches(check: Check, head_dim: int, head_dim_v: int, page_size: int | None) -> None:
    """An append with rotated keys, few queries and many, any head dim in place."""
    for seqlens_q, new, features in (
        (1, 1, {}),
        (3, 5, {"rotary_dim": 32, "causal": True}),
        (70, None, {"leftpad": (3, 0, 37)}),
        ((9, 0, 30), (9, 0, 30), {"causal": True}),
    ):
        case = make_cache_case(
            cached=(100, 0, 37),
            seqlens_q=seqlens_q,
            seqlens_new=new,
            page_size=page_size,
            head_dim=head_dim,
            head_dim_v=head_dim_v,
            **features,
        )
        check(case, backward=False)


@pytest.mark.parametrize("num_splits", [1, 3, 64])
def test_split_keys(num_splits: int) -> None:
    for head_dim, head_dim_v in ((192, 128), (128, 64), (64, 33)):
        case = make_cache_case(
            cached=(900, 3, 450), capacity=1000, head_dim=head_dim, head_dim_v=head_dim_v
        )
        skip_without_row(case, backward=False)
        check_cache(case, num_splits=num_splits)
