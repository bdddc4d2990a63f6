"""A fair comparison: every arm is tuned over as many rates and seeds, and its best rate runs with fresh seeds.

The study, the paired differences with their interval, the verdict and the tables of every comparison are here.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from scipy.stats import t as student

from blockmean.lab.records import Records, run_all
from blockmean.lab.spec import RunSpec, file_name
from blockmean.lab.tasks import Task, steps_per_epoch
from blockmean.lab.train import Record


def last_loss(record: Record) -> float:
    """Mean training loss over the batches of the last epoch; infinite for a run that diverged."""
    return math.inf if diverged(record) else float(record["epochs"][-1]["train_loss"])


def diverged(record: Record) -> bool:
    return record["diverged_at"] is not None


class Stage(NamedTuple):
    """A number of steps with each of these seeds."""

    seeds: tuple[int, ...]
    steps: int


NO_RUNS = Stage((), 0)


class Findings(NamedTuple):
    """What the records of a study say."""

    tuned: dict[str, dict[float, float]]
    """Per arm and rate the mean of the study's measure, infinite where a run diverged."""
    best: dict[str, float]
    """Per arm the rate with the smallest of these."""
    results: dict[str, list[Record]]
    """Per arm the records of its best rate with the fresh seeds, in their order."""
    every: list[Record]
    """All records of the study."""
    target: list[Record]
    """The records of the baseline's best rate that set the target, those of tuning first."""
    started: dict[str, int]
    """The arms that have any record, usable or not, with the number of their usable tuning runs."""
    unusable: list[str]
    """One sentence for each record that cannot be used; it counts as missing."""


