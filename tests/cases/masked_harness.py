"""What tests of masks, biases and sinks share: run a MaskedCase, compare it with the reference."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_attn_cuda import flash_attn_func, flash_attn_varlen_func
from tests.cases.attention import VarlenCase
from tests.cases.harness import missing_row, run_reference, seed_dropout
from tests.cases.masked import MaskedCase, MaskedInputs
from tests.reference import AttentionResult
from tests.reference.options import WITH_GRADIENT
from tests.reference.tolerance import Closeness, assert_close


def skip_without_masked_row(case: MaskedCase, *, backward: bool = True) -> None:
    """Skip the test, saying which row the build lacks, where it cannot run this case."""
    has = {"block_sparse": case.mask is not None, "bias": case.bias is not None}
    has["block_sparse"] |= has["bias"] and case.chunk > 0
    further = {name for name, wanted in has.items() if wanted}
    reason = missing_row(case.of, backward=backward, further=further)
    if reason is not None:
        pytest.skip(reason)


def attend_masked(
    case: MaskedCase, inputs: MaskedInputs, leaves: dict[str, Tensor], **changes: Any
) -> Any:
    """What the public function returns where `leaves` replace q, k, v, bias and sink, and `changes`
    other arguments.
    """
    of = inputs.of
    given = {name: leaves.get(name, getattr(of, name)) for name in "qkv"}
    name_of_bias = "attn_mask" if inputs.relative_bias is None else "relative_bias"
    others = {name_of_bias if x == "bias" else x: y for x, y in leaves.items() if x not in given}
    masks = case.arguments(inputs) | others
    options = {**case.of.arguments(), "alibi_slopes": of.alibi_slopes, **masks, **changes}
    if options["dropout_p"] > 0.0:
        seed_dropout(case.of)
    if isinstance(case.of, VarlenCase):
        most = dict(zip(("max_seqlen_q", "max_seqlen_k"), case.seqlens, strict=True))
        return flash_attn_varlen_func(**given, **of.lengths(), **{**most, **options})
    return flash_attn_func(**given, **options)


def run_masked(
    case: MaskedCase,
    inputs: MaskedInputs,
    *,
    backward: bool = True,
    use_dlse: bool = True,
    **changes: Any,
) -> AttentionResult:
    """out and lse of the public function, and its gradients where `backward`; `changes` are other
    arguments of it.

    Where the function returns no lse, it is that of the call without dropout, which lse does not
    see, and has no gradient.
    """
    leaves = {}
    if backward:
        leaves = {name: getattr(inputs.of, name).detach().requires_grad_() for name in "qkv"}
        of_bias = inputs.bias if inputs.relative_bias is None else inputs.relative_bias
        for name in WITH_GRADIENT:
            described = getattr(case, name)
            if described is not None and getattr(described, "requires_grad", True):
                x = of_bias if name == "bias" else getattr(inputs, name)
                leaves[name] = x.detach().requires_grad_()
    returns_lse = case.returns_lse and (case.of.dropout_p == 0.0 or "block_mask" not in changes)
    found = attend_masked(case, inputs, leaves, return_attn_probs=returns_lse, **changes)
    out, *others = found if isinstance(found, tuple) else (found,)
    if returns_lse:
        lse = others[0]
    else:
        with torch.no_grad():
            undropped = {**changes, "dropout_p": 0.0, "return_attn_probs": True}
            lse = attend_masked(case, inputs, {}, **undropped)[1]
    result = AttentionResult(out=out.detach(), lse=lse.detach())
    if case.of.max_logits:
        assert not others[-1].requires_grad
        result.max_logits = others[-1]
    if backward:
        outputs, incoming = [out], [inputs.of.dout]
        if use_dlse and returns_lse:
            outputs.append(lse)
            incoming.append(inputs.of.dlse)
        gradients = torch.autograd.grad(outputs, list(leaves.values()), incoming)
        for name, gradient in zip(leaves, gradients, strict=True):
            setattr(result, f"d{name}", gradient)
    return result


def check_large_values(case: MaskedCase, fill: float, rtol: float) -> None:
    """Keys with a large negative value, as other code hides them, and those beside large ones: they
    have no weight, as if they were hidden.
    """
    skip_without_masked_row(case)
    inputs = case.make_inputs()
    chosen = torch.rand(inputs.bias.shape, device=inputs.bias.device) < 0.5
    chosen[..., 5] = fill > 0.0
    hidden = chosen if fill < 0.0 else ~chosen
    large = inputs.bias.masked_fill(chosen, fill)
    actual, expected = (
        run_masked(case, replace(inputs, bias=bias)).tensors()
        for bias in (large, large.masked_fill(hidden, -torch.inf))
    )
    for name, y in expected.items():
        torch.testing.assert_close(
            actual[name], y, rtol=rtol, atol=1e-3, msg=lambda m, n=name: f"{n}: {m}"
        )
    assert not actual["dbias"][hidden].any()


def check_filled_rows(case: MaskedCase, fill: float) -> None:
    """Rows of a bias that hold one large negative number, as where other code hides all keys of a
    padding query: their output is the mean of the values, and they have no gradient, as if they saw
    no key.
    """
    skip_without_masked_row(case)
    inputs = case.make_inputs()
    heads, queries = inputs.bias.shape[1:3]
    places = torch.arange(heads * queries, device=inputs.bias.device).view(1, heads, queries, 1)
    rows = (places % 7 == 3) | (places // 64 % 5 == 2)  # some here and there, and some together
    filled, hidden = (
        run_masked(case, replace(inputs, bias=inputs.bias.masked_fill(rows, value)))
        for value in (fill, -torch.inf)
    )
    assert all(x.isfinite().all() for x in (filled.out, filled.dq, filled.dk, filled.dv))
    # Other rows of a warp have a rounding more in their LSE, and so now and then in dS.
    rounding = torch.finfo(case.of.dtype).eps
    for name in ("dq", "dk", "dv", "dbias"):
        x, y = getattr(filled, name), getattr(hidden, name)
        torch.testing.assert_close(
            x,
            y,
            rtol=2.0 * rounding,
            atol=rounding * y.abs().max().item(),
            msg=lambda m, n=name: f"{n}: {m}",
        )
    mean = inputs.of.v.float().mean(1, keepdim=True)  # (batch, 1, key heads, head_dim_v)
    mean = mean.repeat_interleave(heads // mean.shape[2], 2).expand_as(filled.out)
    of_rows = rows.squeeze(-1).transpose(1, 2).expand(filled.out.shape[:3])  # (batch, Sq, heads)
    assert not filled.dq[of_rows].any()
    assert not filled.dbias.masked_fill(~rows, 0.0).any()
    torch.testing.assert_close(
        filled.out[of_rows].float(), mean[of_rows], rtol=2e-2, atol=2e-2, msg="out"
    )


def masked_reference(
    case: MaskedCase, inputs: MaskedInputs, *, use_dlse: bool = True, **others: Any
) -> tuple[AttentionResult, AttentionResult]:
    """(fp64 result, naive low-precision result) for tolerance.assert_close. `others` are
    run_reference's.
    """
    use_dlse = use_dlse and case.returns_lse
    masks = replace(inputs, mask=case.visible(inputs)).options()
    results = run_reference(case.of, inputs.of, use_dlse=use_dlse, **masks, **others)
    if inputs.relative_bias is not None:
        for result in results:
            result.dbias = _of_distances(case, result.dbias, inputs.relative_bias)
        # A row's dS sums to 0, but for what rounding did to the out of which D is made.
        of_rows = (inputs.of.dout * results[0].out).nan_to_num().norm().item()
        rounding = torch.finfo(case.of.dtype).eps * of_rows
        results[0].noise["dbias"] = results[0].noise.get("dbias", 0.0) + rounding
    return results


def _of_distances(case: MaskedCase, dbias: Tensor | None, relative_bias: Tensor) -> Tensor | None:
    """The gradient of a relative_bias, of that of the bias that it stands for."""
    if dbias is None:
        return None
    leaf = relative_bias.to(torch.float64).requires_grad_()
    (found,) = torch.autograd.grad(case.over_pairs(leaf), leaf, dbias.double())
    return found.to(dbias.dtype)


def check_masked(
    case: MaskedCase,
    seed: int = 0,
    *,
    backward: bool = True,
    use_dlse: bool = True,
    inputs: MaskedInputs | None = None,
    **changes: Any,
) -> list[Closeness]:
    """Results against the reference, of a call without gradients too, whose kernels keep nothing
    for a backward; `changes` are arguments that must not matter.
    """
    inputs = case.make_inputs(seed) if inputs is None else inputs
    # Before the reference, which leaves its numbers in memory that is allocated next.
    results = [
        run_masked(case, inputs, backward=each, use_dlse=use_dlse, **changes)
        for each in ((True, False) if backward else (False,))
    ]
    expected = masked_reference(case, inputs, use_dlse=use_dlse)
    report, *_ = [assert_close(result, *expected) for result in results]
    return report
