"""The records of one matrix between blocks over training, and their picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from blockmean.optim import BlockStatistics
from blockmean.plot._axes import FONT, require_pyplot
from blockmean.plot._block_matrix import ZERO

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_LINES = 10
"""The most lines whose colours are distinct."""


@dataclass
class CouplingHistory:
    """One matrix of an optimizer over the recorded steps."""

    group: int
    coupling: str
    names: list[str]
    sizes: list[int]
    steps: list[int] = field(default_factory=list)
    condition: list[float | None] = field(default_factory=list)
    correction_share: list[float | None] = field(default_factory=list)
    diagonal: list[Tensor] = field(default_factory=list)  # of A, (L,) in float32 each

    def add(self, step: int, statistics: BlockStatistics) -> None:
        self.steps.append(step)
        self.condition.append(_finite(statistics.condition))
        self.correction_share.append(_finite(statistics.correction_share))
        self.diagonal.append(statistics.diagonal.detach().to("cpu", torch.float32))

    def thin(self) -> None:
        """Forget every second record; the first one stays."""
        for column in (self.steps, self.condition, self.correction_share, self.diagonal):
            del column[1::2]

    def as_dict(self) -> dict[str, Any]:
        """In plain values that strict JSON can hold; a number that is not finite is None."""
        diagonal = [[_finite(v) for v in values.tolist()] for values in self.diagonal]
        return {**vars(self), "diagonal": diagonal}


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def draw_histories(histories: Sequence[CouplingHistory]) -> Figure:
    """A_ii, the condition of A and the share of the correction over the steps, one panel each.

    For variants with A_ii = 1 by definition the first is left out.
    """
    plt = require_pyplot()
    figure: Figure
    unit = all(bool((values == 1).all()) for history in histories for values in history.diagonal)
    heights = (1, 1) if unit else (2, 1, 1)
    figure, axes = plt.subplots(
        len(heights), sharex=True, figsize=(8, 2 * sum(heights)), layout="constrained", height_ratios=heights
    )
    if not unit:
        _draw_blocks(axes[0], histories)
        axes[0].set(yscale="log", ylabel="$A_{ii}$")
    names = [_name(history, histories) for history in histories]
    condition, share = axes[-2:]
    for ax, values in (
        (condition, [history.condition for history in histories]),
        (share, [history.correction_share for history in histories]),
    ):
        _draw_lines(ax, [history.steps for history in histories], values, names, thin="other matrices")
    largest = max((v for history in histories for v in history.condition if v is not None), default=1.0)
    condition.set(yscale="log" if largest > 10 else "linear", ylabel="condition of $A$")
    condition.set_ylim(*(None, None) if largest > 10 else (1.0, max(1.05 * largest, 1.1)))
    if any(None in history.condition for history in histories):
        condition.set_title("gaps: $A$ is singular", fontsize=FONT, loc="right")
    share.set(ylabel="share of correction", xlabel="step")
    for ax in axes:
        ax.grid(color="0.9", linewidth=0.6)
        ax.set_axisbelow(True)
        ax.margins(x=0.02)
    share.set_ylim(0, 1.05 * max((v for history in histories for v in history.correction_share if v), default=1.0))
    return figure


def _name(history: CouplingHistory, histories: Sequence[CouplingHistory]) -> str:
    several = len({other.group for other in histories}) > 1
    return f"group {history.group}: {history.coupling}" if several else history.coupling


def _draw_blocks(ax: Axes, histories: Sequence[CouplingHistory]) -> None:
    """A_ii of all blocks: a line each if they are few, else the most interesting ones and the range of all."""
    several = len({history.group for history in histories}) > 1
    steps: list[list[int]] = []
    lines: list[Tensor] = []
    names: list[str] = []
    for history in histories:
        values = torch.stack([nonzero_diagonal(diagonal) for diagonal in history.diagonal])  # (records, L)
        for i in values.isfinite().any(0).nonzero().flatten().tolist():
            steps.append(history.steps)
            lines.append(values[:, i])
            names.append(f"group {history.group}: {history.names[i]}" if several else history.names[i])
    interesting = _of_interest(lines)
    if len(interesting) < len(lines):
        _draw_ranges(ax, histories)
    for i in interesting:
        ax.plot(steps[i], lines[i], marker=".", ms=4, linewidth=1.2, label=names[i])
    _legend(ax, len(lines) - len(interesting), "further blocks\n(all grey, middle half darker)")
    left_out = sum(len(history.names) for history in histories) - len(lines)
    if left_out:
        note = f"left out: {left_out:,} block{'s' if left_out > 1 else ''} whose $A_{{ii}}$ is 0 up to rounding"
        ax.set_title(note, fontsize=FONT, loc="right")


def nonzero_diagonal(diagonal: Tensor) -> Tensor:
    """A_ii, or NaN where it is 0 up to rounding or not finite."""
    return diagonal.where(diagonal.isfinite() & (diagonal > ZERO * diagonal.nan_to_num(0, 0, 0).max()), torch.nan)


def _draw_ranges(ax: Axes, histories: Sequence[CouplingHistory]) -> None:
    """The range of all A_ii at every step, and of their middle half."""
    at: dict[int, list[Tensor]] = {}
    for history in histories:
        for step, values in zip(history.steps, history.diagonal, strict=True):
            at.setdefault(step, []).append(nonzero_diagonal(values))
    edges = torch.tensor([0.0, 0.25, 0.75, 1.0])
    steps = sorted(at)
    spans = torch.stack([torch.cat(at[step]).nanquantile(edges) for step in steps])
    for low, high, alpha in ((0, 3, 0.15), (1, 2, 0.25)):
        ax.fill_between(steps, spans[:, low], spans[:, high], color="0.3", alpha=alpha, linewidth=0)


def _of_interest(lines: Sequence[Tensor]) -> list[int]:
    """All lines if they are few; else those that end highest, and those that changed most."""
    if len(lines) <= MOST_LINES:
        return list(range(len(lines)))
    logs = [line[line.isfinite()].log() for line in lines]
    last = {i: float(log[-1]) for i, log in enumerate(logs) if len(log)}
    change = {i: abs(float(log[-1] - log[0])) for i, log in enumerate(logs) if len(log)}
    chosen = sorted(last, key=last.__getitem__, reverse=True)[: MOST_LINES // 2]
    left = sorted(change.keys() - set(chosen), key=lambda i: (-change[i], i))
    return [*chosen, *left[: MOST_LINES - len(chosen)]]


def _draw_lines(
    ax: Axes, steps: Sequence[list[int]], values: Sequence[list[float | None]], names: Sequence[str], thin: str
) -> None:
    """One line per matrix; if there are many, the highest in colours and the others in grey."""
    heights = [max((v for v in line if v is not None), default=-math.inf) for line in values]
    chosen = sorted(range(len(names)), key=heights.__getitem__, reverse=True)[:MOST_LINES]
    for i, (x, line) in enumerate(zip(steps, values, strict=True)):
        y = [math.nan if v is None else v for v in line]
        if i in chosen:
            ax.plot(x, y, marker=".", ms=4, linewidth=1.2, label=names[i], zorder=3)
        else:
            ax.plot(x, y, color="0.7", linewidth=0.6)
    if len(names) > 1:
        _legend(ax, len(names) - len(chosen), thin)


def _legend(ax: Axes, left_out: int, what: str) -> None:
    title = f"{left_out:,} {what}" if left_out else None
    ax.legend(
        loc="upper left", bbox_to_anchor=(1.01, 1), fontsize=FONT, title=title, title_fontsize=FONT, frameon=False
    )
