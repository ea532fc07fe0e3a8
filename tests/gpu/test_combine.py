"""flash_attn_combine: partial results of any number of splits become one, against fp64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from flash_attn_cuda import flash_attn_combine, flash_attn_func
from tests.cases.harness import DEVICE, bits, make_case, scaled
from tests.cases.matrix import inputs_of

pytestmark = pytest.mark.gpu

OUT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def make_partials(
    splits: int, batch: int = 2, seqlen: int = 5, heads: int = 3, head_dim: int = 64, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """out_partial (splits, B, S, H, D) and lse_partial (splits, B, S, H), both fp32."""
    generator = torch.Generator().manual_seed(seed)
    out = torch.randn(splits, batch, seqlen, heads, head_dim, generator=generator)
    lse = 3.0 * torch.randn(splits, batch, seqlen, heads, generator=generator)
    return out.to(DEVICE), lse.to(DEVICE)


def combine_in_fp64(out_partial: Tensor, lse_partial: Tensor) -> tuple[Tensor, Tensor]:
    """(out (B, S, H, D), lse (B, S, H)) by the definition; a split of lse -inf does not count."""
    lse_partial = lse_partial.double()
    lse = torch.logsumexp(lse_partial, 0)
    absent = lse_partial == -torch.inf
    weights = (lse_partial - lse.masked_fill(lse == -torch.inf, 0.0)).exp().masked_fill(absent, 0.0)
    present = out_partial.double().masked_fill(absent[..., None], 0.0)
    return (weights[..., None] * present).sum(0), lse


def assert_combined(
    actual: tuple[Tensor, Tensor], out_partial: Tensor, lse_partial: Tensor
) -> None:
    """One rounding to the output's dtype, and fp32's for the sums."""
    out, lse = actual
    expected_out, expected_lse = combine_in_fp64(out_partial, lse_partial)
    assert out.shape == expected_out.shape and lse.shape == expected_lse.shape
    assert lse.dtype == torch.float32
    rounding = torch.finfo(out.dtype).eps if out.dtype != torch.float32 else 2.0**-20
    torch.testing.assert_close(out.double(), expected_out, rtol=rounding, atol=2.0**-19)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=2.0**-20, atol=2.0**-19)


SHAPES: list[dict[str, int]] = [
    *({"splits": n} for n in (1, 2, 3, 7, 32, 128, 129, 300)),
    *({"splits": 4, "head_dim": d} for d in (1, 8, 32, 59, 96, 111, 128, 192, 256, 512)),
    *(
        {"splits": 3, "batch": scaled(b, min(b, 50)), "seqlen": s, "heads": h, "head_dim": 16}
        for b, s, h in ((0, 5, 3), (2, 0, 3), (1, 1, 1), (1, 700, 2), (300, 1, 40), (70_000, 1, 1))
    ),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", OUT_DTYPES, ids=["fp32", "bf16", "fp16"])
def test_shapes_and_dtypes(dtype: torch.dtype, shape: dict[str, int]) -> None:
    partials = make_partials(**shape)
    out, lse = flash_attn_combine(*partials, out_dtype=dtype)
    assert out.dtype == dtype
    assert_combined((out, lse), *partials)


def test_the_dtype_of_a_result_nobody_asked_for_is_fp32() -> None:
    out, lse = flash_attn_combine(*make_partials(2))
    assert out.dtype == lse.dtype == torch.float32


@pytest.mark.parametrize("shape", [(2, 5, 3), (2, 0, 3), (2, 5, 1)], ids=str)
def test_lse_lies_as_a_compiler_is_told(shape: tuple[int, int, int]) -> None:
    """(batch, seqlen, heads), as in FlashAttention-3, the rows of a head side by side."""
    partials = make_partials(2, *shape)
    _, lse = flash_attn_combine(*partials)
    _, told = torch.ops.flash_attn_cuda._flash_attn_combine(*(x.to("meta") for x in partials), None)
    assert lse.shape == told.shape == shape and lse.stride() == told.stride()


@pytest.mark.parametrize("rubbish", [torch.nan, torch.inf, 0.0], ids=str)
def test_a_split_without_keys_is_not_read(rubbish: float) -> None:
    """A kernel that found no key leaves its partial output unwritten."""
    out_partial, lse_partial = make_partials(6)
    lse_partial[2] = -torch.inf
    lse_partial[:, 1, 3, 0] = -torch.inf
    lse_partial[:5, 0, 0] = -torch.inf
    out_partial.masked_fill_((lse_partial == -torch.inf)[..., None], rubbish)
    out, lse = flash_attn_combine(out_partial, lse_partial)
    assert_combined((out, lse), out_partial, lse_partial)
    assert not out[1, 3, 0].any() and lse[1, 3, 0] == -torch.inf
    assert torch.equal(out[0, 0], out_partial[5, 0, 0]), "a single split keeps its values"


def test_lse_far_apart_and_large() -> None:
    """Weights underflow or are close to one; exp of the values themselves would overflow."""
    for offset, spread in ((0.0, 200.0), (5e4, 1.0), (-5e4, 1.0)):
        out_partial, lse_partial = make_partials(5)
        lse_partial = (lse_partial * spread + offset).float()
        out, lse = flash_attn_combine(out_partial, lse_partial)
        assert out.isfinite().all() and lse.isfinite().all()
        expected_out, expected_lse = combine_in_fp64(out_partial, lse_partial)
        # A weight is as exact as the fp32 lse of its split.
        rounding = 2.0**-19 + 2.0**-22 * lse.abs().max().item()
        torch.testing.assert_close(out.double(), expected_out, rtol=rounding, atol=rounding)
        torch.testing.assert_close(lse.double(), expected_lse, rtol=2.0**-22, atol=2.0**-19)


@pytest.mark.parametrize("dtype", OUT_DTYPES, ids=["fp32", "bf16", "fp16"])
def test_into_a_given_tensor(dtype: torch.dtype) -> None:
    """All of `out` is written and nothing around it, whatever its strides."""
    partials = make_partials(4, head_dim=24)
    expected, _ = flash_attn_combine(*partials, out_dtype=dtype)
    buffer = torch.full((4, 7, 5, 40), 77.0, dtype=dtype, device=DEVICE)
    inside = buffer[1:3, 1:6, 1:4, 8:32]
    inside.fill_(torch.nan)
    out, lse = flash_attn_combine(*partials, out=inside)
    assert out.data_ptr() == inside.data_ptr()
    assert torch.equal(bits(inside), bits(expected))
    assert_combined((inside, lse), *partials)
    inside.fill_(77.0)
    assert (buffer == 77.0).all()


def test_inputs_of_any_strides() -> None:
    out_partial, lse_partial = make_partials(4)
    expected = flash_attn_combine(out_partial, lse_partial)
    strided = (
        out_partial.transpose(0, 3).contiguous().transpose(0, 3),
        lse_partial.transpose(1, 3).contiguous().transpose(1, 3),
    )
    for x, y in zip(flash_attn_combine(*strided), expected, strict=True):
        assert torch.equal(bits(x), bits(y))


@pytest.mark.parametrize("head_dim", [40, 128])
def test_attention_in_pieces(head_dim: int) -> None:
    """Keys cut at odd places, one piece empty: combined, they give attention over all keys."""
    case = make_case(seqlen_q=33, seqlen_k=150, num_heads_k=2, head_dim=head_dim)
    inputs = inputs_of(case, backward=False)
    whole, whole_lse, _ = flash_attn_func(inputs.q, inputs.k, inputs.v, return_attn_probs=True)
    outs, lses = [], []
    for begin, end in ((0, 1), (1, 70), (70, 70), (70, 150)):
        piece = (x[:, begin:end] for x in (inputs.k, inputs.v))
        out, lse, _ = flash_attn_func(inputs.q, *piece, return_attn_probs=True)
        outs.append(out.float())
        lses.append(lse.transpose(1, 2))
    out, lse = flash_attn_combine(torch.stack(outs), torch.stack(lses))
    # The pieces were rounded to 16 bits once each, the whole once.
    torch.testing.assert_close(out, whole.float(), rtol=2.0**-7, atol=2.0**-8)
    torch.testing.assert_close(lse, whole_lse.transpose(1, 2), rtol=2.0**-18, atol=2.0**-18)


@settings(
    max_examples=scaled(60, 20),
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(
    splits=st.integers(1, 40),
    shape=st.tuples(st.integers(0, 4), st.integers(0, 30), st.integers(1, 9), st.integers(1, 256)),
    absent=st.floats(0.0, 1.0),
    dtype=st.sampled_from(OUT_DTYPES),
    seed=st.integers(0, 1 << 20),
)
def test_random_shapes(
    splits: int, shape: tuple[int, int, int, int], absent: float, dtype: torch.dtype, seed: int
) -> None:
    out_partial, lse_partial = make_partials(splits, *shape, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.rand(lse_partial.shape, generator=generator).to(DEVICE) < absent
    lse_partial.masked_fill_(hidden, -torch.inf)
    out_partial.masked_fill_(hidden[..., None], torch.nan)
    result = flash_attn_combine(out_partial, lse_partial, out_dtype=dtype)
    assert_combined(result, out_partial, lse_partial)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("out_partial", lambda out, lse: (out.half(), lse)),
        ("out_partial", lambda out, lse: (out[0], lse)),
        ("lse_partial", lambda out, lse: (out, lse.double())),
        ("lse_partial", lambda out, lse: (out, lse[:, :, :1])),
        ("lse_partial", lambda out, lse: (out, lse.transpose(2, 3))),
        ("out_partial", lambda out, lse: (out[:0], lse[:0])),
    ],
)
def test_bad_partials(name: str, change: object) -> None:
    with pytest.raises((TypeError, ValueError), match=rf"^{name}: .*got"):
        flash_attn_combine(*change(*make_partials(3)))


@pytest.mark.parametrize("shape", [(2, 5, 3, 32), (2, 5, 3), (3, 5, 3, 64)], ids=str)
def test_bad_output_tensors(shape: tuple[int, ...]) -> None:
    with pytest.raises((TypeError, ValueError), match=r"^out: .*got"):
        flash_attn_combine(*make_partials(3), out=torch.empty(shape, device=DEVICE))


def test_bad_output_dtypes() -> None:
    partials = make_partials(3)
    with pytest.raises((TypeError, ValueError), match=r"^out_dtype: .*got.*int32"):
        flash_attn_combine(*partials, out_dtype=torch.int32)
    given = torch.empty(2, 5, 3, 64, dtype=torch.float16, device=DEVICE)
    with pytest.raises((TypeError, ValueError), match=r"^out(_dtype)?: .*got"):
        flash_attn_combine(*partials, out=given, out_dtype=torch.bfloat16)
