"""Results of benchmarks as documents: what they were measured with; their JSON, CSV and plot."""

from __future__ import annotations

import csv
import json
import os
import platform
import subprocess
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

import torch  # noqa: E402

from benchmarks.core.grid_tables import Row, add_ratios, summarise, table_rows  # noqa: E402
from benchmarks.core.power import current_gauge  # noqa: E402
from benchmarks.core.runner import Result  # noqa: E402
from benchmarks.core.turns import Protocol  # noqa: E402
from tests.cases.attention import DTYPE_NAMES  # noqa: E402

SCHEMA = 1


def row_of(result: Result) -> Row:
    """One result as flat values, the same keys whether it has figures or not."""
    case, timing, which = result.case, result.timing, result.which
    power = result.measurement.power
    return {
        "case": str(case),
        "batch": case.batch,
        "seqlen_q": case.seqlen_q,
        "seqlen_k": case.seqlen_k,
        "num_heads_q": case.num_heads_q,
        "num_heads_k": case.num_heads_k,
        "head_dim": case.head_dim,
        "head_dim_v": case.value_dim,
        "dtype": DTYPE_NAMES[case.dtype],
        "causal": case.causal,
        "pass": which.value,
        "backend": result.backend,
        "status": result.status.value,
        "reason": result.reason,
        "median_ms": timing and timing.median_ms,
        "low_ms": timing and timing.low_ms,
        "high_ms": timing and timing.high_ms,
        "samples": timing and timing.samples,
        "tflops": timing and timing.teraflops(case, which),
        "gbps": timing and timing.gigabytes_per_second(case, which),
        "sm_clock_mhz": power.sm_clock_mhz,
        "watts": power.watts,
        "joules_per_call": power.joules_per_call,
        "peak_bytes": result.measurement.peak_bytes,
        "ratio": None,
        "check": result.check,
    }


# Names the commit where the sources are a copy without their repository.
COMMIT_VARIABLE = "FLASH_ATTN_CUDA_COMMIT"


def environment(device: str) -> Row:
    """What the figures depend on besides the code under test. uncommitted_changes is None where git
    cannot say, as in a copy of the sources without their repository.
    """
    changes = command_output("git", "-C", str(ROOT), "status", "--porcelain", "-uno")
    facts: Row = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "commit": os.environ.get(COMMIT_VARIABLE)
        or command_output("git", "-C", str(ROOT), "rev-parse", "HEAD"),
        "uncommitted_changes": None if changes is None else bool(changes),
        "flash_attn_cuda": package_version("flash_attn_cuda"),
        "build": build_facts(),
        "triton": package_version("triton"),
    }
    if torch.device(device).type != "cuda":
        return facts | {"device": platform.processor() or platform.machine(), "driver": None}
    properties = torch.cuda.get_device_properties(device)
    query = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    driver = command_output(*query)
    gauge = current_gauge()
    return facts | {
        "device": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "driver": driver.splitlines()[0] if driver else None,
        "power_limit_watts": gauge and gauge.limit_watts(),
        "cudnn": torch.backends.cudnn.version(),
    }


def command_output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def package_version(name: str) -> str | None:
    try:
        return __import__(name).__version__
    except ImportError:
        return None


def build_facts() -> Row | None:
    """What the installed extension was built from, archs and nvcc among it; None without one."""
    try:
        from flash_attn_cuda.installed import build_info
    except ImportError:
        return None
    record = build_info.build_record()
    if not record:
        return None
    facts = {key: value for key, value in record.items() if key != "instances"}
    return facts | {"kernels": len(record["instances"])}


def make_document(
    rows: Sequence[Row], baseline: str, device: str, command: str, protocol: Protocol
) -> Row:
    """Everything a run leaves behind; `rows` get their ratios."""
    add_ratios(rows, baseline)
    return {
        "schema": SCHEMA,
        "command": command,
        "protocol": protocol.facts(),
        "baseline": baseline,
        "environment": environment(device),
        "summary": summarise(rows, baseline),
        "results": list(rows),
    }


def write_csv(document: Row, path: Path) -> None:
    rows = [row | {"check": row["check"] and row["check"]["passes"]} for row in document["results"]]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]) if rows else [])
        writer.writeheader()
        writer.writerows(rows)


def plot(document: Row, path: Path) -> None:
    """TFLOP/s over sequence length: a row of panels per pass, a panel per head dim and mask."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    _, lines = table_rows(document)
    passes = unique(key[0] for key in lines)
    kinds = unique(key[1:4] for key in lines)
    backends = unique(key[4] for key in lines)
    figure, grid = pyplot.subplots(
        len(passes) or 1,
        len(kinds) or 1,
        figsize=(3.2 * max(2, len(kinds)), 3.0 * max(1, len(passes))),
        squeeze=False,
        layout="constrained",
    )
    for which, axes_row in zip(passes, grid, strict=False):
        for (dtype, head_dims, mask), axes in zip(kinds, axes_row, strict=False):
            for color, backend in enumerate(backends):
                rows = lines.get((which, dtype, head_dims, mask, backend), {})
                lengths = sorted(rows)
                speeds = [rows[length]["tflops"] for length in lengths]
                axes.plot(lengths, speeds, "o-", color=f"C{color}", ms=3, label=backend)
            axes.set_xscale("log", base=2)
            axes.set_ylim(bottom=0)
            axes.set_title(f"{which} {dtype} d{head_dims} {mask}", fontsize=9)
            axes.grid(alpha=0.3)
        axes_row[0].set_ylabel("TFLOP/s")
    grid[0][0].legend(fontsize=8)
    figure.supxlabel(f"sequence length; {document['environment']['device']}", fontsize=9)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def unique(values: Iterable) -> list:
    return list(dict.fromkeys(values))


def json_text(document: Row) -> str:
    """JSON with a line for each fact of a document and for each of its rows."""
    facts = ",\n".join(f" {json.dumps(key)}: {value_text(x)}" for key, x in document.items())
    return f"{{\n{facts}\n}}\n"


def value_text(value: object) -> str:
    if not isinstance(value, list) or not value:
        return json.dumps(value)
    rows = ",\n".join(f"  {json.dumps(row)}" for row in value)
    return f"[\n{rows}\n ]"


def write_outputs(
    document: Row, *, json_path: Path | None, csv_path: Path | None, plot_path: Path | None
) -> None:
    for path in (json_path, csv_path, plot_path):
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
    if json_path is not None:
        json_path.write_text(json_text(document))
    if csv_path is not None:
        write_csv(document, csv_path)
    if plot_path is not None:
        plot(document, plot_path)
