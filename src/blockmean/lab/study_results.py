"""What the records of a study say: tables, AdamW's loss as a function of tokens, and what is missing."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from itertools import pairwise

from blockmean.lab.compare import (
    MedianRange,
    Table,
    differences,
    format_number,
    interval,
    median_range,
    p_value,
    pairs,
)
from blockmean.lab.race import held_out_loss
from blockmean.lab.study import RUNOFF_SEEDS, Findings, Study
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
    """The steps after which AdamW has a loss, by interpolation in the logarithm of the steps.

    Zero where it is above all of the curve, infinite where it is below: the curve does not go that far.
    """
    if not curve or loss > curve[0][1]:
        return 0.0
    for (before, high), (after, low) in pairwise(curve):
        if low <= loss <= high:
            part = (high - loss) / (high - low) if high > low else 0.0
            return math.exp(math.log(before) + part * (math.log(after) - math.log(before)))
    return curve[-1][0] if loss == curve[-1][1] else math.inf


def saved(curve: Curve, records: Sequence[Record], iteration: float = 1.0) -> MedianRange | None:
    """Tokens of runs as a part of those that AdamW needs for the same loss; times `iteration`, a ratio, seconds.

    Needs a curve of two points at least. 0 is a bound: AdamW does not get there within its curve.
    """
    if len(curve) < 2 or len(records) < 2:
        return None
    needed = [equivalent_steps(curve, held_out_loss(record)) for record in records]
    steps = [record["spec"]["steps"] * iteration for record in records]
    return median_range([mine / its if its else math.inf for mine, its in zip(steps, needed, strict=True)])


def iteration_ratio(study: Study, name: str, arm: str) -> MedianRange | None:
    """Processor time of a step over AdamW's, seed by seed: of the short runs for times, or else of the final ones."""
    for records in (study.times(name), study.findings(name).final):
        if arm in records and BASELINE in records:
            paces = pairs(records[arm], records[BASELINE], lambda record: record["seconds"] / record["spec"]["steps"])
            return median_range([mine / its for mine, its in paces])
    return None


def results_table(study: Study, name: str) -> Table:
    """The arms of a cell with final runs, the smallest held-out loss first."""
    cell, found = study.cells[name], study.findings(name)
    theirs, curve = found.final.get(BASELINE, []), tokens_curve(study, name)
    images = not cell.task.tokenizer
    rows = []
    for arm in sorted(found.final, key=lambda arm: statistics.mean(map(held_out_loss, found.final[arm]))):
        ours, seeds = found.final[arm], cell.seeds_of(arm)
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
                _ratio(saved(curve, ours)) if arm != BASELINE else "–",
                _ratio(saved(curve, ours, iteration.median)) if iteration else "–",
                str(iteration or "–"),
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


def _ratio(found: MedianRange | None) -> str:
    """A ratio as text; 0 means that AdamW's curve ends before."""
    if found is None:
        return "–"
    return "below the curve" if found.median == 0 else str(found)


def settings_table(study: Study, name: str) -> Table:
    """The best settings of every arm, and what it took to find them."""
    cell, found = study.cells[name], study.findings(name)
    rows = []
    for arm, search in found.searches.items():
        budget = cell.budget(arm)
        if budget and not search.tried:
            continue
        best = found.best.get(arm, search.best)
        edges = at_edge(best, study.axes(name, arm)) if budget else []
        state = "settings of the other cell" if not budget else f"{len(search.tried)} of {budget}"
        if search.wanted is not None:
            state += ", under way"
        elif budget:
            state += ", converged" if search.converged else ", budget spent"
        others = study.runoff(name, arm, search)
        state += f"; run-off: {len(others)} × {len(RUNOFF_SEEDS)}" if others else ""
        losses = [loss for loss in others.get(best, [search.tried.get(best)]) if loss is not None]
        rows.append(
            [
                arm,
                *(f"{value:g}" for value in best),
                state + (f"; edge: {', '.join(edges)}" if edges else ""),
                format_number(statistics.mean(losses), ".4f") if losses else "–",
            ]
        )
    header = ["optimizer", *(axis.name for axis in AXES), "tuning runs", "held-out loss, tuning seeds"]
    return Table(f"{cell.task.title}: settings", header, rows)


def sensitivity_table(study: Study, name: str) -> Table:
    """What the settings beside the best ones cost: held-out loss minus theirs, with the first tuning seed."""
    found = study.findings(name)
    rows = []
    for arm, search in found.searches.items():
        best = found.best.get(arm, search.best)
        if best not in search.tried or not math.isfinite(search.tried[best]):
            continue
        cells = []
        for i in range(len(AXES)):
            others = {
                point[i]: loss
                for point, loss in search.tried.items()
                if point[:i] == best[:i] and point[i + 1 :] == best[i + 1 :] and point != best
            }
            cells.append(
                ", ".join(f"{x:g}: {_signed(y - search.tried[best])}" for x, y in sorted(others.items())) or "–"
            )
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
        share = statistics.median(record["step_seconds"] / record["seconds"] for record in ours)
        rows.append([what, str(len(ours)), format_number(mean, ".4f"), str(interval(gained) or "–"), f"{share:.1%}"])
    header = ["Anova with", "seeds", "held-out loss", "− Anova's", "optimizer's share"]
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
        counts = {arm: _final_runs(cell, found, arm) for arm in study.arms_of(name)}
        wanted = {arm: cell.seeds_of(arm) * max(1, len(cell.rates)) for arm in counts}
        missing = [f"{arm} ({counts[arm]} of {wanted[arm]})" for arm in counts if counts[arm] < wanted[arm]]
        if not any(counts.values()):
            lines.append(f"{name}: no final runs yet.")
        elif missing:
            lines.append(f"{name}: final runs are missing of {'; '.join(missing)}.")
        lines += [f"{problem}; it counts as missing." for problem in dict.fromkeys(found.unusable)]
    return lines


def _final_runs(cell: Cell, found: Findings, arm: str) -> int:
    return sum(map(len, found.rates.get(arm, {}).values())) if cell.rates else len(found.final.get(arm, []))
