"""A small grid of calls for compute-sanitizer: every compiled row that this GPU runs, what prepares
and follows it, masks, biases and sinks, odd shapes, and every bad input.

    compute-sanitizer --tool memcheck  python -m tests.sanitizer.sanitize
    compute-sanitizer --tool racecheck python -m tests.sanitizer.sanitize
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool initcheck \\
        python -m tests.sanitizer.sanitize

memcheck and initcheck see single tensors only if torch does not carve them out of one large
allocation, hence the variable (good for memcheck too). None of the tools sees what TMA reads and
writes: initcheck takes out, dk, dv and the gradient of a bias of Hopper kernels for uninitialised.
Decode kernels, and the preprocess of a sink's gradient, read words of the workspace before anybody
wrote them, on purpose, and decode kernels load O of splits without keys, which they do not use
(marked_counter.h, sm80/decode/combine.h).
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
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from flash_attn_cuda import (
    BlockSparsity,
    check_device_errors,
    cuda_unavailable_reason,
    flash_attn_combine,
    flash_attn_varlen_func,
)
from flash_attn_cuda.call.rules import TILE
from flash_attn_cuda.installed import build_info
from flash_attn_cuda.report.explain import call_of_shapes, explain
from tests.cases import bad_input, second_order
from tests.cases.attention import DTYPE_NAMES, AttentionCase, KvCacheCase, VarlenCase
from tests.cases.bands import BandCase
from tests.cases.families import planned
from tests.cases.fp8_cache import Fp8Case, assert_fp8_close
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
from tests.cases.layouts import moved
from tests.cases.masked import MaskedCase, MaskedInputs
from tests.cases.masked_harness import masked_reference, run_masked
from tests.cases.merge import merge_cases
from tests.cases.parts import Documents, Inputs, run_parts, run_whole, worse_than
from tests.cases.rotary import RotaryCase, arranged, difference
from tests.cases.second_order import DerivativeCase
from tests.cases.varlen import in_longer_buffers
from tests.reference import AttentionResult
from tests.reference.tolerance import compare
from tests.sanitizer import cases, masked_cases
from tests.sanitizer.masked_cases import ListChange, MaskChange

# A call: its name, what runs it and returns what is wrong or raises AssertionError, and why this
# build cannot.
Call = tuple[str, Callable[[int], list[str]], str | None]

reference_device = "cpu"


# -- between devices -------------------------------------------------------------------------------


def on_host(case: Any) -> Any:
    """The same where references are made."""
    return replace(case, device=reference_device)


def wrong(result: AttentionResult, reference: Any) -> list[str]:
    """What is not close to the reference and the naive result, and what the device has found."""
    compared = compare(result.to(reference_device), *reference)
    return [str(item) for item in compared if not item.passes] + flagged()


def flagged() -> list[str]:
    """What the device has found in tensors of indices, as a problem."""
    try:
        check_device_errors()
    except ValueError as error:
        return [f"flagged {error}"]
    return []


# -- running them ----------------------------------------------------------------------------------


def run_case(case: Case, seed: int) -> list[str]:
    """One forward and, where wanted and compiled, one backward; over a cache with splits chosen,
    fixed, and independent of the batch.
    """
    host_case = on_host(case)
    inputs = host_case.make_inputs(seed)
    on_device = moved(inputs, DEVICE)
    if isinstance(case, KvCacheCase):
        for changes in ({}, {"num_splits": 3}, {"batch_invariant": True}):
            results = attend_over_cache(host_case, on_device, **changes)
            assert_cache_close(host_case, inputs, *(x.to(reference_device) for x in results))
        return flagged()
    with_backward = missing_row(case, backward=True) is None
    result = (run_forward_backward if with_backward else run_forward)(case, on_device)
    rng_state = drawn_of(case, on_device)
    return wrong(
        result, run_reference(host_case, inputs, use_dlse=with_backward, rng_state=rng_state)
    )


def drawn_of(case: AttentionCase | VarlenCase, on_device: Any) -> Tensor | None:
    """The random state of the case's call, where references are made."""
    if case.dropout_p == 0.0:
        return None
    return drawn_rng_state(case, on_device).to(reference_device)


def run_spare_rows(case: VarlenCase, seed: int) -> list[str]:
    """Rows of all tensors behind the last sequence, as in the buffers of a captured graph: no entry
    of what sequences have of their own is read for them.
    """
    host_case = on_host(case)
    inputs = host_case.make_inputs(seed)
    with_backward = missing_row(case, backward=True) is None
    run = run_forward_backward if with_backward else run_forward
    within = {}
    for name, x in run(case, in_longer_buffers(moved(inputs, DEVICE), 200, 90)).tensors().items():
        rows = case.total_k if name in ("dk", "dv") else case.total_q
        within[name] = x.narrow(int(name == "lse"), 0, rows)
    reference = run_reference(host_case, inputs, use_dlse=with_backward)
    return wrong(AttentionResult(**within), reference)


