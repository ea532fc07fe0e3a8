"""A small grid of calls for compute-sanitizer: every compiled row once forward and backward, and a
few odd shapes.

    compute-sanitizer --tool memcheck  python tests/sanitize.py
    compute-sanitizer --tool racecheck python tests/sanitize.py
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool initcheck python tests/sanitize.py

memcheck and initcheck see single tensors only if torch does not carve them out of one large
allocation, hence the variable (good for memcheck too). Inputs come from the CPU and results go back
there to be compared, so that nearly every kernel the sanitizer watches is this package's. Exit
status 1 if a result is wrong; add --error-exitcode 1 for the sanitizer's findings.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from cases import DTYPE_NAMES, AttentionCase, AttentionInputs, Layout, arrange  # noqa: E402
from harness import (  # noqa: E402
    DEVICE,
    ON_CPU,
    missing_row,
    run_forward,
    run_forward_backward,
    run_reference,
)
from tolerance import compare  # noqa: E402

from flash_attn_cuda import build_info, cuda_unavailable_reason  # noqa: E402

DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


def row_cases() -> Iterator[AttentionCase]:
    """Two a row, ragged: full with shared key heads, causal with a partly used head dim."""
    rows = {(row.dtype, row.head_dim) for row in build_info.compiled_rows()}
    if ON_CPU:
        rows = {("bf16", 32)}
    for dtype, head_dim in sorted(rows):
        for causal in (False, True):
            yield AttentionCase(
                batch=1,
                seqlen_q=70 if causal else 150,
                seqlen_k=150 if causal else 70,
                num_heads_q=2,
                num_heads_k=2 if causal else 1,
                head_dim=head_dim - 8 if causal else head_dim,
                dtype=DTYPES[dtype],
                causal=causal,
            )


def odd_cases() -> Iterator[AttentionCase]:
    """Rows without keys, single rows, copied layouts, shared key heads, padded head dims."""
    base = AttentionCase(
        batch=1, seqlen_q=40, seqlen_k=40, num_heads_q=2, num_heads_k=2, causal=True
    )
    yield replace(base, seqlen_q=200, seqlen_k=60)
    yield replace(base, seqlen_q=1, seqlen_k=1, head_dim=8)
    yield replace(base, seqlen_q=1, seqlen_k=300)
    yield replace(base, num_heads_q=8, num_heads_k=1, head_dim=128)
    yield replace(base, batch=3, head_dim=59)
    yield replace(base, layout=Layout.surrounded, head_dim=40, causal=False)
    yield replace(base, layout=Layout.misaligned)


def run(case: AttentionCase, seed: int) -> list[str]:
    """One forward and, where compiled, one backward; returns what is wrong."""
    host_case = replace(case, layout=Layout.contiguous, device="cpu")
    inputs = host_case.make_inputs(seed)
    moved = {name: x.to(DEVICE) for name, x in vars(inputs).items()}
    for name in ("q", "k", "v", "dout"):
        moved[name] = arrange(moved[name], case.layout)
    with_backward = missing_row(case, backward=True) is None
    result = (run_forward_backward if with_backward else run_forward)(
        case, AttentionInputs(**moved)
    )
    reference = run_reference(host_case, inputs, use_dlse=with_backward)
    return [str(item) for item in compare(result.to("cpu"), *reference) if not item.passes]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="run only cases whose name contains this text")
    options = parser.parse_args()
    reason = None if ON_CPU else cuda_unavailable_reason()
    if reason is not None:
        print(f"sanitize: cannot run: {reason}", file=sys.stderr)
        return 2
    started = time.monotonic()
    ran, wrong = 0, 0
    for case in (*row_cases(), *odd_cases()):
        if options.only not in str(case) or missing_row(case, backward=False) is not None:
            continue
        problems = run(case, seed=ran)
        ran += 1
        wrong += bool(problems)
        print(f"{case}: {'; '.join(problems) or 'right'}", flush=True)
    seconds = time.monotonic() - started
    rows = len(build_info.compiled_rows())
    print(
        f"sanitize: {ran} cases on {DEVICE}, {rows} compiled rows, {wrong} wrong, {seconds:.0f} s"
    )
    return 1 if wrong or ran == 0 else 0


if __name__ == "__main__":
    sys.exit(main())