@dataclass(frozen=True)
class Study:
    """Several optimizers on one task. `arms` gives for each its name, class and options."""

    name: str
    task: Task
    arms: Mapping[str, Mapping[str, Any]]
    rates: tuple[float, ...] | Mapping[str, tuple[float, ...]]
    """The same for all arms, or for each its own."""
    tuning: Stage
    """Chooses the rate. `NO_RUNS` if there is nothing to choose: every arm has one rate."""
    final: Stage
    measure: Callable[[Record], float] = last_loss
    """Chooses the rate: the smallest is the best."""
    baseline: str | None = None
    """The arm whose rates are tried before any other arm runs."""
    target: Stage = NO_RUNS
    """Further runs of the baseline's best rate. With its tuning runs they set the target, and choose nothing."""
    curve: bool = False
    seed_shifts: Mapping[str, int] = field(default_factory=dict)
    """Arms whose seeds are others, by how much."""

    def __post_init__(self) -> None:
        several = [arm for arm in self.arms if len(self.rates_of(arm)) != 1]
        if several and not self.tuning.seeds:
            raise ValueError(f"Without tuning every arm has one rate. Got another number for {', '.join(several)}.")

    def file(self, folder: Path) -> Path:
        """The file of its records in a folder."""
        return folder / f"{file_name(self.name)}.jsonl"

    def rates_of(self, arm: str) -> tuple[float, ...]:
        return self.rates[arm] if isinstance(self.rates, Mapping) else self.rates

    def at_edge(self, arm: str, rate: float) -> bool:
        """Whether no larger or no smaller rate was tried, so that a better one may lie beyond."""
        rates = self.rates_of(arm)
        return len(rates) > 1 and rate in (min(rates), max(rates))

    def epochs(self, stage: Stage) -> int:
        return stage.steps // steps_per_epoch(self.task.dataset, self.task.batch)

    def specs(self, arm: str, rates: Sequence[float], stage: Stage) -> list[RunSpec]:
        """Every rate with every seed of a stage."""
        shift = self.seed_shifts.get(arm, 0)
        return [
            self.task.spec(self.arms[arm], rate, seed + shift, stage.steps, self.curve)
            for rate in rates
            for seed in stage.seeds
        ]

    def tuning_specs(self) -> list[RunSpec]:
        """The runs among which the learning rates are chosen: the baseline's first, then the arms in turn."""
        runs = {arm: self.specs(arm, self.rates_of(arm), self.tuning) for arm in self.arms}
        first = runs.pop(self.baseline) if self.baseline is not None else []
        return [*first, *in_turn(runs.values())]

    def target_specs(self, best: Mapping[str, float]) -> list[RunSpec]:
        """The further runs that set the target."""
        rate = best.get(self.baseline or "")
        return [] if self.baseline is None or rate is None else self.specs(self.baseline, [rate], self.target)

    def final_specs(self, best: Mapping[str, float]) -> list[RunSpec]:
        """The runs with fresh seeds, for each seed all arms one after another: they share the state of the machine."""
        return list(in_turn(self.specs(arm, [rate], self.final) for arm, rate in best.items()))

    def findings(self, folder: Path) -> Findings:
        """What the records in a folder say.

        An arm that misses a tuning run has no best rate yet: the best of some is not the best of all. Nor has one that
        diverges with every rate.
        """
        known = Records(self.file(folder))
        tuned: dict[str, dict[float, float]] = {}
        best: dict[str, float] = {}
        results: dict[str, list[Record]] = {}
        every: list[Record] = []
        target: list[Record] = []
        started: dict[str, int] = {}
        for arm in self.arms:
            before = len(known.unusable)
            rates = self.rates_of(arm)
            runs = {rate: known.of(self.specs(arm, [rate], self.tuning)) for rate in rates}
            tuning = [record for records in runs.values() for record in records]
            every += tuning
            if tuning or len(known.unusable) > before:
                started[arm] = len(tuning)
            if not self.tuning.seeds:
                best[arm] = rates[0]
            elif all(len(records) == len(self.tuning.seeds) for records in runs.values()):
                losses = {rate: statistics.mean(map(self.measure, records)) for rate, records in runs.items()}
                tuned[arm], smallest = losses, min(losses, key=losses.__getitem__)
                best |= {arm: smallest} if math.isfinite(losses[smallest]) else {}
            if arm == self.baseline and arm in best:
                further = known.of(self.target_specs(best))
                every += further
                target = runs[best[arm]] + further
        for arm, rate in best.items():
            records = known.of(self.specs(arm, [rate], self.final))
            every += records
            if records:
                results[arm] = records
                started.setdefault(arm, 0)
        return Findings(tuned, best, results, every, target, started, known.unusable)

    def is_complete(self, folder: Path) -> bool:
        """Whether every run has a record."""
        known = self.findings(folder)
        specs = [*self.tuning_specs(), *self.target_specs(known.best), *self.final_specs(known.best)]
        return len(known.every) == len(specs)

    def total_steps(self) -> int:
        """Training steps of the whole study."""
        tuning = len(self.tuning_specs()) * self.tuning.steps
        target = len(self.target.seeds) * self.target.steps
        return tuning + target + len(self.arms) * len(self.final.seeds) * self.final.steps

    def stages(self, folder: Path) -> Iterator[list[RunSpec]]:
        """All runs, stage by stage; the later ones depend on the records of the earlier ones."""
        yield self.tuning_specs()
        yield self.target_specs(self.findings(folder).best)
        yield self.final_specs(self.findings(folder).best)

    def run(
        self, folder: Path, data_dir: Path | None, jobs: int, on_steps: Callable[[int], None] = lambda steps: None
    ) -> None:
        """Make all runs that have no record yet, and add their records to the file in a folder."""
        done = 0
        for specs in self.stages(folder):

            def report(steps: int, done: int = done) -> None:
                on_steps(done + steps)

            for _ in run_all(specs, self.file(folder), data_dir, jobs, report):
                pass
            done += sum(spec.steps for spec in specs)


