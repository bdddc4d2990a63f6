"""`blockmean bench`: measurements against other optimizers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from blockmean.cli._app import (
    app,
    check_folder,
    console,
    progress,
    readable_errors,
    resumable,
    run_studies,
    split_names,
    watch,
)

if TYPE_CHECKING:
    from blockmean.lab.compare import Table as Cells
    from blockmean.lab.race import Race, TaskResult
    from blockmean.lab.study import Study

bench = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Measure optimizers against each other.")
app.add_typer(bench, name="bench")


Profile = Annotated[
    str,
    typer.Option(help="quick (embedded data, minutes) or full (the published comparison: hours or days)."),
]
DataDir = Annotated[
    Path | None, typer.Option(help="Folder with mnist, cifar10 and text.", show_default="$BLOCKMEAN_DATA")
]
Jobs = Annotated[int, typer.Option(help="Runs at a time, each on one thread.", min=1)]
ListAll = Annotated[bool, typer.Option("--list", help="List the names that can be given, and exit.")]


@bench.callback()
def _group() -> None:
    """Measure optimizers against each other."""


@bench.command(short_help="Race tuned optimizers on several tasks.")
def race(
    tasks: Annotated[
        str | None, typer.Option(help="Names from --list, separated by commas.", show_default="all")
    ] = None,
    arms: Annotated[
        str | None,
        typer.Option(help="Names from --list, separated by commas; AdamW always runs.", show_default="all"),
    ] = None,
    profile: Profile = "quick",
    data_dir: DataDir = None,
    out: Annotated[Path, typer.Option(help="Folder for race.json and plots.", file_okay=False)] = Path("out/race"),
    records: Annotated[
        Path | None,
        typer.Option(help="Folder for the records, one file per task.", file_okay=False, show_default="OUT/records"),
    ] = None,
    jobs: Jobs = 2,
    seeds: Annotated[int, typer.Option(help="Fresh seeds for the best rate of every arm.", min=1)] = 5,
    tuning_seeds: Annotated[int, typer.Option(help="Seeds that try every learning rate.", min=1, max=5)] = 1,
    steps: Annotated[
        int | None, typer.Option(help="Steps of each run, for a quick trial.", min=1, show_default="those of the task")
    ] = None,
    draw_only: Annotated[
        bool, typer.Option("--draw-only", help="Run nothing: show tables and plots of the records so far.")
    ] = False,
    list_all: ListAll = False,
) -> None:
    """Race optimizers: steps and seconds to AdamW's training loss, and the loss after equal steps.

    Every arm tries four learning rates; its best one runs with fresh seeds. AdamW's best rate also runs with further
    tuning seeds, which set the target. Finished runs are kept as records and not repeated: stop with Ctrl-C at any
    time, and run the same command again to resume.
    """
    with readable_errors("bench race"):
        from blockmean.lab.arms import ARMS
        from blockmean.lab.race import make_race, missing_packages
        from blockmean.lab.records import Records
        from blockmean.lab.tasks import verify_data

        if list_all:
            _list(profile)
            return
        chosen = split_names(arms)
        missing = missing_packages(arm for arm in ARMS if chosen is None or arm in chosen)
        _require("bench race", missing)
        found = make_race(split_names(tasks), chosen, profile, seeds, tuning_seeds, steps)
        records = records or out / "records"
        for folder in (out, records):
            check_folder(folder)
        if draw_only and not any(Records(study.file(records)).every() for study in found.studies().values()):
            raise FileNotFoundError(f"There are no records of this race in {records}. Give their folder as --records.")
        if not draw_only:
            for study in found.studies().values():
                if not study.is_complete(records):
                    verify_data(study.task, data_dir)
        for folder in (out, records):
            folder.mkdir(parents=True, exist_ok=True)
    if not draw_only:
        with resumable(records):
            run_studies(found.studies().values(), records, data_dir, jobs, lambda: _write(found, records, out))
    with progress() as bars:
        written = _write(found, records, out, watch(bars))
    _show(written, out)


@bench.command(short_help="Time a step against torch's own optimizers.")
def step(
    networks: Annotated[
        str | None,
        typer.Option(help="Names from --list, or COUNTxROWS as 12x1000, separated by commas.", show_default="all"),
    ] = None,
    optimizers: Annotated[
        str | None,
        typer.Option(help="Names from --list, separated by semicolons.", show_default="all but numbers of means"),
    ] = None,
    sweep: Annotated[
        str | None,
        typer.Option(help="Instead: measure cost against parameters, blocks or means."),
    ] = None,
    threads: Annotated[int, typer.Option(help="Threads of every step.", min=1)] = 1,
    repetitions: Annotated[int, typer.Option(help="Samples of every optimizer.", min=3)] = 11,
    longest: Annotated[float, typer.Option(help="Time limit of one measurement, in seconds.", min=1)] = 180,
    out: Annotated[Path, typer.Option(help="File for the records.", dir_okay=False)] = Path("out/steps.jsonl"),
    show_only: Annotated[
        bool, typer.Option("--show-only", help="Measure nothing: show the tables of the records so far.")
    ] = False,
    list_all: ListAll = False,
) -> None:
    """Time the steps of optimizers, each beside torch's default and fused form in one interleaved run.

    Every optimizer has a process of its own. Finished measurements are kept and not repeated: stop with Ctrl-C at any
    time, and run the same command again to resume. Run nothing else on the
    machine meanwhile.
    """
    with readable_errors("bench step"):
        from blockmean.lab.steps import (
            NETWORKS,
            OF_A_SWEEP,
            STEPPERS,
            SWEEPS,
            USUAL,
            network,
            notes,
            run,
            table,
            unmeasured,
        )
        from blockmean.lab.steps import read as read_all

        if list_all:
            for name in NETWORKS:
                print(f"network    {name}")
            for name in STEPPERS:
                print(f"optimizer  {name}")
            return
        if sweep is not None and sweep not in SWEEPS:
            raise ValueError(f"There is no sweep {sweep!r}. There are {', '.join(SWEEPS)}.")
        chosen = split_names(networks) or list(SWEEPS[sweep] if sweep else NETWORKS)
        names = split_names(optimizers, ";") or list(OF_A_SWEEP[sweep] if sweep else USUAL)
        unknown = [name for name in names if name not in STEPPERS]
        if unknown:
            raise ValueError(f"There is no optimizer {'; '.join(unknown)}. There are {'; '.join(STEPPERS)}.")
        for name in set(chosen) - set(NETWORKS):
            network(name)  # or an error that says which there are
        check_folder(out.parent)
        if show_only and not read_all(out, chosen, threads):
            raise FileNotFoundError(f"There are no measurements of these networks in {out}. Give their file as --out.")
        total = 0 if show_only else sum(len(unmeasured(out, names, name, threads)) for name in chosen)
    with resumable(out), progress() as bars:
        show, done = watch(bars), 0
        for name in chosen if total else []:
            show("measurements", done, total)
            for optimizer, row in run(out, names, name, threads, repetitions, longest):
                said = row.get("missing") or f"{row['beside_fused']['median']:.2f} × torch's fused step"
                console.print(f"{name}, {optimizer}: {said}", soft_wrap=True)
                done += 1
                show("measurements", done, total)
    for costs in read_all(out, chosen, threads):
        console.print(_rich(table(costs)))
        for note in notes(costs):
            console.print(note, soft_wrap=True)
    console.print(
        "Medians with quartiles; × is the ratio to torch's own optimizer of that kind, timed in turns.",
        style="dim",
    )


@bench.command(short_help="Compare tuned optimizers with learning-rate schedules.")
def study(
    cells: Annotated[
        str | None, typer.Option(help="Names from --plan, separated by commas.", show_default="all")
    ] = None,
    arms: Annotated[
        str | None, typer.Option(help="Names from --plan, separated by semicolons.", show_default="all")
    ] = None,
    profile: Profile = "quick",
    text: Annotated[
        Path | None, typer.Option(help="A text of your own, plain or .gz.", show_default="Python's documentation")
    ] = None,
    data_dir: DataDir = None,
    records: Annotated[Path, typer.Option(help="Folder for the records, one file per cell.", file_okay=False)] = Path(
        "out/study"
    ),
    out: Annotated[Path, typer.Option(help="Folder for plots.", file_okay=False)] = Path("out"),
    jobs: Jobs = 1,
    show_only: Annotated[
        bool, typer.Option("--show-only", help="Run nothing: show tables of the records so far.")
    ] = False,
    plan: Annotated[bool, typer.Option("--plan", help="Run nothing: list cells, arms, runs and hours.")] = False,
    times: Annotated[
        bool, typer.Option("--times", help="Only time a few steps of the tuned arms. Run nothing else on the machine.")
    ] = False,
) -> None:
    """Compare tuned optimizers: warm-up and decay to zero, five tuned settings each, fresh seeds.

    Every arm searches rate, weight decay, β₂, β₁ and warm-up by coordinate descent with a stated number of runs, AdamW
    with twice as many; the best settings run with fresh seeds. Finished runs are kept as records and not repeated: stop
    with Ctrl-C at any time, and run the same command again to resume.
    """
    with readable_errors("bench study"):
        from blockmean.lab.study import make_study, missing_packages
        from blockmean.lab.tasks import verify_data

        found = make_study(records, split_names(cells), split_names(arms, ";"), profile, text)
        for folder in (records, out):
            check_folder(folder)
        if plan:
            _show_plan(found)
            return
        if not show_only:
            _require("bench study", missing_packages(found))
            for cell in found.cells.values():
                verify_data(cell.task, data_dir)

    def say(cell: str, arm: str, record: dict[str, Any]) -> None:
        from blockmean.lab.study import describe

        console.print(f"{cell}, {arm}, {describe(record)}; {sum(1 for _ in found.wanted())} runs left", soft_wrap=True)

    if not show_only:
        with resumable(records):
            if times:
                found.run_times(data_dir, say)
            else:
                found.run(data_dir, jobs, say)
    _show_study(found, out)


def _show_study(found: Study, out: Path) -> None:
    """Tables and pictures of the records so far, and what is missing."""
    from blockmean.lab.study_pictures import draw_cell
    from blockmean.lab.study_results import notes, tables

    wide = console.width >= WIDE
    for name in found.cells:
        for cells in tables(found, name):
            if wide:
                console.print(_rich(cells))
            elif ": sensitivity" not in cells.title:  # a narrow window breaks its numbers
                console.print(_rich(cells, {i: x for i, x in enumerate(cells.header) if x not in WIDE_ONLY}))
        if found.findings(name).final:
            console.print(str(draw_cell(found, name, out / f"study-{name}").png), soft_wrap=True)
    for note in notes(found):
        console.print(note, soft_wrap=True)
    if not wide:
        console.print(f"A window of {WIDE} columns shows the whole tables.", style="dim")


def _show_plan(found: Study) -> None:
    """The runs of every cell, and how long they take."""
    shown = Table("cell", "task", "tuning", "final", "more", "done", "time")
    total = 0.0
    for row in found.plan():
        total += row.hours
        counts = (row.tuning, row.final, f"{row.more:g}", row.done, _duration(row.hours))
        shown.add_row(row.cell, found.cells[row.cell].task.title, *map(str, counts))
    console.print(shown)
    for name in found.cells:
        console.print(f"{name}: {'; '.join(found.arms_of(name))}", soft_wrap=True)
    console.print(
        "Numbers are runs: to tune at most, with fresh seeds, and more for AdamW's curve and ablations. In all "
        f"{_duration(total)} of processor time, by the runs so far or a guess where there are none.",
        soft_wrap=True,
    )


def _duration(hours: float) -> str:
    return f"{hours:.1f} h" if hours >= 1 else f"{60 * hours:.0f} min"


def _list(profile: str) -> None:
    """Print the tasks of a profile and the arms with their rates."""
    from blockmean.lab.arms import ARMS
    from blockmean.lab.race import tasks_of

    for name, task in tasks_of(profile).items():
        print(f"task  {name:20} {task.title}: {task.steps} steps of batch {task.batch}")
    for name, arm in ARMS.items():
        rates = ", ".join(f"{rate:g}" for rate in arm.rates)
        options = "".join(f", {key}={value}" for key, value in arm.options.items())
        print(f"arm   {name:20} {arm.optimizer}{options}; rates {rates}")


WIDE = 170
"""Columns of a window in which the whole table of a task can be read."""

WIDE_ONLY = {"seeds", "σ", "p", "iteration × AdamW's", "optimizer's share", "bytes/param", "tuning runs"}
"""Columns of a study that a narrower window does not show."""

MAIN_COLUMNS = {0: "optimizer", 3: "final loss", 5: "verdict", 7: "steps × AdamW's", 9: "seconds × AdamW's"}
"""Those of a race that a narrower window shows."""


def _write(
    race: Race, records: Path, out: Path, show: Callable[[str, int, int], None] = lambda what, done, total: None
) -> list[TaskResult]:
    """Write race.json and the pictures from the records, finished or not."""
    from blockmean.lab.race import results, save_summary
    from blockmean.lab.race_pictures import draw_overview, draw_task

    found = results(race, records)
    save_summary(race, found, out / "race.json")
    ready = [one for one in found if one.arms]
    for done, one in enumerate(ready):
        show("pictures", done, len(ready) + 1)
        draw_task(one, out / f"race-{one.name}")
    if ready:
        draw_overview(ready, out / "race")
        show("pictures", len(ready) + 1, len(ready) + 1)
    return found


def _show(found: list[TaskResult], out: Path) -> None:
    from blockmean.lab.race import notes, table

    for one in found:
        if one.arms:
            console.print(_rich(table(one), None if console.width >= WIDE else MAIN_COLUMNS))
    for note in notes(found):
        console.print(note, soft_wrap=True)
    console.print(
        "Ratios are medians over paired seeds with their range, differences means with a 95% t interval; ∞: the target "
        "was missed; ≤: AdamW missed it with some seeds, and its whole run counts; edge: the best rate is the largest "
        "or smallest tried.",
        style="dim",
    )
    if console.width < WIDE:
        console.print(f"A window of {WIDE} columns shows the whole tables; race.json has everything.", style="dim")
    for path in (out / "race.json", *sorted(out.glob("race*.png"))):
        console.print(str(path), soft_wrap=True)


def _rich(cells: Cells, columns: Mapping[int, str] | None = None) -> Table:
    """A table for the terminal; `columns` chooses some, and their headers."""
    chosen = columns or dict(enumerate(cells.header))
    shown = Table(*chosen.values(), title=cells.title, title_justify="left")
    for row in cells.rows:
        shown.add_row(*(row[i] for i in chosen))
    return shown


def _require(command: str, missing: list[str]) -> None:
    """Stop if packages are missing."""
    if missing:
        raise SystemExit(f"`blockmean {command}` needs {' and '.join(missing)}. In a checkout: pip install '.[race]'")
