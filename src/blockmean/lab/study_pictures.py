"""The picture of a study: held-out loss against tokens and against processor seconds."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import TYPE_CHECKING

from matplotlib.figure import Figure

from blockmean.lab.picture import Picture, save
from blockmean.lab.spec import RunSpec
from blockmean.lab.study import Study
from blockmean.lab.study_cells import ARMS, BASELINE
from blockmean.lab.study_results import iteration_seconds, tokens_curve
from blockmean.lab.tasks import epoch_length
from blockmean.lab.tokens import CONTEXT
from blockmean.lab.train import Record

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw_cell(study: Study, name: str, path: Path) -> Picture:
    """The arms of a cell that have final runs: the course of their held-out loss, and AdamW's L(D) as dots."""
    cell, found = study.cells[name], study.findings(name)
    unit = cell.task.batch * (CONTEXT if cell.task.tokenizer else 1)
    figure = Figure(figsize=(7.2, 4.4), layout="constrained")
    figure.suptitle(f"{cell.task.title}: held-out loss", fontsize=12)
    left, right = figure.subplots(1, 2, sharey=True)
    ends, paces = [], iteration_seconds(study, name)
    for arm, records in found.final.items():
        kept = [record for record in records if record["diverged_at"] is None]
        if not kept:
            continue
        steps, losses = _course(kept)
        _line(left, [step * unit / 1e6 for step in steps], losses, arm)
        if arm in paces:
            _line(right, [step * paces[arm] for step in steps], losses, arm)
        ends.append((losses[len(losses) // 4], losses[-1]))
    curve = tokens_curve(study, name)
    if len(curve) > 1:
        dots = [steps * unit / 1e6 for steps, _ in curve], [loss for _, loss in curve]
        left.plot(*dots, "o:", color=ARMS[BASELINE].colour, fillstyle="none", label=f"{BASELINE}, own schedules")
        left.set_xscale("log", base=2)
        left.set_xlim(cell.task.steps * unit / 8e6)
        left.xaxis.set_major_formatter("{x:g}")
    if ends:
        low, high = min(end for _, end in ends), max(start for start, _ in ends)
        left.set_ylim(low - 0.08 * (high - low), high + 0.08 * (high - low))
    left.set(xlabel="million tokens" if cell.task.tokenizer else "million images", ylabel="held-out loss")
    right.set_xlabel("processor seconds, one thread")
    for ax in (left, right):
        ax.grid(alpha=0.3)
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", fontsize=9, frameon=False, ncols=3)
    said = (
        "Medians over the fresh seeds. Along the run a fixed part of the held-out data is tested; curves are shifted "
        "to end at the loss on all of it. Circles: AdamW at the end of schedules of that length."
    )
    return save(figure, path, said)


def _course(records: list[Record]) -> tuple[list[float], list[float]]:
    """Steps, and losses after every test as medians over runs."""
    every = epoch_length(RunSpec(**records[0]["spec"]))
    length = min(len(record["epochs"]) for record in records)
    steps = [every * (i + 1.0) for i in range(length)]
    losses = [statistics.median(record["epochs"][i]["test_loss"] for record in records) for i in range(length)]
    shift = statistics.median(record["test_loss"] for record in records) - losses[-1]
    return steps, [loss + shift for loss in losses]


def _line(ax: Axes, xs: list[float], ys: list[float], arm: str) -> None:
    width = 2.2 if arm in (BASELINE, "Anova") else 1.3
    ax.plot(xs, ys, color=ARMS[arm].colour, linewidth=width, label=arm)
