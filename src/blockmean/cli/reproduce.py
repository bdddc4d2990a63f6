"""`blockmean reproduce` runs the paper's experiments and writes the report; `blockmean report` only the report."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

import blockmean
from blockmean.cli._app import (
    app,
    check_folder,
    console,
    errors,
    progress,
    readable_errors,
    resumable,
    run_studies,
    watch,
)

if TYPE_CHECKING:
    from blockmean.lab.paper import Outcome, ReportConfig

Parts = Annotated[
    list[str] | None,
    typer.Argument(help="Names from `blockmean reproduce --list`.", show_default="all", metavar="PART"),
]
Profile = Annotated[
    str, typer.Option(help="quick (5,000 embedded digits, minutes) or paper (MNIST and CIFAR-10, many hours).")
]
DataDir = Annotated[Path | None, typer.Option(help="Folder with MNIST and CIFAR-10.", show_default="$BLOCKMEAN_DATA")]
Out = Annotated[Path, typer.Option(help="Output folder for report.html and its pictures.", file_okay=False)]
Records = Annotated[
    Path | None,
    typer.Option(help="Folder for the records, one file per study.", file_okay=False, show_default="OUT/records"),
]
Seeds = Annotated[
    int | None,
    typer.Option(help="Seeds of the final runs, at the best learning rate.", min=1, show_default="by profile"),
]
Epochs = Annotated[int | None, typer.Option(help="Epochs of each final run.", min=1, show_default="by profile")]

PUBLISHED = Path(blockmean.__file__).parents[2] / "results"
"""The records in a checkout of the project; an installed wheel has none."""

WORK = {
    "quick": "Training on the embedded digits, then figures and tables: about five minutes of processor time.",
    "paper": "Training on MNIST and CIFAR-10, then figures and tables: many hours of processor time.",
}
"""What a profile costs; the quick one was measured on one core of an AMD EPYC."""

COLOURS = {"holds": "green", "does not hold": "bold red", "within noise": "yellow", "no verdict": "dim"}


@app.command(short_help="Run the paper's experiments and write a report.")
def reproduce(
    parts: Parts = None,
    profile: Profile = "quick",
    data_dir: DataDir = None,
    download: Annotated[
        bool, typer.Option("--download", help="Download MNIST and CIFAR-10 if they are missing.")
    ] = False,
    seeds: Seeds = None,
    epochs: Epochs = None,
    jobs: Annotated[int, typer.Option(help="Parallel runs, each on one thread.", min=1)] = 2,
    out: Out = Path("out"),
    records: Records = None,
    list_parts: Annotated[bool, typer.Option("--list", help="List the parts and exit.")] = False,
) -> None:
    """Run the paper's experiments, check its claims, compare Anova with AdamW, and write report.html.

    The quick profile takes about five minutes of processor time, besides installation. Finished runs are kept as
    records: stop with Ctrl-C at any time, and run the same command again to resume. The exit code is 1 if an exact
    (mathematical) claim does not hold. Examples:

    \b
    blockmean reproduce
    blockmean reproduce theorems fig5
    blockmean reproduce --profile paper --data-dir FOLDER
    """
    with readable_errors("reproduce"):
        from blockmean.lab.data import verify
        from blockmean.lab.paper import PARTS
        from blockmean.lab.paper.protocol import anova_study, studies

        if list_parts:
            for name, part in PARTS.items():
                print(f"{name:10} {(part.__doc__ or '').partition(chr(10))[0]}")
            return
        config = _config(profile, out, records, data_dir, seeds, epochs)
        chosen = _select(parts)
        for folder in (config.out, config.records):
            check_folder(folder)
        wanted = studies(profile, seeds, epochs) if "fig5" in chosen else []
        wanted += [anova_study(seeds, epochs)] if "anova" in chosen else []
        unfinished = [study for study in wanted if not study.is_complete(config.records)]
        for dataset in dict.fromkeys(study.task.dataset for study in (studies(profile) if download else unfinished)):
            verify(dataset, data_dir, download)
        for folder in (config.out, config.records):
            folder.mkdir(parents=True, exist_ok=True)
    if unfinished:
        console.print(
            f"{WORK[profile]} Records: {config.records}. Ctrl-C stops; the same command resumes.", soft_wrap=True
        )
    with resumable(config.records):
        run_studies(wanted, config.records, data_dir, jobs)
        _report(chosen, config)


@app.command(short_help="Write the report from existing records.")
def report(
    parts: Parts = None,
    profile: Profile = "quick",
    seeds: Seeds = None,
    epochs: Epochs = None,
    out: Out = Path("out"),
    records: Records = None,
) -> None:
    """Write report.html from existing records, without running anything.

    Example, the published runs in a checkout of the project:

    \b
    blockmean report --profile paper --records results
    """
    with readable_errors("report"):
        config = replace(_config(profile, out, records, None, seeds, epochs), measure=False)
        chosen = _select(parts)
        check_folder(out)
        if records is not None and not records.is_dir():
            raise FileNotFoundError(f"There is no folder {records}. Give the one that `blockmean reproduce` wrote.")
        out.mkdir(parents=True, exist_ok=True)
    _report(chosen, config)


def _config(
    profile: str, out: Path, records: Path | None, data_dir: Path | None, seeds: int | None, epochs: int | None
) -> ReportConfig:
    from blockmean.lab.paper import ReportConfig
    from blockmean.lab.paper.protocol import studies

    studies(profile, seeds, epochs)  # raises if there is no such profile
    published = PUBLISHED if PUBLISHED.exists() else None
    return ReportConfig(out, records or out / "records", profile, data_dir, seeds, epochs, published)


def _select(parts: list[str] | None) -> list[str]:
    from blockmean.lab.paper import PARTS

    unknown = [name for name in parts or [] if name not in PARTS]
    if unknown:
        raise ValueError(f"There is no part {', '.join(unknown)}. The parts are {', '.join(PARTS)}.")
    return list(dict.fromkeys(parts or PARTS))


def _report(chosen: list[str], config: ReportConfig) -> None:
    """Make the parts and the report, and print the verdicts."""
    import torch

    from blockmean.lab.paper import PARTS, Verdict
    from blockmean.lab.report import write_report
    from blockmean.lab.sources import DamagedData

    torch.set_num_threads(1)  # faster for small matrices, and rounding does not depend on the number of cores
    outcomes: dict[str, Outcome] = {}
    missing: dict[str, str] = {}
    with progress() as bars:
        show = watch(bars)
        for done, name in enumerate(chosen):
            show("report", done, len(chosen))
            try:
                outcomes[name] = PARTS[name](replace(config, on_progress=show))
            except (FileNotFoundError, DamagedData) as error:  # the other parts can still be shown
                missing[name] = str(error)
        path = write_report(outcomes, config, config.out / "report.html", missing)
        show("report", len(chosen), len(chosen))
    _show(outcomes)
    for name, outcome in outcomes.items():
        for problem in outcome.unusable:
            errors.print(f"{name}: {problem}; it counts as missing.", soft_wrap=True)
    for name, why in missing.items():
        console.print(f"{name} is not in the report: {why}", soft_wrap=True)
    console.print(f"report: {path}", soft_wrap=True)
    claims = [claim for outcome in outcomes.values() for claim in outcome.claims]
    if any(claim.exact and claim.verdict is Verdict.FAILS for claim in claims):
        raise typer.Exit(1)


def _show(outcomes: dict[str, Outcome]) -> None:
    """Print a table of all claims."""
    if not any(outcome.claims for outcome in outcomes.values()):
        return
    table = Table()
    for header in ("part", "claim", "measured", "verdict"):
        table.add_column(header, overflow="fold")  # an ellipsis would hide the end of a long name
    for name, outcome in outcomes.items():
        for claim in outcome.claims:
            verdict = Text(str(claim.verdict), style=COLOURS[claim.verdict])
            table.add_row(name, claim.claim, claim.measured, verdict)
    console.print(table)
