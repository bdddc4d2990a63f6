"""A picture of one training run."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from blockmean.lab.picture import Picture, save

SMOOTH = 50
"""The most steps that the loss is averaged over: single batches are too noisy to read."""


def draw_training_curve(record: dict[str, Any], losses: list[float], path: Path) -> Picture:
    """Loss per step and test error per epoch."""
    spec = record["spec"]
    figure = Figure(figsize=(9.5, 3.4), layout="constrained")
    diverged = "" if record["diverged_at"] is None else f" – diverged at step {record['diverged_at'] + 1}"
    task = f"{spec['model']} model on {spec['dataset']}"
    figure.suptitle(f"{spec['optimizer']}, learning rate {spec['lr']:g}: {task}{diverged}")
    left, right = figure.subplots(1, 2)
    steps = range(1, len(losses) + 1)
    left.plot(steps, losses, color="tab:blue", alpha=0.25, linewidth=0.8, label="each batch")
    window = max(1, min(SMOOTH, len(losses) // 10))
    left.plot(steps, _smooth(losses, window), color="tab:blue", label=f"mean of the last {window}")
    left.set(xlabel="step", ylabel="training loss (cross-entropy)", ylim=(0, None))
    left.legend(fontsize=8)
    errors = [epoch["test_error"] for epoch in record["epochs"]]
    right.plot(range(1, len(errors) + 1), errors, color="tab:red", marker="o", markersize=3)
    right.set(xlabel="epoch", ylabel="test error", xlim=(0.5, max(1, len(errors)) + 0.5), ylim=(0, None))
    if not errors:
        right.text(0.5, 0.5, "no epoch was completed", ha="center", va="center", transform=right.transAxes)
    right.xaxis.set_major_locator(MaxNLocator(integer=True))
    right.yaxis.set_major_formatter(PercentFormatter(1.0))
    for ax in (left, right):
        ax.grid(alpha=0.3)
    return save(figure, path)


def _smooth(losses: list[float], window: int) -> list[float]:
    """The mean of the last `window` losses at every step."""
    sums = list(accumulate(losses, initial=0.0))
    return [(sums[i] - sums[max(0, i - window)]) / min(i, window) for i in range(1, len(sums))]
