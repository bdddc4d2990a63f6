"""Shared by all pictures: new axes, lines across a matrix, and which labels have room."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LARGEST = 4096
"""The most rows to draw: no screen shows single cells of more, and a picture would only cost memory."""

FONT = 8  # points
LINE = 1.3 * FONT  # points from one line of text to the next


def require_pyplot() -> Any:
    """matplotlib.pyplot, or an error that says how to get it."""
    try:
        import matplotlib.pyplot as plt
    except ImportError as missing:
        raise ImportError("Pictures need matplotlib: pip install matplotlib") from missing
    return plt


def new_axes(size: tuple[float, float] | None = None) -> Axes:
    """The axes of a new figure, one of pyplot, so that `plt.show()` shows it.

    With a size, in inches, the axes fill the figure: call `make_room` when all is drawn. Without one, matplotlib does
    the layout.
    """
    plt = require_pyplot()
    figure = plt.figure(layout="constrained") if size is None else plt.figure(figsize=size)
    ax: Axes = figure.subplots() if size is None else figure.add_axes((0, 0, 1, 1))
    return ax


def make_room(ax: Axes, pad: float = 0.08) -> None:  # inches
    """Enlarge the figure to hold everything around its axes, which keep their size."""
    figure: Any = ax.figure
    boxes: Any = ax.get_window_extent(), ax.get_tightbbox()
    inner, outer = (box.transformed(figure.dpi_scale_trans.inverted()) for box in boxes)  # inches
    width, height = outer.width + 2 * pad, outer.height + 2 * pad
    left, bottom = inner.x0 - outer.x0 + pad, inner.y0 - outer.y0 + pad
    figure.set_size_inches(width, height)
    ax.set_position((left / width, bottom / height, inner.width / width, inner.height / height))


def cell_size(ax: Axes, rows: int) -> float:
    """The height of a row in points, where a matrix fills the axes."""
    ax.apply_aspect()  # or the box is still that of an empty axes, which need not be square
    return float(ax.get_window_extent().height) / ax.figure.dpi * 72 / rows


def draw_lines(ax: Axes, at: Sequence[int], rows: int, *, color: str, linewidth: float) -> None:
    """Lines across the whole matrix at the given rows and columns; the outermost ones must not be clipped by half."""
    ax.hlines(at, 0, rows, color=color, linewidth=linewidth, clip_on=False)
    ax.vlines(at, 0, rows, color=color, linewidth=linewidth, clip_on=False)


def with_room(centres: Sequence[float], points: Sequence[float], first: Sequence[int]) -> list[int]:
    """The labels that do not overlap others, in order: `first` says which choose first, all positions in points."""
    kept: list[int] = []
    for i in first:
        if all(abs(centres[i] - centres[j]) >= (points[i] + points[j]) / 2 for j in kept):
            kept.append(i)
    return sorted(kept)
