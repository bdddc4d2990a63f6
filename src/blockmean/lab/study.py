"""A study of tuned optimizers: finished schedules, several tuned settings, fresh seeds.

    cell      a task, its arms, how many runs tune each of them, and with how many fresh seeds the best settings run
    tuning    coordinate descent over rate, weight decay, β₂, β₁ and warm-up; twice the budget for AdamW
    final     the best settings with fresh seeds, the same for all arms: equal weights, equal batches
    curve     AdamW's best settings with fewer and more tokens: its loss L(D) tells gains as tokens saved

What to run next follows from the records, so a study resumes wherever it was stopped.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

from blockmean.lab.arms import find
from blockmean.lab.compare import in_turn
from blockmean.lab.environment import package_version
from blockmean.lab.race import held_out_loss
from blockmean.lab.records import Records, run_all
from blockmean.lab.spec import RunSpec
from blockmean.lab.study_cells import ARMS, BASELINE, PROFILES, Cell
from blockmean.lab.study_search import Axis, Point, Search, descend
from blockmean.lab.tasks import Task, require_one_of
from blockmean.lab.tokens import CONTEXT
from blockmean.lab.train import Record

TUNING_SEEDS = (100, 101)
"""All arms tune with the first. Where a cell says so, AdamW has the mean of both, so that no lucky seed sets it."""
TIMING_SEEDS, TIMING_STEPS = (200, 201, 202), 40
"""Short runs for times that are published: the long ones share the machine with whatever else runs."""


class Findings(NamedTuple):
    """What the records of a cell say."""

    searches: dict[str, Search]
    """Of the arms whose search can begin."""
    best: dict[str, Point]
    """Of the arms whose search is over."""
    final: dict[str, list[Record]]
    """Per arm the records of its best settings with the fresh seeds, in their order."""
    curve: dict[float, list[Record]]
    """AdamW's records per multiple of the steps."""
    rates: dict[str, dict[float, list[Record]]]
    """Of a cell with given rates."""
    ablations: dict[str, list[Record]]
    unusable: list[str]


