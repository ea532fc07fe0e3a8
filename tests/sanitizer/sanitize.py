"""A small grid of calls for compute-sanitizer: every compiled row that this GPU runs, what prepares
and follows it, masks, biases and sinks, odd shapes, and every bad input.

    compute-sanitizer --tool memcheck  python -m tests.sanitizer.sanitize
    compute-sanitizer --tool racecheck python -m tests.sanitizer.sanitize
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool initcheck \\
        python -m tests.sanitizer.sanitize

memcheck and initcheck see single tensors only if torch does not carve them out of one large
allocation, hence the variable (good for memcheck too). None of the tools sees what TMA reads and
writes: initcheck takes out, dk, dv and the gradient of a bias of Hopper kernels for uninitialised.
Decode kernels read words of the workspace before anybody wrote them, on purpose, and load O of
splits without keys, which they do not use (marked_counter.h, sm80/decode/combine.h).
Inputs come from the CPU and results go back there to be compared, so that nearly every kernel the
sanitizer watches is this package's; --references-on-gpu is faster where none watches. Exit status 1
if a result is wrong; add --error-exitcode 1 for the sanitizer's findings.

On a Hopper GPU FLASH_ATTN_CUDA_CAPABILITY_LIMIT=80 in the environment brings the rows of other
GPUs, and FLASH_ATTN_CUDA_SMEM_LIMIT those for less shared memory.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from flash_attn_cuda import (
    BlockSparsity,
    build_info,
    check_device_errors,
    cuda_unavailable_reason,
    flash_attn_combine,
    flash_attn_varlen_func,
)
from flash_attn_cuda.explain import call_of_shapes, explain
from flash_attn_cuda.masks.lists import TILE
from tests.cases import bad_input, second_order
from tests.cases.accumulate import SumCase
from tests.cases.attention import (
    DTYPE_NAMES,
    AttentionCase,
    KvCacheCase,
    Layout,
    VarlenCase,
    arrange,
)
from tests.cases.bands import BandCase
from tests.cases.families import planned
from tests.cases.fp8_cache import Fp8Case, Fp8Inputs, assert_fp8_close
from tests.cases.fp8_cache import attend as attend_fp8
from tests.cases.harness import (
    DEVICE,
    ON_CPU,
    Case,
    assert_cache_close,
    attend_over_cache,
    drawn_rng_state,
    missing_row,
    run_forward,
    run_forward_backward,
    run_reference,
)
from tests.cases.masked import MaskedCase, MaskedInputs
from tests.cases.masked_harness import run_masked
from tests.cases.merge import MergeCase, merge_cases
from tests.cases.parts import Documents, Inputs, run_parts, run_whole, worse_than
from tests.cases.rotary import RotaryCase, arranged, difference
from tests.cases.second_order import DerivativeCase, compare_derivatives
from tests.cases.varlen import in_longer_buffers
from tests.reference import AttentionResult
from tests.reference.tolerance import compare
from tests.sanitizer.cases import (
    ListChange,
    MaskChange,
    bad_list_cases,
    band_cases,
    derivative_cases,
    fp8_cases,
    long_cases,
    many_tile_cases,
    many_tile_masked_cases,
    masked_cases,
    odd_cases,
    of_one_head,
    outgrown_cases,
    part_cases,
    row_cases,
    sanitized_rotary_cases,
    sanitized_sum_cases,
    spare_row_cases,
    value_cases,
    with_most_heads,
)

# A call: its name, what runs it and returns what is wrong, and why this build cannot.
Call = tuple[str, Callable[[int], list[str]], str | None]


# -- running them ----------------------------------------------------------------------------------


reference_device = "cpu"


def on_host(case: Case) -> Case:
    """The same where references are made, contiguous."""
    case = replace(case, device=reference_device)
    return replace(case, layout=Layout.contiguous) if isinstance(case, AttentionCase) else case


def moved(inputs: Any, case: Case | MaskedCase) -> Any:
    """`inputs` on the device, in memory of the case's layout."""
    tensors = {
        field.name: getattr(inputs, field.name).to(DEVICE, copy=True)
        for field in fields(inputs)
        if isinstance(getattr(inputs, field.name), torch.Tensor)
    }
    if isinstance(case, AttentionCase):
        for name in ("q", "k", "v", "dout"):
            tensors[name] = arrange(tensors[name], case.layout)
    return replace(inputs, **tensors)


