"""A fair comparison: every arm gets the same learning rates and seeds to choose among, the best meets fresh seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from scipy.stats import t as student

from blockmean.lab.records import read, run_all
from blockmean.lab.train import Record, Spec, steps_per_epoch


class Stage(NamedTuple):
    """So many epochs with each of these seeds."""

    seeds: tuple[int, ...]
    epochs: int


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

    def specs(self, arm: str, rates: Sequence[float], stage: Stage) -> list[Spec]:
        """Every rate with every seed of a stage."""
        steps = stage.epochs * steps_per_epoch(self.dataset, self.batch)
        task: dict[str, Any] = {"dataset": self.dataset, "model": self.model, "steps": steps, "inputs": self.inputs}
        return [
            Spec(**task, **self.arms[arm], batch=self.batch, flip=self.flip, lr=rate, seed=seed)
            for rate in rates
            for seed in stage.seeds
        ]

    def tuning_specs(self) -> list[Spec]:
        """The runs among which the learning rates are chosen."""
        return [spec for arm in self.arms for spec in self.specs(arm, self.rates, self.tuning)]

    def tuned(self, folder: Path) -> dict[str, dict[float, float]]:
        """Per arm and rate the mean training loss of the last epoch, infinite where a run diverged or is missing."""
        return {
            arm: {
                rate: _mean_loss([read(folder, s) for s in self.specs(arm, [rate], self.tuning)]) for rate in self.rates
            }
            for arm in self.arms
        }

    def best_rates(self, folder: Path) -> dict[str, float]:
        """The learning rate of each arm with the smallest training loss."""
        return {arm: min(losses, key=losses.__getitem__) for arm, losses in self.tuned(folder).items()}

    def final_specs(self, folder: Path) -> dict[str, list[Spec]]:
        """Per arm the runs at its best rate, one for each fresh seed; known once the tuning runs are there."""
        return {arm: self.specs(arm, [rate], self.final) for arm, rate in self.best_rates(folder).items()}

    def final_records(self, folder: Path) -> dict[str, list[Record]]:
        """What these runs gave, as far as they are there."""
        found = {arm: [read(folder, spec) for spec in specs] for arm, specs in self.final_specs(folder).items()}
        return {arm: [record for record in records if record is not None] for arm, records in found.items()}

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
        behind = sum(spec.steps for spec in tuning)
        final = [spec for specs in self.final_specs(folder).values() for spec in specs]
        for _ in run_all(final, folder, data_dir, jobs, lambda steps: on_steps(behind + steps)):
            pass


def _mean_loss(records: Sequence[Record | None]) -> float:
    losses = [math.inf if r is None or r["diverged_at"] is not None else r["epochs"][-1]["train_loss"] for r in records]
    return statistics.mean(losses)


class Interval(NamedTuple):
    """A mean and half the width of its 95% confidence interval."""

    mean: float
    half_width: float

    @property
    def excludes_zero(self) -> bool:
        return abs(self.mean) > self.half_width

    def __str__(self) -> str:
        return f"{self.mean:+.4g} ± {self.half_width:.2g}"


def paired(ours: Sequence[float], theirs: Sequence[float]) -> Interval:
    """The mean difference between runs with equal seeds, by Student's t; one pair alone has no finite interval."""
    differences = [a - b for a, b in zip(ours, theirs, strict=True)]
    n = len(differences)
    half = float(student.ppf(0.975, n - 1)) * statistics.stdev(differences) / math.sqrt(n) if n > 1 else math.inf
    return Interval(statistics.mean(differences), half)
