"""A picture of one training run, or of several beside each other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from blockmean.lab.arms import ARMS
from blockmean.lab.picture import Picture, save
from blockmean.lab.race import seconds_after, smoothed
from blockmean.lab.tasks import LOSSES
from blockmean.lab.train import Record

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = {arm.optimizer: arm.colour for arm in reversed(ARMS.values())}  # those of the race, where it has them
FURTHER = ("tab:green", "tab:orange", "tab:purple", "tab:olive", "tab:cyan", "tab:pink")
MOST_POINTS = 500


def draw_training_curves(records: Sequence[Record], path: Path) -> Picture:
    """Training loss against steps and against processor seconds; held-out loss and error after every epoch."""
    spec = records[0]["spec"]
    figure = Figure(figsize=(9.5, 7), layout="constrained")
    axes = list(figure.subplots(2, 2).flat)
    by_step, by_second, held_out, errors = axes
    free = iter(FURTHER)
    for record in records:
        name = record["spec"]["optimizer"]
        colour = COLOURS.get(name) or next(free)
        diverged = "" if record["diverged_at"] is None else f", diverged at step {record['diverged_at'] + 1}"
        label = f"{name}, lr {record['spec']['lr']:g}{diverged}"
        losses = smoothed(record)
        at = range(1, len(losses) + 1, max(1, len(losses) // MOST_POINTS))
        shown = [losses[step - 1] for step in at]
        if len(records) == 1:
            by_step.plot(at, [record["losses"][step - 1] for step in at], color=colour, alpha=0.25, linewidth=0.8)
        by_step.plot(at, shown, color=colour, label=label)
        by_second.plot([seconds_after(record, step) for step in at], shown, color=colour)
        epochs = range(1, len(record["epochs"]) + 1)
        for ax, name in ((held_out, "test_loss"), (errors, "test_error")):
            values = [math.nan if epoch[name] is None else epoch[name] for epoch in record["epochs"]]
            ax.plot(epochs, values, color=colour, marker="o", markersize=3)
    images = spec["loss"] == "cross_entropy"
    by_step.set(xlabel="step", ylabel=f"training loss ({spec['loss'].replace('_', '-')}), smoothed")
    by_second.set(xlabel="processor seconds, one thread")
    held_out.set(xlabel="epoch", ylabel="held-out loss", ylim=(0, None))
    errors.set(xlabel="epoch", ylabel=f"held-out {'error' if images else LOSSES[spec['loss']].unit}", ylim=(0, None))
    for ax in (held_out, errors):
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    if images:
        errors.yaxis.set_major_formatter(PercentFormatter(1.0))
    for ax in (by_step, by_second):
        ax.set_yscale("log")
    for ax in axes:
        _finish(ax)
    figure.suptitle(f"{spec['model']} model on {spec['dataset']}, batch {spec['batch']}, seed {spec['seed']}")
    figure.legend(loc="outside lower center", ncols=min(4, len(records)), frameon=False)
    return save(figure, path)


def _finish(ax: Axes) -> None:
    if not any(len(line.get_xdata()) for line in ax.lines):  # type: ignore[arg-type]  # a range or a list
        ax.text(0.5, 0.5, "nothing to show", ha="center", va="center", transform=ax.transAxes)
    ax.grid(alpha=0.3, which="both", linewidth=0.6)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