def run_spare_rows(case: VarlenCase, seed: int) -> list[str]:
    """Rows of all tensors behind the last sequence, as in the buffers of a captured graph: no entry
    of what sequences have of their own is read for them.
    """
    host_case = on_host(case)
    inputs = host_case.make_inputs(seed)
    longer = in_longer_buffers(moved(inputs, case), 200, 90)
    with_backward = missing_row(case, backward=True) is None
    result = (run_forward_backward if with_backward else run_forward)(case, longer)
    trimmed = {
        name: x.narrow(
            int(name == "lse"), 0, case.total_k if name in ("dk", "dv") else case.total_q
        )
        for name, x in result.tensors().items()
    }
    reference = run_reference(host_case, inputs, use_dlse=with_backward)
    return flagged() + differences(AttentionResult(**trimmed).to(reference_device), reference)


def run_parts_of(case: VarlenCase, seed: int) -> list[str]:
    """Parts of the sequences, with results in fp32, against the whole of them."""
    documents = Documents(case.lengths_q, case.lengths_k or case.lengths_q, (32,), (48,))
    heads = (case.num_heads_q, case.num_heads_k)
    inputs = Inputs.random(documents, heads, case.head_dim, case.dtype, DEVICE, seed=seed)
    options: dict[str, Any] = {
        "causal": case.causal,
        "window_size_left": case.window[0],
        "window_size_right": case.window[1],
        "softcap": case.softcap,
        "dropout_p": case.dropout_p,
        "deterministic": case.deterministic,
    }
    slopes = None if case.alibi is None else torch.linspace(0.5, 0.1, heads[0])
    on_device = None if slopes is None else slopes.to(DEVICE)
    whole, rng_state = run_whole(documents, inputs, **options, alibi_slopes=on_device)
    given = rng_state if case.dropout_p > 0.0 else None
    on_cpu = None if given is None else given.cpu()
    exact, _ = run_whole(
        documents, inputs.exact(), **options, alibi_slopes=slopes, rng_state=on_cpu
    )
    parts = run_parts(documents, inputs, given, **options, alibi_slopes=on_device)
    return worse_than(parts, whole, exact) + flagged()


def run_band(case: BandCase, seed: int) -> list[str]:
    """A band of any ends, and where there is one its backward."""
    host_case = replace(case, device=reference_device)
    rows = host_case.rows(seed)
    on_device = replace(
        rows,
        pages={},
        **{
            name: x.to(DEVICE, copy=True)
            for name, x in vars(rows).items()
            if isinstance(x, torch.Tensor)
        },
    )
    result = case.run(on_device).to(reference_device)
    return differences(result, host_case.reference(rows)) + flagged()


def run_case(case: Case, seed: int) -> list[str]:
    """One forward and, where wanted and compiled, one backward; returns what is wrong."""
    host_case = on_host(case)
    inputs = host_case.make_inputs(seed)
    on_device = moved(inputs, case)
    if isinstance(host_case, KvCacheCase):
        return run_cache(host_case, inputs, on_device)
    with_backward = missing_row(case, backward=True) is None
    result = (run_forward_backward if with_backward else run_forward)(case, on_device)
    rng_state = (
        drawn_rng_state(case, on_device).to(reference_device) if case.dropout_p > 0.0 else None
    )
    reference = run_reference(host_case, inputs, use_dlse=with_backward, rng_state=rng_state)
    return differences(result.to(reference_device), reference)


def differences(result: AttentionResult, reference: Any) -> list[str]:
    """What is not close to the reference and the naive result."""
    return [str(item) for item in compare(result, *reference) if not item.passes]


