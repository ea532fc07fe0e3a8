"""What the GPU tests share: run a case through the package and compare it with the reference.

A case is an AttentionCase, a VarlenCase or a KvCacheCase; the functions below take any.

FLASH_ATTN_CUDA_TEST_DEVICE=cpu runs the GPU tests on the CPU backend instead, which debugs the
tests themselves. Those that need a real device (marker `cuda_only`) are skipped then, and sizes are
cut by `scaled`.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias, TypeVar

import pytest
import torch
from torch import Tensor

from flash_attn_cuda import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from flash_attn_cuda.functions.interface import _flash_attn_forward, _flash_attn_varlen_forward
from flash_attn_cuda.installed import build_info
from kernel_table.all_rows import ALL_ROWS
from kernel_table.hopper_rows import stands_for
from tests import reference
from tests.cases.attention import (
    DTYPE_NAMES,
    AttentionCase,
    AttentionInputs,
    KvCacheCase,
    KvCacheInputs,
    VarlenCase,
    VarlenInputs,
)
from tests.cases.varlen import in_longer_buffers
from tests.reference import AttentionResult, KvCacheResult, kvcache_reference
from tests.reference.tolerance import Closeness, assert_close

DEVICE = os.environ.get("FLASH_ATTN_CUDA_TEST_DEVICE", "cuda")
ON_CPU = DEVICE == "cpu"

Case: TypeAlias = AttentionCase | VarlenCase | KvCacheCase
Inputs: TypeAlias = AttentionInputs | VarlenInputs | KvCacheInputs
Result = TypeVar("Result")

# The `check` fixture of conftest.py: (case, options of matrix.judge) -> comparisons.
Check = Callable[..., list[Closeness]]


def make_case(**fields: Any) -> AttentionCase:
    """An AttentionCase on the device under test."""
    return AttentionCase(device=DEVICE, **fields)


def make_varlen_case(**fields: Any) -> VarlenCase:
    """A VarlenCase on the device under test."""
    return VarlenCase(device=DEVICE, **fields)


def make_cache_case(**fields: Any) -> KvCacheCase:
    """A KvCacheCase on the device under test."""
    return KvCacheCase(device=DEVICE, **fields)


def scaled(size: int, cpu_size: int) -> int:
    """`size` on a GPU, `cpu_size` where the CPU backend stands in for it."""
    return cpu_size if ON_CPU else size


# -- what the build can run ------------------------------------------------------------------------


def missing_row(case: Case, *, backward: bool, further: Collection[str] = ()) -> str | None:
    """What the build lacks for this case and `further` features, or None. The CPU backend lacks
    nothing.
    """
    if ON_CPU:
        return None
    is_masked = case.causal or max(case.window) >= 0
    for pass_name in ("forward", "backward") if backward else ("forward",):
        needed = {*case.given("needs"), *further}
        if pass_name == "forward":
            needed.discard("deterministic")
        covered = any(
            row.pass_name == pass_name
            and not {"tangent", "e4m3_kv"} & set(row.config["features"])
            and ("latent" in row.config["features"])
            == (isinstance(case, KvCacheCase) and case.has_qv)
            and row.dtype == DTYPE_NAMES[case.dtype]
            and row.head_dim >= case.head_dim
            and row.head_dim_v >= case.value_dim
            and (row.mask == "windowed" or not is_masked)
            and needed <= set(row.config["features"])
            and (row.config.get("kind", "tiles") == "tiles" or isinstance(case, KvCacheCase))
            for row in build_info.compiled_rows()
        )
        if not covered:
            mask = "windowed" if is_masked else "full"
            return " ".join(
                [
                    f"no compiled {pass_name} row for {DTYPE_NAMES[case.dtype]}, {mask},",
                    f"head_dim {case.head_dim}",
                    *sorted(needed),
                ]
            )
    return None


def skip_without_row(case: Case, *, backward: bool = True) -> None:
    """Skip the test, saying which row the build lacks, where it cannot run this case."""
    reason = missing_row(case, backward=backward and not isinstance(case, KvCacheCase))
    if reason is not None:
        pytest.skip(reason)


def built_row(name: str) -> str:
    """That row of the kernel table, or what stands for it in a build for Hopper alone."""
    compiled = {row.name for row in build_info.compiled_rows()}
    rows = {row.name: row for row in ALL_ROWS}
    candidates = [name, *(other for other in rows if stands_for(rows[other], rows[name]))]
    return next((row for row in candidates if row in compiled), name)


# -- dropout ---------------------------------------------------------------------------------------


def seed_dropout(case: Case) -> None:
    """Seed torch's generator, so that the next call of this case draws a mask known beforehand."""
    torch.manual_seed(zlib.crc32(str(case).encode()))


