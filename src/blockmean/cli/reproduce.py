"""`blockmean reproduce` makes the runs of the paper and its report, `blockmean report` the report alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import (
    BarColumn,
    Progress,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

import blockmean
from blockmean.cli._app import app, console, readable_errors

if TYPE_CHECKING:
    from blockmean.lab.paper import Outcome, ReportConfig
    from blockmean.lab.study import Study

Parts = Annotated[
    list[str] | None, typer.Argument(help="Parts of the paper, as `reproduce --list` names them; all by default.")
]
Profile = Annotated[str, typer.Option(help="quick: 5,000 embedded digits. paper: MNIST and CIFAR-10, hours.")]
DataDir = Annotated[Path | None, typer.Option(help="The folder with MNIST and CIFAR-10 (or BLOCKMEAN_DATA).")]
Out = Annotated[Path, typer.Option(help="The folder for the report and its pictures.", file_okay=False, writable=True)]
Records = Annotated[
    Path | None, typer.Option(help="The folder for records, one per run. OUT/records by default.", file_okay=False)
]
Seeds = Annotated[int | None, typer.Option(help="Seeds for the best rate of each optimizer.", min=1)]
Epochs = Annotated[int | None, typer.Option(help="Epochs of these runs.", min=1)]

PUBLISHED = Path(blockmean.__file__).parents[2] / "results"
"""The records that come with a checkout of the project; an installed wheel has none."""

COLOURS = {"holds": "green", "does not hold": "bold red", "within noise": "yellow", "no verdict": "dim"}


@app.command()
def reproduce(
    parts: Parts = None,
    profile: Profile = "quick",
    data_dir: DataDir = None,
    download: Annotated[bool, typer.Option("--download", help="Fetch MNIST and CIFAR-10 if not there.")] = False,
    seeds: Seeds = None,
    epochs: Epochs = None,
    jobs: Annotated[int, typer.Option(help="Runs at a time, one thread each.", min=1)] = 2,
    out: Out = Path("out"),
    records: Records = None,
    list_parts: Annotated[bool, typer.Option("--list", help="List the parts and stop.")] = False,
) -> None:
    """Run the experiments of the paper, check its claims, draw its figures, and write it all into report.html.

    A run that has a record is not made again: stop it with Ctrl-C whenever you like, the same command goes on. The exit
    code is 1 if something that is mathematically certain does not hold.
    """
    with readable_errors("reproduce"):
        from blockmean.lab.data import verify
        from blockmean.lab.paper import PARTS
        from blockmean.lab.paper.protocol import studies

        if list_parts:
            for name, part in PARTS.items():
                print(f"{name:10} {(part.__doc__ or '').partition(chr(10))[0]}")
            return
        config = _config(profile, out, records, data_dir, seeds, epochs)
        chosen = _chosen(parts)
        wanted = studies(profile, seeds, epochs) if "fig5" in chosen else []
        unfinished = [study for study in wanted if not study.is_complete(config.records / study.name)]
        for dataset in dict.fromkeys(study.dataset for study in (studies(profile) if download else unfinished)):
            verify(dataset, data_dir, download)
        for folder in (config.out, config.records):
            folder.mkdir(parents=True, exist_ok=True)  # where that cannot be, say so before the first run
    try:
        _run(wanted, config, jobs)
        _report(chosen, config)
    except KeyboardInterrupt:
        console.print(f"Stopped. Finished runs are in {config.records}; the same command goes on from there.")
        raise typer.Exit(130) from None


@app.command()
def report(
    parts: Parts = None,
    profile: Profile = "quick",
    seeds: Seeds = None,
    epochs: Epochs = None,
    out: Out = Path("out"),
    records: Records = None,
) -> None:
    """Write report.html from the records that are there; nothing is run or measured, no data is needed.

    In a checkout of the project, `--profile paper --records results` shows the published runs.
    """
    with readable_errors("report"):
        config = replace(_config(profile, out, records, None, seeds, epochs), measure=False)
        chosen = _chosen(parts)
        out.mkdir(parents=True, exist_ok=True)
    _report(chosen, config)


def _config(
    profile: str, out: Path, records: Path | None, data_dir: Path | None, seeds: int | None, epochs: int | None
) -> ReportConfig:
    from blockmean.lab.paper import ReportConfig
    from blockmean.lab.paper.protocol import studies

    studies(profile, seeds, epochs)  # raises where there is no such profile
    published = PUBLISHED if PUBLISHED.exists() else None
    return ReportConfig(out, records or out / "records", profile, data_dir, seeds, epochs, published)


def _chosen(parts: list[str] | None) -> list[str]:
    from blockmean.lab.paper import PARTS

    unknown = [name for name in parts or [] if name not in PARTS]
    if unknown:
        raise ValueError(f"there is no part {', '.join(unknown)}. The parts are: {', '.join(PARTS)}.")
    return list(dict.fromkeys(parts or PARTS))


def _run(wanted: list[Study], config: ReportConfig, jobs: int) -> None:
    """Make the runs that have no record yet, with one bar per study."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TextColumn("left:"),
        TimeRemainingColumn(elapsed_when_finished=False),
    )
    with Progress(*columns, console=console, speed_estimate_period=300) as progress:
        bars = {study.name: progress.add_task(study.name, total=study.total_steps(), start=False) for study in wanted}
        for study in wanted:
            bar = bars[study.name]
            progress.start_task(bar)

            def show(steps: int, bar: TaskID = bar) -> None:
                progress.update(bar, completed=steps)

            study.run(config.records / study.name, config.data_dir, jobs, show)


def _report(chosen: list[str], config: ReportConfig) -> None:
    """Make the parts and the report, and print what was found."""
    import torch

    from blockmean.lab.paper import PARTS, Verdict
    from blockmean.lab.report import write_report
    from blockmean.lab.sources import DamagedData

    torch.set_num_threads(1)  # small matrices: faster so, and rounding does not depend on the cores
    outcomes: dict[str, Outcome] = {}
    missing: dict[str, str] = {}
    with console.status("making the report") as status:
        for name in chosen:
            status.update(f"measuring {name}" if name == "table4" and config.measure else f"drawing {name}")
            try:
                outcomes[name] = PARTS[name](config)
            except (FileNotFoundError, DamagedData) as error:  # no reason to withhold the rest
                missing[name] = str(error)
        path = write_report(outcomes, config, config.out / "report.html", missing)
    _show(outcomes)
    for name, why in missing.items():
        console.print(f"{name} is not in the report: {why}", soft_wrap=True)
    console.print(f"report: {path}", soft_wrap=True)
    claims = [claim for outcome in outcomes.values() for claim in outcome.claims]
    if any(claim.exact and claim.verdict is Verdict.FAILS for claim in claims):
        raise typer.Exit(1)


def _show(outcomes: dict[str, Outcome]) -> None:
    """Print a table of all claims."""
    table = Table("part", "claim", "measured", "verdict")
    for name, outcome in outcomes.items():
        for claim in outcome.claims:
            verdict = Text(str(claim.verdict), style=COLOURS[claim.verdict])
            table.add_row(name, claim.claim, claim.measured, verdict)
    console.print(table)