@dataclass(frozen=True)
class Study:
    """Cells, and the arms that take part."""

    cells: Mapping[str, Cell]
    arms: tuple[str, ...]
    folder: Path
    """Of the records, a file per cell."""
    only_settings: frozenset[str] = frozenset()
    """Cells that nobody asked for, whose settings others take: only their searches run."""

    def file(self, name: str) -> Path:
        return self.folder / f"{name}.jsonl"

    def axes(self, name: str, arm: str) -> tuple[Axis, ...]:
        """All axes of a search; those that do not move have one value."""
        return self.cells[name].axes(arm, self.start(name, arm) or ARMS[arm].start)

    def start(self, name: str, arm: str) -> Point | None:
        """Where the search of an arm begins; None as long as that depends on records that are missing."""
        cell = self.cells[name]
        if arm in cell.search_less:
            return self.best(name, BASELINE)
        return self.best(cell.like, arm) if cell.like else ARMS[arm].start

    def search(self, name: str, arm: str) -> Search | None:
        """The search of an arm as far as its records go; None if it cannot begin."""
        start, cell = self.start(name, arm), self.cells[name]
        if start is None:
            return None
        budget = cell.budget(arm)
        if not budget:
            return Search(start, float("nan"), converged=True)
        known = self.records(name)

        def loss(point: Point) -> float | None:
            specs = self.tuning_specs(name, arm, point)
            records = known.of(specs)
            return statistics.mean(map(tuning_loss, records)) if len(records) == len(specs) else None

        return descend(start, self.axes(name, arm), budget, loss)

    def best(self, name: str, arm: str) -> Point | None:
        """The best settings of an arm; None as long as its tuning is not over, or if it always diverged."""
        found = self.search(name, arm)
        return found.best if found is not None and found.wanted is None and found.loss != float("inf") else None

    def tuning_specs(self, name: str, arm: str, point: Point) -> list[RunSpec]:
        """The runs that tell how good a point is."""
        cell = self.cells[name]
        count = cell.baseline_seeds if arm == BASELINE else 1
        specs = [self.spec(name, arm, point, seed) for seed in TUNING_SEEDS[:count]]
        return [replace(spec, split="validation") for spec in specs] if cell.validates else specs

    def spec(self, name: str, arm: str, point: Point, seed: int, steps: int = 0) -> RunSpec:
        """A run of a cell; `arm` may be one of its ablations."""
        cell = self.cells[name]
        settings = {**ARMS, **cell.ablations}[arm].settings(point)
        if arm == "Adam-mini":  # it cannot tell the width of a model
            settings["options"]["num_embeds"] = int(cell.task.model.split("-")[1])
        if cell.start:
            before = self.best(cell.start, BASELINE)
            if before is None:
                raise ValueError(f"{cell.start} has no best settings of {BASELINE} yet.")
            settings["start"] = asdict(self.spec(cell.start, BASELINE, before, 0))
        return cell.task.spec(settings, point[0], seed, steps)

    def arms_of(self, name: str) -> list[str]:
        """The arms of a cell, in the order in which they run."""
        cell = self.cells[name]
        return [arm for arm in ARMS if arm in self.arms and (arm in cell.arms or arm in cell.search_less)]

    def records(self, name: str) -> Records:
        """The records of a cell; read again only when the file has grown."""
        path = self.file(name)
        size = path.stat().st_size if path.exists() else 0
        cached = _READ.get(path)
        if cached is None or cached[0] != size:
            _READ[path] = cached = size, Records(path)
        return cached[1]

    def final_specs(self, name: str, arm: str) -> list[RunSpec]:
        """The best settings of an arm with the fresh seeds, or every rate with them; empty while none are known."""
        cell, point = self.cells[name], self.best(name, arm)
        if point is None or (cell.start and self.best(cell.start, BASELINE) is None):
            return []
        points = [(rate, *point[1:]) for rate in cell.rates] or [point]
        return [self.spec(name, arm, one, seed) for seed in range(cell.seeds) for one in points]

    def curve_specs(self, name: str) -> dict[float, list[RunSpec]]:
        """AdamW's runs with fewer and more steps."""
        cell, point = self.cells[name], self.best(name, BASELINE)
        if point is None:
            return {}
        return {
            times: [
                self.spec(name, BASELINE, point, seed, round(times * cell.task.steps))
                for seed in range(cell.curve_seeds)
            ]
            for times in cell.curve
        }

    def ablation_specs(self, name: str) -> dict[str, list[RunSpec]]:
        """The runs of Anova's variants."""
        cell, point = self.cells[name], self.best(name, "Anova")
        if point is None or "Anova" not in self.arms:
            return {}
        seeds = range(cell.few_seeds)
        return {what: [self.spec(name, what, point, seed) for seed in seeds] for what in cell.ablations}

    def findings(self, name: str) -> Findings:
        """What the records of a cell say."""
        known, cell = self.records(name), self.cells[name]
        searches = {arm: found for arm in self.arms_of(name) if (found := self.search(name, arm)) is not None}
        best = {arm: point for arm in searches if (point := self.best(name, arm)) is not None}
        specs = {arm: self.final_specs(name, arm) for arm in best}
        rates = {
            arm: {rate: known.of(spec for spec in own if spec.lr == rate) for rate in cell.rates}
            for arm, own in specs.items()
        }
        final = {arm: known.of(own) for arm, own in specs.items()} if not cell.rates else {}
        curve = {times: known.of(own) for times, own in self.curve_specs(name).items()}
        ablations = {what: known.of(own) for what, own in self.ablation_specs(name).items()}
        return Findings(
            searches,
            best,
            {arm: records for arm, records in final.items() if records},
            {times: records for times, records in curve.items() if records},
            rates if cell.rates else {},
            {what: records for what, records in ablations.items() if records},
            known.unusable,
        )

    def wanted(self) -> Iterator[tuple[str, str, RunSpec]]:
        """The runs that can be made now and have no record: cell, arm or part of the study, spec."""
        for name in self.cells:
            known = self.records(name)
            arms = self.arms_of(name)
            for arm in arms:
                found = self.search(name, arm)
                if found is not None and found.wanted is not None:
                    specs = self.tuning_specs(name, arm, found.wanted)
                    yield from ((name, arm, spec) for spec in specs if not known.of([spec]))
            if name in self.only_settings:
                continue
            curve = self.curve_specs(name) if BASELINE in self.arms else {}
            parts = {
                **{arm: self.final_specs(name, arm) for arm in arms},
                **{f"{BASELINE} × {times:g}": own for times, own in curve.items()},
                **self.ablation_specs(name),
            }
            names = {spec: what for what, own in parts.items() for spec in own}
            for spec in in_turn(parts.values()):
                if not known.of([spec]):
                    yield name, names[spec], spec

    def run(
        self, data_dir: Path | None, jobs: int, on_record: Callable[[str, str, Record], None] = lambda *said: None
    ) -> None:
        """Make all runs that have no record yet."""
        while todo := list(self.wanted()):
            name = todo[0][0]
            batch = [(arm, spec) for cell, arm, spec in todo if cell == name]
            if batch[0][1].seed in TUNING_SEEDS:
                batch = batch[:jobs]  # what comes next depends on them
            arms = {spec.key: arm for arm, spec in batch}
            for record in run_all([spec for _, spec in batch], self.file(name), data_dir, jobs):
                on_record(name, arms[RunSpec(**record["spec"]).key], record)

    def run_times(
        self, data_dir: Path | None, on_record: Callable[[str, str, Record], None] = lambda *said: None
    ) -> None:
        """Time a few steps of every arm at its best settings, one run at a time, the arms in turn."""
        for name in self.cells:
            specs = self.timing_specs(name)
            arms = {spec.key: arm for arm, own in specs.items() for spec in own}
            for record in run_all(list(in_turn(specs.values())), self.file(f"{name}-times"), data_dir):
                on_record(name, arms[RunSpec(**record["spec"]).key], record)

    def timing_specs(self, name: str) -> dict[str, list[RunSpec]]:
        """Short runs of the arms whose settings are known."""
        points = {arm: point for arm in self.arms_of(name) if (point := self.best(name, arm)) is not None}
        cell = self.cells[name]
        waits = cell.start and self.best(cell.start, BASELINE) is None
        if waits or not cell.seeds or name in self.only_settings:
            return {}
        return {
            arm: [self.spec(name, arm, point, seed, TIMING_STEPS) for seed in TIMING_SEEDS]
            for arm, point in points.items()
        }

    def times(self, name: str) -> dict[str, list[Record]]:
        """The records of these runs, of arms that have them all."""
        known = Records(self.file(f"{name}-times"))
        found = {arm: known.of(specs) for arm, specs in self.timing_specs(name).items()}
        return {arm: records for arm, records in found.items() if len(records) == len(TIMING_SEEDS)}

    # ---------------------------------------------------------------- the plan

    def plan(self) -> list[PlanRow]:
        """Per cell the number of runs, those that are done, and processor hours as far as records tell."""
        rows = []
        for name, cell in self.cells.items():
            done = len(self.records(name).every())
            arms = self.arms_of(name)
            tuning = sum(cell.budget(arm) * (cell.baseline_seeds if arm == BASELINE else 1) for arm in arms)
            final = cell.seeds * len(arms) * max(1, len(cell.rates))
            more = cell.curve_seeds * sum(cell.curve) if BASELINE in self.arms else 0
            ablations = len(cell.ablations) * cell.few_seeds if "Anova" in self.arms else 0
            if name in self.only_settings:
                final = more = ablations = 0
            whole = tuning + final + more + ablations  # in runs of the cell's own length
            rows.append(PlanRow(name, tuning, final, more + ablations, done, whole * self.seconds(name) / 3600))
        return rows

    def seconds(self, name: str) -> float:
        """Processor seconds of a run of a cell: the median of its records, or those of others scaled by their tokens.

        Counted are training and the tests along the way, which are about 4% of it.
        """
        mine = _seconds_per_step(self.records(name).every())
        task = self.cells[name].task
        if mine is None:
            guesses = {
                other: per_step * _work(task) / _work(cell.task)
                for other, cell in self.cells.items()
                if (per_step := _seconds_per_step(self.records(other).every())) is not None
            }
            mine = next(iter(guesses.values()), max(_work(task) / 4e10, 0.02))
        return 1.04 * mine * task.steps


