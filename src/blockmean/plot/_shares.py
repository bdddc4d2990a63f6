"""How much of every gradient is means, and of which kind: one bar per matrix."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from blockmean._checks import require
from blockmean.optim import Anova, MeanStatistics
from blockmean.optim.base import BaseOptimizer
from blockmean.optim.inspection import PART_NAMES, Parts, unwrap
from blockmean.plot._axes import FONT, LINE, cell_size, make_room, new_axes, with_room

if TYPE_CHECKING:
    from matplotlib.axes import Axes

OWNER = "plot.shares"
COLOURS = ("#0b2d5c", "#d55e00", "#7cc3ee", "#e4e4e4")
"""Of the four parts, from dark to light: distinct for every kind of colour vision, and in grey."""

WIDTH, TALLEST = 5.8, 9.0  # inches; WIDTH is that of the legend in one line
ROW, LEAST, THICKEST = 1.5 * LINE, 7.0, 16.0  # points: a row of a new picture, the least that is readable, a bar
FEW = 8  # rows that say too little about a model with hundreds of matrices


class Row(NamedTuple):
    """A matrix, or all matrices of a module."""

    name: str
    shares: Parts
    chance: float  # of all means


def shares(
    source: Anova | MeanStatistics | Sequence[MeanStatistics], ax: Axes | None = None, title: str | None = None
) -> Axes:
    """Draw which part of every gradient is grand means, means per unit, means per input and remainder.

    One bar per matrix, in the order of the model. The number at its right is the share of all means together. The black
    mark shows where they would end by chance, in a gradient of independent noise. If there are more matrices than rows
    have room, the bars are those of modules: averages over their matrices, weighted by entries.

    Args:
        source: an `Anova` (or a wrapper that holds one as `optimizer`), its `block_statistics()`, or entries of them.
        ax: where to draw; the legend lies above. By default, a new figure of a fitting size.
        title: above the legend.

    >>> import torch
    >>> layer = torch.nn.Linear(12, 10)
    >>> optimizer = Anova(layer.named_parameters())
    >>> layer(torch.ones(12)).sum().backward()
    >>> optimizer.step()
    >>> [label.get_text() for label in shares(optimizer).get_yticklabels()]
    ['weight']
    """
    found = _statistics(source)
    is_new = ax is None
    room = 72 * TALLEST if ax is None else cell_size(ax, 1)
    all_rows = _rows(found, most=int(room / LEAST))
    every = max(1, math.ceil(len(all_rows) * LEAST / room))
    rows = all_rows[::every]
    ax = ax or new_axes((WIDTH, min(room, ROW * len(rows)) / 72))
    ax.set(xlim=(0, 1), ylim=(len(rows), 0))
    height = cell_size(ax, len(rows))
    _draw_bars(ax, rows, height)
    middles = [i + 0.5 for i in range(len(rows))]
    kept = with_room([height * y for y in middles], [LINE] * len(rows), range(len(rows)))
    ax.set_yticks([middles[i] for i in kept], [rows[i].name for i in kept], fontsize=FONT)
    for i in kept:
        text = "no gradient" if math.isnan(rows[i].shares.means) else f"{rows[i].shares.means:.0%}"
        ax.text(1.015, middles[i], text, fontsize=FONT, va="center", transform=ax.get_yaxis_transform())
    ax.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0%", "25%", "50%", "75%", "100%"], fontsize=FONT)
    note = f" (one in {every} of {len(all_rows):,} rows)" if every > 1 else ""
    ax.set_xlabel(f"share of the gradient's energy{note}", fontsize=FONT + 1)
    ax.tick_params(axis="y", length=0)
    ax.spines[["top", "right", "left"]].set_visible(False)
    _draw_legend(ax, title, lines=1 if is_new else 3)  # a layout may still make given axes narrower
    if is_new:
        ax.text(1.015, 1.0, "means", fontsize=FONT, va="bottom", transform=ax.transAxes)
        make_room(ax)
    return ax


def _statistics(source: Anova | MeanStatistics | Sequence[MeanStatistics]) -> list[MeanStatistics]:
    found = unwrap(source)
    if isinstance(found, BaseOptimizer):
        if not isinstance(found, Anova):
            raise TypeError(
                f"{OWNER} draws the means of Anova, and {type(found).__name__} has matrices between blocks instead. "
                "plot.coupling(optimizer) draws them."
            )
        found = found.block_statistics()
        if not found:
            raise ValueError(f"{OWNER}: no matrix has means yet. Take a step first, with means='auto'.")
    elif isinstance(found, MeanStatistics):
        found = [found]
    known = isinstance(found, Sequence) and bool(found) and all(isinstance(s, MeanStatistics) for s in found)
    shown = found if isinstance(found, Sequence) else type(found)
    require(known, "source", OWNER, "an Anova or its block_statistics()", shown, TypeError)
    return list(found)


def _rows(found: Sequence[MeanStatistics], most: int) -> list[Row]:
    """One row per matrix if they fit, else per module, as deep as fits, unless only a few modules are left then."""
    several = len({statistics.group for statistics in found}) > 1
    names = [f"group {s.group}: {s.parameter}" if several else s.parameter for s in found]
    rows = [_row(name, [statistics]) for name, statistics in zip(names, found, strict=True)]
    for depth in range(max(name.count(".") for name in names), 0, -1):
        if len(rows) <= most:
            break
        modules = [".".join(name.split(".")[:depth]) for name in names]
        runs = [list(run) for _, run in itertools.groupby(range(len(names)), modules.__getitem__)]
        if len(runs) < FEW:
            break
        rows = [_row(modules[run[0]] if run[1:] else names[run[0]], [found[i] for i in run]) for run in runs]
    return rows


def _row(name: str, found: Sequence[MeanStatistics]) -> Row:
    """The averages of matrices, weighted by entries; without a gradient they count for chance alone."""
    live = [s for s in found if not math.isnan(s.shares.means)]
    parts = (_average([s.shares[i] for s in live], live) for i in range(len(PART_NAMES)))
    chance = _average([s.chance.means for s in found], found)
    return Row(name if len(found) == 1 else f"{name} ({len(found)} matrices)", Parts(*parts), chance)


def _average(values: Sequence[float], of: Sequence[MeanStatistics]) -> float:
    return sum(s.entries * x for s, x in zip(of, values, strict=True)) / sum(s.entries for s in of) if of else math.nan


def _draw_bars(ax: Axes, rows: Sequence[Row], height: float) -> None:
    """The four parts from left to right, and the mark of chance."""
    thick = min(0.72, THICKEST / height)
    middles = [i + 0.5 for i in range(len(rows))]
    left = [0.0] * len(rows)
    for part, colour in enumerate(COLOURS):
        widths = [0.0 if math.isnan(row.shares[part]) else row.shares[part] for row in rows]
        ax.barh(middles, widths, thick, left, color=colour, label=PART_NAMES[part], edgecolor="white", linewidth=0.4)
        left = [x + width for x, width in zip(left, widths, strict=True)]
    top, bottom = ([y + sign * 0.65 * thick for y in middles] for sign in (-1, 1))
    for width, colour in ((2.6, "white"), (1.1, "black")):
        ax.vlines([row.chance for row in rows], top, bottom, color=colour, linewidth=width, clip_on=False, zorder=3)


def _draw_legend(ax: Axes, title: str | None, lines: int) -> None:
    from matplotlib.lines import Line2D

    handles, labels = ax.get_legend_handles_labels()
    handles.append(Line2D([], [], color="black", marker="|", linestyle="none", markersize=8, markeredgewidth=1.1))
    ax.legend(
        handles,
        [*labels, "means by chance"],
        loc="lower left",
        bbox_to_anchor=(0, 1),
        borderaxespad=0.3,
        borderpad=0,
        ncols=-(-5 // lines),
        fontsize=FONT,
        frameon=False,
        handlelength=1.2,
        handletextpad=0.5,
        columnspacing=1.2,
    )
    if title is not None:
        ax.set_title(title, pad=(1.25 * lines) * LINE + 8)
