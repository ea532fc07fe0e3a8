"""The figure of speed by sequence length: ours beside three peers, causal, forward and backward."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from benchmarks.core.grid_tables import OURS
from benchmarks.core.performance_tables import PEERS
from benchmarks.core.result_files import CARDS, PASSES, rows_of, thousands

HEAD_DIMS = (64, 128, 256)
LABELS = {OURS: "flash_attn_cuda", **PEERS}
STYLES = {
    OURS: {"color": "#0050b3", "lw": 2.4, "marker": "o", "ms": 4, "zorder": 3},
    "fa3": {"color": "#d9480f", "lw": 1.5, "marker": "s", "ms": 3.5},
    "sdpa_cudnn": {"color": "#2b8a3e", "lw": 1.5, "marker": "^", "ms": 4},
    "sdpa_flash": {"color": "#777777", "lw": 1.5, "marker": "v", "ms": 4},
}
# Text stays text, the same results make the same file, and a file is small.
SETTINGS = {
    "svg.fonttype": "none",
    "svg.hashsalt": "speed",
    "font.sans-serif": ["DejaVu Sans", "Arial"],
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
}

Line = dict[int, float]  # what is drawn, TFLOP/s here, by the length or another number


def lines_of(card: str) -> dict[str, Line]:
    """By pass, head dim and backend."""
    return {
        f"{which} {head_dim} {backend}": line(card, which, head_dim, backend)
        for which in PASSES
        for head_dim in HEAD_DIMS
        for backend in STYLES
    }


def line(card: str, which: str, head_dim: int, backend: str) -> Line:
    wanted = {"head_dim": head_dim, "backend": backend, "causal": True, "status": "ok"}
    rows = rows_of(f"{card}_{which}_sm90", **wanted)
    return {row["seqlen_q"]: round(row["tflops"], 1) for row in rows}


def digest(lines: dict[str, Line]) -> str:
    """Of what a figure shows."""
    return hashlib.sha256(json.dumps(lines).encode()).hexdigest()[:16]


def metadata(lines: dict[str, Line]) -> dict[str, str | None]:
    """Of a figure's file."""
    return {"Date": None, "Creator": None, "Source": digest(lines)}


def draw(card: str, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with matplotlib.rc_context(SETTINGS):
        shape = {"nrows": len(PASSES), "ncols": len(HEAD_DIMS)}
        figure, grid = pyplot.subplots(
            **shape, figsize=(9.2, 5.4), sharex=True, sharey=True, layout="constrained"
        )
        for which, row in zip(PASSES, grid, strict=True):
            for head_dim, axes in zip(HEAD_DIMS, row, strict=True):
                draw_panel(axes, card, which, head_dim)
            row[0].set_ylabel("TFLOP/s")
        grid[0][0].set_ylim(bottom=0)  # of all panels, once all lines are drawn
        figure.legend(
            *grid[0][0].get_legend_handles_labels(),
            loc="outside upper center",
            ncols=4,
            frameon=False,
        )
        figure.supxlabel(f"sequence length; one {CARDS[card]}, causal, bf16", fontsize=10)
        figure.savefig(path, metadata=metadata(lines_of(card)))
        pyplot.close(figure)


def draw_panel(axes: Any, card: str, which: str, head_dim: int) -> None:
    for backend, style in STYLES.items():
        speeds = line(card, which, head_dim, backend)
        axes.plot(list(speeds), list(speeds.values()), label=LABELS[backend], **style)
    axes.set_xscale("log", base=2)
    axes.minorticks_off()
    axes.tick_params(left=False, bottom=False)
    axes.set_xticks(list(speeds), [thousands(length) for length in speeds])
    axes.set_title(f"{which}, D = {head_dim}", fontsize=10)
    axes.grid(axis="y", alpha=0.25)