def in_turn(lists: Iterable[Sequence[RunSpec]]) -> Iterator[RunSpec]:
    """The first of every list, then the second of every list, and so on."""
    return (spec for spec in chain.from_iterable(zip_longest(*lists)) if spec is not None)


class Interval(NamedTuple):
    """A mean and half the width of its 95% confidence interval."""

    mean: float
    half_width: float

    def __str__(self) -> str:
        # Two digits of the half width, and as many decimals of the mean; five at most, the rest is rounding.
        decimals = min(max(0, 1 - math.floor(math.log10(max(self.half_width, 1e-5)))), 5)
        mean = round(self.mean, decimals)
        sign = "+" if mean else ""
        return f"{mean:{sign}z.{decimals}f} ± {self.half_width:.{decimals}f}".replace("-", "−")


def pairs(
    ours: Sequence[Record], theirs: Sequence[Record], value: Callable[[Record], float], shift: int = 0
) -> list[tuple[float, float]]:
    """(ours, theirs) for every seed that both have; our seeds are larger by `shift`."""
    others = {record["spec"]["seed"]: value(record) for record in theirs}
    seeds = [(record, record["spec"]["seed"] - shift) for record in ours]
    return [(value(record), others[seed]) for record, seed in seeds if seed in others]


def differences(
    ours: Sequence[Record], theirs: Sequence[Record], value: Callable[[Record], float], shift: int = 0
) -> list[float]:
    """Ours minus theirs for every seed that both have; 0 where both are infinite."""
    return [0.0 if mine == its else mine - its for mine, its in pairs(ours, theirs, value, shift)]


def interval(values: Sequence[float]) -> Interval | None:
    """Their mean with its 95% interval by Student's t; None for fewer than two, or where one is not finite."""
    n = len(values)
    if n < 2 or not all(map(math.isfinite, values)):
        return None
    half = float(student.ppf(0.975, n - 1)) * statistics.stdev(values) / math.sqrt(n)
    return Interval(statistics.mean(values), half)


def p_value(values: Sequence[float]) -> float | None:
    """Of the paired t-test: how likely differences this far from 0 are if there is none. None as for `interval`."""
    mean = interval(values)
    if mean is None:
        return None
    if not mean.half_width:
        return 0.0 if mean.mean else 1.0
    n = len(values)
    quantile = float(student.ppf(0.975, n - 1))
    return float(2 * student.sf(abs(mean.mean) / mean.half_width * quantile, n - 1))


def format_difference(values: Sequence[float]) -> str:
    """The mean of differences and its interval, or why there is none."""
    if not values:
        return "no pair of runs"
    if len(values) == 1:
        digits = ".2g" if abs(values[0]) < 100 else ".0f"
        return f"{values[0]:+{digits}} with one seed".replace("-", "−")
    return str(interval(values) or "no mean, runs diverged")


class MedianRange(NamedTuple):
    """A median, and the range of the values; infinite values count as large.

    For n independent values the range holds the true median with probability 1 − 2·2⁻ⁿ: 94% for five.
    """

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return "{} ({}–{})".format(*(format_number(value, ".2f") for value in self))


def median_range(values: Sequence[float]) -> MedianRange | None:
    """The median of values, some perhaps infinite, and their range; None for fewer than two."""
    return MedianRange(statistics.median(values), min(values), max(values)) if len(values) > 1 else None


def format_number(value: float, spec: str) -> str:
    """A number as text, infinity as a sign."""
    return "∞" if math.isinf(value) else f"{value:{spec}}"


class Verdict(StrEnum):
    """The result of checking a claim."""

    HOLDS = "holds"
    FAILS = "does not hold"
    NOISE = "within noise"
    UNKNOWN = "no verdict"

    @classmethod
    def of(cls, holds: bool) -> Verdict:
        """For claims that are either true or not."""
        return cls.HOLDS if holds else cls.FAILS


