"""A picture of a BlockSparsity; matplotlib is imported when one is drawn."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..call.pieces import PIECE
from ..call.rules import TILE

COLORS = {"hidden": "#e8eaed", "visible": "#2f6db5", "partial": "#f0a63a"}  # by the piece's value
MOST_GRID_LINES = 64


def plot_pieces(pieces: Tensor, queries: int, keys: int, title: str, ax: Any = None) -> Any:
    """BlockSparsity.plot of the pieces (query pieces, key pieces) of a head, on the CPU: an Axes
    whose units are queries (down) and keys (to the right).

    Lines are drawn between tiles where there are few enough to see them.
    """
    try:
        from matplotlib import pyplot
        from matplotlib.colors import ListedColormap
        from matplotlib.patches import Patch
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "plot: needs matplotlib, which is not installed", name="matplotlib"
        ) from error

    if ax is None:
        ax = pyplot.subplots(figsize=(6, 6), layout="constrained")[1]
    if pieces.numel() > 0:
        ax.imshow(
            pieces.numpy(),
            cmap=ListedColormap(list(COLORS.values())),
            vmin=0,
            vmax=len(COLORS) - 1,
            interpolation="nearest",
            extent=(0, pieces.shape[1] * PIECE, pieces.shape[0] * PIECE, 0),
        )
    for seqlen, line in ((queries, ax.axhline), (keys, ax.axvline)):
        if seqlen <= TILE * MOST_GRID_LINES:
            for position in range(TILE, seqlen, TILE):
                line(position, color="white", linewidth=0.8)
    ax.set_xlim(0, max(1, keys))
    ax.set_ylim(max(1, queries), 0)
    ax.set_xlabel("key")
    ax.set_ylabel("query")
    pairs = max(1, pieces.numel())
    handles = [
        Patch(color=color, label=f"{name} {(pieces == value).sum().item() / pairs:.1%}")
        for value, (name, color) in enumerate(COLORS.items())
    ]
    ax.legend(handles=handles, title="pieces", loc="upper left", bbox_to_anchor=(1.0, 1.0))
    ax.set_title(title)
    return ax