def run_parts_of(case: VarlenCase, seed: int) -> list[str]:
    """Parts of the sequences, with results in fp32, against the whole of them."""
    documents = Documents(case.lengths_q, case.lengths_k or case.lengths_q, (32,), (48,))
    heads = (case.num_heads_q, case.num_heads_k)
    inputs = Inputs.random(documents, heads, case.head_dim, case.dtype, DEVICE, seed=seed)
    slopes = None if case.alibi is None else torch.linspace(0.5, 0.1, heads[0])
    names = ("causal", "softcap", "dropout_p", "deterministic")
    options: dict[str, Any] = {name: getattr(case, name) for name in names}
    options["window_size_left"], options["window_size_right"] = case.window
    on_device = options | {"alibi_slopes": None if slopes is None else slopes.to(DEVICE)}
    whole, rng_state = run_whole(documents, inputs, **on_device)
    given = rng_state if case.dropout_p > 0.0 else None
    on_cpu = options | {"alibi_slopes": slopes, "rng_state": None if given is None else given.cpu()}
    exact, _ = run_whole(documents, inputs.exact(), **on_cpu)
    parts = run_parts(documents, inputs, given, **on_device)
    return worse_than(parts, whole, exact) + flagged()


def run_band(case: BandCase, seed: int) -> list[str]:
    """A band of any ends, and where there is one its backward."""
    host_case = on_host(case)
    rows = host_case.rows(seed)
    return wrong(case.run(moved(rows, DEVICE)), host_case.reference(rows))


def run_derivatives(case: DerivativeCase, seed: int) -> list[str]:
    """A jvp and a double backward, whose references are made on the device."""
    for transform in (second_order.jvp, second_order.double_backward):
        second_order.check_derivatives(case, transform, seed)
    return flagged()


def run_fp8(case: Fp8Case, seed: int) -> list[str]:
    """A call over a cache of e4m3, and what it appended."""
    host_case = replace(case, cache=on_host(case.cache))
    inputs = host_case.make_inputs(seed)
    result, found = attend_fp8(case, moved(inputs, DEVICE))
    back = [x.to(reference_device) if isinstance(x, Tensor) else x for x in found]
    assert_fp8_close(host_case, inputs, result.to(reference_device), back)
    return flagged()


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


def run_rotary(case: RotaryCase, seed: int) -> list[str]:
    """As a new tensor, with its gradient, and in place."""
    host, dout, (cos, sin) = case.make_x(seed), case.make_x(seed + 1), case.make_tables(seed)
    tables = (cos.to(DEVICE), sin.to(DEVICE))
    x = arranged(host.to(DEVICE), case.layout).requires_grad_()
    out = case.run(x, tables)
    out.backward(dout.to(DEVICE))
    found = {
        "out": (out.detach(), case.expected(host, (cos, sin))),
        "dx": (x.grad, case.expected(dout, (cos, -sin))),
        "in place": (case.run(x.detach(), tables, inplace=True), case.expected(host, (cos, sin))),
    }
    differences = {name: difference(result.cpu(), y) for name, (result, y) in found.items()}
    return [f"{name}: {text}" for name, text in differences.items() if text is not None]


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
    on_device = replace(moved(inputs, DEVICE), of=moved(without_unvisited(case, inputs), DEVICE))
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
    return problems + wrong(result, reference_of(host_case, inputs, on_device, with_backward))


def reference_of(
    case: MaskedCase, inputs: MaskedInputs, on_device: MaskedInputs, use_dlse: bool
) -> Any:
    rng_state = drawn_of(case.of, on_device.of)
    use_dlse = use_dlse and rng_state is None
    return masked_reference(case, inputs, use_dlse=use_dlse, rng_state=rng_state)


def lists_of(case: MaskedCase, inputs: MaskedInputs) -> BlockSparsity | None:
    """Made where the inputs are; None where the call shall make them, or has no mask."""
    if case.mask is None or case.mask.given in ("attn_mask", "key_lists"):
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
    of_rows = (out.detach(), *(x.grad for x in leaves))
    out, dq, dk, dv = (x[None, :seqlen] for x in of_rows)
    result = AttentionResult(out, lse.detach()[None, :, :seqlen], dq, dk, dv)
    return wrong(result, reference_of(host_case, inputs, inputs, use_dlse=False))


# -- all of them -----------------------------------------------------------------------------------


def why_not_planned(plan: Callable[[], Any]) -> str | None:
    """What the build or this GPU lacks for what is planned, or None."""
    if ON_CPU:
        return None
    try:
        plan()
    except RuntimeError as error:
        if "no compiled" not in str(error):
            raise
        return str(error)
    return None


def missing_for(case: MaskedCase, *passes: str) -> str | None:
    """The same of passes of the case."""
    further = {"block_sparse": case.mask is not None, "bias": case.bias is not None}
    return why_not_planned(lambda: [planned(case.of, name, **further) for name in passes])


def missing_for_fp8(cache: KvCacheCase) -> str | None:
    """The same of a call over a cache of e4m3."""
    sizes: dict[str, Any] = {"batch_size": cache.batch, "seqlen_k": 256, "causal": True}
    sizes |= {"num_heads_q": cache.num_heads_q, "num_heads_k": cache.num_heads_k}
    sizes |= {"head_dim": cache.head_dim, "head_dim_v": cache.value_dim}
    sizes |= {"dtype": DTYPE_NAMES[cache.dtype], "lengths_on_device": True, "e4m3": True}
    calls_of = (call_of_shapes(seqlen_q=seqlen_q, **sizes) for seqlen_q in (1, 100))
    return why_not_planned(lambda: [explain("forward", call) for call in calls_of])


