"""Pictures of a race, drawn from its records: training loss against steps and against processor seconds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from blockmean.lab.arms import ARMS, BASELINE
from blockmean.lab.picture import Picture, save
from blockmean.lab.race import WINDOW, TaskResult, seconds_after, smoothed
from blockmean.lab.train import Record, time_marks

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

OVERVIEW = (BASELINE, "SOAP", "AdamBMA", "Anova")
"""The arms of the overview, which has to be readable when it is small."""
ROOM = 0.06
"""Of the height of an axis, left free below the best and above the first point that is shown."""


def draw_task(found: TaskResult, path: Path) -> Picture:
    """One task, all arms: loss against processor seconds, and against steps."""
    figure = Figure(figsize=(9, 5.4), layout="constrained")
    figure.suptitle(f"{found.task.title}: training loss, {found.task.steps} steps", fontsize=12)
    left, right = figure.subplots(1, 2, sharey=True)
    for arm in found.arms:
        _curves(left, found, arm, by_seconds=True)
        _curves(right, found, arm, by_seconds=False)
    for ax, label in ((left, "processor seconds"), (right, "step")):
        _finish(ax, found)
        ax.set_xlabel(label)
    left.set_ylabel("training loss, trailing mean")
    # Far apart in speed: AdamW's whole run would be a sliver beside a run of ten times its seconds.
    if _spread(found) > 8:
        left.set_xscale("log")
        left.set_xlabel("processor seconds (log scale)")
    right.margins(x=0.01)
    handles, labels = right.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, fontsize=9, frameon=False)
    return save(figure, path, _caption(found))


def draw_overview(found: Sequence[TaskResult], path: Path) -> Picture:
    """Loss against processor seconds for a few arms, one small panel per task; two in a row fit a phone."""
    shown = [one for one in found if any(arm in one.arms for arm in OVERVIEW)]
    rows = math.ceil(len(shown) / 2)
    figure = Figure(figsize=(5.4, 1.65 * rows + 0.4), layout="constrained")
    axes = figure.subplots(rows, 2, squeeze=False).flatten()
    entries: dict[str, Artist] = {}
    for ax, one in zip(axes, shown, strict=False):
        for arm in OVERVIEW:
            if arm in one.arms:
                _curves(ax, one, arm, by_seconds=True)
        _finish(ax, one, OVERVIEW)
        _log_seconds(ax)
        ax.set_title(one.task.title, fontsize=9)
        ax.tick_params(labelsize=8)
        entries |= dict(zip(*reversed(ax.get_legend_handles_labels()), strict=True))
    spare = axes[len(shown) :]
    for ax in spare:
        ax.set_axis_off()
    if len(spare):
        spare[0].legend(list(entries.values()), list(entries), loc="center", fontsize=11, frameon=False)
    else:
        figure.legend(
            list(entries.values()), list(entries), loc="outside upper center", ncols=3, fontsize=10, frameon=False
        )
    figure.supxlabel("processor seconds, one thread (log scale)", fontsize=10)
    figure.supylabel("training loss", fontsize=10)
    missing = [arm for arm in OVERVIEW if arm not in entries]
    caption = "Training loss against processor seconds, on a log scale; thin lines are seeds, thick ones their median."
    return save(figure, path, caption + (f" No runs of {', '.join(missing)} yet." if missing else ""))


def _curves(ax: Axes, found: TaskResult, arm: str, by_seconds: bool) -> None:
    """A thin line per seed, and a thick one through the medians at every second percent of the steps."""
    records = found.findings.results[arm]
    lines = [_points(record, by_seconds) for record in records]
    colour = ARMS[arm].colour
    for xs, ys in lines:  # every third point and the last: dozens of lines make a large file
        ax.plot(xs[::-3], ys[::-3], color=colour, linewidth=0.6, alpha=0.45, zorder=2)
    thick: dict[str, Any] = {"color": colour, "linewidth": 2.0, "label": arm, "zorder": 3}
    if ARMS[arm].control:  # it lies on another line
        thick |= {"linestyle": (0, (4, 2)), "linewidth": 1.4}
    length = min(len(xs) for xs, _ in lines)  # a run that diverged is shorter
    xs = [statistics.median(line[0][i] for line in lines) for i in range(length)]
    ys = [statistics.median(line[1][i] for line in lines) for i in range(length)]
    ax.plot(xs, ys, **thick)


def _points(record: Record, by_seconds: bool) -> tuple[list[float], list[float]]:
    """Smoothed losses at every second percent of the steps, from the first full window on."""
    losses = smoothed(record)
    steps = record["spec"]["steps"]
    at = [mark for mark in time_marks(steps)[::-2][::-1] if max(1, steps // WINDOW) <= mark <= len(losses)]
    return [seconds_after(record, mark) if by_seconds else mark for mark in at], [losses[mark - 1] for mark in at]


def _spread(found: TaskResult) -> float:
    """How many times longer the slowest arm takes than the fastest."""
    seconds = [max(statistics.median(result.total_seconds), 1e-9) for result in found.arms.values()]
    return max(seconds) / min(seconds) if seconds else 1.0


def _log_seconds(ax: Axes) -> None:
    """Equal distances are equal factors, from the first point that is in sight; the arms differ by up to ten times."""
    top = ax.get_ylim()[1]
    lines = [line.get_xydata() for line in ax.lines if line.get_label() != "target"]
    seen = [x for line in lines for x, y in np.asarray(line) if y <= top]
    ax.set_xscale("log")
    if seen:
        ax.set_xlim(left=0.9 * min(seen))
    ax.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    ax.xaxis.set_major_formatter("{x:g}")
    ax.xaxis.set_minor_formatter(NullFormatter())


def _finish(ax: Axes, found: TaskResult, arms: Sequence[str] | None = None) -> None:
    """The target as a line, and limits that show what happens after the first steps."""
    if found.target is not None:
        ax.axhline(found.target, color="0.2", linewidth=0.9, linestyle=":", zorder=1, label="target")
    chosen = [records for arm, records in found.findings.results.items() if arms is None or arm in arms]
    losses = [_points(record, False)[1] for records in chosen for record in records]
    losses = [line for line in losses if line]
    if losses:
        low = min(map(min, losses))
        # From where the typical run is after a tenth of its steps: the first fall would flatten all that follows.
        high = statistics.median(line[len(line) // 10] for line in losses)
        high = max(high, found.target or high)
        room = ROOM * (high - low) or 1.0
        ax.set_ylim(low - room, high + room)
    ax.grid(alpha=0.3, linewidth=0.6)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)


def _caption(found: TaskResult) -> str:
    caption = (
        "Thin: each seed, smoothed over a trailing twentieth of the steps; thick: the median. Dotted: the target, the "
        "mean final loss of AdamW's best rate with three other seeds."
    )
    return caption + (f" Not run yet: {', '.join(found.missing)}." if found.missing else "")
