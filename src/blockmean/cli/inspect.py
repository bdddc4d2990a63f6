"""`blockmean inspect`: how the blocks of a model are coupled."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from blockmean.cli._app import app, check_folder, console, progress, readable_errors, watch

if TYPE_CHECKING:
    from blockmean.lab.inspect import Inspection


@app.command(short_help="Show how the blocks of a model are coupled.")
def inspect(
    model: Annotated[
        str,
        typer.Argument(
            help="small, large, mlp, cnn, convnet or resnet; or module:object: an nn.Module or a function for one.",
            metavar="MODEL",
        ),
    ],
    dataset: Annotated[str, typer.Option(help="digits, mnist or cifar10.")] = "digits",
    inputs: Annotated[str, typer.Option(help="Scaling of the pixels: raw, normalised or centred.")] = "normalised",
    data_dir: Annotated[
        Path | None, typer.Option(help="Folder with the files of the data set.", show_default="$BLOCKMEAN_DATA")
    ] = None,
    download: Annotated[bool, typer.Option("--download", help="Fetch the data set if it is missing.")] = False,
    data: Annotated[
        str | None,
        typer.Option(
            help="Your own data instead: module:object, a pair of tensors (inputs, targets), a DataLoader of such "
            "batches, or a function that returns either."
        ),
    ] = None,
    loss: Annotated[
        str, typer.Option(help="cross_entropy, mse, or module:function (outputs, targets) -> mean loss.")
    ] = "cross_entropy",
    partition: Annotated[
        str, typer.Option(help="One block per tensor, unit, kernel, module or element; or all.")
    ] = "tensor",
    matrix: Annotated[str, typer.Option(help="empirical_fisher, fisher, ggn or hessian.")] = "empirical_fisher",
    samples: Annotated[int, typer.Option(help="Number of samples, drawn at random.")] = 1000,
    train_steps: Annotated[int, typer.Option(help="Steps of AdamW to train first.")] = 0,
    seed: Annotated[int, typer.Option(help="Seed for initial weights, training and samples.")] = 0,
    norm_probes: Annotated[
        int, typer.Option(help="Random probes to estimate how much the block mean explains; 0 to skip it.")
    ] = 8,
    rows: Annotated[int, typer.Option(help="Rows of the table: the blocks with most of the trace.", min=1)] = 40,
    out: Annotated[Path, typer.Option(help="Folder for the heat map and the numbers.", file_okay=False)] = Path("out"),
) -> None:
    """Show how the blocks of a model are coupled.

    Computes a curvature matrix of the model on data, prints a table of its blocks, and writes a heat map (PNG and SVG)
    and all numbers (JSON). The files are named after the request; only the same request replaces them.
    """
    with readable_errors("inspect"):
        from blockmean.lab.inspect import Request
        from blockmean.lab.inspect import inspect as look

        check_folder(out)
        request = Request(
            model, dataset, inputs, data, loss, partition, matrix, samples, train_steps, seed, norm_probes
        )
        with progress() as bars:
            found = look(request, data_dir, download, watch(bars))
    replaced = {path for path in found.paths(out) if path.exists()}
    saved = found.save(out)
    _show_blocks(found, rows, saved[-1])
    console.print(str(found.report), soft_wrap=True)
    for path in saved:
        console.print(f"{path} (replaced)" if path in replaced else str(path), soft_wrap=True)


def _show_blocks(found: Inspection, count: int, numbers: Path) -> None:
    """Print a table of blocks, and where the blocks are that it leaves out."""
    shown = found.largest(count)
    table = Table(title=found.title)
    table.add_column("block", overflow="fold")
    for name in ("size", "A_ii", "λ", "share of trace"):
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
        console.print(f"{left:,} further blocks, with {rest:.1%} of the trace, are in {numbers.name}.", soft_wrap=True)
