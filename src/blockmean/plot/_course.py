"""What a recorder has seen of one matrix between blocks, and the picture of its course."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from blockmean.optim import BlockStatistics
from blockmean.plot._axes import FONT, require_pyplot
from blockmean.plot._between import SILENT

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_LINES = 10
"""Lines that can be told apart by their colours."""


@dataclass
class Course:
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
        self.condition.append(statistics.condition if math.isfinite(statistics.condition) else None)
        self.correction_share.append(statistics.correction_share)
        self.diagonal.append(statistics.diagonal.detach().to("cpu", torch.float32))

    def thin(self) -> None:
        """Forget every second record; the first one stays."""
        for column in (self.steps, self.condition, self.correction_share, self.diagonal):
            del column[1::2]

    def as_dict(self) -> dict[str, Any]:
        """In plain values, as JSON has them; a condition that is infinite is None."""
        return {**vars(self), "diagonal": [values.tolist() for values in self.diagonal]}


def draw_courses(courses: Sequence[Course]) -> Figure:
    """A_ii, the condition of A and the share of the correction over the steps, one panel each.

    Variants that have A_ii = 1 by definition do without the first.
    """
    plt = require_pyplot()
    figure: Figure
    unit = all(bool((values == 1).all()) for course in courses for values in course.diagonal)
    heights = (1, 1) if unit else (2, 1, 1)
    figure, axes = plt.subplots(
        len(heights), sharex=True, figsize=(8, 2 * sum(heights)), layout="constrained", height_ratios=heights
    )
    if not unit:
        _draw_blocks(axes[0], courses)
        axes[0].set(yscale="log", ylabel="$A_{ii}$")
    names = [_name(course, courses) for course in courses]
    condition, share = axes[-2:]
    for ax, values in (
        (condition, [course.condition for course in courses]),
        (share, [course.correction_share for course in courses]),
    ):
        _draw_lines(ax, [course.steps for course in courses], values, names, thin="other matrices")
    largest = max((v for course in courses for v in course.condition if v is not None), default=1.0)
    condition.set(yscale="log" if largest > 10 else "linear", ylabel="condition of $A$")
    condition.set_ylim(*(None, None) if largest > 10 else (1.0, max(1.05 * largest, 1.1)))
    if any(None in course.condition for course in courses):
        condition.set_title("gaps: $A$ is singular", fontsize=FONT, loc="right")
    share.set(ylabel="share of correction", xlabel="step")
    for ax in axes:
        ax.grid(color="0.9", linewidth=0.6)
        ax.set_axisbelow(True)
        ax.margins(x=0.02)
    share.set_ylim(0, 1.05 * max((v for course in courses for v in course.correction_share if v), default=1.0))
    return figure


def _name(course: Course, courses: Sequence[Course]) -> str:
    several = len({other.group for other in courses}) > 1
    return f"group {course.group}: {course.coupling}" if several else course.coupling


def _draw_blocks(ax: Axes, courses: Sequence[Course]) -> None:
    """A_ii of all blocks: a line each where they are few, else those of interest before the range of all."""
    several = len({course.group for course in courses}) > 1
    steps: list[list[int]] = []
    lines: list[Tensor] = []
    names: list[str] = []
    for course in courses:
        values = torch.stack([_heard(diagonal) for diagonal in course.diagonal])  # (records, L)
        for i in values.isfinite().any(0).nonzero().flatten().tolist():
            steps.append(course.steps)
            lines.append(values[:, i])
            names.append(f"group {course.group}: {course.names[i]}" if several else course.names[i])
    interesting = _of_interest(lines)
    if len(interesting) < len(lines):
        _draw_ranges(ax, courses)
    for i in interesting:
        ax.plot(steps[i], lines[i], marker=".", ms=4, linewidth=1.2, label=names[i])
    _legend(ax, len(lines) - len(interesting), "further blocks\n(all grey, middle half darker)")
    silent = sum(len(course.names) for course in courses) - len(lines)
    if silent:
        note = f"left out: {silent:,} block{'s' if silent > 1 else ''} whose $A_{{ii}}$ is 0 up to rounding"
        ax.set_title(note, fontsize=FONT, loc="right")


def _heard(diagonal: Tensor) -> Tensor:
    """A_ii, or NaN where it is 0 up to rounding."""
    return diagonal.where(diagonal > SILENT * diagonal.max(), torch.nan)


def _draw_ranges(ax: Axes, courses: Sequence[Course]) -> None:
    """The range of all A_ii at every step, and of their middle half."""
    at: dict[int, list[Tensor]] = {}
    for course in courses:
        for step, values in zip(course.steps, course.diagonal, strict=True):
            at.setdefault(step, []).append(_heard(values))
    edges = torch.tensor([0.0, 0.25, 0.75, 1.0])
    steps = sorted(at)
    spans = torch.stack([torch.cat(at[step]).nanquantile(edges) for step in steps])
    for low, high, alpha in ((0, 3, 0.15), (1, 2, 0.25)):
        ax.fill_between(steps, spans[:, low], spans[:, high], color="0.3", alpha=alpha, linewidth=0)


def _of_interest(lines: Sequence[Tensor]) -> list[int]:
    """All lines where they are few; else those that end highest, and those that changed most."""
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
    """One line per matrix; where there are many, the highest in colours and the others grey."""
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
