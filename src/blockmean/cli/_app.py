"""What all commands share: the application, the consoles, and messages for what a user can put right."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

try:
    import typer
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        TaskID,
        TaskProgressColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )
except ModuleNotFoundError as missing:  # the core needs torch alone
    raise SystemExit(f"The command line needs {missing.name}. In a checkout: pip install '.[lab]'") from missing

from blockmean import __version__

if TYPE_CHECKING:
    from blockmean.lab.compare import Study

WIDE_HELP = {"max_content_width": 120}  # the lines of a help text fill the window up to here; the default is 80
app = typer.Typer(add_completion=False, no_args_is_help=True, rich_markup_mode=None, context_settings=WIDE_HELP)
console = Console(markup=False, highlight=False)  # brackets in names and paths are no markup
errors = Console(markup=False, highlight=False, stderr=True)


@app.callback(invoke_without_command=True)
def blockmean(version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False) -> None:
    """Train with Anova or a block-mean optimizer, compare it with AdamW, and reproduce the block-mean paper.

    \b
    blockmean train --compare AdamW,Anova   a first comparison, half a minute
    blockmean inspect cnn                   how the tensors of a model are coupled
    blockmean reproduce                     every claim of the paper, checked
    blockmean COMMAND --help                options and examples
    """
    if version:
        print(f"blockmean {__version__}")
        raise typer.Exit


@contextmanager
def readable_errors(command: str) -> Iterator[None]:
    """Turn errors that a user can put right into one message: a missing extra, missing or damaged data, bad values."""
    try:
        yield
    except ModuleNotFoundError as missing:
        raise SystemExit(
            f"`blockmean {command}` needs {missing.name}. In a checkout: pip install '.[lab]'"
        ) from missing
    except (OSError, ValueError) as error:
        raise typer.BadParameter(str(error)) from error


def check_folder(path: Path) -> None:
    """Raise OSError if files cannot be written into a folder; it is not created yet."""
    existing = next(parent for parent in (path.absolute(), *path.absolute().parents) if parent.exists())
    if not existing.is_dir():
        raise NotADirectoryError(f"{path} cannot be a folder: {existing} is a file. Choose another one.")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise PermissionError(f"{path} cannot be written: there is no permission to write to {existing}.")


def split_names(given: str | None, between: str = ",") -> list[str] | None:
    """The names in an option, each once; None if it is not given, ValueError if it has none."""
    if given is None:
        return None
    found = list(dict.fromkeys(name.strip() for name in given.split(between) if name.strip()))
    if not found:
        raise ValueError(f"Give names, separated by {between!r}. Got {given!r} instead.")
    return found


def progress(*details: str, transient: bool = False) -> Progress:
    """Bars for what takes long, each with its share, the time so far and the time left; `details` are columns.

    Transient bars disappear in the end.
    """
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        *map(TextColumn, details),
        TimeElapsedColumn(),
        TextColumn("left:"),
        TimeRemainingColumn(elapsed_when_finished=False),
    )
    # Drawn twice a second, not ten times: some of what a bar shows is a measurement of time.
    return Progress(*columns, console=console, speed_estimate_period=300, refresh_per_second=2, transient=transient)


def watch(bars: Progress) -> Callable[[str, int, int], None]:
    """A function of (what, done, total) that draws a bar for everything it hears of."""
    tasks: dict[str, TaskID] = {}

    def show(what: str, done: int, total: int) -> None:
        if what not in tasks:
            tasks[what] = bars.add_task(what, total=total)
        bars.update(tasks[what], completed=done, total=total)

    return show


@contextmanager
def resumable(records: Path) -> Iterator[None]:
    """If it is stopped, or a process is killed, say how to resume."""
    from blockmean.lab.records import WorkerKilled

    try:
        yield
    except KeyboardInterrupt:
        errors.print(f"Stopped. Finished runs are in {records}: run the same command again to resume.", soft_wrap=True)
        raise typer.Exit(130) from None
    except WorkerKilled as error:
        errors.print(str(error), soft_wrap=True)
        raise typer.Exit(1) from None


def run_studies(
    studies: Collection[Study],
    records: Path,
    data_dir: Path | None,
    jobs: int,
    then: Callable[[], object] = lambda: None,
) -> None:
    """Make the runs that have no record yet, with a bar per study; `then` is called after each."""
    with progress() as bars:
        tasks = [bars.add_task(study.name, total=study.total_steps(), start=False) for study in studies]
        for study, bar in zip(studies, tasks, strict=True):
            bars.start_task(bar)

            def show(steps: int, bar: TaskID = bar) -> None:
                bars.update(bar, completed=steps)

            study.run(records, data_dir, jobs, show)
            then()


def main() -> None:
    """Entry point of the `blockmean` command."""
    app()
