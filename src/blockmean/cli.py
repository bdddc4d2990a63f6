"""The command line: `blockmean reproduce` shows that the paper holds, part by part."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

try:
    import typer
    from rich.console import Console
    from rich.progress import track
    from rich.table import Table
except ModuleNotFoundError as missing:  # the core needs torch alone
    raise SystemExit(f"The command line needs {missing.name}: pip install 'blockmean[lab]'") from missing

from blockmean import __version__

if TYPE_CHECKING:
    from blockmean.lab.paper import Outcome

app = typer.Typer(add_completion=False, no_args_is_help=True, rich_markup_mode=None)
console = Console()


@app.callback(invoke_without_command=True)
def blockmean(version: Annotated[bool, typer.Option("--version", help="Show the version and stop.")] = False) -> None:
    """Block mean matrices, and optimizers that see the dependency between groups of parameters."""
    if version:
        print(f"blockmean {__version__}")
        raise typer.Exit


@app.command()
def reproduce(
    parts: Annotated[list[str] | None, typer.Argument(help="Which parts of the paper; all of them by default.")] = None,
    out: Annotated[Path, typer.Option(help="The folder for pictures.", file_okay=False)] = Path("out"),
    list_parts: Annotated[bool, typer.Option("--list", help="List the parts and stop.")] = False,
) -> None:
    """Check the claims of the paper and draw its figures. Exit code 1 if a claim does not hold."""
    try:
        from blockmean.lab.paper import PARTS
    except ModuleNotFoundError as missing:
        raise SystemExit(f"`blockmean reproduce` needs {missing.name}: pip install 'blockmean[lab]'") from missing
    if list_parts:
        for name, part in PARTS.items():
            print(f"{name:10} {(part.__doc__ or '').partition(chr(10))[0]}")
        return
    unknown = [name for name in parts or [] if name not in PARTS]
    if unknown:
        raise typer.BadParameter(f"there is no part {', '.join(unknown)}. The parts are: {', '.join(PARTS)}.")
    chosen = list(dict.fromkeys(parts or PARTS))
    outcomes = {name: PARTS[name](out) for name in track(chosen, "reproducing", console=console, transient=True)}
    _show(outcomes)
    if not all(claim.holds for outcome in outcomes.values() for claim in outcome.claims):
        raise typer.Exit(1)


def _show(outcomes: dict[str, Outcome]) -> None:
    """Print a table of all claims, then the pictures."""
    table = Table("part", "claim", "measured", "holds?")
    for name, outcome in outcomes.items():
        for claim in outcome.claims:
            table.add_row(name, claim.claim, claim.measured, "[green]yes" if claim.holds else "[bold red]NO")
    console.print(table)
    for outcome in outcomes.values():
        for picture in outcome.pictures:
            console.print(str(picture), highlight=False, soft_wrap=True)


def main() -> None:
    """What the `blockmean` command runs."""
    app()
