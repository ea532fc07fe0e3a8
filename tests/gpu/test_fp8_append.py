"""What an append leaves in a cache of FP8 (e4m3) on the GPU: every byte and every scale."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from flash_attn_cuda import flash_attn_with_kvcache, quantize_kv
from tests.cases.fp8_cache import APPENDS, E4M3, check_appended_numbers
from tests.cases.fp8_harness import make, same_bytes
from tests.cases.harness import DEVICE, Check
from tests.cases.matrix import Call, check_calls, each, grid
from tests.reference.fp8 import from_bytes

pytestmark = pytest.mark.gpu


TABLE: dict[str, list[Call]] = {
    # Of a token and of many, with scales that are given, per head and per token, or made.
    "appends": grid(
        cached=(100, 0, 37), causal=True, page_size=[None, 7],
        rotary=[(0, True), (32, True), (64, False)],
        of=[
            *({"queries": (1, 1), "form": form} for form in ("token", "head")),
            *({"queries": (40, 40), "form": form} for form in ("mixed", "expanded")),
            *(
                {"queries": (n, n), "quantize": "token", "strides": strides}
                for n in (1, 40) for strides in ("plain", "strided")
            ),
        ],
    ),
    "head dims": grid(
        cached=(100, 0, 37), seqlens_new=3, dtype=torch.float16, form="token",
        head_dims=[(16, 16), (80, 48), (192, 192), (512, 512)],
        quantize=[None, "token"], batch_idx=[None, (3, 0, 2)],
    ),
}  # fmt: skip


@each(TABLE)
def test_appends(check: Check, calls: list[Call]) -> None:
    check_calls(check, calls)


@pytest.mark.parametrize("name", APPENDS)
def test_numbers_are_appended_as_they_are(name: str) -> None:
    case = make(cached=(100, 0, 37), **APPENDS[name])
    check_appended_numbers(replace(case, k_form="number", v_form="number"))


SPECIAL = [0.0, -0.0, torch.nan, torch.inf, -torch.inf, 448.0, -449.0, 464.0, 466.0, 3e38]
SPECIAL += [2.0**-9, 2.0**-10, 3 * 2.0**-11, 2.0**-11, -(2.0**-9) * 1.5, 17.0]


@pytest.mark.parametrize("scale", [1.0, 0.0, -0.5, 3.7, 1e-38, 1e30, torch.inf, torch.nan])
def test_special_numbers(scale: float) -> None:
    """The bytes of every kind of number, by every kind of scale, are the CPU backend's."""
    make(cached=(1,))  # or skip
    x = torch.tensor(SPECIAL, dtype=torch.bfloat16)
    found = []
    for device in ("cpu", DEVICE):
        new = x.view(1, 1, 1, 16).to(device)
        caches = [torch.zeros(1, 4, 1, 16, device=device).to(E4M3) for _ in "kv"]
        scales = torch.full((1, 4, 1), scale, device=device)
        given = {"k_descale": scales, "v_descale": scale}
        flash_attn_with_kvcache(torch.zeros_like(new), *caches, new, new, cache_seqlens=2, **given)
        found.append([from_bytes(x.view(torch.uint8)).cpu() for x in caches])
    torch.testing.assert_close(*found, rtol=0, atol=0, equal_nan=True)


def test_scales_of_special_rows() -> None:
    """Of zeros, of NaN, with infinities: the CPU backend's, to the bit."""
    make(cached=(1,))  # or skip
    rows = torch.randn(6, 16)
    rows[0], rows[1], rows[2] = 0.0, torch.nan, torch.tensor(SPECIAL)
    rows[3, 4], rows[4, 2] = torch.inf, torch.nan
    found = []
    for device in ("cpu", DEVICE):
        new = rows.view(1, 6, 1, 16).to(device, torch.bfloat16)
        caches = [torch.zeros(1, 8, 1, 16, device=device).to(E4M3) for _ in "kv"]
        scales = [torch.zeros(1, 8, 1, device=device) for _ in "kv"]
        flash_attn_with_kvcache(
            torch.zeros_like(new), *caches, new, new, cache_seqlens=1,
            k_descale=scales[0], v_descale=scales[1], quantize="token",
        )  # fmt: skip
        bytes_ = [from_bytes(x.view(torch.uint8)).cpu() for x in caches]
        found.append([*bytes_, *(x.cpu() for x in scales)])
    torch.testing.assert_close(*found, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("quantize", [None, "token"])
def test_append_then_read(quantize: str | None) -> None:
    """Steps of one token leave what one call of all leaves, and quantize_kv makes."""
    steps, sizes = 9, (2, 9, 2, 64)
    make(cached=(1,), head_dim=64)  # or skip
    q, k, v = (
        torch.randn(2, steps, heads, 64, device=DEVICE, dtype=torch.bfloat16) for heads in (4, 2, 2)
    )
    states = []
    for step in (1, steps):
        caches = [torch.full(sizes, torch.nan, device=DEVICE).to(E4M3) for _ in "kv"]
        scales = [torch.full(sizes[:-1], 0.01, device=DEVICE) for _ in "kv"]
        for t in range(0, steps, step):
            at = slice(t, t + step)
            out = flash_attn_with_kvcache(
                q[:, at], *caches, k[:, at], v[:, at], cache_seqlens=t, causal=True,
                k_descale=scales[0], v_descale=scales[1], quantize=quantize,
            )  # fmt: skip
        states.append((*caches, *scales))
        if step == 1:
            last = out
    for x, y in zip(*states, strict=True):
        assert same_bytes(x, y)
    torch.testing.assert_close(last, out[:, -1:], rtol=0.02, atol=0.02)
    if quantize is not None:
        for x, y in zip(states[0], quantize_kv(k, v), strict=True):
            assert same_bytes(x, y)
