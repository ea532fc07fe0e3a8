"""The figure of dq's error: ours beside its peers and maths, over keys' mean and over length."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.core.grid_tables import OURS
from benchmarks.core.result_files import CARDS, rows_of, thousands
from benchmarks.core.speed_figure import LABELS, SETTINGS, STYLES, Line, metadata
from benchmarks.suites.accuracy import HEADS, MATHS, OF_DEVIATIONS, SEQLENS, WITHOUT_ROUNDING
from benchmarks.suites.grid import MASKS

HEAD_DIM, DTYPE = 128, "bf16"
BY_MEAN, BY_LENGTH = "mean", "length"
XLABELS = {
    BY_MEAN: f"mean of keys in standard deviations, of values 1; S = {thousands(SEQLENS[0])}",
    BY_LENGTH: "sequence length; means of 1",
}
# Lines that lie upon one another get thinner.
WIDTHS = {"sdpa_flash": (6.0, 9), "sdpa_cudnn": (3.5, 7), "fa3": (1.5, 4)}
ALL_STYLES: dict[str, dict[str, Any]] = {
    **{name: STYLES[name] | {"lw": width, "ms": size} for name, (width, size) in WIDTHS.items()},
    WITHOUT_ROUNDING: STYLES[OURS] | {"ls": "--", "lw": 1.0, "ms": 2},
    OURS: STYLES[OURS],
    OF_DEVIATIONS: STYLES[OURS] | {"ls": "-.", "lw": 1.5, "ms": 3},
    MATHS: {"color": "#111111", "lw": 1.5, "ls": ":", "marker": "D", "ms": 3, "zorder": 4},
}
ALL_LABELS = LABELS | {
    WITHOUT_ROUNDING: "keep_rounding=False",
    OF_DEVIATIONS: "flash_attn_cuda of k - mean(k)",
    MATHS: "products of 16 bits, softmax of fp32",
}


def lines_of(card: str) -> dict[str, Line]:
    """By mask, panel and contender."""
    return {
        f"{mask} {along} {name}": line(card, mask, along, name)
        for mask in MASKS
        for along in XLABELS
        for name in ALL_STYLES
    }


def line(card: str, mask: str, along: str, name: str) -> Line:
    wanted = {"head_dim": HEAD_DIM, "dtype": DTYPE, "causal": MASKS[mask], "heads": [*HEADS]}
    rows = [row for row in rows_of(f"{card}_accuracy", **wanted) if name in row]
    if along == BY_MEAN:
        rows = [row for row in rows if row["seqlen"] == SEQLENS[0] and row["means"][1] == 1]
        return {row["means"][0]: row[name]["dq"] for row in rows}
    rows = sorted((row for row in rows if row["means"] == [1, 1]), key=lambda row: row["seqlen"])
    return {row["seqlen"]: row[name]["dq"] for row in rows}


def draw(card: str, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lines = lines_of(card)
    with matplotlib.rc_context(SETTINGS | {"svg.hashsalt": "accuracy"}):
        figure, grid = pyplot.subplots(
            len(MASKS), len(XLABELS), figsize=(9.2, 5.8), sharex="col", sharey=True,
            layout="constrained",
        )  # fmt: skip
        for mask, row in zip(MASKS, grid, strict=True):
            for along, axes in zip(XLABELS, row, strict=True):
                draw_panel(axes, along, {n: lines[f"{mask} {along} {n}"] for n in ALL_STYLES})
                axes.set_title(mask, fontsize=10)
            row[0].set_ylabel("error of dq")
        for axes, text in zip(grid[-1], XLABELS.values(), strict=True):
            axes.set_xlabel(text)
        handles = grid[0][0].get_legend_handles_labels()
        figure.legend(*handles, loc="outside upper center", ncols=3, frameon=False)
        figure.supxlabel(f"one {CARDS[card]}, D = {HEAD_DIM}, {DTYPE}", fontsize=10)
        figure.savefig(path, metadata=metadata(lines))
        pyplot.close(figure)


def draw_panel(axes: Any, along: str, lines: dict[str, Line]) -> None:
    """Means are evenly spaced, as 0 has no logarithm."""
    if along == BY_LENGTH:
        axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.minorticks_off()
    for name, errors in lines.items():
        places = range(len(errors)) if along == BY_MEAN else list(errors)
        if errors:
            axes.plot(places, list(errors.values()), label=ALL_LABELS[name], **ALL_STYLES[name])
            ticks = map(str if along == BY_MEAN else thousands, errors)
            axes.set_xticks(places, list(ticks))
    axes.tick_params(left=False, bottom=False)
    axes.grid(axis="y", alpha=0.25)