def tuning_loss(record: Record) -> float:
    """What settings are chosen by; infinite for a run that diverged. Held-out data are for the final runs alone.

    It is the loss on data for validation. Where the end of a text is held out, which is of another kind, it is the
    training loss over the last twentieth of the steps.
    """
    if record["spec"].get("split") == "validation":
        return held_out_loss(record)
    return math.inf if record["train_loss"] is None else float(record["train_loss"])


def describe(record: Record) -> str:
    """The settings of a run and what came of it, in a line."""
    spec = record["spec"]
    kept = {name: value for name, value in spec["options"].items() if name in ("weight_decay", "betas", "momentum")}
    settings = {"lr": spec["lr"], **kept, "warm_up": spec["warm_up"], "seed": spec["seed"], "steps": spec["steps"]}
    said = ", ".join(f"{name}={value}" for name, value in settings.items())
    return f"{said}: held-out loss {held_out_loss(record):.4f}, {record['seconds']:.0f} s"


class PlanRow(NamedTuple):
    """A cell of the plan."""

    cell: str
    tuning: int
    """Runs at most."""
    final: int
    more: float
    """The baseline's curve and ablations, in runs of the cell's length."""
    done: int
    hours: float


_READ: dict[Path, tuple[int, Records]] = {}


def _seconds_per_step(records: list[Record]) -> float | None:
    found = [r["seconds"] / r["spec"]["steps"] for r in records if r["diverged_at"] is None]
    return statistics.median(found) if found else None


