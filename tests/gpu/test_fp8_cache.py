"""Caches of FP8 (e4m3) on the GPU, against the dequantized fp64 reference: every byte of both
caches and every scale too. Rows that hold no key are NaN, as are scales that no row in use has.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flash_attn_cuda import (
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    quantize_kv,
)
from tests.cases.attention import Alibi
from tests.cases.fp8_cache import E4M3, Fp8Case, Fp8Inputs, attend, check_fp8, reference_of
from tests.cases.fp8_harness import FORMS, make, same_bytes
from tests.cases.harness import (
    DEVICE,
    ON_CPU,
    Check,
    bits,
    captured,
    no_host_sync,
    scaled,
)
from tests.cases.matrix import DTYPES, Call, check_calls, each, grid, pairs
from tests.gpu.limits import run_limited
from tests.reference import AttentionResult, kvcache_reference
from tests.reference.fp8 import from_bytes, to_bytes
from tests.reference.tolerance import assert_close

pytestmark = pytest.mark.gpu


def assert_same(actual: AttentionResult, expected: AttentionResult, context: str = "") -> None:
    for name in ("out", "lse"):
        x, y = (bits(getattr(result, name)) for result in (actual, expected))
        assert torch.equal(x, y), f"{name} {context}: {int((x != y).sum())} elements differ"


# -- by tables -------------------------------------------------------------------------------------

FP16, FP32 = torch.float16, torch.float32
EVERY_FORM = [*FORMS]
PLACES: list[dict[str, Any]] = [
    {"batch_idx": (3, 0, 2), "entries": 5},
    {"leftpad": (10, 0, 37)},
    {"batch_idx": (3, 0, 2), "entries": 5, "leftpad": (90, 0, 1)},
]
SHAPES: dict[str, list[Call]] = {
    # Decode rows and those of prefill, reading alone and with an append.
    "query lengths": grid(
        form=EVERY_FORM, cached=(150, 0, 37), capacity=300, head_dim=scaled(128, 32),
        of=[
            of
            for n in (1, 5, 16, 130)
            for of in ({"seqlens_q": n, "page_size": 16}, {"queries": (n, n), "causal": True})
        ],
    ),
    "head dims": grid(
        cached=(150, 0, 64), causal=True, head_dim=[16, 48, 64, 80, 128, 192, 256, 512],
        of=[
            {"queries": (1, 1), "form": "token"},
            {"queries": (33, 33), "form": "head", "dtype": FP16},
            {"queries": (1, 1), "form": "head", "dtype": FP16},
        ],
    ),
    "value dims": grid(
        cached=(150, 0, 64), page_size=16, causal=True,
        head_dims=[(192, 128), (64, 128), (128, 48), (512, 256)],
        of=[{"seqlens_q": 1, "form": "token"}, {"seqlens_q": 40, "form": "head"}],
    ),
    "heads": grid(
        cached=(150, 3, 64), causal=True, heads=[(4, 4), (6, 2), (16, 1), (32, 8), (40, 1)],
        of=[
            {"queries": (1, 1), "form": "mixed"},
            {"queries": (3, 3), "form": "expanded"},
            {"queries": (20, 20), "form": "mixed"},
        ],
    ),
    "page sizes": grid(
        cached=(299, 0, 16, 257), capacity=340, causal=True, page_size=[1, 7, 16, 48, 256],
        of=[
            {"queries": (1, 1), "form": "token"},
            {"queries": (33, 40), "form": "mixed"},
            {"queries": (5, None), "form": "head"},
        ],
    ),
    "options": grid(
        cached=(100, 0, 37),
        of=[
            {"seqlens_q": 1, "page_size": 16, "form": "token"},
            {"seqlens_q": 40, "form": "head"},
            {"seqlens_q": 40, "page_size": 16, "form": "token"},
        ],
        option=[
            *({"softcap": 4.0}, {"alibi": Alibi.per_batch}, {"sink": FP32}, {"window": (33, 5)}),
            *({"window": (40, -1), "causal": True}, {"softmax_scale": -0.2}, PLACES[0]),
            *({"leftpad": (10, 0, 37), "causal": True}, PLACES[2] | {"sink": FP32}),
            {
                **{"softcap": 4.0, "alibi": Alibi.per_head, "sink": FP32, "window": (40, 3)},
                **{"leftpad": (10, 0, 37), "batch_idx": (3, 0, 2)},
            },
        ],
    ),
    "packed queries": grid(
        cached=(100, 0, 37), causal=True,
        queries=[
            *(((1, 1, 1), None), ((5, 0, 70), (5, 0, 70)), ((3, 1, 0), (20, 1, 2))),
            ((1, 130, 4), None),
        ],
        of=[
            *({"form": "mixed"}, {"form": "token", "page_size": 16}),
            {"form": "head", "page_size": 16},
        ],
    ),
    "trees": grid(
        cached=(300, 0, 37), capacity=500, tree=["drawn", "any"], form=["head", "token"],
        queries=[(9, 9), (130, 130), ((5, 0, 70), None)], page_size=[None, 16],
        head_dim=[64, 128, 256, 512],
    ),
    "queries of e4m3": grid(
        cached=(150, 0, 37), page_size=16, q_is_fp8=True,
        of=[
            *(
                {"seqlens_q": n, "form": form, "causal": True, "softcap": 5.0}
                for n in (1, 33) for form in ("head", "token")
            ),
            *({"queries": (n, n), "form": "expanded", "rotary_dim": 32} for n in (1, 33)),
        ],
    ),
    "splits": grid(
        cached=(scaled(3000, 600), 0, 63, scaled(1000, 200)), capacity=scaled(3200, 700),
        causal=True, num_splits=[0, 1, 3, 64],
        of=[
            {"queries": (1, 1), "page_size": 16, "form": "token"},
            {"queries": (70, 1), "form": "head"},
            {"queries": (1, 1), "form": "head"},
        ],
    ),
    "pairs": pairs(
        seed=3,
        cached=(100, 0, 37),
        form=EVERY_FORM,
        dtype=DTYPES,
        head_dim=[32, 64, 80, 128, 192, 256, 512],
        heads=[(4, 4), (8, 2), (6, 1), (5, 5)],
        queries=[
            *((1, 1), (1, None), (7, 7), (40, 40), (40, 2)),
            *(((3, 0, 20), (3, 0, 20)), ((1, 4, 0), None)),
        ],
        page_size=[None, 1, 16, 48, 256],
        places=[{}, *PLACES[:2]],
        range=[{}, {"causal": True}, {"window": (33, -1)}, {"window": (40, 3)}],
        score=[{}, {"softcap": 4.0}, {"alibi": Alibi.per_batch}, {"sink": FP32}],
        rotary=[(0, True), (16, True), (32, False)],
        quantize=[None, "token"],
        num_splits=[0, 1, 3, 50],
    ),
}  # fmt: skip


@each(SHAPES)
def test_by_tables(check: Check, calls: list[Call]) -> None:
    check_calls(check, calls)


# -- what another call gives -----------------------------------------------------------------------


@pytest.mark.parametrize("queries", [1, 30])
@pytest.mark.parametrize("form", ["powers", "token"])
def test_attention_chunks(form: str, queries: int) -> None:
    """As over the cache in 16 bits, dequantized, with what that rounds."""
    case = make(form, cached=(100, 64, 37), seqlens_q=queries, causal=True)
    inputs = case.make_inputs()
    actual, _ = attend(case, inputs, attention_chunk=32)
    dense = {}
    for name in "kv":
        cache = getattr(inputs.cache, f"{name}_cache")
        scale = inputs.scales[f"{name}_descale"]
        if isinstance(scale, Tensor):
            scale = scale[..., None] if scale.dim() == 3 else scale[:, None, :, None]
        dense[f"{name}_cache"] = (from_bytes(cache.view(torch.uint8)) * scale).to(torch.bfloat16)
    given = {**inputs.cache.arguments(), **dense, "causal": True, "attention_chunk": 32}
    expected = flash_attn_with_kvcache(**given)
    torch.testing.assert_close(actual.out, expected, rtol=0.02, atol=0.02)


# -- pages of packed sequences ---------------------------------------------------------------------


@pytest.mark.parametrize("form", ["head", "token"])
def test_packed_sequences_over_pages(form: str) -> None:
    """flash_attn_varlen_func: what flash_attn_with_kvcache says."""
    case = make(form, cached=(100, 0, 37), seqlens_q=(5, 3, 70), page_size=16, causal=True)
    inputs = case.make_inputs()
    expected, _ = attend(case, inputs)
    cache = inputs.cache
    out, lse, _ = flash_attn_varlen_func(
        cache.q, cache.k_cache, cache.v_cache, cache.cu_seqlens_q, None, 70, 192,
        block_table=cache.block_table, seqused_k=cache.cache_seqlens, causal=True,
        return_attn_probs=True, **inputs.scales,
    )  # fmt: skip
    exact = reference_of(case, inputs)
    assert_close(AttentionResult(out=out, lse=lse), exact.expected, exact.naive)
    torch.testing.assert_close(out, expected.out, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("seqlens", [((1, 1, 1), (60, 0, 7)), ((5, 0, 130), (5, 9, 200))], ids=str)
def test_packed_keys(seqlens: Any) -> None:
    """flash_attn_varlen_func without a block_table: scales of heads and of sequences."""
    make(cached=(1,))  # or skip
    lengths = [torch.tensor(x, dtype=torch.int32) for x in seqlens]
    bounds = [torch.cat([x.new_zeros(1), x.cumsum(0).int()]).to(DEVICE) for x in lengths]
    total_q, total_k = (int(x.sum()) for x in lengths)
    q = torch.randn(total_q, 4, 64, device=DEVICE, dtype=torch.bfloat16)
    k, v = (to_bytes(64.0 * torch.randn(total_k, 2, 64)).to(DEVICE).view(E4M3) for _ in "kv")
    for scale in (torch.rand(2, device=DEVICE) / 64.0, torch.rand(3, 2, device=DEVICE) / 64.0):
        given = {"causal": True, "softcap": 5.0}
        out = flash_attn_varlen_func(
            q, k, v, *bounds, None, None, k_descale=scale, v_descale=scale, **given
        )
        of_rows = scale if scale.dim() == 1 else scale.repeat_interleave(lengths[1].to(DEVICE), 0)
        wide = [
            (from_bytes(x.view(torch.uint8)) * of_rows[..., None]).to(torch.bfloat16)
            for x in (k, v)
        ]
        expected = flash_attn_varlen_func(q, *wide, *bounds, None, None, **given)
        torch.testing.assert_close(out, expected, rtol=0.02, atol=0.02)


# -- bits ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["head", "token"])
@pytest.mark.parametrize("seqlen_q", [1, 3, 40])
def test_batch_invariance(seqlen_q: int, form: str) -> None:
    lengths = (scaled(2000, 300), 0, 63, scaled(1100, 200))
    sizes: dict[str, Any] = {"capacity": scaled(2048, 320), "page_size": 16, "causal": True}
    case = make(form, cached=lengths, seqlens_q=seqlen_q, **sizes)
    inputs = case.make_inputs()
    together, _ = attend(case, inputs, batch_invariant=True)
    for b in range(len(lengths)):
        alone = Fp8Inputs(inputs.cache.sequence(b), inputs.scales)
        by_itself, _ = attend(case, alone, batch_invariant=True, num_splits=b)
        assert torch.equal(bits(by_itself.out[0]), bits(together.out[b]))
        assert torch.equal(bits(by_itself.lse[0]), bits(together.lse[b]))


@pytest.mark.parametrize("form", ["head", "token"])
@pytest.mark.parametrize("seqlen_q", [1, 100])
def test_repeats_to_the_bit(seqlen_q: int, form: str) -> None:
    case = make(
        form, cached=(scaled(900, 200), 0, 63), seqlens_q=seqlen_q, capacity=scaled(960, 256)
    )
    inputs = case.make_inputs()
    expected, _ = attend(case, inputs)
    for _ in range(3):
        assert_same(attend(case, inputs)[0], expected)


def many_queries(seqlen_q: int) -> Fp8Case:
    sizes = {"seqlens_q": seqlen_q, "capacity": 768, "head_dim": 128}
    return make("powers", cached=(700, 64, 37), **sizes)


@pytest.mark.cuda_only
@pytest.mark.parametrize("seqlen_q", [130, 300])
def test_powers_of_two_are_exact(seqlen_q: int) -> None:
    """Of kernels with the same tiles and products, which those of sm80 are."""
    many_queries(seqlen_q)  # or skip
    program = f"from {__name__} import check_powers; check_powers({seqlen_q})"
    result = run_limited("-c", program, capability=80)
    assert result.returncode == 0, result.stdout + result.stderr


def check_powers(seqlen_q: int) -> None:
    """The bits of the call over the dequantized cache in 16 bits."""
    case = many_queries(seqlen_q)
    inputs = case.make_inputs()
    actual, _ = attend(case, inputs, num_splits=1)
    wide = {}
    for name in "kv":
        scale = inputs.scales[f"{name}_descale"]
        scale = scale[:, None, :, None] if isinstance(scale, Tensor) else scale
        x = from_bytes(getattr(inputs.cache, f"{name}_cache").view(torch.uint8)) * scale
        wide[f"{name}_cache"] = x.to(torch.bfloat16)
    given = {**inputs.cache.arguments(), **wide, "num_splits": 1, "return_softmax_lse": True}
    out, lse = flash_attn_with_kvcache(**given)
    assert_same(actual, AttentionResult(out=out, lse=lse))


@pytest.mark.parametrize("shift", [1, 3, 16, 48])
def test_offsets(shift: int) -> None:
    """Caches that begin at any 16 bytes; on CUDA others are refused."""
    case = make("head", cached=(100, 0, 37), seqlens_q=2)
    inputs = case.make_inputs()
    expected, _ = attend(case, inputs)
    moved = {}
    for name in ("k_cache", "v_cache"):
        x = getattr(inputs.cache, name).view(torch.uint8)
        room = torch.full((x.numel() + shift,), 0x7F, dtype=torch.uint8, device=DEVICE)
        moved[name] = room[shift:].view(x.shape).copy_(x).view(E4M3)
    given = inputs.arguments() | moved | {"return_softmax_lse": True}
    if shift % 16 != 0 and not ON_CPU:
        refused = f"^k_cache: must begin at a multiple of 16 bytes .* an address {shift} after one"
        with pytest.raises(ValueError, match=refused):
            flash_attn_with_kvcache(**given)
        return
    out, lse = flash_attn_with_kvcache(**given)
    torch.testing.assert_close(out, expected.out, rtol=0.02, atol=0.02)
    torch.testing.assert_close(lse, expected.lse, rtol=1e-4, atol=1e-4)


# -- streams ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("quantize", [None, "token"])
@pytest.mark.parametrize("page_size", [None, 16])
def test_a_captured_step(page_size: int | None, quantize: str | None) -> None:
    """A replay at other lengths reads, appends and scales by the lengths of then."""
    sizes: dict[str, Any] = {"capacity": 192, "page_size": page_size, "causal": True}
    case = make(
        "token", quantize=quantize, cached=(150, 20, 37), seqlens_q=1, seqlens_new=1, **sizes
    )
    static = case.make_inputs().arguments()
    for name, x in static.items():
        if isinstance(x, Tensor) and x.dtype in (torch.float32, E4M3):  # no NaN: lengths change
            y = x.view(torch.uint8) if x.dtype == E4M3 else x
            y[x.float().isnan()] = 0 if x.dtype == E4M3 else 1.0 / 64.0
            static[name] = x

    def step(given: dict[str, Any]) -> Tensor:
        return flash_attn_with_kvcache(**given, quantize=quantize, causal=True)

    written = ("k_cache", "v_cache", "k_descale", "v_descale")
    before = {name: static[name].clone() for name in written}
    replay = captured(lambda: step(static))
    for lengths in ((0, 191, 5), (100, 0, 0), (191, 191, 191)):
        for name, x in before.items():
            static[name].copy_(x)
        static["cache_seqlens"].copy_(torch.tensor(lengths, dtype=torch.int32))
        fresh = static | {name: x.clone() for name, x in before.items()}
        expected = step(fresh)
        assert torch.equal(bits(replay()), bits(expected)), lengths
        for name in written:
            assert same_bytes(static[name], fresh[name]), (name, lengths)


@pytest.mark.cuda_only
@pytest.mark.parametrize("scale", ["number", "tensor"])
def test_nothing_waits_for_the_device(scale: str) -> None:
    case = make("token", quantize="token", cached=(100, 0, 37), seqlens_q=1, seqlens_new=1)
    given = case.make_inputs().arguments() | {"quantize": "token"}
    if scale == "number":
        given |= {"k_descale": 0.02, "v_descale": 0.5, "quantize": None}
    flash_attn_with_kvcache(**given)
    with no_host_sync():
        flash_attn_with_kvcache(**given)
        quantize_kv(given["k"], given["v"])


# -- accuracy --------------------------------------------------------------------------------------


def judged(
    q: Tensor, k: Tensor, v: Tensor, scales: tuple[Tensor, Tensor], **options: Any
) -> AttentionResult:
    """Checks the call over e4m3 (B, S, Hk, D) and scales that broadcast against it."""
    shapes = [x.squeeze(-1) if x.shape[1] > 1 else x[:, 0, :, 0] for x in scales]
    out, lse = flash_attn_with_kvcache(
        q, k, v, k_descale=shapes[0], v_descale=shapes[1], return_softmax_lse=True, **options
    )
    wide = [from_bytes(x.view(torch.uint8)) * y for x, y in zip((k, v), scales, strict=True)]
    exact = kvcache_reference(q.double(), *wide).expected
    naive = kvcache_reference(q, *(x.to(q.dtype) for x in wide)).naive
    result = AttentionResult(out=out, lse=lse)
    assert_close(result, exact, naive)
    return result


@pytest.mark.parametrize("per_token", [False, True], ids=["head", "token"])
@pytest.mark.parametrize("seqlen_q", [1, 128])
def test_needle(seqlen_q: int, per_token: bool) -> None:
    """128k keys and values of one sign: sums that are not kept in fp32 lose their ends. The error
    is no larger than that of the call over the dequantized cache.
    """
    keys, head_dim = scaled(131072, 2048), 128
    make(cached=(1,), head_dim=head_dim)  # or skip
    q = torch.randn(1, seqlen_q, 2, head_dim, device=DEVICE, dtype=torch.bfloat16)
    k = torch.randn(1, keys, 1, head_dim, device=DEVICE)
    v = 1.0 + torch.rand(1, keys, 1, head_dim, device=DEVICE)
    k[:, keys // 3] = q[:, 0, :1].float() * 1.5  # the needle
    k8, v8, k_scale, v_scale = quantize_kv(k, v, "token" if per_token else "head")
    at = (..., None) if per_token else (slice(None), None, slice(None), None)
    scales = (k_scale[at], v_scale[at])
    result = judged(q, k8, v8, scales)
    wide = [from_bytes(x.view(torch.uint8)) * y for x, y in zip((k8, v8), scales, strict=True)]
    exact = kvcache_reference(q.double(), *wide).expected
    half = flash_attn_with_kvcache(q, *(x.to(q.dtype) for x in wide))
    errors = [(x.double() - exact.out).abs().mean().item() for x in (result.out, half)]
    assert errors[0] <= 1.25 * errors[1] + 1e-6, errors


@pytest.mark.parametrize("mode", ["head", "token"])
@pytest.mark.parametrize("seqlen_q", [1, 100])
def test_outlier_channels(seqlen_q: int, mode: str) -> None:
    """Some columns of k are 30 times as large, as models have them, and some tokens."""
    make(cached=(1,), head_dim=64)  # or skip
    q = 0.2 * torch.randn(2, seqlen_q, 4, 64, device=DEVICE, dtype=torch.bfloat16)
    k, v = (torch.randn(2, 700, 2, 64, device=DEVICE) for _ in "kv")
    k[..., 5::17] *= 30.0
    k[:, ::50] *= 10.0
    v[:, 3::70] *= 20.0
    k8, v8, k_scale, v_scale = quantize_kv(k, v, mode)
    at = (..., None) if mode == "token" else (slice(None), None, slice(None), None)
    judged(q, k8, v8, (k_scale[at], v_scale[at]))


@pytest.mark.parametrize("scale", [0.0, torch.nan, torch.inf, -0.5, 1e-40])
def test_scales_that_nobody_wants(scale: float) -> None:
    """Of one sequence: the bits of the others do not see them."""
    case = make("token", cached=(100, 64, 37), seqlens_q=2, page_size=16)
    inputs = case.make_inputs()
    expected, _ = attend(case, inputs)
    table = inputs.cache.block_table
    assert table is not None
    bad = {name: x.clone() for name, x in inputs.scales.items()}
    for x in bad.values():
        x[table[0].long()] = scale
    result, _ = attend(case, Fp8Inputs(inputs.cache, bad))
    assert torch.equal(bits(result.out[1:]), bits(expected.out[1:]))
    assert torch.equal(bits(result.lse[1:]), bits(expected.lse[1:]))
    if scale in (0.0, -0.5):  # what is not finite is nobody's result
        check_fp8(case, inputs=Fp8Inputs(inputs.cache, bad))


@pytest.mark.parametrize("per_token", [False, True], ids=["head", "token"])
@pytest.mark.parametrize("options", [{}, {"softcap": 5.0}], ids=str)
@pytest.mark.parametrize("seqlen_q", [1, 300])
@pytest.mark.parametrize("head_dim", [16, 128, 320])
@pytest.mark.parametrize(
    ("dtype", "exponents"),
    [(torch.bfloat16, ((-96, -96), (100, 120), (14, 124))), (torch.float16, ((14, 14), (100, -2)))],
    ids=["bf16", "fp16"],
)
def test_scales_at_the_ends_of_the_range(
    dtype: torch.dtype, exponents: Any, head_dim: int, seqlen_q: int, options: Any, per_token: bool
) -> None:
    """Of keys, with a softmax_scale that makes scores moderate, and of values: what the scale 1
    gives, times as much. The numbers that scales stand for are beyond fp16.
    """
    make(cached=(1,), head_dim=head_dim, dtype=dtype)  # or skip
    q = torch.randn(2, seqlen_q, 4, head_dim, device=DEVICE, dtype=dtype)
    k8 = torch.randn(2, 700, 2, head_dim, device=DEVICE).to(E4M3)
    v8 = (torch.randn(2, 700, 2, head_dim, device=DEVICE) / 64.0).to(E4M3)  # sums stay finite
    ones = torch.ones(2, 700, 2, device=DEVICE)

    def attended(of_keys: int, of_values: int) -> list[Tensor]:
        scales = [ones * 2.0**of if per_token else 2.0**of for of in (of_keys, of_values)]
        found = flash_attn_with_kvcache(
            *(q, k8, v8),
            **{"k_descale": scales[0], "v_descale": scales[1], "causal": True, **options},
            softmax_scale=head_dim**-0.5 * 2.0**-of_keys,
            return_softmax_lse=True,
        )
        return [x.double() for x in found]

    out, lse = attended(0, 0)
    for of_keys, of_values in exponents:
        scaled_out, scaled_lse = attended(of_keys, of_values)
        assert scaled_out.isfinite().all()
        torch.testing.assert_close(scaled_lse, lse, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(scaled_out * 2.0**-of_values, out, rtol=2.0**-7, atol=2.0**-12)
