"""A race of optimizers: who reaches AdamW's training loss in how many steps and seconds, and how far each one gets.

Every arm tries the same number of learning rates with the same number of seeds; its best one then runs with fresh
seeds. The target of a task is what AdamW reaches with its best rate in the tuning runs, before any other arm runs.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from blockmean.lab.arms import ARMS, BASELINE, PEERS, Unsuitable, find
from blockmean.lab.compare import (
    Findings,
    Interval,
    MedianInterval,
    Stage,
    Study,
    Table,
    Verdict,
    bootstrap_median,
    differences,
    diverged,
    interval,
    pairs,
    verdict,
)
from blockmean.lab.environment import environment, package_version
from blockmean.lab.records import store
from blockmean.lab.tasks import LOSSES, PROFILES, Task
from blockmean.lab.train import Record, check, time_marks

TUNING_SEEDS = (100, 101, 102, 103, 104)
IN_WORDS = {**{one: str(one) for one in Verdict}, Verdict.HOLDS: "better", Verdict.FAILS: "worse"}
LAST = 10
"""The final training loss is the mean over the last tenth of the steps."""
WINDOW = 20
"""A curve is smoothed by the mean over the trailing twentieth of the steps.

Shorter than the tenth of the target on purpose: the loss still falls during that tenth, so that a run as good as those
that set the target crosses it shortly before its end, and not half of the time never.
"""


def final_loss(record: Record) -> float:
    """Mean training loss over the last tenth of the steps; infinite for a run that diverged."""
    losses = record["losses"]
    return math.inf if diverged(record) else statistics.mean(losses[-max(1, len(losses) // LAST) :])


def held_out_loss(record: Record) -> float:
    """Loss on held-out data at the end; infinite for a run that diverged."""
    return math.inf if diverged(record) or record["test_loss"] is None else float(record["test_loss"])


def smoothed(record: Record) -> list[float]:
    """The trailing mean of the training loss at every step; over all steps so far until there are enough."""
    window = max(1, record["spec"]["steps"] // WINDOW)
    sums = list(accumulate(record["losses"], initial=0.0))
    return [(sums[i] - sums[max(0, i - window)]) / min(i, window) for i in range(1, len(sums))]


def steps_to(record: Record, target: float) -> float:
    """The first step whose trailing mean, over a whole window, is at or below a target; infinite if there is none."""
    window = max(1, record["spec"]["steps"] // WINDOW)
    reached = (i for i, loss in enumerate(smoothed(record), 1) if i >= window and loss <= target)
    return next(reached, math.inf)


def seconds_after(record: Record, steps: float) -> float:
    """Processor seconds of training until a step, interpolated between the marks of the record."""
    if math.isinf(steps):
        return math.inf
    before, passed = 0, 0.0
    for mark, seconds in zip(time_marks(record["spec"]["steps"]), record["seconds_at"], strict=False):
        if steps <= mark:
            return float(passed + (seconds - passed) * (steps - before) / (mark - before))
        before, passed = mark, seconds
    return float(record["seconds"])  # a run that diverged between two marks


@dataclass(frozen=True)
class Race:
    """Arms, tasks and how many seeds."""

    tasks: dict[str, Task]
    arms: tuple[str, ...]
    seeds: int
    tuning_seeds: int
    left_out: dict[str, dict[str, str]]
    """Per task the arms that have nothing to do in its model, and why."""

    def studies(self) -> dict[str, Study]:
        """One study per task."""
        found = {}
        for name, task in self.tasks.items():
            arms = [arm for arm in self.arms if arm not in self.left_out[name]]
            found[name] = Study(
                name,
                task,
                {arm: ARMS[arm].settings() for arm in arms},
                {arm: ARMS[arm].rates for arm in arms},
                Stage(TUNING_SEEDS[: self.tuning_seeds], task.steps),
                Stage(tuple(range(self.seeds)), task.steps),
                final_loss,
                BASELINE,
                curve=True,
                seed_shifts={arm: ARMS[arm].seed_shift for arm in arms},
            )
        return found


def make_race(
    tasks: Sequence[str] | None = None,
    arms: Sequence[str] | None = None,
    profile: str = "full",
    seeds: int = 5,
    tuning_seeds: int = 1,
    steps: int | None = None,
) -> Race:
    """A race, checked: every run of it can be made. ModuleNotFoundError names a package that is missing.

    Args:
        tasks, arms: names, all by default. AdamW always runs, because it sets the targets.
        steps: steps of every run instead of those of the tasks, for a trial.
    """
    if profile not in PROFILES:
        raise ValueError(f"profile must be one of {', '.join(PROFILES)}. Got {profile!r} instead.")
    known = PROFILES[profile]
    for what, given, all_of_them in (("task", tasks, known), ("arm", arms, ARMS)):
        unknown = [name for name in given or [] if name not in all_of_them]
        if unknown:
            raise ValueError(f"There is no {what} {', '.join(map(repr, unknown))}. There are {'; '.join(all_of_them)}.")
    if not 1 <= tuning_seeds <= len(TUNING_SEEDS):
        raise ValueError(f"tuning seeds must be 1 to {len(TUNING_SEEDS)}. Got {tuning_seeds} instead.")
    chosen = {name: replace(known[name], steps=steps or known[name].steps) for name in tasks or known}
    runners = tuple(arm for arm in ARMS if arm == BASELINE or arms is None or arm in arms)
    left_out: dict[str, dict[str, str]] = {}
    for name, task in chosen.items():
        left_out[name] = {}
        for arm in runners:
            try:
                check(task.spec(ARMS[arm].settings(), ARMS[arm].rates[0], 0))
            except Unsuitable as error:
                left_out[name][arm] = str(error)
    return Race(chosen, runners, seeds, tuning_seeds, left_out)


def missing_packages(arms: Iterable[str] | None = None) -> list[str]:
    """Packages that these arms need and that are not installed."""
    missing = set()
    for arm in arms or ARMS:
        try:
            find(ARMS[arm].optimizer)
        except ModuleNotFoundError as error:
            missing.add(str(error.name))
    return sorted(missing)


class Result(NamedTuple):
    """How one arm did in one task, from the records of its best rate with the fresh seeds."""

    rate: float
    edge: bool
    """Whether the best rate is the largest or smallest tried."""
    seeds: list[int]
    diverged: int
    final_loss: list[float]
    held_out_loss: list[float]
    held_out_error: list[float]
    steps: list[float]
    """To the target, per seed; infinite where it was missed."""
    seconds: list[float]
    total_seconds: list[float]
    optimizer_share: float
    """Median over seeds of the optimizer's part of the processor time."""
    bytes_per_parameter: float
    steps_ratio: MedianInterval | None
    """To AdamW's; a miss is infinite. Where AdamW itself misses, its whole run counts, which is less than the truth."""
    seconds_ratio: MedianInterval | None
    iteration_ratio: MedianInterval | None
    """Processor time of the whole run over AdamW's."""
    loss_difference: Interval | None
    verdict: str
    """Whether the final training loss is better or worse than AdamW's, beyond noise."""

    @property
    def misses(self) -> int:
        return sum(map(math.isinf, self.steps))