def call_of(kind: str, run: Callable[..., list[str]], case: Any, *, backward: bool = False) -> Call:
    """Of a case without a mask; backward: for which there must be a row."""
    case = replace(case, device=DEVICE)
    return f"{kind}{case}", partial(run, case), missing_row(case, backward=backward)


def masked_call(
    kind: str,
    case: MaskedCase,
    run: Callable[..., list[str]] = run_masked_case,
    **changes: Any,
) -> Call:
    case = replace(case, of=replace(case.of, device=DEVICE))
    return f"{kind}: {case}", partial(run, case, **changes), missing_for(case, "forward")


def problems_of(case: Any, seed: int) -> list[str]:
    del seed  # the case's own
    return case.problems() + flagged()


def calls(most_heads: int | None = None) -> Iterator[Call]:
    """most_heads: of queries in calls of many tiles; given, those of derivatives have one."""
    for case in (*cases.row_cases(), *cases.odd_cases()):
        yield call_of("", run_case, case)
    for case in cases.latent_cases():
        yield call_of("latent: ", run_case, case)
    for case in cases.spare_row_cases():
        yield call_of("spare rows: ", run_spare_rows, case)
    for case in cases.part_cases():
        yield call_of("parts: ", run_parts_of, case, backward=True)
    for band in cases.band_cases():
        band = replace(band, device=DEVICE)
        yield f"band: {band}", partial(run_band, band), band.missing_row()
    for sums in cases.sanitized_sum_cases(DEVICE):
        lacking = missing_row(sums.row(), backward=True)
        yield f"sums: {sums}", lambda seed, sums=sums: sums.problems(seed) + flagged(), lacking
    for name, masked, change in masked_cases.masked_cases():
        yield masked_call(name, masked, change_mask=change)
    for case in cases.long_cases():
        yield call_of("many keys: ", run_case, case)
    for case in (*cases.many_tile_cases(), *cases.value_cases()):
        yield call_of("many tiles: ", run_case, cases.with_most_heads(case, most_heads))
    for masked, change in masked_cases.many_tile_masked_cases():
        masked = replace(masked, of=cases.with_most_heads(masked.of, most_heads))
        yield masked_call("many tiles", masked, change_mask=change)
    for derivative in cases.derivative_cases(DEVICE):
        derivative = cases.of_one_head(derivative) if most_heads is not None else derivative
        lacking = missing_for(derivative.of, "forward", "backward", "jvp", "hvp")
        yield f"derivatives: {derivative}", partial(run_derivatives, derivative), lacking
    for fp8 in cases.fp8_cases(DEVICE):
        yield f"fp8: {fp8}", partial(run_fp8, fp8), missing_for_fp8(fp8.cache)
    yield "combine", run_combine, None
    for merge in merge_cases(DEVICE):
        yield f"merge: {merge}", partial(problems_of, merge), None
    for rotary in cases.sanitized_rotary_cases(DEVICE):
        yield f"rotary: {rotary}", partial(run_rotary, rotary), None
    lacking = missing_row(AttentionCase(causal=True), backward=True)
    for bad in bad_input.bad_content_cases():
        yield f"bad input: {bad.name}", partial(run_bad_content, bad), lacking
    for name, masked, change_lists in masked_cases.bad_list_cases():
        yield masked_call(f"bad input: lists with {name}", masked, change_lists=change_lists)
    for masked in masked_cases.outgrown_cases():
        yield masked_call("bad input: longer than its mask", masked, run_longer_sequence)


def parse_share(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"([1-9]\d*)/([1-9]\d*)", text)
    if match is None or int(match[1]) > int(match[2]):
        raise argparse.ArgumentTypeError(f"must be I/N with I from 1 to N, got {text!r}")
    return int(match[1]), int(match[2])


def parse() -> argparse.Namespace:
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
    return parser.parse_args()


def main() -> int:
    options = parse()
    global reference_device
    reference_device = DEVICE if options.references_on_gpu else "cpu"
    reason = None if ON_CPU else cuda_unavailable_reason()
    if reason is not None:
        print(f"sanitize: cannot run: {reason}", file=sys.stderr)
        return 2
    bad_input.margins = 0
    started = time.monotonic()
    ran, failed = 0, 0
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
        try:
            problems = run(ran)
        except AssertionError as error:
            problems = [str(error)]
        ran += 1
        failed += bool(problems)
        print(f"{name}: {'; '.join(problems) or 'right'}", flush=True)
    seconds = time.monotonic() - started
    rows = len(build_info.compiled_rows())
    print(
        f"sanitize: {ran} calls on {DEVICE}, {rows} compiled rows, {failed} wrong, {seconds:.0f} s"
    )
    return 1 if failed or ran == 0 else 0


if __name__ == "__main__":
    sys.exit(main())
