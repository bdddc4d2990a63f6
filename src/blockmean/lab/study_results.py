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


def curve_records(study: Study, name: str) -> dict[int, list[Record]]:
    """AdamW's runs that each finished their own schedule, with the cell's steps and multiples of them."""
    cell, found = study.cells[name], study.findings(name)
    points = {round(times * cell.task.steps): records for times, records in found.curve.items()}
    points[cell.task.steps] = found.final.get(BASELINE, [])
    if cell.longer in study.cells:
        points[study.cells[cell.longer].task.steps] = study.findings(cell.longer).final.get(BASELINE, [])
    return {steps: records for steps, records in points.items() if records}


def tokens_curve(study: Study, name: str) -> Curve:
    """AdamW's loss L(D)."""
    means = {steps: statistics.mean(map(held_out_loss, own)) for steps, own in curve_records(study, name).items()}
    return sorted((float(steps), loss) for steps, loss in means.items() if math.isfinite(loss))


def equivalent_steps(curve: Curve, loss: float) -> float:
    """The steps after which AdamW has a loss, by monotone cubic interpolation of it over the logarithm of the steps.

    Straight lines would lie above a convex curve, and so overstate what AdamW needs. Zero where the loss is above all
    of the curve, infinite where it is below: the curve does not go that far.
    """
    falling = [point for i, point in enumerate(curve) if all(point[1] < loss for _, loss in curve[:i])]
    if not falling or loss > falling[0][1]:
        return 0.0
    if loss <= falling[-1][1]:
        return falling[-1][0] if loss == falling[-1][1] else math.inf
    steps, losses = zip(*falling, strict=True)
    return float(np.exp(PchipInterpolator(np.log(steps), losses).solve(loss, extrapolate=False)[0]))


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
    steps, their_loss = ours[0]["spec"]["steps"], statistics.mean(map(held_out_loss, theirs)) if theirs else math.inf
    if len(curve) < 2 or not gained or not all(map(math.isfinite, (*gained, their_loss))):
        return None
    half = found.half_width if (found := interval(gained)) else 0.0
    needed = [equivalent_steps(curve, their_loss + statistics.mean(gained) + shift) for shift in (0.0, -half, half)]
    ratio, low, high = (iteration * steps / its if its else math.inf for its in needed)
    return Saving(ratio, low, high, (iteration * steps / curve[-1][0], iteration * steps / curve[0][0]))


def iteration_seconds(study: Study, name: str) -> dict[str, float]:
    """Processor time of an iteration with every arm: of the short runs for times, or else of the final ones.

    Forward and backward pass are the same code in all arms, so that their time is the median over all runs: what
    differs between arms there is noise, and more than what most optimizers take.
    """
    records = study.times(name) or study.findings(name).final
    if not records:
        return {}
    rest = statistics.median(_pace(r, "seconds") - _pace(r, "step_seconds") for r in chain(*records.values()))
    return {arm: rest + statistics.median(_pace(r, "step_seconds") for r in own) for arm, own in records.items()}


def _pace(record: Record, what: str) -> float:
    """Seconds of a step."""
    return float(record[what] / max(1, record["spec"]["steps"]))


def results_table(study: Study, name: str) -> Table:
    """The arms of a cell with final runs, the smallest held-out loss first."""
    cell, found = study.cells[name], study.findings(name)
    theirs, curve = found.final.get(BASELINE, []), tokens_curve(study, name)
    seconds = iteration_seconds(study, name)
    images = not cell.task.tokenizer
    rows = []
    for arm in sorted(found.final, key=lambda arm: statistics.mean(map(held_out_loss, found.final[arm]))):
        ours, seeds = found.final[arm], cell.seeds
        losses = list(map(held_out_loss, ours))
        gained = differences(ours, theirs, held_out_loss) if arm != BASELINE else []
        timed_both = arm != BASELINE and arm in seconds and BASELINE in seconds
        iteration = seconds[arm] / seconds[BASELINE] if timed_both else None
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
    header = [
        "optimizer",
        *(axis.name for axis in AXES),
        "points",
        "validation loss" if cell.validates else "training loss",
    ]
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
    rows = []
    for steps, records in sorted(curve_records(study, name).items()):
        losses = list(map(held_out_loss, records))
        deviation = f"{statistics.stdev(losses):.4f}" if len(losses) > 1 else "–"
        mean = format_number(statistics.mean(losses), ".4f")
        rows.append([f"{steps / cell.task.steps:g}", str(steps), str(len(losses)), mean, deviation])
    header = ["× the tokens", "steps", "seeds", "held-out loss", "σ"]
    return Table(f"{cell.task.title}: AdamW's L(D)", header, rows)


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
        found = study.findings(name)
        lines += [f"{problem}; it counts as missing." for problem in dict.fromkeys(found.unusable)]
        arms = study.arms_of(name)
        ready = {arm for arm, search in found.searches.items() if search.wanted is None}
        waiting = [arm for arm in arms if cell.budget(arm) and arm not in ready]
        searching = [f"{name}: the search is not over of {'; '.join(waiting)}."] if waiting else []
        if name in study.only_settings or not cell.seeds:
            lines += searching
            continue
        counts = {arm: _final_runs(cell, found, arm) for arm in arms}
        wanted = dict.fromkeys(counts, cell.seeds * max(1, len(cell.rates)))
        if BASELINE in arms:
            counts |= {f"{BASELINE} × {times:g}": len(found.curve.get(times, [])) for times in cell.curve}
            wanted |= {f"{BASELINE} × {times:g}": cell.curve_seeds for times in cell.curve}
        if "Anova" in arms and cell.ablations:
            counts["ablations"] = sum(map(len, found.ablations.values()))
            wanted["ablations"] = len(cell.ablations) * cell.few_seeds
        missing = [f"{what} ({counts[what]} of {wanted[what]})" for what in counts if counts[what] < wanted[what]]
        if not any(counts.values()):
            lines.append(f"{name}: no final runs yet.")
            continue
        lines += searching
        lines += [f"{name}: runs are missing of {'; '.join(missing)}."] if missing else []
    return lines


def _final_runs(cell: Cell, found: Findings, arm: str) -> int:
    return sum(map(len, found.rates.get(arm, {}).values())) if cell.rates else len(found.final.get(arm, []))