def drawn_rng_state(case: AttentionCase | VarlenCase, inputs: Any) -> Tensor:
    """(seed, offset) that a call right after seed_dropout draws, as the private forward tells."""
    scores = (case.dropout_p, case.head_dim**-0.5, case.causal)
    tensors = [_padded(x) for x in (inputs.q, inputs.k, inputs.v)]
    seed_dropout(case)
    if isinstance(case, VarlenCase):
        most = (max(1, case.total_q), max(1, case.total_k))
        lengths = (inputs.cu_seqlens_q, inputs.cu_seqlens_k)
        return _flash_attn_varlen_forward(*tensors, *lengths, *most, *scores)[3]
    return _flash_attn_forward(*tensors, *scores, -1, -1, 0.0, None, False)[3]


def expected_keep_mask(case: AttentionCase | VarlenCase, rng_state: Tensor) -> Tensor:
    """(B, Hq, Sq, Sk) booleans by the reference's own random numbers, longest lengths of packed."""
    if isinstance(case, VarlenCase):
        lengths = (case.max_seqlen_q, case.max_seqlen_k)
    else:
        lengths = (case.seqlen_q, case.seqlen_k)
    seed, offset = rng_state.tolist()
    mask = reference.keep_mask(seed, offset, case.dropout_p, case.batch, case.num_heads_q, *lengths)
    return mask.to(rng_state.device)


def _padded(x: Tensor) -> Tensor:
    """To a head_dim that is a multiple of 8, as the operators want it."""
    return torch.nn.functional.pad(x, (0, -x.shape[-1] % 8))


# -- running a case --------------------------------------------------------------------------------


def attend(
    case: Case, inputs: Any, q: Tensor, k: Tensor, v: Tensor, **changes: Any
) -> tuple[Tensor, ...]:
    """(out, lse, S_dmask) and what else the public function returns for this case, on these
    tensors.
    """
    options = {**case.arguments(), "alibi_slopes": inputs.alibi_slopes, "return_attn_probs": True}
    options |= changes
    if case.dropout_p > 0.0:
        seed_dropout(case)
    if isinstance(case, VarlenCase):
        most = {"max_seqlen_q": case.max_seqlen_q, "max_seqlen_k": case.max_seqlen_k}
        return flash_attn_varlen_func(q, k, v, **inputs.lengths(), **{**most, **options})
    return flash_attn_func(q, k, v, **options)


def attend_over_cache(
    case: KvCacheCase, inputs: KvCacheInputs, **changes: Any
) -> tuple[AttentionResult, Tensor, Tensor]:
    """(out and lse, k_cache, v_cache): the caches are copies, written where the call appends."""
    options = case.arguments()
    del options["dropout_p"], options["deterministic"]
    given = inputs.arguments()
    given |= {name: given[name].clone() for name in ("k_cache", "v_cache")}
    if inputs.attn_mask is not None and isinstance(case.seqlens_q, tuple):
        given["max_seqlen_q"] = max(case.seqlens_q, default=0)
    out, lse = flash_attn_with_kvcache(
        **{
            **given,
            **options,
            "rotary_interleaved": case.rotary_interleaved,
            "return_softmax_lse": True,
            **changes,
        }
    )
    return AttentionResult(out=out, lse=lse), given["k_cache"], given["v_cache"]