def run_cache(host_case: KvCacheCase, inputs: Any, on_device: Any) -> list[str]:
    """The case with splits chosen, fixed, and independent of the batch."""
    problems = []
    for changes in ({}, {"num_splits": 3}, {"batch_invariant": True}):
        result, *caches = attend_over_cache(host_case, on_device, **changes)
        try:
            assert_cache_close(
                host_case,
                inputs,
                result.to(reference_device),
                *(x.to(reference_device) for x in caches),
            )
        except AssertionError as error:
            problems.append(f"{changes}: {error}")
    return problems


def run_derivatives(case: DerivativeCase, seed: int) -> list[str]:
    """A jvp and a double backward."""
    problem = case.make_problem(seed)
    return [
        str(x)
        for transform in (second_order.jvp, second_order.double_backward)
        for x in compare_derivatives(problem, transform, transform(problem.attend, problem))
        if not x.passes
    ]


def run_fp8(case: Fp8Case, seed: int) -> list[str]:
    """A call over a cache of e4m3, and what it appended."""
    host_case = replace(case, cache=on_host(case.cache))
    inputs = host_case.make_inputs(seed)
    caches = {field.name: getattr(inputs.cache, field.name) for field in fields(inputs.cache)}
    cache = replace(inputs.cache, **{name: as_it_lies(x) for name, x in caches.items()})
    scales = {name: as_it_lies(x) for name, x in inputs.scales.items()}
    result, found = attend_fp8(case, Fp8Inputs(cache, scales))
    back = [x.to(reference_device) if isinstance(x, Tensor) else x for x in found]
    try:
        assert_fp8_close(host_case, inputs, result.to(reference_device), back)
    except AssertionError as error:
        return [str(error)]
    return flagged()


def as_it_lies(x: Any) -> Any:
    """A tensor on the device, with its strides and the memory between its elements."""
    if not isinstance(x, Tensor):
        return x
    memory = x.new_empty(0).set_(x.untyped_storage())
    return memory.to(DEVICE, copy=True).as_strided(x.shape, x.stride(), x.storage_offset())


def missing_for_fp8(cache: KvCacheCase) -> str | None:
    """What the build or this GPU lacks for a call over a cache of e4m3, or None."""
    if ON_CPU:
        return None
    sizes: dict[str, Any] = {"batch_size": cache.batch, "seqlen_k": 256, "causal": True}
    sizes |= {"num_heads_q": cache.num_heads_q, "num_heads_k": cache.num_heads_k}
    sizes |= {"head_dim": cache.head_dim, "head_dim_v": cache.value_dim}
    sizes |= {"dtype": DTYPE_NAMES[cache.dtype], "lengths_on_device": True, "e4m3": True}
    try:
        for seqlen_q in (1, 100):
            explain("forward", call_of_shapes(seqlen_q=seqlen_q, **sizes))
    except RuntimeError as error:
        if "no compiled" not in str(error):
            raise
        return str(error)
    return None


def run_combine(seed: int) -> list[str]:
    """Odd sizes, and a part without keys whose output is not to be read."""
    generator = torch.Generator().manual_seed(seed)
    out_partial = torch.randn(5, 2, 7, 3, 59, generator=generator)
    lse_partial = torch.randn(5, 2, 7, 3, generator=generator)
    out_partial[1], lse_partial[1] = torch.nan, -torch.inf
    weights = lse_partial.double().softmax(0)[..., None]
    expected = (weights * out_partial.double().nan_to_num(0.0)).sum(0)
    out, _ = flash_attn_combine(out_partial.to(DEVICE), lse_partial.to(DEVICE))
    worst = (out.cpu().double() - expected).abs().max().item()
    return [] if worst < 1e-5 else [f"out: off by {worst}"]


def run_sums(case: SumCase, seed: int) -> list[str]:
    return case.problems(seed) + flagged()


def run_merge(case: MergeCase, seed: int) -> list[str]:
    del seed  # the case's own
    return case.problems()


