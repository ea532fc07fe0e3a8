"""Host time of one small attention call, in microseconds: what Python, checks and launches cost.

    python -m benchmarks.suites.host_overhead --backends ours sdpa_flash sdpa_cudnn
    python -m benchmarks.suites.host_overhead --backends ours ours_cache --modes inference
    PYTHONPATH=OTHER_CHECKOUT python -m benchmarks.suites.host_overhead ...  # another build

Batches of calls are issued without waiting, few enough for the launch queue never to fill, then the
device is waited for outside the clock. Backends take turns; medians over the batches are reported.
"""

from __future__ import annotations

import argparse
import gc
import shlex
import sys
import time
from collections import ChainMap
from collections.abc import Iterator
from dataclasses import replace
from enum import Enum
from pathlib import Path

import torch

from benchmarks.core.documents import environment, json_text
from benchmarks.core.metrics import Timing
from benchmarks.core.runner import Call, Measurement, Status, failure
from benchmarks.core.turns import even, order_of_turns
from benchmarks.peers.backends import (
    BACKENDS,
    Attend,
    Backend,
    Unsupported,
    is_cuda,
    require_ours,
)
from tests.cases.attention import AttentionCase

SCHEMA = 1
CALLS_PER_BATCH = 100  # of a few launches each; a stream queues 1,024
WARMUP_BATCHES = 3
SMALL_CASE = AttentionCase(
    batch=1, seqlen_q=128, seqlen_k=128, num_heads_q=8, num_heads_k=8, head_dim=128
)


class Mode(str, Enum):
    inference = "inference"  # forward, no gradient wanted
    recording = "recording"  # forward that records for autograd
    training = "training"  # forward and backward


def lengths(case: AttentionCase, starts: bool) -> torch.Tensor:
    """cu_seqlens of the case's sequences, or their lengths."""
    each = torch.full((case.batch,), case.seqlen_k, dtype=torch.int32, device=case.device)
    return torch.nn.functional.pad(each.cumsum(0, dtype=torch.int32), (1, 0)) if starts else each


def prepare_varlen(case: AttentionCase) -> Attend:
    from flash_attn_cuda import flash_attn_varlen_func

    require_ours(case.device)
    starts, longest = lengths(case, starts=True), case.seqlen_k

    def attend(*tensors: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.flatten(0, 1) for x in tensors)
        out = flash_attn_varlen_func(q, k, v, starts, starts, longest, longest)
        return out.view(tensors[0].shape)

    return attend


def prepare_cache(case: AttentionCase) -> Attend:
    from flash_attn_cuda import flash_attn_with_kvcache

    require_ours(case.device)
    used = lengths(case, starts=False)
    return lambda q, k, v: flash_attn_with_kvcache(q, k, v, cache_seqlens=used)


OWN = {
    "ours_varlen": Backend("ours_varlen", "flash_attn_varlen_func", prepare_varlen),
    "ours_cache": Backend("ours_cache", "flash_attn_with_kvcache, inference", prepare_cache),
}
CHOICES = ChainMap(OWN, BACKENDS)


def make_call(backend: Backend, case: AttentionCase, mode: Mode) -> Call:
    if backend.name == "ours_cache" and mode is not Mode.inference:
        raise Unsupported("has no gradients")
    attend, inputs = backend.prepare(case), case.make_inputs()
    q, k, v, dout = (backend.view(x) for x in (inputs.q, inputs.k, inputs.v, inputs.dout))
    if mode is not Mode.inference:
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    if mode is Mode.training:
        return lambda: torch.autograd.grad(attend(q, k, v), (q, k, v), dout)
    return lambda: attend(q, k, v)


def time_batch(call: Call, calls: int, synchronise: Call) -> float:
    """Milliseconds of host time per call."""
    synchronise()
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    elapsed = time.perf_counter() - begin
    synchronise()
    return elapsed * 1e3 / calls


def measure(
    case: AttentionCase, names: list[str], mode: Mode, batches: int, calls: int
) -> Iterator[dict[str, object]]:
    """One entry per backend: median and quartiles in microseconds, or why there is none. An even
    number of batches, of which every second round is in reverse order.
    """
    ready: dict[str, Call] = {}
    synchronise = torch.cuda.synchronize if is_cuda(case) else (lambda: None)
    refused: dict[str, Measurement] = {}
    with torch.set_grad_enabled(mode is not Mode.inference):
        for name in names:
            try:
                call = make_call(CHOICES[name], case, mode)
                with CHOICES[name].scope():
                    for _ in range(WARMUP_BATCHES):
                        time_batch(call, calls, synchronise)
                ready[name] = call
            except Exception as error:
                refused[name] = failure(error)
        running = list(ready)
        samples: dict[str, list[float]] = {name: [] for name in running}
        gc.disable()
        try:
            for index in order_of_turns(len(running), even(batches)):
                name = running[index]
                with CHOICES[name].scope():
                    samples[name].append(time_batch(ready[name], calls, synchronise))
        finally:
            gc.enable()
    for name in names:
        entry: dict[str, object] = {"backend": name, "mode": mode.value}
        if name in refused:
            yield entry | {"status": refused[name].status.value, "reason": refused[name].reason}
            continue
        timing = Timing.of(samples[name])
        yield entry | {
            "status": Status.ok.value,
            "median_us": timing.median_ms * 1e3,
            "low_us": timing.low_ms * 1e3,
            "high_us": timing.high_ms * 1e3,
            "batches": timing.samples,
        }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--backends",
        nargs="+",
        choices=CHOICES,
        default=["ours", "sdpa_flash", "sdpa_cudnn"],
        metavar="NAME",
    )
    parser.add_argument("--modes", nargs="+", choices=[m.value for m in Mode], default=list(Mode))
    parser.add_argument(
        "--batches", type=int, default=50, help="least samples (default: %(default)s)"
    )
    parser.add_argument("--calls", type=int, default=CALLS_PER_BATCH, help="calls per sample")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)

    case = replace(SMALL_CASE, device=options.device)
    print(f"host time of one call, {case}")
    results = []
    for mode in map(Mode, options.modes):
        for entry in measure(case, options.backends, mode, options.batches, options.calls):
            results.append(entry)
            figure = entry.get("reason") or (
                f"{entry['median_us']:.1f} us ({entry['low_us']:.1f} to {entry['high_us']:.1f})"
            )
            print(f"{mode.value:10} {entry['backend']:15} {figure}", flush=True)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        command = ["python", "-m", "benchmarks.suites.host_overhead", *(arguments or sys.argv[1:])]
        document = {
            "schema": SCHEMA,
            "command": shlex.join(command),
            "case": str(case),
            "environment": environment(options.device),
            "results": results,
        }
        options.json.write_text(json_text(document))
    failed = [f"{e['mode']} {e['backend']}" for e in results if e["status"] == Status.failed.value]
    if failed:
        print(f"failed: {'; '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