def run_forward(case: Case, inputs: Any) -> AttentionResult:
    """out and lse of the public function, without autograd."""
    if isinstance(case, KvCacheCase):
        return attend_over_cache(case, inputs)[0]
    with torch.no_grad():
        out, lse, _, *others = attend(case, inputs, inputs.q, inputs.k, inputs.v)
    return AttentionResult(out=out, lse=lse, max_logits=others[0] if others else None)


def run_forward_backward(
    case: AttentionCase | VarlenCase, inputs: Any, *, use_dlse: bool = True, **changes: Any
) -> AttentionResult:
    """The public function and its gradients, through lse as well where `use_dlse`; `changes` are
    other arguments of it.
    """
    leaves = [x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    out, lse, _, *others = attend(case, inputs, *leaves, **changes)
    outputs, incoming = [out], [inputs.dout]
    if use_dlse:
        outputs.append(lse)
        incoming.append(inputs.dlse)
    dq, dk, dv = torch.autograd.grad(outputs, leaves, incoming)
    result = AttentionResult(out=out.detach(), lse=lse.detach(), dq=dq, dk=dk, dv=dv)
    result.max_logits = others[0] if others else None
    return result


# -- comparing it ----------------------------------------------------------------------------------


def references(
    case: AttentionCase | VarlenCase,
    inputs: Any,
    *,
    use_dlse: bool = True,
    rng_state: Tensor | None = None,
    **features: Any,
) -> tuple[Callable[[], AttentionResult], Callable[[], AttentionResult]]:
    """What computes the fp64 and the naive low-precision result. `rng_state` is that of the call,
    by default what these inputs would draw; `features` override the case's options.
    """
    mask = None
    if case.dropout_p > 0.0:
        state = drawn_rng_state(case, inputs) if rng_state is None else rng_state
        mask = expected_keep_mask(case, state)
    options = {"options": replace(case.options(inputs.alibi_slopes, mask), **features)}
    functions = (reference.attention_with_gradients, reference.low_precision)
    if isinstance(case, VarlenCase):
        options |= inputs.lengths()
        functions = (reference.varlen_attention_with_gradients, reference.varlen_low_precision)
    tensors = (inputs.q, inputs.k, inputs.v, inputs.dout, inputs.dlse if use_dlse else None)
    exact, naive = (partial(run, *tensors, **options) for run in functions)
    return exact, naive


def run_reference(
    case: AttentionCase | VarlenCase, inputs: Any, **given: Any
) -> tuple[AttentionResult, AttentionResult]:
    """(fp64 result, naive low-precision result) for tolerance.assert_close, by `references`."""
    exact, naive = references(case, inputs, **given)
    return exact(), naive()


def check_rows_behind(case: VarlenCase, rows_q: int, rows_k: int) -> None:
    """Of so many rows behind the last sequence, all NaN, nothing is read; out, dq, dk, dv are 0
    there and lse is -inf.
    """
    inputs = case.make_inputs()
    result = run_forward_backward(case, in_longer_buffers(inputs, rows_q, rows_k))
    within = {}
    for name, x in result.tensors().items():
        dim, total = int(name == "lse"), case.total_k if name in ("dk", "dv") else case.total_q
        within[name], behind = x.split([total, x.shape[dim] - total], dim)
        assert (behind == (-torch.inf if name == "lse" else 0.0)).all(), name
    assert_close(AttentionResult(**within), *run_reference(case, inputs))


def reference_of_cache(case: KvCacheCase, inputs: KvCacheInputs, **features: Any) -> KvCacheResult:
    given = {**inputs.arguments(), "options": case.options(), **features}
    return kvcache_reference(**given, rotary_interleaved=case.rotary_interleaved)


def check_cache(
    case: KvCacheCase, seed: int = 0, inputs: KvCacheInputs | None = None, **changes: Any
) -> list[Closeness]:
    """Output, lse and every row of both caches; `changes` are arguments that must not matter, like
    num_splits.
    """
    inputs = case.make_inputs(seed) if inputs is None else inputs
    return assert_cache_close(case, inputs, *attend_over_cache(case, inputs, **changes))


def assert_cache_close(
    case: KvCacheCase,
    inputs: KvCacheInputs,
    actual: AttentionResult,
    *caches: Tensor,
    mask: Tensor | None = None,
) -> list[Closeness]:
    """What attend_over_cache returned against the reference on `inputs`, of the same device, with a
    mask.
    """
    expected = reference_of_cache(case, inputs, mask=mask)
    wanted = (expected.k_cache, expected.v_cache)
    for name, cache, y in zip(("k_cache", "v_cache"), caches, wanted, strict=True):
        same = bits(cache) == bits(y)
        if name == "k_cache" and case.rotary_dim > 0:  # rotated in fp32, then rounded
            near = (cache.double() - y.double()).abs() <= 1.01 * torch.finfo(cache.dtype).eps * (
                y.double().abs() + 2.0**-10
            )
            same |= near & expected.appended[..., None, None]
        wrong = int((~same).flatten(2).any(-1).sum())
        assert wrong == 0, f"{name}: {wrong} rows are wrong"
    exact, naive = expected.expected, expected.naive
    if case.rotary_dim > 0:  # what is rotated is rounded to 16 bits, and lse sees that
        seen = exact.lse != -torch.inf
        rounding = (naive.lse.double() - exact.lse)[seen].abs()
        noise = {"lse": 2.0 * rounding.max().item() + 2.0**-9 if rounding.numel() else 0.0}
        exact = replace(exact, noise={**exact.noise, **noise})
    return assert_close(actual, exact, naive)


def bits(x: Tensor) -> Tensor:
    """The bits as integers: equality is bitwise, NaN and signed zero included."""
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    return x.detach().contiguous().view(integer)


def assert_same_bits(
    actual: AttentionResult,
    expected: AttentionResult,
    context: str = "",
    *,
    deterministic: bool = False,
    summed: Collection[str] = ("dq",),
) -> None:
    """All bitwise equal, but `summed` to one rounding unless the call was deterministic: these are
    sums of atomic adds, in any order.
    """
    for name, x in actual.tensors().items():
        y = expected.tensors()[name]
        if name in summed and not ON_CPU and not deterministic:
            assert_same_up_to_one_rounding(x, y, f"{name} {context}")
        else:
            different = int((bits(x) != bits(y)).sum())
            assert different == 0, f"{name} {context}: {different} of {x.numel()} elements differ"


def assert_same_up_to_one_rounding(x: Tensor, y: Tensor, context: str = "") -> None:
    """One last place of the dtype, and 2^-20 of the largest value for fp32 sums."""
    x32, y32 = x.float(), y.float()
    if x.numel() == 0:
        return
    limits = torch.finfo(x.dtype)
    of_subnormals = max(limits.smallest_normal * limits.eps, torch.finfo(torch.float32).tiny)
    last_place = (limits.eps * y32.abs()).clamp_min(of_subnormals)
    allowed = last_place + 2.0**-20 * y32.abs().max()
    worst = ((x32 - y32).abs() / allowed).max().item()
    assert worst <= 1.0, f"{context}: {worst:.2f} times one rounding apart"


# -- streams, graphs, synchronisation --------------------------------------------------------------


@contextmanager
def side_stream() -> Iterator[None]:
    """Run the body on a stream of its own, ordered after and before the current one."""
    if ON_CPU:
        yield
        return
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream().wait_stream(stream)


@contextmanager
def no_host_sync() -> Iterator[None]:
    """An error if anything in the body waits for the device."""
    if ON_CPU:
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def captured(function: Callable[[], Result]) -> Callable[[], Result]:
    """`function` as a CUDA graph: each call of what is returned replays it and gives the tensors
    that it was captured with. On the CPU backend, `function` itself.
    """
    if ON_CPU:
        return function
    with side_stream():
        function()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = function()
    # torch fills the captured seed on the capture's stream, a replay on its own: nothing else
    # keeps the first from coming last.
    torch.cuda.synchronize()

    def replay() -> Result:
        graph.replay()
        return results

    return replay