def run_rotary(case: RotaryCase, seed: int) -> list[str]:
    """As a new tensor, with its gradient, and in place."""
    host, tables, problems = case.make_x(seed), case.make_tables(seed), []
    on_device = [table.to(DEVICE) for table in tables]
    x = arranged(host.to(DEVICE), case.layout).requires_grad_()
    dout = case.make_x(seed + 1)
    out = case.run(x, (on_device[0], on_device[1]))
    out.backward(dout.to(DEVICE))
    in_place = case.run(x.detach(), (on_device[0], on_device[1]), inplace=True)
    cos, sin = tables
    for name, result, expected in (
        ("out", out.detach(), case.expected(host, tables)),
        ("dx", x.grad, case.expected(dout, (cos, -sin))),
        ("in place", in_place, case.expected(host, tables)),
    ):
        wrong = difference(result.cpu(), expected)
        problems += [] if wrong is None else [f"{name}: {wrong}"]
    return problems


def run_bad_content(case: bad_input.BadContent, seed: int) -> list[str]:
    """Clamped and flagged; the CPU backend refuses the call instead."""
    prepared = case.prepare()
    results: bad_input.Results = {}
    try:
        results |= prepared.call()
        check_device_errors()
    except ValueError as error:
        if not re.search(case.match, str(error)):
            return [f"raised {error}"]
        if not results:
            return []
    else:
        return ["nothing was flagged"]
    return [] if prepared.expected is None else bad_input.differences(results, prepared.expected())


# -- masks, biases and sinks -----------------------------------------------------------------------


def missing_for(case: MaskedCase, *passes: str) -> str | None:
    """What the build or this GPU lacks for passes of the case, or None."""
    if ON_CPU:
        return None
    further = {"block_sparse": case.mask is not None, "bias": case.bias is not None}
    try:
        for pass_name in passes:
            planned(case.of, pass_name, **further)
    except RuntimeError as error:
        if "no compiled" not in str(error):
            raise
        return str(error)
    return None


def flagged() -> list[str]:
    """What the device has found in tensors of indices, as a problem."""
    try:
        check_device_errors()
    except ValueError as error:
        return [f"flagged {error}"]
    return []


def run_masked_case(
    case: MaskedCase,
    seed: int,
    *,
    change_mask: MaskChange | None = None,
    change_lists: ListChange | None = None,
) -> list[str]:
    """As run_case. Where lists are changed, a call with those comes before, in each pass: it must
    end, flag nothing and leave the call with good ones right.
    """
    host_case = replace(case, of=on_host(case.of))
    inputs = host_case.make_inputs(seed)
    if change_mask is not None:
        inputs = replace(inputs, mask=change_mask(inputs.mask))
    on_device = replace(moved(inputs, case), of=moved(without_unvisited(case, inputs), case.of))
    with_backward = missing_for(case, "backward") is None
    lists = lists_of(host_case, inputs)
    given: dict[str, Any] = {}
    if lists is not None:
        case, given = replace(case, mask=None), {"block_mask": lists.to(DEVICE)}
    if change_lists is not None and lists is not None:
        good = lists.to("cpu")  # where changes are made
        bad = change_lists(good)
        for pass_name in ("forward", "backward") if with_backward else ("forward",):
            own = {"rows": bad.rows} if pass_name == "forward" else {"columns": bad.columns}
            bad_mask = replace(good, bits=bad.bits, **own).to(DEVICE)
            run_masked(case, on_device, backward=pass_name == "backward", block_mask=bad_mask)
    problems = flagged()
    result = run_masked(case, on_device, backward=with_backward, **given)
    drops = case.of.dropout_p > 0.0
    reference = run_reference(
        host_case.of,
        inputs.of,
        use_dlse=with_backward and not drops,
        rng_state=drawn_rng_state(case.of, on_device.of).to(reference_device) if drops else None,
        mask=inputs.mask,
        bias=inputs.bias,
        sink=inputs.sink,
    )
    return problems + differences(result.to(reference_device), reference)


def lists_of(case: MaskedCase, inputs: MaskedInputs) -> BlockSparsity | None:
    """Made where the inputs are; None where the call shall make them, or has no mask."""
    if case.mask is None or case.mask.given == "attn_mask":
        return None
    mask = case.arguments(inputs)["block_mask"]
    if isinstance(mask, BlockSparsity):
        return mask
    return BlockSparsity.from_blocks(mask, case.mask.size, *case.seqlens)