class TaskResult(NamedTuple):
    """One task of the race, as far as its records go."""

    name: str
    task: Task
    study: Study
    findings: Findings
    target: float | None
    arms: dict[str, Result]

    @property
    def missing(self) -> list[str]:
        """Arms without any final run yet."""
        return [arm for arm in self.study.arms if arm not in self.arms]


def results(race: Race, folder: Path) -> list[TaskResult]:
    """What the records in a folder say."""
    found = []
    for name, study in race.studies().items():
        findings = study.findings(folder / name)
        rate = findings.best.get(BASELINE)
        target = None if rate is None else findings.tuned[BASELINE][rate]
        arms = {} if target is None else {arm: _result(study, findings, arm, target) for arm in findings.results}
        found.append(TaskResult(name, race.tasks[name], study, findings, target, arms))
    return found


def _result(study: Study, found: Findings, arm: str, target: float) -> Result:
    ours, theirs = found.results[arm], found.results.get(BASELINE, []) if arm != BASELINE else []
    shift = study.seed_shifts.get(arm, 0)

    def steps(record: Record) -> float:
        return steps_to(record, target)

    def seconds(record: Record) -> float:
        return seconds_after(record, steps(record))

    def ratio(value: Callable[[Record], float], whole: Callable[[Record], float]) -> MedianInterval | None:
        # Where AdamW misses, its whole run counts: it would take longer. Where both miss, there is nothing to compare.
        found = zip(pairs(ours, theirs, value, shift), pairs(ours, theirs, whole, shift), strict=True)
        return bootstrap_median(
            [mine / min(its, run) for (mine, its), (_, run) in found if its < math.inf or mine < its]
        )

    def all_steps(record: Record) -> float:
        return float(len(record["losses"]))

    def all_seconds(record: Record) -> float:
        return float(record["seconds"])

    gained = differences(ours, theirs, final_loss, shift)
    last = ours[-1]
    return Result(
        found.best[arm],
        study.at_edge(arm, found.best[arm]),
        [record["spec"]["seed"] for record in ours],
        sum(map(diverged, ours)),
        list(map(final_loss, ours)),
        list(map(held_out_loss, ours)),
        [record["test_error"] for record in ours],
        list(map(steps, ours)),
        [round(seconds(record), 4) for record in ours],
        [record["seconds"] for record in ours],
        round(statistics.median(record["step_seconds"] / max(record["seconds"], 1e-9) for record in ours), 4),
        round(last["state_bytes"] / last["parameters"], 3),
        ratio(steps, all_steps),
        ratio(seconds, all_seconds),
        ratio(all_seconds, all_seconds),
        interval(gained),
        IN_WORDS[verdict(gained) if len(gained) > 1 else Verdict.UNKNOWN],
    )


