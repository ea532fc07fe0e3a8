"""Attention problems over a KV cache of FP8 (e4m3): a KvCacheCase and what its scales are like.
Rows that hold no key are NaN, and so are scales that no row in use has. With qv, keys are in 16
bits, and values may be latent rows of bytes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from flash_attn_cuda import LatentFormat, flash_attn_with_kvcache, latent_views
from tests.cases.kvcache import KvCacheCase, KvCacheInputs
from tests.cases.masked_operators import int32
from tests.reference import AttentionResult
from tests.reference.fp8 import (
    Fp8CacheResult,
    fp8_cache_reference,
    from_bytes,
    from_powers,
    scaled_down,
    to_bytes,
    to_powers,
    token_powers,
    token_scales,
)
from tests.reference.tolerance import Closeness, assert_close

E4M3 = torch.float8_e4m3fn
E8M0 = torch.float8_e8m0fnu
FORMS = ("number", "head", "batch", "token")
STRIDES = ("plain", "expanded", "strided")
TOKEN_FORMS = ("token", "group")


@dataclass(frozen=True)
class Fp8Inputs:
    """`cache`: the tensors of a call, caches of e4m3. Scales as they are given."""

    cache: KvCacheInputs
    scales: dict[str, Any]  # q_descale, if q is of e4m3, k_descale, if k_cache is, v_descale
    rows: Tensor | None = None  # that caches and v_descale are views of (Fp8Case.views)

    def arguments(self) -> dict[str, Any]:
        return {**self.cache.arguments(), **self.scales}


@dataclass(frozen=True)
class Fp8Case:
    """The forms of scales, and their strides; `powers`: all that are given are powers of two. With
    qv k_form is "none", as keys have no scales, v_form may be "group", a scale for each group of a
    row's columns, and strides "rows", views of rows of bytes; is_v4: those of DeepSeek V4, whose
    rotary columns are values.
    """

    cache: KvCacheCase
    k_form: str = "head"
    v_form: str = "head"
    strides: str = "plain"
    powers: bool = False
    quantize: str | None = None
    q_is_fp8: bool = False
    group: int = 128
    is_v4: bool = False

    def __str__(self) -> str:
        parts = [str(self.cache), f"k_{self.k_form}", f"v_{self.v_form}", self.strides]
        parts += ["powers"] * self.powers + ["quantize"] * (self.quantize is not None)
        return "-".join(parts + ["q_fp8"] * self.q_is_fp8 + ["v4"] * self.is_v4)

    def make_inputs(self, seed: int = 0) -> Fp8Inputs:
        cache, given = self.cache, self.cache.make_inputs(seed)
        generator = torch.Generator(cache.device).manual_seed(seed + 1)
        k, v = given.k_cache, given.v_cache
        in_use = ~k[..., 0, 0].isnan() | self._appended(given)
        scales: dict[str, Any] = {}
        stored = {}
        for name, x, form in (("k", k, self.k_form), ("v", v, self.v_form)):
            if form == "none":
                continue
            if form in TOKEN_FORMS and self.strides != "expanded" and not self.powers:
                groups = x if form == "token" else x.unflatten(-1, (-1, self.group))
                # What is stored uses all of e4m3.
                of_rows = (token_powers if self.is_v4 else token_scales)(groups)
                stored[name] = to_bytes(scaled_down(groups, of_rows[..., None])).view(x.shape)
                made = torch.where(
                    groups[..., 0].isnan(), self._random(groups.shape[:-1], generator), of_rows
                )
            else:
                stored[name] = to_bytes(x.float() * 64.0)
                made = self._random(self._shape(form, x), generator)
            scales[f"{name}_descale"] = self._as_given(form, made, in_use)
        if self.q_is_fp8:
            form = self.k_form if self.k_form != "token" else "batch"
            shape = self._shape(form, k)
            scales["q_descale"] = self._as_given(
                form, 16.0 * self._random(shape, generator), in_use
            )
            q = to_bytes(given.q.float() * 4.0).view(E4M3)
            given = replace(given, q=q)
        caches = {f"{name}_cache": x.view(E4M3) for name, x in stored.items()}
        inputs = Fp8Inputs(replace(given, **caches), scales)
        return self._in_rows(inputs) if self.strides == "rows" else inputs

    @property
    def row_format(self) -> LatentFormat:
        """With bytes of no part, as rows of bytes have elsewhere."""
        latent, rotary = self.cache.value_dim, self.cache.head_dim
        if self.is_v4:
            rows = latent + 2 * rotary
            return LatentFormat(
                *(latent, rotary, self.group, E8M0),
                scale_offset=0,
                rotary_offset=latent,
                row_bytes=rows + 8,
                page_scale_bytes=8,
            )
        begin = -(-(latent + 4 * (latent // self.group)) // 16) * 16
        end = begin + 2 * rotary
        return LatentFormat(
            *(latent, rotary, self.group),
            scale_offset=latent,
            rotary_offset=begin,
            row_bytes=-(-end // 16) * 16 + 16,
        )

    def views(self, rows: Tensor) -> dict[str, Tensor]:
        """Arguments that lie in rows of bytes, of V4 in pages that begin at multiples of 16."""
        names = ("k_cache", "v_cache", "v_descale")
        if self.is_v4:
            token = (self.cache.num_heads_k, self.row_format.row_bytes)
            count = rows.shape[1] // (token[0] * token[1])
            rows = rows[:, : count * token[0] * token[1]].unflatten(1, (count, *token))
        return dict(zip(names, latent_views(rows, self.row_format, self.cache.dtype), strict=True))

    def _in_rows(self, inputs: Fp8Inputs) -> Fp8Inputs:
        given = inputs.arguments()
        shape = (*given["k_cache"].shape[:-1], self.row_format.row_bytes)
        if self.is_v4:
            shape = (shape[0], -(-math.prod(shape[1:]) // 16) * 16)
        rows = torch.full(shape, 0xFF, dtype=torch.uint8, device=self.cache.device)
        views = self.views(rows)
        if self.is_v4:
            given["v_descale"] = to_powers(given["v_descale"]).view(E8M0)
        for name, view in views.items():
            view.copy_(given[name])
        scales = {"v_descale": views.pop("v_descale")}
        return Fp8Inputs(replace(inputs.cache, **views), scales, rows)

    def _shape(self, form: str, x: Tensor) -> tuple[int, ...]:
        heads = self.cache.num_heads_k
        shapes = {"number": (1,), "head": (heads,), "batch": (self.cache.batch, heads)}
        if form == "group":
            return *x.shape[:-1], x.shape[-1] // self.group
        return shapes.get(form, x.shape[:-1])

    def _random(self, shape: Any, generator: torch.Generator) -> Tensor:
        """Around 1 / 64."""
        device = self.cache.device
        if self.powers or self.is_v4:
            exponents = torch.randint(-7, -4, tuple(shape), device=device, generator=generator)
            return torch.exp2(exponents.float())
        x = torch.rand(tuple(shape), device=device, generator=generator)
        return (x + 0.5) / 64.0

    def _as_given(self, form: str, scale: Tensor, in_use: Tensor) -> Any:
        if form == "number":
            return scale.item()
        if self.strides == "expanded":
            first = scale[..., :1] if scale.dim() < 3 else scale[:1, :1]
            return first.contiguous().expand(scale.shape)
        if form in TOKEN_FORMS:
            unused = ~in_use.view(*in_use.shape, *(1,) * (scale.dim() - 2))
            scale = scale.masked_fill(unused, torch.nan)
        if self.strides == "plain" or scale.numel() == 0:
            return scale.contiguous()
        room = scale.new_full((2 * scale.shape[-1], *scale.shape[:-1]), torch.nan)
        return room[::2].movedim(0, -1).copy_(scale)

    def _appended(self, given: KvCacheInputs) -> Tensor:
        """Rows of the cache that are written, booleans like its first two dimensions."""
        cache = self.cache
        rows = torch.zeros(given.k_cache.shape[:2], dtype=torch.bool, device=cache.device)
        if cache.seqlens_new is None:
            return rows
        lengths = cache.of_each(cache.seqlens_new)
        for index, (used, count) in enumerate(zip(cache.cached, lengths, strict=True)):
            entry = index if cache.batch_idx is None else cache.batch_idx[index]
            at = torch.arange(used, used + count, device=cache.device)
            if given.block_table is None:
                rows[entry, at] = True
            else:
                pages = given.block_table[entry].long()[at // given.k_cache.shape[1]]
                rows[pages, at % given.k_cache.shape[1]] = True
        return rows


def packed_inputs(dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    """Two sequences and a row behind, 4 heads of queries, 2 of keys."""
    return {
        "q": torch.randn(9, 4, 32, dtype=dtype),
        "k": to_bytes(40.0 * torch.randn(12, 2, 32)).view(E4M3),
        "v": to_bytes(40.0 * torch.randn(12, 2, 16)).view(E4M3),
        "cu_seqlens_q": int32(0, 5, 8),
        "cu_seqlens_k": int32(0, 5, 11),
        "max_seqlen_q": 5,
        "max_seqlen_k": 6,
    }


def dequantized(x: Tensor, scale: Tensor | float, dtype: torch.dtype = torch.float64) -> Tensor:
    return (from_bytes(x.view(torch.uint8)) * scale).to(dtype)


def a_cache(
    new: int = 0, form: str = "head", dtype: torch.dtype = torch.bfloat16
) -> dict[str, Any]:
    """Arguments: 2 sequences of up to 9 keys, 4 heads of queries over 2, head dim 32."""
    case = Fp8Case(
        KvCacheCase(*((4, 6), 1, new or None, 9), head_dim=32, head_dim_v=16, device="cpu"),
        *(form, form),
    )
    given = case.make_inputs().arguments()
    return {name: x for name, x in given.items() if x is not None}


def attend(case: Fp8Case, inputs: Fp8Inputs, **changes: Any) -> tuple[AttentionResult, list[Any]]:
    """(out and lse, k_cache, v_cache, k_descale, v_descale): what is written is copied before."""
    options = case.cache.arguments()
    del options["dropout_p"], options["deterministic"]
    given = inputs.arguments()
    rows = None if inputs.rows is None else inputs.rows.clone()
    if rows is not None:
        given |= case.views(rows)
    else:
        given |= {name: given[name].clone() for name in ("k_cache", "v_cache")}
    if case.quantize is not None and rows is None:
        for name in inputs.scales.keys() - {"q_descale"}:
            x = given[name]
            given[name] = x.new_empty_strided(x.shape, x.stride()).copy_(x)
    out, lse = flash_attn_with_kvcache(
        **{
            **given,
            **options,
            "rotary_interleaved": case.cache.rotary_interleaved,
            "return_softmax_lse": True,
            "quantize": case.quantize,
            "values_include_rope": case.is_v4,
            **changes,
        }
    )
    names = ("k_cache", "v_cache", "k_descale", "v_descale")
    if rows is not None:
        parts = rows.clone()
        for part in case.views(parts).values():
            part.view(torch.uint8).fill_(0xFF)
        assert bool((parts == 0xFF).all()), "bytes of no part are written"
    return AttentionResult(out=out, lse=lse), [given.get(name) for name in names]


def reference_of(case: Fp8Case, inputs: Fp8Inputs, **changes: Any) -> Fp8CacheResult:
    arguments = inputs.arguments()
    options = case.cache.options(arguments.pop("alibi_slopes"))
    sink = arguments.pop("sink")
    q, heads = arguments["q"], case.cache.num_heads_k
    for name in ("q_descale", "k_descale", "v_descale"):
        if isinstance(scale := arguments.get(name), float):
            arguments[name] = torch.full((heads,), scale, device=q.device)
    if case.q_is_fp8:
        arguments["q"] = from_bytes(q.view(torch.uint8)).bfloat16()
    return fp8_cache_reference(
        **arguments,
        quantize=case.quantize,
        values_include_rope=case.is_v4,
        rotary_interleaved=case.cache.rotary_interleaved,
        options=options,
        sink=sink,
        **changes,
    )


def check_fp8(
    case: Fp8Case, seed: int = 0, inputs: Fp8Inputs | None = None, **changes: Any
) -> list[Closeness]:
    """Output, lse, every byte of both caches and every scale; `changes` are arguments that must not
    matter, like num_splits.
    """
    inputs = case.make_inputs(seed) if inputs is None else inputs
    actual, found = attend(case, inputs, **changes)
    return assert_fp8_close(case, inputs, actual, found)


def assert_fp8_close(
    case: Fp8Case, inputs: Fp8Inputs, actual: AttentionResult, found: list[Any]
) -> list[Closeness]:
    is_rotated = case.cache.rotary_dim > 0 and case.cache.seqlens_new is not None
    expected = reference_of(case, inputs, attends=not is_rotated)
    heads = case.cache.num_heads_k
    scales = [
        torch.full((heads,), x, device=actual.out.device) if isinstance(x, float) else x
        for x in found[2:]
    ]
    if case.is_v4:
        scales[1] = from_powers(scales[1].view(torch.uint8))
    wanted = (expected.k_cache, expected.v_cache)
    wanted_scales = (expected.k_descale, expected.v_descale)
    for name, cache, y, scale, z in zip(
        "kv", found[:2], wanted, scales, wanted_scales, strict=True
    ):
        may_differ = is_rotated and name == "k"
        new = expected.appended if may_differ else torch.zeros_like(expected.appended)
        wrong = (_bytes(cache) != _bytes(y)).flatten(2).any(-1) & ~new
        assert not wrong.any(), f"{name}_cache: {int(wrong.sum())} rows are wrong"
        if scale is None or z is None:
            eps = torch.finfo(cache.dtype).eps
            turned = cache[new].double(), y[new].double()
            torch.testing.assert_close(*turned, rtol=1.01 * eps, atol=1e-6)
            continue
        same = (scale == z) | (scale.isnan() & z.isnan())
        if may_differ and scale.dim() == 3:
            eps = torch.finfo(actual.out.dtype).eps
            same |= new[..., None] & ((scale - z).abs() <= 1.01 * eps * z)
        assert bool(same.all()), f"{name}_descale: {int((~same).sum())} scales are wrong"
        if may_differ and scale.dim() == 3:
            assert_one_number_off(cache[new], scale[new], y[new], z[new])
        elif may_differ:
            codes = (cache[new].view(torch.uint8).int() - y[new].int()).abs()
            signs = (from_bytes(cache[new].view(torch.uint8)) - from_bytes(y[new])).abs() <= 2.0**-8
            assert bool(((codes <= 1) | signs).all()), "k_cache: more than one number off"
    if is_rotated:
        written = (*found[:2], *scales)
        expected = reference_of(case, inputs, written=written)
    exact, naive = expected.expected, expected.naive
    if actual.out.dtype == torch.float64:
        torch.testing.assert_close(actual.out, exact.out, rtol=1e-11, atol=1e-11)
        torch.testing.assert_close(actual.lse, exact.lse, rtol=1e-11, atol=1e-11)
        return []
    # Queries that are rotated are rounded, and so are latent values times scales: lse sees that.
    if (is_rotated or case.cache.has_qv) and actual.out.dtype.itemsize == 2:
        seen = exact.lse != -torch.inf
        rounding = (naive.lse.double() - exact.lse)[seen].abs()
        noise = {"lse": 2.0 * rounding.max().item() + 2.0**-9 if rounding.numel() else 0.0}
        exact = replace(exact, noise={**exact.noise, **noise})
    return assert_close(actual, exact, naive)


def _bytes(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format).view(torch.uint8)


def check_appended_numbers(case: Fp8Case) -> None:
    """New keys that are numbers of e4m3 already, wherever they begin, are those that new keys of 16
    bits become. Scales are numbers.
    """
    inputs = case.make_inputs()
    of_numbers = {}
    for name in "kv":
        x, scale = getattr(inputs.cache, name), torch.tensor(inputs.scales[f"{name}_descale"])
        made = to_bytes(scaled_down(x, scale.to(x.device)))
        anywhere = made.new_empty(made.numel() + 1)[1:].view(made.shape).copy_(made)
        of_numbers[name] = anywhere.view(E4M3)
    expected, written = attend(case, inputs)
    found, also = attend(case, replace(inputs, cache=replace(inputs.cache, **of_numbers)))
    assert torch.equal(found.out, expected.out) and torch.equal(found.lse, expected.lse)
    for x, y in zip(also[:2], written[:2], strict=True):
        assert torch.equal(x.view(torch.uint8), y.view(torch.uint8))


# What appends such numbers.
APPENDS: dict[str, dict[str, Any]] = {
    "dense": {"seqlens_new": 3, "head_dim_v": 16},
    "pages": {"seqlens_new": 5, "page_size": 7, "head_dim": 80},
    "packed": {"seqlens_q": (2, 0, 5), "seqlens_new": (3, 1, 4), "batch_idx": (3, 0, 2)},
}


def assert_one_number_off(cache: Tensor, scale: Tensor, code: Tensor, expected: Tensor) -> None:
    """Keys and their scales, of what was rotated in fp32 and not in fp64."""
    x = from_bytes(cache.view(torch.uint8)) * scale[..., None].double()
    y = from_bytes(code) * expected[..., None].double()
    allowed = 0.13 * y.abs() + 2.0**-8 * expected[..., None].double()
    assert bool(((x - y).abs() <= allowed).all()), "k_cache: more than one number off"
