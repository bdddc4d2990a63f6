"""The correlation between blocks as a heat map, next to the scale of each block."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch

from blockmean.plot._axes import FONT, LARGEST, LINE, cell_size, draw_lines, make_room, new_axes, with_room
from blockmean.plot._block_matrix import BlockMatrix, Source, block_matrix

if TYPE_CHECKING:
    from matplotlib.axes import Axes

T = TypeVar("T")

COLOURS = "RdBu_r"
POSITIVE, NEGATIVE = "#b2182b", "#2166ac"  # those of the colour map
UNKNOWN, UNCOUPLED = "0.7", "0.93"
GAP, STRIP, VALUES, BAR = 12.0, 64.0, 44.0, 10.0  # widths in points; VALUES is that of the numbers next to the strip
NUMBERS, TEXT = 24.0, 0.99 * LINE  # points that a cell needs for its number, and a row for the one next to it
WIDEST = 8.0  # inches


class Labels(NamedTuple):
    """Labels of the rows, their places (in rows), and the lines between groups of blocks."""

    at: list[float]
    texts: list[str]
    edges: list[int]


def coupling(
    source: Source, *, ax: Axes | None = None, title: str | None = None, scale: bool = True, colorbar: bool = True
) -> Axes:
    """Draw how blocks depend on each other: A_ij / √|A_ii A_jj| as colours, red above 0, white at 0, blue below.

    That leaves out the scales of blocks, so A_ii is drawn next to it on a logarithmic axis, blue where it is negative.
    Large cells show their numbers. Where the names of all blocks have no room, those of their parameters or modules
    take their place, with lines between them.

    Dark grey cells have no data: A_ii is 0 up to rounding. Light grey ones are between blocks that an optimizer does
    not couple, because they are in different modules or parameter groups. With coupling "none" there is only A_ii to
    draw. `AdaGradBMA` sets A_ii to 1 in the variants "paper" and "consistent"; the picture then shows A_ij itself,
    without a scale.

    Args:
        source: a BlockMean, a Curvature, an optimizer (or a wrapper that holds one as `optimizer`), what its
            `block_statistics()` returns, or one entry of it. At most 4,096 blocks, 100,000 where they are not coupled.
        ax: where to draw the heat map; scale and colour bar lie outside. By default, a new figure of a fitting size.
        title: above the heat map.
        scale: whether to draw A_ii next to the heat map.
        colorbar: whether to draw the meaning of the colours.

    >>> from blockmean import BlockMean, Partition
    >>> M = BlockMean(Partition.from_sizes([1, 1]), lam=[4.0, 9.0], B=[[0.0, 3.0], [3.0, 0.0]])
    >>> coupling(M, title="two blocks").get_title()
    'two blocks'
    """
    found = block_matrix(source, "plot.coupling")
    L = len(found.names)
    is_new = ax is None
    ax = ax or new_axes((_side(L) if found.A.ndim == 2 else 4.0, _side(L)))
    if found.A.ndim == 2:
        ax.set(xlim=(0, L), ylim=(L, 0), aspect="equal")
    cell = cell_size(ax, L)
    labels = _labels(found.names, cell)
    if found.A.ndim == 1:
        _draw_scale(ax, found, labels, cell)
        if ax.get_xlim()[0] < 1 < ax.get_xlim()[1]:
            ax.axvline(1, color="0.4", linewidth=0.8)  # what a diagonal method takes it for
        ax.set_yticks(labels.at, labels.texts, fontsize=FONT)
        ax.set_xlabel("$A_{ii}$ (blocks are not coupled)", fontsize=FONT + 1)
    else:
        constant = bool((found.diagonal == 1).all())
        scale = scale and not constant
        _draw_correlation(ax, found, labels, cell)
        edge = 1 + GAP / (cell * L)
        if scale:
            strip = ax.inset_axes((edge, 0, STRIP / (cell * L), 1), sharey=ax)
            _draw_scale(strip, found, labels, cell)
            strip.tick_params(labelleft=False)
            strip.set_title("$A_{ii}$", fontsize=FONT + 1)
            edge += (STRIP + (VALUES if cell >= TEXT else 12)) / (cell * L)
        if colorbar:
            _draw_colorbar(ax, edge, BAR / (cell * L), found, constant)
    _draw_legend(ax, found, title)
    if is_new:
        make_room(ax)
    return ax


def _side(L: int) -> float:
    """The height of a new picture in inches: room for numbers if cells are few, else for names."""
    return max(2.0, 0.42 * L) if L <= 15 else min(WIDEST, max(6.0, LINE / 72 * L))


# ---------------------------------------------------------------- labels


def _labels(names: Sequence[str], cell: float) -> Labels:
    """The finest level of names (blocks, parameters, modules) that fits; if none does, as many as have room."""
    best: tuple[float, list[int], list[tuple[str, int, int]]] | None = None
    coarser: list[int] = []
    for level in _levels(names):
        runs = _runs(level)
        middles = [cell * (start + stop) / 2 for _, start, stop in runs]
        longest_first = sorted(range(len(runs)), key=lambda i, runs=runs: runs[i][1] - runs[i][2])  # type: ignore[misc]
        kept = with_room(middles, [LINE] * len(runs), longest_first)
        if best is None or (best[0] < 1 and len(kept) / len(runs) > best[0]):
            best = len(kept) / len(runs), kept, runs
        if not coarser and len(runs) < len(names):
            coarser = [start for _, start, _ in runs[1:]]
    assert best is not None
    _, kept, runs = best
    edges = [start for _, start, _ in runs[1:]] if len(runs) < len(names) else coarser
    return Labels([(runs[i][1] + runs[i][2]) / 2 for i in kept], [runs[i][0] for i in kept], edges)


def _levels(names: Sequence[str]) -> list[list[str]]:
    """Names of blocks, of their parameters, of modules and so on: 'net.0.weight[3]', 'net.0.weight', 'net.0', 'net'."""
    levels = [list(names)]
    if any("[" in name for name in names):
        levels.append([name.partition("[")[0] for name in names])
    while any("." in name for name in levels[-1]):
        levels.append([name.rpartition(".")[0] or name for name in levels[-1]])
    return levels


def _runs(values: Sequence[T]) -> list[tuple[T, int, int]]:
    """(value, first, one past the last) of every run of equal values."""
    runs, start = [], 0
    for value, same in itertools.groupby(values):
        stop = start + sum(1 for _ in same)
        runs.append((value, start, stop))
        start = stop
    return runs


# ---------------------------------------------------------------- drawing


def _draw_correlation(ax: Axes, found: BlockMatrix, labels: Labels, cell: float) -> None:
    values, L = found.correlation(), len(found.names)
    # Light grey first, dark grey above it, then the colours, which are transparent where there is no number.
    ax.set_facecolor(UNCOUPLED)
    extent = (0, L, L, 0)
    if bool(found.unknown.any()):
        ones = torch.where(found.unknown, 1.0, torch.nan).numpy()
        ax.imshow(ones, cmap="gray", vmin=0, vmax=1 / float(UNKNOWN), extent=extent, interpolation="nearest")
    # Neighbours of opposite signs would be mixed to grey, unless there are more cells than points anyway.
    interpolation = "nearest" if cell >= 1 else "auto"
    ax.imshow(values.numpy(), cmap=COLOURS, vmin=-1, vmax=1, extent=extent, interpolation=interpolation)
    if cell >= NUMBERS:
        for i, j in values.isfinite().nonzero().tolist():
            value = float(values[i, j])
            colour = "white" if abs(value) > 0.6 else "black"
            ax.text(j + 0.5, i + 0.5, _short(value), ha="center", va="center", fontsize=FONT - 0.5, color=colour)
    draw_lines(ax, labels.edges, L, color="0.15", linewidth=min(0.6, 0.1 * cell * L / (1 + len(labels.edges))))
    draw_lines(ax, [0, L], L, color="0.15", linewidth=0.8)
    ax.set_yticks(labels.at, labels.texts, fontsize=FONT)
    ax.set_xticks(labels.at, labels.texts, fontsize=FONT, rotation=90)
    ax.tick_params(length=0 if len(labels.at) == L else 2)
    ax.spines[:].set_visible(False)  # the outermost lines are drawn already


def _short(value: float) -> str:
    text = f"{value:.2f}" if abs(value) < 10 else f"{value:.0e}".replace("e+0", "e")
    return text.replace("-0.00", "0.00").replace("-", "−")


def _draw_scale(ax: Axes, found: BlockMatrix, labels: Labels, cell: float) -> None:
    """A_ii as dots next to the rows, and as numbers where there is room."""
    L, diagonal = len(found.names), found.diagonal
    middles = torch.arange(L) + 0.5
    known = ~found.no_data
    ax.set_ylim(L, 0)
    if bool(known.any()):
        decades = diagonal[known].abs().log10()
        low, high = math.floor(float(decades.min())), math.ceil(float(decades.max()))
        ax.set(xscale="log", xlim=(10.0**low / 1.5, 10.0 ** max(high, low + 1) * 1.5))
        _place_decades(ax, low, max(high, low + 1))
        for mask, colour in ((known & (diagonal > 0), POSITIVE), (known & (diagonal < 0), NEGATIVE)):
            if bool(mask.any()):
                size = min(6.0, max(1.5, 0.5 * cell))
                many = L > LARGEST  # one dot each would make an SVG of megabytes
                ax.plot(diagonal[mask].abs(), middles[mask], "o", color=colour, ms=size, clip_on=False, rasterized=many)
    else:
        ax.set_xticks([])
    for without_data, start, stop in _runs(found.no_data.tolist()):
        if without_data:
            ax.axhspan(start, stop, color=UNKNOWN, linewidth=0)
    ax.hlines(labels.edges, 0, 1, color="0.6", linewidth=0.4, transform=ax.get_yaxis_transform())
    ax.grid(axis="x", color="0.9", linewidth=0.6)
    ax.set_axisbelow(True)
    ax.tick_params(axis="y", length=0)
    ax.spines[:].set_color("0.6")
    if cell >= TEXT:
        for y, value, without_data in zip(middles.tolist(), diagonal.tolist(), found.no_data.tolist(), strict=True):
            text = "–" if without_data else f"{value:.3g}".replace("-", "−")
            ax.text(1.04, y, text, fontsize=FONT - 1, va="center", transform=ax.get_yaxis_transform())


def _place_decades(ax: Axes, low: int, high: int) -> None:
    """At most four powers of ten, all the same distance apart, and no labels between them."""
    step = max(1, -(-(high - low) // 3))
    exponents = range(high, low - 1, -step) if high - low > 3 else range(low, high + 1)
    ax.set_xticks([10.0**e for e in exponents], [f"$10^{{{e}}}$" for e in exponents], fontsize=FONT - 1)
    ax.minorticks_off()


def _draw_colorbar(ax: Axes, left: float, width: float, found: BlockMatrix, constant: bool) -> None:
    image = ax.images[-1]
    beyond = bool((found.correlation().nan_to_num(0).abs() > 1 + 1e-4).any())  # more than rounding
    negative = bool((found.diagonal[~found.no_data] < 0).any())
    inside = "|A_{ii} A_{jj}|" if negative else "A_{ii} A_{jj}"
    bar = ax.figure.colorbar(image, cax=ax.inset_axes((left, 0, width, 1)), extend="both" if beyond else "neither")
    bar.ax.tick_params(labelsize=FONT)
    meaning = rf"correlation $A_{{ij}} / \sqrt{{{inside}}}$"
    if constant:
        meaning = "$A_{ij}$, with $A_{ii}$ = 1 by definition"
    elif beyond:
        meaning += " (beyond ±1: $A$ is indefinite)"
    bar.set_label(meaning, fontsize=FONT + 1)


def _draw_legend(ax: Axes, found: BlockMatrix, title: str | None) -> None:
    """The title, and under it the meaning of the greys that occur."""
    from matplotlib.patches import Patch

    greys = []
    if bool(found.unknown.any()):
        text = "no data: $A_{ii}$ is 0 up to rounding"
        greys.append(Patch(facecolor=UNKNOWN, label=text))
    if not bool(found.coupled.all()):
        greys.append(Patch(facecolor=UNCOUPLED, edgecolor="0.6", linewidth=0.5, label="not coupled"))
    if greys:
        ax.legend(
            handles=greys,
            loc="lower left",
            bbox_to_anchor=(0, 1),
            borderaxespad=0.2,
            ncols=2,
            fontsize=FONT,
            frameon=False,
        )
    if title is not None:
        ax.set_title(title, pad=22 if greys else None)
