"""A race of optimizers: who reaches AdamW's training loss in how many steps and seconds, and how far each one gets.

Every arm tries the same number of learning rates with the same number of seeds; its best one then runs with fresh
seeds. The target of a task is the mean final loss of AdamW's best rate over at least three tuning seeds. Those beyond
the ones that all arms tune with are run at that rate only: they set the target and choose nothing.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from blockmean.lab.arms import ARMS, BASELINE, PEERS, Unsuitable, find
from blockmean.lab.compare import (
    Column,
    Findings,
    Interval,
    MedianRange,
    Stage,
    Study,
    Table,
    Verdict,
    differences,
    diverged,
    format_number,
    interval,
    mean_columns,
    median_range,
    pairs,
    results_table,
    verdict,
)
from blockmean.lab.environment import environment, package_version
from blockmean.lab.records import store
from blockmean.lab.tasks import LOSSES, PROFILES, Task, require_one_of
from blockmean.lab.train import Record, check, time_marks

TUNING_SEEDS = (100, 101, 102, 103, 104)
TARGET_RUNS = 3
"""AdamW's runs that set the target, at least: with one seed it may be too lucky for AdamW itself."""
IN_WORDS = {**{one: str(one) for one in Verdict}, Verdict.HOLDS: "better", Verdict.FAILS: "worse"}
LAST = 10
"""The final training loss is the mean over the last tenth of the steps."""
WINDOW = 20
"""A curve is smoothed by the mean over the trailing twentieth of the steps.

Shorter than the tenth of the final loss on purpose: the loss still falls during that tenth, and with equal windows a
run that ends at the target would reach it in its last step or never. In the published race AdamW crosses it after about
90% of its steps, or never; in the MLPs after 65%, because the loss drops when the second epoch begins and then stays.
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
                Stage(TUNING_SEEDS[self.tuning_seeds : TARGET_RUNS], task.steps),
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
    known = tasks_of(profile)
    for what, given, all_of_them in (("task", tasks, known), ("arm", arms, ARMS)):
        unknown = [name for name in given or [] if name not in all_of_them]
        if unknown:
            more = "; more with --profile full" if what == "task" and profile != "full" else ""
            names = f"{', '.join(map(repr, unknown))}. There are {'; '.join(all_of_them)}{more}."
            raise ValueError(f"There is no {what} {names}")
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


def tasks_of(profile: str) -> dict[str, Task]:
    """The tasks of a profile; ValueError if there is no such profile."""
    require_one_of("profile", profile, PROFILES)
    return PROFILES[profile]


def missing_packages(arms: Iterable[str] | None = None) -> list[str]:
    """Packages that these arms need and that are not installed."""
    missing = set()
    for arm in arms or ARMS:
        try:
            find(ARMS[arm].optimizer)
        except ModuleNotFoundError as error:
            missing.add(str(error.name))
    return sorted(missing)


@dataclass(frozen=True, kw_only=True)
class Result:
    """How one arm did in one task, from the records of its best rate with the fresh seeds."""

    rate: float
    edge: bool
    """Whether the best rate is the largest or smallest tried."""
    seeds: list[int]
    diverged: int
    final_loss: list[float]
    held_out_loss: list[float]
    steps: list[float]
    """To the target, per seed; infinite where it was missed, empty while there is no target."""
    seconds: list[float]
    misses: int
    total_seconds: list[float]
    optimizer_share: float
    """Median over seeds of the optimizer's part of the processor time."""
    bytes_per_parameter: float
    steps_ratio: MedianRange | None
    """To AdamW's, seed by seed; a miss is infinite. Where AdamW misses, its whole run counts: an upper bound."""
    seconds_ratio: MedianRange | None
    iteration_ratio: MedianRange | None
    """Processor time per step over AdamW's."""
    loss_difference: Interval | None
    verdict: str
    """Whether the final training loss is better or worse than AdamW's, beyond noise."""


