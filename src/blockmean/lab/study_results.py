"""What the records of a study say: tables, AdamW's loss as a function of tokens, and what is missing."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
from scipy.interpolate import PchipInterpolator

from blockmean.lab.compare import Table, differences, format_number, interval, p_value
from blockmean.lab.race import held_out_loss
from blockmean.lab.study import Findings, Study
from blockmean.lab.study_cells import AXES, BASELINE, Cell
from blockmean.lab.study_search import at_edge
from blockmean.lab.train import Record

Curve = list[tuple[float, float]]
"""(steps, mean held-out loss) of AdamW, fewer steps first."""


def tokens_curve(study: Study, name: str) -> Curve:
    """AdamW's loss L(D): of runs that each finished their own schedule, with the cell's steps and multiples of them."""
    cell, found = study.cells[name], study.findings(name)
    points = {round(times * cell.task.steps): records for times, records in found.curve.items()}
    points[cell.task.steps] = found.final.get(BASELINE, [])
    if cell.longer in study.cells:
        points[study.cells[cell.longer].task.steps] = study.findings(cell.longer).final.get(BASELINE, [])
    means = {steps: statistics.mean(map(held_out_loss, records)) for steps, records in points.items() if records}
    return sorted((float(steps), loss) for steps, loss in means.items() if math.isfinite(loss))


def equivalent_steps(curve: Curve, loss: float) -> float:
    """The steps after which AdamW has a loss, by monotone cubic interpolation in the logarithm of the steps.

    Straight lines would lie above a convex curve, and so overstate what AdamW needs. Zero where the loss is above all
    of the curve, infinite where it is below: the curve does not go that far.
    """
    falling = [point for i, point in enumerate(curve) if all(point[1] < loss for _, loss in curve[:i])]
    if not falling or loss > falling[0][1]:
        return 0.0
    if loss <= falling[-1][1]:
        return falling[-1][0] if loss == falling[-1][1] else math.inf
    steps, losses = zip(*reversed(falling), strict=True)
    return float(np.exp(PchipInterpolator(losses, np.log(steps))(loss)))


class Saving(NamedTuple):
    """A cost as a part of AdamW's for the same loss, and its ends where the paired difference has its 95% interval.

    Zero where AdamW's curve ends before it has that loss, infinite where the loss is above all of it.
    """

    ratio: float
    low: float
    high: float
    bounds: tuple[float, float]
    """The smallest and largest ratio that the curve can tell."""

    def __str__(self) -> str:
        ends = "–".join(map(self._text, (self.low, self.high)))
        return f"{self._text(self.ratio)} ({ends})" if self.low < self.high else self._text(self.ratio)

    def _text(self, value: float) -> str:
        if value == 0:
            return f"< {self.bounds[0]:.2f}"
        return f"> {self.bounds[1]:.2f}" if math.isinf(value) else f"{value:.2f}"


def saved(curve: Curve, ours: Sequence[Record], theirs: Sequence[Record], iteration: float = 1.0) -> Saving | None:
    """Tokens of runs as a part of those that AdamW needs for their mean loss; times `iteration`, a ratio, seconds.

    AdamW's loss plus the paired difference is looked up on its curve. Needs a curve of two points at least.
    """
    gained = differences(ours, theirs, held_out_loss)
    if len(curve) < 2 or not gained or not all(map(math.isfinite, gained)):
        return None
    steps, their_loss = ours[0]["spec"]["steps"], statistics.mean(map(held_out_loss, theirs))
    half = found.half_width if (found := interval(gained)) else 0.0
    needed = [equivalent_steps(curve, their_loss + statistics.mean(gained) + shift) for shift in (0.0, -half, half)]
    ratio, low, high = (iteration * steps / its if its else math.inf for its in needed)
    return Saving(ratio, low, high, (iteration * steps / curve[-1][0], iteration * steps / curve[0][0]))


def iteration_ratio(study: Study, name: str, arm: str) -> float | None:
    """Processor time of an iteration over AdamW's: of the short runs for times, or else of the final ones.

    Forward and backward pass are the same code in all arms, so that their time is the median over all runs: what
    differs between arms there is noise, and more than what most optimizers take.
    """
    for records in (study.times(name), study.findings(name).final):
        if arm in records and BASELINE in records:
            rest = statistics.median(
                _pace(record, "seconds") - _pace(record, "step_seconds") for record in chain(*records.values())
            )
            mine, its = (statistics.median(_pace(r, "step_seconds") for r in records[one]) for one in (arm, BASELINE))
            return (rest + mine) / (rest + its)
    return None


def _pace(record: Record, what: str) -> float:
    """Seconds of a step."""
    return float(record[what] / max(1, record["spec"]["steps"]))


def results_table(study: Study, name: str) -> Table:
    """The arms of a cell with final runs, the smallest held-out loss first."""
    cell, found = study.cells[name], study.findings(name)
    theirs, curve = found.final.get(BASELINE, []), tokens_curve(study, name)
    images = not cell.task.tokenizer
    rows = []
    for arm in sorted(found.final, key=lambda arm: statistics.mean(map(held_out_loss, found.final[arm]))):
        ours, seeds = found.final[arm], cell.seeds
        losses = list(map(held_out_loss, ours))
        gained = differences(ours, theirs, held_out_loss) if arm != BASELINE else []
        iteration = iteration_ratio(study, name, arm) if arm != BASELINE else None
        timed = study.times(name).get(arm, ours)
        error = [f"{statistics.mean(record['test_error'] for record in ours):.2%}"] if images else []
        rows.append(
            [
                arm,
                f"{len(ours)} of {seeds}" if len(ours) < seeds else str(seeds),
                format_number(statistics.mean(losses), ".4f"),
                f"{statistics.stdev(losses):.4f}" if len(losses) > 1 and all(map(math.isfinite, losses)) else "–",
                *error,
                str(interval(gained) or "–"),
                f"{p:.2g}" if (p := p_value(gained)) is not None else "–",
                str(saved(curve, ours, theirs) or "–") if arm != BASELINE else "–",
                str(saved(curve, ours, theirs, iteration) or "–") if iteration else "–",
                f"{iteration:.3f}" if iteration else "–",
                f"{statistics.median(r['step_seconds'] / r['seconds'] for r in timed):.1%}",
                f"{ours[-1]['state_bytes'] / ours[-1]['parameters']:.1f}",
            ]
        )
    header = [
        "optimizer",
        "seeds",
        "held-out loss",
        "σ",
        *(["test error"] if images else []),
        "− AdamW's",
        "p",
        "tokens × AdamW's" if not images else "steps × AdamW's",
        "seconds × AdamW's",
        "iteration × AdamW's",
        "optimizer's share",
        "bytes/param",
    ]
    return Table(cell.task.title, header, rows)


def settings_table(study: Study, name: str) -> Table:
    """The best settings of every arm, and what it took to find them."""
    cell, found = study.cells[name], study.findings(name)
    rows = []
    for arm, search in found.searches.items():
        if not search.tried:  # none yet, or the settings are those of another cell
            continue
        edges = at_edge(search.best, study.axes(name, arm))
        state = f"{len(search.tried)} of {cell.budget(arm)}"
        if cell.baseline_seeds > 1 and arm == BASELINE:
            state += f", {cell.baseline_seeds} seeds each"
        if search.wanted is not None:
            state += ", under way"
        else:
            state += ", converged" if search.converged else ", budget spent"
        rows.append(
            [
                arm,
                *(f"{value:g}" for value in search.best),
                state + (f"; edge: {', '.join(edges)}" if edges else ""),
                format_number(search.loss, ".4f"),
            ]
        )
    header = ["optimizer", *(axis.name for axis in AXES), "points", "training loss" if cell.task.tokenizer else "loss"]
    return Table(f"{cell.task.title}: settings", header, rows)


def sensitivity_table(study: Study, name: str) -> Table:
    """What the settings beside the best ones cost: their loss minus the best one."""
    found = study.findings(name)
    rows = []
    for arm, search in found.searches.items():
        if not search.tried or not math.isfinite(search.loss):
            continue
        cells = []
        for i in range(len(AXES)):
            others = {
                point[i]: loss
                for point, loss in search.tried.items()
                if point[:i] == search.best[:i] and point[i + 1 :] == search.best[i + 1 :] and point != search.best
            }
            cells.append(", ".join(f"{x:g}: {_signed(y - search.loss)}" for x, y in sorted(others.items())) or "–")
        rows.append([arm, *cells])
    return Table(f"{study.cells[name].task.title}: sensitivity", ["optimizer", *(axis.name for axis in AXES)], rows)


def _signed(value: float) -> str:
    return "diverged" if math.isinf(value) else f"{value:+.3f}".replace("-", "−")


def curve_table(study: Study, name: str) -> Table:
    """AdamW's loss with fewer and more tokens."""
    cell = study.cells[name]
    rows = [
        [f"{steps / cell.task.steps:g}", f"{steps:.0f}", f"{loss:.4f}"] for steps, loss in tokens_curve(study, name)
    ]
    return Table(f"{cell.task.title}: AdamW's L(D)", ["× the tokens", "steps", "held-out loss"], rows)


