"""What all commands share: the application itself, the console, and the packages they need."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

try:
    import typer
    from rich.console import Console
except ModuleNotFoundError as missing:  # the core needs torch alone
    raise SystemExit(f"The command line needs {missing.name}: pip install 'blockmean[lab]'") from missing

from blockmean import __version__

app = typer.Typer(add_completion=False, no_args_is_help=True, rich_markup_mode=None)
console = Console(markup=False, highlight=False)  # brackets in names and paths are brackets


@app.callback(invoke_without_command=True)
def blockmean(version: Annotated[bool, typer.Option("--version", help="Show the version and stop.")] = False) -> None:
    """Block mean matrices, and optimizers that see the dependency between groups of parameters."""
    if version:
        print(f"blockmean {__version__}")
        raise typer.Exit


@contextmanager
def readable_errors(command: str) -> Iterator[None]:
    """Turn what a user can put right into one message: a missing extra, missing or damaged data, wrong values."""
    try:
        yield
    except ModuleNotFoundError as missing:
        raise SystemExit(f"`blockmean {command}` needs {missing.name}: pip install 'blockmean[lab]'") from missing
    except (OSError, ValueError) as error:
        raise typer.BadParameter(str(error)) from error


def main() -> None:
    """What the `blockmean` command runs."""
    app()