def verdict(found: Sequence[float]) -> Verdict:
    """Whether differences are below 0 beyond noise; a run that diverged is infinitely bad."""
    mean = interval(found)
    if mean is None:
        worse, better = math.inf in found, -math.inf in found
        return Verdict.NOISE if worse == better else Verdict.of(better)
    return Verdict.NOISE if abs(mean.mean) <= mean.half_width else Verdict.of(mean.mean < 0)


class Table(NamedTuple):
    """A table as text, cell by cell."""

    title: str
    header: list[str]
    rows: list[list[str]]

    def markdown(self) -> str:
        """The table in Markdown, without its title."""
        lines = [self.header, ["---"] * len(self.header), *self.rows]
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)


class Column(NamedTuple):
    """A title, and the cell of an arm that has final runs."""

    title: str
    cell: Callable[[str], str]


def mean_columns(
    study: Study,
    found: Findings,
    baseline: str | Mapping[str, str],
    value: Callable[[Record], float],
    title: str,
    spec: str,
    difference: str,
) -> list[Column]:
    """The mean of a measure over the final runs, and its paired difference from the baseline, perhaps one per arm."""

    def mean(arm: str) -> str:
        return format_number(statistics.mean(map(value, found.results[arm])), spec)

    def gained(arm: str) -> str:
        other = baseline if isinstance(baseline, str) else baseline.get(arm, arm)
        theirs = found.results.get(other, []) if other != arm else []
        shift = study.seed_shifts.get(arm, 0)
        return str(interval(differences(found.results[arm], theirs, value, shift)) or "–")

    return [Column(title, mean), Column(difference, gained)]


def results_table(
    study: Study,
    found: Findings,
    columns: Sequence[Column],
    title: str,
    failures: Callable[[str], str] = lambda arm: "",
    arms: Iterable[str] | None = None,
) -> Table:
    """What the best rate of each arm reached; `failures` of an arm stand beside its seeds.

    The arms are those that have any record, unless some are given in an order of their own.
    """
    wanted = len(study.final.seeds)
    rows = []
    for arm in found.started if arms is None else arms:
        count = len(found.results.get(arm, []))
        if not count:
            rows.append([arm, *_without_results(study, found, arm), *["–"] * len(columns)])
            continue
        rate = found.best[arm]
        seeds = [str(wanted) if count == wanted else f"{count} of {wanted}", failures(arm)]
        start = [arm, f"{rate:g} (edge)" if study.at_edge(arm, rate) else f"{rate:g}", ", ".join(filter(None, seeds))]
        rows.append([*start, *(column.cell(arm) for column in columns)])
    return Table(title, ["optimizer", "rate", "seeds", *(column.title for column in columns)], rows)


def _without_results(study: Study, found: Findings, arm: str) -> list[str]:
    """The rate of an arm that has no final run yet, and why it has none."""
    rate = found.best.get(arm)
    if rate is not None:
        return [f"{rate:g}", f"0 of {len(study.final.seeds)}"]
    if arm in found.tuned:
        return ["none", "diverged with every rate"]
    wanted = len(study.rates_of(arm)) * len(study.tuning.seeds)
    return ["none yet", f"{found.started[arm]} of {wanted} tuning runs"]


def unfinished(study: Study, found: Findings, *arms: str) -> str:
    """Which of these arms lack runs: a verdict waits for all of them."""
    counts = {arm: len(found.results.get(arm, [])) for arm in arms}
    wanted = len(study.final.seeds)
    short = [f"{arm} has {count} of {wanted} runs" for arm, count in counts.items() if count < wanted]
    return ", ".join(short) or ("" if wanted > 1 else "one seed says nothing of noise")


def provenance(records: Sequence[Record]) -> str:
    """The code and machine that made records."""
    made = Counter(
        "code {code}, torch {torch}, {cpu}".format_map({"code": "?", "torch": "?", "cpu": "?", **record["environment"]})
        for record in records
    )
    return "; ".join(f"{count} runs by {what}" for what, count in made.most_common())