class TaskResult(NamedTuple):
    """One task of the race, as far as its records go."""

    name: str
    task: Task
    study: Study
    findings: Findings
    target: float | None
    arms: dict[str, Result]
    left_out: dict[str, str]
    """The arms that have nothing to do in its model, and why."""

    @property
    def missing(self) -> list[str]:
        """Arms without any final run yet."""
        return [arm for arm in self.study.arms if arm not in self.arms]

    @property
    def is_bound(self) -> bool:
        """Whether AdamW missed its own target with a seed: then ratios to its steps and seconds are upper bounds."""
        return BASELINE in self.arms and self.arms[BASELINE].misses > 0

    def times(self, ratio: MedianRange | None) -> str:
        """A ratio to AdamW's steps or seconds as text."""
        if ratio is None:
            return "–"
        return f"≤ {ratio}" if self.is_bound and math.isfinite(ratio.median) else str(ratio)

    @property
    def target_text(self) -> str:
        """The target as text, and whether AdamW reached it."""
        if self.target is None:
            return "no target yet"
        missed = f", missed by AdamW with {self.arms[BASELINE].misses} of {len(self.arms[BASELINE].seeds)} seeds"
        return f"target {self.target:.4g}{missed if self.is_bound else ''}"


def results(race: Race, folder: Path) -> list[TaskResult]:
    """What the records in a folder say."""
    found = []
    for name, study in race.studies().items():
        findings = study.findings(folder)
        target = target_of(study, findings)
        arms = {arm: _result(study, findings, arm, target) for arm in findings.results}
        found.append(TaskResult(name, race.tasks[name], study, findings, target, arms, race.left_out[name]))
    return found


def target_of(study: Study, found: Findings) -> float | None:
    """The mean final loss of the runs that set the target; None while one of them is missing, or if one diverged."""
    if len(found.target) < len(study.tuning.seeds) + len(study.target.seeds):
        return None
    target = statistics.mean(map(final_loss, found.target))
    return target if math.isfinite(target) else None


def _result(study: Study, found: Findings, arm: str, target: float | None) -> Result:
    ours, theirs = found.results[arm], found.results.get(BASELINE, []) if arm != BASELINE else []
    shift = study.seed_shifts.get(arm, 0)

    def steps(record: Record) -> float:
        return steps_to(record, -math.inf if target is None else target)

    def seconds(record: Record) -> float:
        return seconds_after(record, steps(record))

    def all_steps(record: Record) -> float:
        return float(len(record["losses"]))

    def all_seconds(record: Record) -> float:
        return float(record["seconds"])

    def iteration(record: Record) -> float:
        return all_seconds(record) / max(all_steps(record), 1.0)  # a run that diverges is shorter

    def ratio(value: Callable[[Record], float], whole: Callable[[Record], float]) -> MedianRange | None:
        # Where AdamW misses, its whole run counts: it would take longer.
        both = zip(pairs(ours, theirs, value, shift), pairs(ours, theirs, whole, shift), strict=True)
        return median_range([mine / min(its, run) for (mine, its), (_, run) in both])

    gained = differences(ours, theirs, final_loss, shift)
    last = ours[-1]
    reached = [] if target is None else list(map(steps, ours))
    return Result(
        rate=found.best[arm],
        edge=study.at_edge(arm, found.best[arm]),
        seeds=[record["spec"]["seed"] for record in ours],
        diverged=sum(map(diverged, ours)),
        final_loss=list(map(final_loss, ours)),
        held_out_loss=list(map(held_out_loss, ours)),
        steps=reached,
        seconds=[round(seconds_after(record, at), 4) for record, at in zip(ours, reached, strict=False)],
        misses=sum(map(math.isinf, reached)),
        total_seconds=list(map(all_seconds, ours)),
        optimizer_share=round(statistics.median(r["step_seconds"] / max(r["seconds"], 1e-9) for r in ours), 4),
        bytes_per_parameter=round(last["state_bytes"] / last["parameters"], 3),
        steps_ratio=ratio(steps, all_steps) if reached else None,
        seconds_ratio=ratio(seconds, all_seconds) if reached else None,
        iteration_ratio=ratio(iteration, iteration),
        loss_difference=interval(gained),
        verdict=IN_WORDS[verdict(gained) if len(gained) > 1 else Verdict.UNKNOWN],
    )