def without_unvisited(case: MaskedCase, inputs: MaskedInputs) -> Any:
    """inputs.of with NaN in the keys and values that are in no list; packed ones as they are."""
    of = case.of
    if inputs.mask is None or not isinstance(of, AttentionCase):
        return inputs.of
    seen = inputs.mask.any(2).expand(of.batch, of.num_heads_q, -1)
    seen = seen.unflatten(1, (of.num_heads_k, -1)).any(2)
    seen = torch.nn.functional.pad(seen, (0, -of.seqlen_k % TILE)).unflatten(-1, (-1, TILE)).any(-1)
    unseen = ~seen.repeat_interleave(TILE, -1)[..., : of.seqlen_k].mT[..., None]
    k, v = (x.masked_fill(unseen, torch.nan) for x in (inputs.of.k, inputs.of.v))
    return replace(inputs.of, k=k, v=v)


def run_longer_sequence(case: MaskedCase, seed: int) -> list[str]:
    """A packed sequence as the case has it, and behind it one that is three times as long as the
    mask or the bias, which only the device can see: results of the first are right. The CPU backend
    refuses the call.
    """
    host_case = replace(case, of=on_host(case.of))
    inputs = host_case.make_inputs(seed)
    seqlen = case.of.seqlen_q

    def packed(x: Tensor) -> Tensor:
        return x[0].repeat(4, 1, 1).to(DEVICE)

    lists = lists_of(host_case, inputs)
    given: dict[str, Any] = {} if lists is None else {"block_mask": lists.to(DEVICE)}
    if inputs.bias is not None:
        given["attn_mask"] = inputs.bias.to(DEVICE, copy=True).requires_grad_()
    leaves = [packed(x).requires_grad_() for x in (inputs.of.q, inputs.of.k, inputs.of.v)]
    cu_seqlens = bad_input.int32((0, seqlen, 4 * seqlen))
    bounds = (cu_seqlens, cu_seqlens, seqlen, seqlen)
    try:
        out, lse, _ = flash_attn_varlen_func(*leaves, *bounds, return_attn_probs=True, **given)
    except ValueError as error:
        return [] if ON_CPU else [f"raised {error}"]
    out.backward(packed(inputs.of.dout))
    problems = flagged()
    of_rows = (out.detach(), *(x.grad for x in leaves))
    out, dq, dk, dv = (x[None, :seqlen] for x in of_rows)
    result = AttentionResult(out, lse.detach()[None, :, :seqlen], dq, dk, dv)
    masks = {"mask": inputs.mask, "bias": inputs.bias}
    reference = run_reference(host_case.of, inputs.of, use_dlse=False, **masks)
    return problems + differences(result.to(reference_device), reference)


def masked_call(
    name: str,
    case: MaskedCase,
    run: Callable[..., list[str]] = run_masked_case,
    **changes: Any,
) -> Call:
    case = replace(case, of=replace(case.of, device=DEVICE))
    return f"{name}: {case}", partial(run, case, **changes), missing_for(case, "forward")


# -- all of them -----------------------------------------------------------------------------------


