"""A fair comparison: every arm is tuned over the same rates and seeds, and its best rate runs with fresh seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from scipy.stats import t as student

from blockmean.lab.records import UnusableRecord, read_strictly, run_all
from blockmean.lab.spec import RunSpec
from blockmean.lab.train import Record, steps_per_epoch


class Stage(NamedTuple):
    """A number of epochs with each of these seeds."""

    seeds: tuple[int, ...]
    epochs: int


class Findings(NamedTuple):
    """What the records of a study say."""

    tuned: dict[str, dict[float, float]]
    """Per arm and rate the mean training loss of the last epoch, infinite where a run diverged."""
    best: dict[str, float]
    """Per arm the rate with the smallest of these."""
    results: dict[str, list[Record]]
    """Per arm the records of its best rate with the fresh seeds, in their order."""
    every: list[Record]
    """All records of the study."""
    started: dict[str, int]
    """The arms that have any record, usable or not, with the number of their usable tuning runs."""
    unusable: list[str]
    """One sentence for each record that cannot be used; it counts as missing."""


@dataclass(frozen=True)
class Study:
    """Several optimizers on one task. `arms` gives for each its name, class and options."""

    name: str
    dataset: str
    model: str
    arms: dict[str, dict[str, Any]]
    rates: tuple[float, ...]
    tuning: Stage
    final: Stage
    batch: int = 100
    flip: bool = False
    inputs: str = "normalised"

    def specs(self, arm: str, rates: Sequence[float], stage: Stage) -> list[RunSpec]:
        """Every rate with every seed of a stage."""
        steps = stage.epochs * steps_per_epoch(self.dataset, self.batch)
        task: dict[str, Any] = {"dataset": self.dataset, "model": self.model, "steps": steps, "inputs": self.inputs}
        return [
            RunSpec(**task, **self.arms[arm], batch=self.batch, flip=self.flip, lr=rate, seed=seed)
            for rate in rates
            for seed in stage.seeds
        ]

    def tuning_specs(self) -> list[RunSpec]:
        """The runs among which the learning rates are chosen."""
        return [spec for arm in self.arms for spec in self.specs(arm, self.rates, self.tuning)]

    def findings(self, folder: Path) -> Findings:
        """What the records in a folder say.

        An arm that misses a tuning run has no best rate yet: the best of some is not the best of all. Nor has one that
        diverges with every rate.
        """
        tuned: dict[str, dict[float, float]] = {}
        results: dict[str, list[Record]] = {}
        every: list[Record] = []
        started: dict[str, int] = {}
        unusable: list[str] = []
        for arm in self.arms:
            known = len(unusable)
            runs = {rate: _read(folder, self.specs(arm, [rate], self.tuning), unusable) for rate in self.rates}
            tuning = [record for records in runs.values() for record in records]
            every += tuning
            if tuning or len(unusable) > known:
                started[arm] = len(tuning)
            if all(len(records) == len(self.tuning.seeds) for records in runs.values()):
                tuned[arm] = {rate: statistics.mean(map(last_loss, records)) for rate, records in runs.items()}
        best = {arm: min(losses, key=losses.__getitem__) for arm, losses in tuned.items()}
        best = {arm: rate for arm, rate in best.items() if math.isfinite(tuned[arm][rate])}
        for arm, rate in best.items():
            results[arm] = _read(folder, self.specs(arm, [rate], self.final), unusable)
            every += results[arm]
        results = {arm: records for arm, records in results.items() if records}
        return Findings(tuned, best, results, every, started, unusable)

    def is_complete(self, folder: Path) -> bool:
        """Whether every run has a record."""
        known = self.findings(folder)
        return len(known.every) == len(self.tuning_specs()) + len(known.best) * len(self.final.seeds)

    def total_steps(self) -> int:
        """Training steps of the whole study."""
        rates_and_seeds = len(self.rates) * len(self.tuning.seeds) * self.tuning.epochs
        epochs = len(self.arms) * (rates_and_seeds + len(self.final.seeds) * self.final.epochs)
        return epochs * steps_per_epoch(self.dataset, self.batch)

    def run(
        self, folder: Path, data_dir: Path | None, jobs: int, on_steps: Callable[[int], None] = lambda steps: None
    ) -> None:
        """Make all runs that have no record yet, and write their records into a folder."""
        tuning = self.tuning_specs()
        for _ in run_all(tuning, folder, data_dir, jobs, on_steps):
            pass
        done = sum(spec.steps for spec in tuning)
        best = self.findings(folder).best
        final = [spec for arm, rate in best.items() for spec in self.specs(arm, [rate], self.final)]
        for _ in run_all(final, folder, data_dir, jobs, lambda steps: on_steps(done + steps)):
            pass


def _read(folder: Path, specs: Sequence[RunSpec], unusable: list[str]) -> list[Record]:
    """The usable records among those of the specs; what is wrong with the others goes to `unusable`."""
    records = []
    for spec in specs:
        try:
            record = read_strictly(folder, spec)
        except UnusableRecord as error:
            unusable.append(str(error))
        else:
            records += [] if record is None else [record]
    return records


def last_loss(record: Record) -> float:
    """Mean training loss over the batches of the last epoch; infinite for a run that diverged."""
    return math.inf if record["diverged_at"] is not None else float(record["epochs"][-1]["train_loss"])


class Interval(NamedTuple):
    """A mean and half the width of its 95% confidence interval."""

    mean: float
    half_width: float

    def __str__(self) -> str:
        # Two digits of the half width, and as many decimals of the mean; five at most, the rest is rounding.
        decimals = min(max(0, 1 - math.floor(math.log10(max(self.half_width, 1e-5)))), 5)
        return f"{self.mean:+.{decimals}f} ± {self.half_width:.{decimals}f}".replace("-", "−")


def differences(ours: Sequence[Record], theirs: Sequence[Record], value: Callable[[Record], float]) -> list[float]:
    """Ours minus theirs for every seed that both have; 0 where both are infinite."""
    others = {record["spec"]["seed"]: value(record) for record in theirs}
    pairs = [(value(run), others[run["spec"]["seed"]]) for run in ours if run["spec"]["seed"] in others]
    return [0.0 if mine == its else mine - its for mine, its in pairs]


def interval(values: Sequence[float]) -> Interval | None:
    """Their mean with its 95% interval by Student's t; None for fewer than two, or where one is not finite."""
    n = len(values)
    if n < 2 or not all(map(math.isfinite, values)):
        return None
    half = float(student.ppf(0.975, n - 1)) * statistics.stdev(values) / math.sqrt(n)
    return Interval(statistics.mean(values), half)