def table(found: TaskResult) -> Table:
    """The arms of a task, best final loss first."""
    header = [
        "optimizer",
        "rate",
        "seeds",
        "final loss",
        "− AdamW's",
        "steps to target",
        "× AdamW's",
        "seconds to target",
        "× AdamW's",
        "held-out loss",
        "bytes/param",
    ]
    rows = []
    for arm, result in sorted(found.arms.items(), key=lambda item: statistics.mean(item[1].final_loss)):
        count, wanted = len(result.seeds), len(found.study.final.seeds)
        seeds = [str(count) if count == wanted else f"{count} of {wanted}"]
        for what, number in (("missed", result.misses), ("diverged", result.diverged)):
            seeds += [f"{number} {what}"] if number else []
        rows.append(
            [
                arm,
                f"{result.rate:g}{' (edge)' * result.edge}",
                ", ".join(seeds),
                _number(statistics.mean(result.final_loss)),
                str(result.loss_difference or "–"),
                _number(statistics.median(result.steps), whole=True),
                str(result.steps_ratio or "–"),
                _number(statistics.median(result.seconds)),
                str(result.seconds_ratio or "–"),
                _number(statistics.mean(result.held_out_loss)),
                f"{result.bytes_per_parameter:.1f}",
            ]
        )
    target = "no target yet" if found.target is None else f"target {found.target:.4g}"
    return Table(f"{found.task.title}, {found.task.steps} steps: {target}", header, rows)


def _number(value: float, whole: bool = False) -> str:
    if math.isinf(value):
        return "∞"
    return f"{value:.0f}" if whole else f"{value:.4g}"


def notes(race: Race, found: Sequence[TaskResult]) -> list[str]:
    """What is missing, and why."""
    lines = []
    for one in found:
        lines += [f"{one.name}: {arm} is left out. {why}" for arm, why in race.left_out[one.name].items()]
        waiting = [arm for arm in one.missing if one.findings.tuned.get(arm) is None or arm in one.findings.best]
        hopeless = [arm for arm in one.missing if arm not in waiting]
        if waiting:
            lines.append(f"{one.name}: no final runs yet of {'; '.join(waiting)}.")
        lines += [f"{one.name}: {arm} diverged with every rate." for arm in hopeless]
        lines += [f"{problem}; it counts as missing." for problem in one.findings.unusable]
    return lines


def summary(race: Race, found: Sequence[TaskResult]) -> dict[str, Any]:
    """Everything in plain values; infinite ones are None."""
    packages = {name: package_version(name) for name in dict.fromkeys(PEERS.values())}
    return {
        "environment": environment(),
        "packages": packages,
        "seeds": race.seeds,
        "tuning_seeds": race.tuning_seeds,
        "window": f"1/{WINDOW} of the steps",
        "arms": {arm: asdict(ARMS[arm]) for arm in race.arms},
        "notes": notes(race, found),
        "tasks": {
            one.name: {
                **asdict(one.task),
                "error": LOSSES[one.task.loss].unit,
                "target": one.target,
                "tuned": {
                    arm: _plain({f"{r:g}": v for r, v in own.items()}) for arm, own in one.findings.tuned.items()
                },
                "arms": {arm: _plain({**own._asdict(), "misses": own.misses}) for arm, own in one.arms.items()},
            }
            for one in found
        },
    }


def _plain(value: Any) -> Any:
    """As strict JSON takes it: an infinite number is None."""
    if isinstance(value, Interval | MedianInterval):
        value = value._asdict()
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_plain(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def save_summary(race: Race, found: Sequence[TaskResult], path: Path) -> None:
    store(path, json.loads(json.dumps(summary(race, found), allow_nan=False)))