def table(found: TaskResult) -> Table:
    """The arms of a task, best final loss first."""
    arms = found.arms

    def failures(arm: str) -> str:
        counts = {"missed": arms[arm].misses, "diverged": arms[arm].diverged}
        return ", ".join(f"{count} {what}" for what, count in counts.items() if count)

    def median(values: Sequence[float], spec: str) -> str:
        return format_number(statistics.median(values), spec) if values else "–"

    def mean(values: Sequence[float]) -> str:
        return format_number(statistics.mean(values), ".4g")

    columns = [
        *mean_columns(found.study, found.findings, BASELINE, final_loss, "final loss", ".4g", "− AdamW's"),
        Column("verdict", lambda arm: "–" if arm == BASELINE else arms[arm].verdict),
        Column("steps to target", lambda arm: median(arms[arm].steps, ".0f")),
        Column("× AdamW's", lambda arm: found.times(arms[arm].steps_ratio)),
        Column("seconds to target", lambda arm: median(arms[arm].seconds, ".4g")),
        Column("× AdamW's", lambda arm: found.times(arms[arm].seconds_ratio)),
        Column("iteration × AdamW's", lambda arm: str(arms[arm].iteration_ratio or "–")),
        Column("held-out loss", lambda arm: mean(arms[arm].held_out_loss)),
        Column("bytes/param", lambda arm: f"{arms[arm].bytes_per_parameter:.1f}"),
    ]
    order = sorted(arms, key=lambda arm: statistics.mean(arms[arm].final_loss))
    title = f"{found.task.title}, {found.task.steps} steps: {found.target_text}"
    return results_table(found.study, found.findings, columns, title, failures, order)


def notes(found: Sequence[TaskResult]) -> list[str]:
    """What is missing, and why."""
    lines = []
    for one in found:
        lines += [f"{one.name}: {arm} is left out. {why}" for arm, why in one.left_out.items()]
        waiting = [arm for arm in one.missing if one.findings.tuned.get(arm) is None or arm in one.findings.best]
        hopeless = [arm for arm in one.missing if arm not in waiting]
        if one.target is None:
            wanted = len(one.study.tuning.seeds) + len(one.study.target.seeds)
            done = sum(not diverged(record) for record in one.findings.target)
            lines.append(f"{one.name}: no target yet. {BASELINE} has {done} of the {wanted} runs that set it.")
        if waiting:
            lines.append(f"{one.name}: no final runs yet of {'; '.join(waiting)}.")
        lines += [f"{one.name}: {arm} diverged with every rate." for arm in hopeless]
        lines += [f"{problem}; it counts as missing." for problem in one.findings.unusable]
    return lines


def summary(race: Race, found: Sequence[TaskResult]) -> dict[str, Any]:
    """Everything in plain values; infinite ones are None."""
    packages = {name: package_version(name) for name in dict.fromkeys(PEERS.values())}
    values = {
        "environment": environment(),
        "packages": packages,
        "seeds": race.seeds,
        "tuning_seeds": race.tuning_seeds,
        "window": f"1/{WINDOW} of the steps",
        "arms": {arm: asdict(ARMS[arm]) for arm in race.arms},
        "notes": notes(found),
        "tasks": {
            one.name: {
                **asdict(one.task),
                "error": LOSSES[one.task.loss].unit,
                "target": one.target,
                "target_runs": list(map(final_loss, one.findings.target)),
                "tuned": {arm: {f"{r:g}": v for r, v in own.items()} for arm, own in one.findings.tuned.items()},
                "arms": {arm: asdict(own) for arm, own in one.arms.items()},
            }
            for one in found
        },
    }
    plain: dict[str, Any] = as_json(values)
    return plain


def as_json(value: Any) -> Any:
    """As strict JSON takes it: an infinite number is None."""
    if isinstance(value, Interval | MedianRange):
        value = value._asdict()
    if isinstance(value, dict):
        return {key: as_json(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def save_summary(race: Race, found: Sequence[TaskResult], path: Path) -> None:
    store(path, summary(race, found))
