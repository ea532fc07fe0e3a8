"""python -m flash_attn_cuda, or flash-attn-cuda: versions, devices, kernels and a self-check.

With --explain: which kernel a call of given shapes would run. With --table: what was decided for
each compiled kernel.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from dataclasses import fields

import torch

from .call.fields import AttentionCall
from .installed import build_info
from .report import self_check
from .report.explain import call_of_shapes, explain

# Numbers of the call to explain that the declaration alone describes, and their defaults.
NUMBERS = {x.name: x.default for x in fields(AttentionCall) if x.type == "float"}


MODULE = "python -m flash_attn_cuda"


def run(program: str = "flash-attn-cuda") -> int:
    """What the installed command flash-attn-cuda calls."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # a reader such as `head` may leave early
    return main(sys.argv[1:], program)


def main(arguments: Sequence[str], program: str = MODULE) -> int:
    """Returns the exit status: 1 when the self-check fails, there is an extension that does not
    load, or there is nothing to explain or to print.
    """
    given = _parser(program).parse_args(arguments)
    if given.table:
        return print_table()
    if given.explain:
        return explain_call(given)
    print(build_info.describe())
    passed = run_self_check("cpu")
    if build_info.cuda_unavailable_reason() is None:
        passed = run_self_check("cuda") and passed
    if not build_info.extension_loads():
        print(build_info.cuda_unavailable_reason())
        passed = False
    print("self-check passed" if passed else "self-check FAILED")
    return 0 if passed else 1


def run_self_check(device: str) -> bool:
    """Print a line for each check; returns whether all passed."""
    print(f"self-check on {device}: largest error as a fraction of what is allowed")
    passed = True
    for check in self_check.checks(device):
        error = self_check.run(check)
        passed = passed and error <= 1.0
        print(f"  {check}: {error:.2f}{'' if error <= 1.0 else '  FAILED'}")
    return passed


def print_table() -> int:
    """Print the table of compiled kernels; returns the exit status."""
    rows = build_info.compiled_rows()
    if not rows:
        reason = build_info.cuda_unavailable_reason() or "the extension was built without kernels"
        print(f"no kernels: {reason}", file=sys.stderr)
        return 1
    print(build_info.table_text(rows))
    return 0


def explain_call(given: argparse.Namespace) -> int:
    """Print the kernel and the plan of a call; returns the exit status."""
    reason = _reason_against(given.device)
    if reason is not None or build_info.extension is None:
        print(f"nothing to explain: {reason}", file=sys.stderr)
        return 1
    seqlen_k = given.seqlen_q if given.seqlen_k is None else given.seqlen_k
    heads_k = given.heads_q if given.heads_k is None else given.heads_k
    call = {
        "dtype": given.dtype,
        "head_dim": given.head_dim,
        "head_dim_v": given.head_dim_v,
        "batch_size": given.batch,
        "seqlen_q": given.seqlen_q,
        "seqlen_k": seqlen_k,
        "num_heads_q": given.heads_q,
        "num_heads_k": heads_k,
        "causal": given.causal,
        "window_size_left": given.window[0],
        "window_size_right": given.window[1],
        **{name: getattr(given, name) for name in NUMBERS},
        "packed": given.packed,
        "alibi": given.alibi,
        "block_sparse": given.block_sparse,
        "bias": given.bias,
        "e4m3": given.e4m3,
        "qv": given.qv,
        "keys_per_list": given.keys_per_list,
    }
    serving = {
        "page_size": given.page_size,
        "lengths_on_device": given.cache,
        "num_splits": given.num_splits or 0,
        "batch_invariant": given.batch_invariant,
    }
    passes = {"forward": {**call, **serving}}
    if not (given.cache or given.page_size > 0 or given.e4m3 or given.qv):
        passes["backward"] = {**call, "deterministic": given.deterministic}
    status = 0
    for name, arguments in passes.items():
        print(name)
        try:
            plan = explain(name, call_of_shapes(**arguments), given.device)
        except (RuntimeError, ValueError) as error:
            print(f"  none: {error}")
            status = 1
            continue
        for field, value in plan.items():
            print(f"  {field}: {value}")
    return status


def _reason_against(device: int | None) -> str | None:
    """Why calls on this CUDA device cannot be explained, or None."""
    if build_info.extension is not None and device is not None and torch.cuda.is_available():
        count = torch.cuda.device_count()
        if not 0 <= device < count:
            return f"--device: must be from 0 to {count - 1}, got {device}"
    return build_info.cuda_unavailable_reason(device)


def _int32(text: str) -> int:
    """A number as the extension's functions take it, in 32 bits."""
    try:
        number = int(text)
    except ValueError:
        number = None
    if number is None or not -(2**31) <= number < 2**31:
        raise argparse.ArgumentTypeError(f"must be a whole number of 32 bits, got {text!r}")
    return number


def _parser(program: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=program, description=__doc__)
    parser.add_argument("--explain", action="store_true", help="print the kernels of one call")
    parser.add_argument(
        "--table", action="store_true", help="print tile, stages, registers, ... of every kernel"
    )
    call = parser.add_argument_group("the call to explain")
    call.add_argument("--dtype", choices=("fp16", "bf16"), default="bf16")
    call.add_argument("--head-dim", type=_int32, default=128)
    call.add_argument("--head-dim-v", type=_int32, help="of values (default: --head-dim)")
    call.add_argument("--batch", type=_int32, default=1)
    call.add_argument("--seqlen-q", type=_int32, default=4096, help="queries per sequence")
    call.add_argument("--seqlen-k", type=_int32, help="keys per sequence (default: --seqlen-q)")
    call.add_argument("--heads-q", type=_int32, default=16)
    call.add_argument("--heads-k", type=_int32, help="default: --heads-q")
    call.add_argument("--causal", action="store_true")
    call.add_argument(
        "--window",
        type=_int32,
        nargs=2,
        default=(-1, -1),
        metavar=("LEFT", "RIGHT"),
        help="-1: none",
    )
    for name, default in NUMBERS.items():
        flag = "--" + name.removesuffix("_p").replace("_", "-")
        call.add_argument(flag, type=float, default=default, dest=name, metavar="NUMBER")
    call.add_argument("--alibi", action="store_true")
    call.add_argument("--block-sparse", action="store_true", help="a mask, as lists of blocks")
    call.add_argument("--bias", action="store_true", help="a tensor added to the scores")
    call.add_argument("--deterministic", action="store_true")
    call.add_argument("--packed", action="store_true", help="sequence lengths are totals of all")
    call.add_argument("--cache", action="store_true", help="attention over a KV cache")
    call.add_argument("--e4m3", action="store_true", help="keys and values of that dtype")
    call.add_argument("--qv", action="store_true", help="scores of qv and the values as well")
    call.add_argument("--keys-per-list", type=int, default=0, help="with --qv: of key_lists")
    call.add_argument("--page-size", type=_int32, default=0, help="of a paged cache (0: not paged)")
    call.add_argument(
        "--num-splits",
        type=_int32,
        help="parts of the keys, 0: automatic (default: 0 over a cache, in pages or not, else 1)",
    )
    call.add_argument("--batch-invariant", action="store_true")
    call.add_argument("--device", type=_int32, help="CUDA device index (default: the current one)")
    return parser


if __name__ == "__main__":
    sys.exit(run(MODULE))
