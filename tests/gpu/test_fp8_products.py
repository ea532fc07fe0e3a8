"""Products of e4m3 (fp8_products), against fp64. The error is at most twice that of the same maths
where P alone is rounded to e4m3, and out to its dtype; keys, and their scales, that no sequence has
are NaN.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_attn_cuda import flash_attn_varlen_func, flash_attn_with_kvcache
from flash_attn_cuda.report.explain import call_of_shapes, explain
from tests.cases.harness import DEVICE, bits, scaled
from tests.reference.fp8 import from_bytes, to_bytes

pytestmark = pytest.mark.gpu

E4M3 = torch.float8_e4m3fn
POWER = 2.0**7  # of P where the score is the reference


@dataclass(frozen=True)
class Products:
    """Sequences over a cache, dense or in pages, or packed with their keys."""

    seqlens_q: tuple[int, ...]
    seqlens_k: tuple[int, ...]
    heads: tuple[int, int] = (4, 2)
    head_dims: tuple[int, int] = (128, 128)
    dtype: torch.dtype = torch.bfloat16
    causal: bool = False
    window: tuple[int, int] = (-1, -1)
    sink: bool = False
    page_size: int | None = None
    packed: bool = False
    mean: float = 0.0  # of keys and values
    peak: int | None = None  # the key that is the first query, and has almost all of its weight

    def make(self, seed: int = 0) -> tuple[list[Tensor], list[Tensor], dict[str, Any]]:
        """q, k and v of each sequence as bytes, their scales (B, Hk), and the call's arguments."""
        generator = torch.Generator().manual_seed(seed)
        batch, (heads_q, heads_k), (head_dim, head_dim_v) = (
            len(self.seqlens_q), self.heads, self.head_dims,
        )  # fmt: skip
        most_q, most_k = max(self.seqlens_q), max(self.seqlens_k) + 37
        nan = to_bytes(torch.tensor(torch.nan))
        stored = []
        for used, most, heads, columns, mean in (
            (self.seqlens_q, most_q, heads_q, head_dim, 0.0),
            (self.seqlens_k, most_k, heads_k, head_dim, self.mean),
            (self.seqlens_k, most_k, heads_k, head_dim_v, self.mean),
        ):
            x = to_bytes(
                64.0 * (torch.randn(batch, most, heads, columns, generator=generator) + mean)
            )
            for index, length in enumerate(used):
                x[index, length:] = nan
            stored.append(x.to(DEVICE))
        if self.peak is not None:
            stored[1][0, self.peak] = stored[0][0, 0, :: heads_q // heads_k]
        scales = [
            (0.5 + torch.rand(batch, heads_k, generator=generator)).to(DEVICE) / 64.0 for _ in "qkv"
        ]
        given: dict[str, Any] = dict(
            zip(("q_descale", "k_descale", "v_descale"), scales, strict=True),
            causal=self.causal, window_size=self.window,
        )  # fmt: skip
        if self.sink:
            given["sink"] = torch.randn(heads_q, generator=generator).to(DEVICE)
        return stored, scales, given

    def attend(self, seed: int = 0) -> tuple[list[Tensor], list[Tensor]]:
        """out and lse (Hq, Sq) of each sequence."""
        (q, k, v), _, given = self.make(seed)
        lengths = {name: torch.tensor(x, dtype=torch.int32, device=DEVICE)
                   for name, x in (("q", self.seqlens_q), ("k", self.seqlens_k))}  # fmt: skip
        bounds = {
            name: torch.cat([x.new_zeros(1), x.cumsum(0).int()]) for name, x in lengths.items()
        }
        most_q = max(self.seqlens_q)
        given["fp8_products"] = True
        q8 = torch.cat([x[:length] for x, length in zip(q, self.seqlens_q, strict=True)]).view(E4M3)
        shape = (*q8.shape[:-1], self.head_dims[1])
        given["out"] = torch.full(shape, torch.nan, dtype=self.dtype, device=DEVICE)
        if self.packed:
            parts = ([x[:n] for x, n in zip(y, self.seqlens_k, strict=True)] for y in (k, v))
            keys = [torch.cat(x).view(E4M3) for x in parts]
            out, lse, _ = flash_attn_varlen_func(
                q8, *keys, bounds["q"], bounds["k"], most_q, max(self.seqlens_k),
                return_attn_probs=True, **given,
            )  # fmt: skip
        else:
            if self.page_size is not None:
                k, v, given["block_table"] = self._in_pages(k, v)
            out, lse = flash_attn_with_kvcache(
                q8, k.view(E4M3), v.view(E4M3), cache_seqlens=lengths["k"],
                cu_seqlens_q=bounds["q"], max_seqlen_q=most_q, return_softmax_lse=True, **given,
            )  # fmt: skip
        cuts = list(self.seqlens_q)
        return list(out.split(cuts)), list(lse.split(cuts, 1))

    def _in_pages(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Pages in any order, one of them nobody's."""
        size = self.page_size or 1
        count = -(-k.shape[1] // size)
        table = torch.randperm(len(k) * count, generator=torch.Generator().manual_seed(3)) + 1
        table = table.view(len(k), count).int().to(DEVICE)
        made = []
        for x in (k, v):
            pages = (
                to_bytes(torch.tensor(torch.nan))
                .to(DEVICE)
                .repeat(len(k) * count + 1, size, *x.shape[2:])
            )
            padded = torch.nn.functional.pad(
                x, (0, 0, 0, 0, 0, count * size - x.shape[1]), value=127
            )
            pages[table.long()] = padded.unflatten(1, (count, size))
            made.append(pages)
        return made[0], made[1], table

    def expected(self, seed: int = 0) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """Of each sequence out in fp64, out of rounded P, lse, and how far that may be off."""
        stored, scales, given = self.make(seed)
        group = self.heads[0] // self.heads[1]
        for b, (seqlen_q, seqlen_k) in enumerate(zip(self.seqlens_q, self.seqlens_k, strict=True)):
            of_heads = [scale[b].double()[None, :, None] for scale in scales]
            of_heads[0] = of_heads[0].repeat_interleave(group, 1)
            lengths = (seqlen_q, seqlen_k, seqlen_k)
            q, k, v = (
                (from_bytes(x[b, :n]) * scale).transpose(0, 1)
                for x, n, scale in zip(stored, lengths, of_heads, strict=True)
            )
            k, v = (x.repeat_interleave(group, 0) for x in (k, v))
            scores = q @ k.mT * self.head_dims[0] ** -0.5
            at = (
                torch.arange(seqlen_k, device=DEVICE)
                - torch.arange(seqlen_q, device=DEVICE)[:, None]
            )
            at = at - (seqlen_k - seqlen_q)
            left, right = self.window
            hidden = at > (0 if self.causal else right if right >= 0 else math.inf)
            hidden |= at < (-left if left >= 0 else -math.inf)
            scores = scores.masked_fill(hidden, -math.inf)
            lse = scores.logsumexp(-1)
            if self.sink:
                lse = torch.logaddexp(lse, given["sink"].double()[:, None])
            safe = lse.masked_fill(lse == -math.inf, 0.0)[..., None]
            exact = (scores - safe).exp() @ v
            log2e = 1.0 / math.log(2.0)
            largest = scores.amax(-1, keepdim=True) if seqlen_k else scores.sum(-1, keepdim=True)
            reference = (largest * log2e).ceil().masked_fill(largest == -math.inf, 0.0)
            p = from_bytes(to_bytes((scores * log2e - reference).exp2() * POWER)) / POWER
            rounded = (p @ v) * (reference / log2e - safe).exp()
            # What products drop of sums, at most, of scores and so of their logarithm.
            sums = (q.abs() @ k.abs().mT).flatten(1)
            largest_sum = sums.amax(1) if sums.numel() else sums.sum(1)
            dropped = largest_sum * self.head_dims[0] ** -0.5 * 2.0**-10
            outs = (x.transpose(0, 1) for x in (exact, rounded.to(self.dtype).double()))
            yield *outs, lse, dropped[:, None]


def check(case: Products) -> None:
    for out, lse, (exact, rounded, exact_lse, dropped) in zip(
        *case.attend(), case.expected(), strict=True
    ):
        assert not out.isnan().any()
        if not out.numel():
            continue
        allowed = 2.0 * (rounded - exact).abs().max().item() + 1e-5
        assert (out.double() - exact).abs().max().item() <= allowed
        # The mean of the error: products are not dropped towards zero.
        size = exact.abs().mean().item()
        assert abs((out.double() - exact).mean().item()) <= 0.004 * size + 1e-6
        assert ((lse.double() - exact_lse).nan_to_num(0.0).abs() <= 1e-4 + dropped).all()
        assert not lse.isnan().any() and torch.equal(lse.isinf(), exact_lse.isinf())


LENGTHS = ((130, 70, 300), (517, 96, 1))
CASES = [
    *(Products(*LENGTHS, dtype=dtype, causal=causal, packed=packed)
      for dtype in (torch.bfloat16, torch.float16) for causal in (False, True)
      for packed in (False, True)),
    *(Products(*LENGTHS, page_size=size, causal=True) for size in (16, 48, 256, 40)),
    *(Products(*LENGTHS, head_dims=dims, causal=True, packed=packed)
      for dims in ((96, 96), (112, 112), (80, 80), (128, 96), (192, 128), (176, 128), (160, 112))
      for packed in (False, True)),
    *(Products(*LENGTHS, heads=heads, window=(100, 40)) for heads in ((6, 6), (8, 1), (12, 4))),
    Products(*LENGTHS, sink=True, causal=True),
    Products((1, 0, 200), (95, 300, 0), packed=True),
    Products((300,), (97,), causal=True),
    *(Products((256,), (700,), peak=peak) for peak in (0, 350, 699)),
    Products((scaled(1000, 200),), (scaled(3000, 400),), window=(65, 3), heads=(2, 1)),
    *(Products((256,), (scaled(9000, 600),), mean=mean, packed=packed, head_dims=dims)
      for mean in (0.0, 3.0) for packed in (False, True) for dims in ((128, 128), (192, 128))),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_products(case: Products) -> None:
    check(case)


@pytest.mark.parametrize("packed", [False, True])
def test_repeats_to_the_bit(packed: bool) -> None:
    case = Products(*LENGTHS, causal=True, packed=packed)
    first = case.attend()
    for _ in range(3):
        for one, other in zip(first, case.attend(), strict=True):
            assert all(torch.equal(bits(x), bits(y)) for x, y in zip(one, other, strict=True))


@pytest.mark.cuda_only
@pytest.mark.parametrize(
    ("shapes", "multiplies"),
    [
        ({}, True),
        ({"head_dim": 192, "head_dim_v": 128}, True),
        ({"page_size": 16}, True),
        ({"packed": True}, True),
        ({"page_size": 20}, False),
        ({"seqlen_q": 8}, False),
        ({"head_dim": 256}, False),
        ({"softcap": 3.0}, False),
    ],
    ids=str,
)
def test_what_multiplies(shapes: dict[str, Any], multiplies: bool) -> None:
    """Which calls the kernels of products run on a Hopper GPU, others those of q in 16 bits."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("another GPU multiplies in 16 bits")
    call: dict[str, Any] = {"dtype": "bf16", "head_dim": 128, "batch_size": 2, "seqlen_q": 512}
    call |= {"seqlen_k": 1024, "num_heads_q": 8, "num_heads_k": 2, "lengths_on_device": True}
    plan = explain("forward", call_of_shapes(fp8_products=True, **call | shapes))
    assert ("e4m3_products" in plan["config"]["features"]) is multiplies