def calls(most_heads: int | None = None) -> Iterator[Call]:
    """most_heads: of queries in calls of many tiles; given, those of derivatives have one."""
    for case in (*row_cases(), *odd_cases()):
        case = replace(case, device=DEVICE)
        yield str(case), partial(run_case, case), missing_row(case, backward=False)
    for case in spare_row_cases():
        case = replace(case, device=DEVICE)
        lacking = missing_row(case, backward=False)
        yield f"spare rows: {case}", partial(run_spare_rows, case), lacking
    for case in part_cases():
        case = replace(case, device=DEVICE)
        lacking = missing_row(case, backward=True)
        yield f"parts: {case}", partial(run_parts_of, case), lacking
    for band in band_cases():
        band = replace(band, device=DEVICE)
        yield f"band: {band}", partial(run_band, band), band.missing_row()
    for sums in sanitized_sum_cases(DEVICE):
        lacking = missing_row(sums.row(), backward=True)
        yield f"sums: {sums}", partial(run_sums, sums), lacking
    for name, masked, change in masked_cases():
        yield masked_call(name, masked, change_mask=change)
    for case in long_cases():
        case = replace(case, device=DEVICE)
        yield f"many keys: {case}", partial(run_case, case), missing_row(case, backward=False)
    for case in (*many_tile_cases(), *value_cases()):
        case = replace(with_most_heads(case, most_heads), device=DEVICE)
        yield f"many tiles: {case}", partial(run_case, case), missing_row(case, backward=False)
    for masked, change in many_tile_masked_cases():
        masked = replace(masked, of=with_most_heads(masked.of, most_heads))
        yield masked_call("many tiles", masked, change_mask=change)
    for derivative in derivative_cases(DEVICE):
        derivative = of_one_head(derivative) if most_heads is not None else derivative
        lacking = missing_for(derivative.of, "forward", "backward", "jvp", "hvp")
        yield f"derivatives: {derivative}", partial(run_derivatives, derivative), lacking
    for fp8 in fp8_cases(DEVICE):
        yield f"fp8: {fp8}", partial(run_fp8, fp8), missing_for_fp8(fp8.cache)
    yield "combine", run_combine, None
    for merge in merge_cases(DEVICE):
        yield f"merge: {merge}", partial(run_merge, merge), None
    for rotary in sanitized_rotary_cases(DEVICE):
        yield f"rotary: {rotary}", partial(run_rotary, rotary), None
    lacking = missing_row(AttentionCase(causal=True), backward=True)
    for bad in bad_input.bad_content_cases():
        yield f"bad input: {bad.name}", partial(run_bad_content, bad), lacking
    for name, masked, change_lists in bad_list_cases():
        yield masked_call(f"bad input: lists with {name}", masked, change_lists=change_lists)
    for masked in outgrown_cases():
        yield masked_call("bad input: longer than its mask", masked, run_longer_sequence)


def parse_share(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"([1-9]\d*)/([1-9]\d*)", text)
    if match is None or int(match[1]) > int(match[2]):
        raise argparse.ArgumentTypeError(f"must be I/N with I from 1 to N, got {text!r}")
    return int(match[1]), int(match[2])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="run only calls whose name contains this text")
    parser.add_argument(
        "--without", default=None, metavar="TEXT", help="leave out calls whose name contains this"
    )
    parser.add_argument(
        "--share",
        type=parse_share,
        default=(1, 1),
        metavar="I/N",
        help="run the I'th of N shares of them, so that several processes can share the work",
    )
    parser.add_argument(
        "--references-on-gpu", action="store_true", help="make what results are compared with there"
    )
    parser.add_argument(
        "--most-heads",
        type=int,
        default=None,
        metavar="N",
        help="of queries, about, in calls of many tiles: for kernels whose CTAs take one tile",
    )
    options = parser.parse_args()
    global reference_device
    reference_device = DEVICE if options.references_on_gpu else "cpu"
    reason = None if ON_CPU else cuda_unavailable_reason()
    if reason is not None:
        print(f"sanitize: cannot run: {reason}", file=sys.stderr)
        return 2
    bad_input.margins = 0
    started = time.monotonic()
    ran, wrong = 0, 0
    share, shares = options.share
    left_out = options.without
    wanted = (
        call
        for call in calls(options.most_heads)
        if call[2] is None
        and options.only in call[0]
        and (left_out is None or left_out not in call[0])
    )
    for name, run, _ in islice(wanted, share - 1, None, shares):
        problems = run(ran)
        ran += 1
        wrong += bool(problems)
        print(f"{name}: {'; '.join(problems) or 'right'}", flush=True)
    seconds = time.monotonic() - started
    rows = len(build_info.compiled_rows())
    print(
        f"sanitize: {ran} calls on {DEVICE}, {rows} compiled rows, {wrong} wrong, {seconds:.0f} s"
    )
    return 1 if wrong or ran == 0 else 0


if __name__ == "__main__":
    sys.exit(main())
