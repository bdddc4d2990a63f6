"""`blockmean inspect`: how the blocks of a model depend on each other."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from blockmean.cli._app import app, console, readable_errors

if TYPE_CHECKING:
    from blockmean.lab.inspect import Inspection


@app.command()
def inspect(
    model: Annotated[str, typer.Argument(help="small, large, mlp, cnn, or module:function that returns a Module.")],
    dataset: Annotated[str, typer.Option(help="digits, mnist or cifar10.")] = "digits",
    inputs: Annotated[
        str, typer.Option(help="How its pixels are prepared: raw, normalised or centred.")
    ] = "normalised",
    data_dir: Annotated[Path | None, typer.Option(help="The folder with the files of the data set.")] = None,
    download: Annotated[bool, typer.Option("--download", help="Fetch the data set if it is not there.")] = False,
    data: Annotated[str | None, typer.Option(help="Own data: module:function that returns (inputs, targets).")] = None,
    loss: Annotated[
        str, typer.Option(help="cross_entropy, mse, or module:function (outputs, targets) -> mean loss.")
    ] = ("cross_entropy"),
    partition: Annotated[
        str, typer.Option(help="One block per tensor, unit, kernel, module, element; or all.")
    ] = "tensor",
    matrix: Annotated[str, typer.Option(help="empirical_fisher, fisher, ggn or hessian.")] = "empirical_fisher",
    samples: Annotated[int, typer.Option(help="How many samples at most; they are drawn at random.")] = 1000,
    train_steps: Annotated[int, typer.Option(help="Train so many steps of AdamW first.")] = 0,
    seed: Annotated[int, typer.Option(help="Of initial weights, training and drawn samples.")] = 0,
    norm_probes: Annotated[int, typer.Option(help="Probes for what the block mean keeps; 0: it is not measured.")] = 8,
    rows: Annotated[int, typer.Option(help="Rows of the table: the blocks with most of the trace.", min=1)] = 40,
    out: Annotated[Path, typer.Option(help="The folder for coupling.png, .svg and .json.", file_okay=False)] = Path(
        "out"
    ),
) -> None:
    """Show how the blocks of a model depend on each other: a curvature matrix as a table, a heat map and a file."""
    with readable_errors("inspect"):
        from blockmean.lab.inspect import Request
        from blockmean.lab.inspect import inspect as look

        request = Request(
            model, dataset, inputs, data, loss, partition, matrix, samples, train_steps, seed, norm_probes
        )
        with console.status("computing"):
            found = look(request, data_dir, download)
    _show_blocks(found, rows)
    console.print(str(found.matrix.report), soft_wrap=True)
    for path in found.save(out):
        console.print(str(path), soft_wrap=True)


def _show_blocks(found: Inspection, count: int) -> None:
    """Print a table of blocks, and what it leaves out."""
    shown = found.largest(count)
    table = Table(title=found.title)
    table.add_column("block", overflow="fold")
    for name in ("size", "A_ii", "λ", "of trace"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("strongest correlation", overflow="fold")
    for row in shown:
        lam = "–" if row.lam is None else f"{row.lam:.3g}"
        share = "–" if row.share is None else f"{row.share:.1%}"
        strongest = "–" if row.partner is None else f"{row.correlation:+.2f} {row.partner}"
        table.add_row(row.block, f"{row.size:,}", f"{row.A:.3g}", lam, share, strongest)
    console.print(table)
    left = len(found.rows) - len(shown)
    if left:
        rest = 1 - sum(row.share or 0.0 for row in shown)
        console.print(f"{left:,} further blocks, with {rest:.1%} of the trace, are in coupling.json.")