def _work(task: Task) -> float:
    """Floating-point operations of a step, roughly; of convolutions, which are faster, as many as take their time."""
    each = {"gpt-16": 36e3, "gpt-64": 0.25e6, "gpt-96": 0.55e6, "gpt-160": 1.6e6, "resnet10": 10e6}[task.model]
    return 6 * each * task.batch * (CONTEXT if task.tokenizer else 1)


def make_study(
    folder: Path,
    cells: Iterable[str] | None = None,
    arms: Iterable[str] | None = None,
    profile: str = "full",
    text: Path | None = None,
) -> Study:
    """A study of some cells and arms, or all of them.

    Args:
        folder: of the records.
        text: a text of the user's own instead of Python's documentation.
    """
    require_one_of("profile", profile, PROFILES)
    known = PROFILES[profile]
    chosen = list(cells or known)
    runners = list(arms or ARMS)
    for what, given, every in (("cell", chosen, list(known)), ("arm", runners, list(ARMS))):
        unknown = [one for one in given if one not in every]
        if unknown:
            raise ValueError(f"There is no {what} {', '.join(map(repr, unknown))}. There are {'; '.join(every)}.")
    asked = list(chosen)
    for name in chosen:
        chosen += [like for like in [known[name].like] if like and like not in chosen]
    found = {name: known[name] for name in known if name in chosen}
    if text is not None:
        found = {name: _on_text(cell, str(text.resolve())) for name, cell in found.items()}
    return Study(found, tuple(arm for arm in ARMS if arm in runners), folder, frozenset(found) - frozenset(asked))


def missing_packages(study: Study) -> list[str]:
    """Packages that the runs of a study need and that are not installed."""
    missing = set()
    for arm in study.arms:
        try:
            find(ARMS[arm].optimizer)
        except ModuleNotFoundError as error:
            missing.add(str(error.name))
    if package_version("tokenizers") is None and any(cell.task.tokenizer for cell in study.cells.values()):
        missing.add("tokenizers")
    return sorted(missing)


def _on_text(cell: Cell, text: str) -> Cell:
    task = cell.task
    if not task.tokenizer:
        return cell
    dataset = text if not cell.start else task.dataset
    return replace(cell, task=replace(task, tokenizer=text, dataset=dataset, split="pieces"))