def rates_table(study: Study, name: str) -> Table:
    """A cell with given rates: the mean held-out loss of every arm at every rate."""
    cell, found = study.cells[name], study.findings(name)
    rows = [
        [
            arm,
            *(format_number(statistics.mean(map(held_out_loss, own)), ".4f") if own else "–" for own in rates.values()),
        ]
        for arm, rates in found.rates.items()
        if any(rates.values())
    ]
    return Table(cell.task.title, ["optimizer, lr", *(f"{rate:g}" for rate in cell.rates)], rows)


def ablations_table(study: Study, name: str) -> Table:
    """Anova with other options, seed by seed beside Anova itself."""
    found = study.findings(name)
    rows = []
    for what, ours in found.ablations.items():
        gained = differences(ours, found.final.get("Anova", []), held_out_loss)
        mean = statistics.mean(map(held_out_loss, ours))
        p = p_value(gained)
        rows.append(
            [
                what,
                str(len(ours)),
                format_number(mean, ".4f"),
                str(interval(gained) or "–"),
                f"{p:.2g}" if p is not None else "–",
            ]
        )
    header = ["Anova with", "seeds", "held-out loss", "− Anova's", "p"]
    return Table(f"{study.cells[name].task.title}: ablations", header, rows)


def tables(study: Study, name: str) -> list[Table]:
    """All tables of a cell that have a row."""
    cell = study.cells[name]
    if cell.rates:
        found = [rates_table(study, name)]
    else:
        found = [results_table(study, name), settings_table(study, name), sensitivity_table(study, name)]
        found += [curve_table(study, name)] if cell.curve else []
        found += [ablations_table(study, name)] if cell.ablations else []
    return [table for table in found if table.rows]


def notes(study: Study) -> list[str]:
    """What is missing."""
    lines = []
    for name, cell in study.cells.items():
        if name in study.only_settings:
            continue
        found = study.findings(name)
        counts = {arm: _final_runs(cell, found, arm) for arm in study.arms_of(name)}
        wanted = {arm: cell.seeds * max(1, len(cell.rates)) for arm in counts}
        missing = [f"{arm} ({counts[arm]} of {wanted[arm]})" for arm in counts if counts[arm] < wanted[arm]]
        if not any(wanted.values()):
            continue
        if not any(counts.values()):
            lines.append(f"{name}: no final runs yet.")
        elif missing:
            lines.append(f"{name}: final runs are missing of {'; '.join(missing)}.")
        lines += [f"{problem}; it counts as missing." for problem in dict.fromkeys(found.unusable)]
    return lines


def _final_runs(cell: Cell, found: Findings, arm: str) -> int:
    return sum(map(len, found.rates.get(arm, {}).values())) if cell.rates else len(found.final.get(arm, []))
