"""`blockmean inspect`: how the blocks of a model are coupled."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from blockmean.cli._app import app, check_folder, console, progress, readable_errors, watch

if TYPE_CHECKING:
    from blockmean.lab.inspect import Inspection, Row
    from blockmean.optim import MeanStatistics

GAP, EDGES = 3, 4  # columns between two cells of the table, and at its sides


@app.command(short_help="Show how the blocks of a model are coupled.")
def inspect(
    model: Annotated[
        str,
        typer.Argument(
            help="small, large, mlp, cnn, convnet, resnet or resnet10; or your own as module:object, an nn.Module or a "
            "function that returns one.",
            metavar="MODEL",
        ),
    ],
    dataset: Annotated[str, typer.Option(help="digits, mnist or cifar10.")] = "digits",
    inputs: Annotated[str, typer.Option(help="Pixel scaling: raw, normalised or centred.")] = "normalised",
    data_dir: Annotated[
        Path | None, typer.Option(help="Folder with the data set.", show_default="$BLOCKMEAN_DATA")
    ] = None,
    download: Annotated[bool, typer.Option("--download", help="Download the data set if it is missing.")] = False,
    data: Annotated[
        str | None,
        typer.Option(
            help="Your own data as module:object: a pair of tensors (inputs, targets), a DataLoader of such batches, "
            "or a function that returns either."
        ),
    ] = None,
    loss: Annotated[
        str, typer.Option(help="cross_entropy, mse, or your own as module:function, (outputs, targets) -> mean loss.")
    ] = "cross_entropy",
    partition: Annotated[
        str, typer.Option(help="One block per tensor, unit (output), kernel, module or element; or all in one.")
    ] = "tensor",
    matrix: Annotated[
        str, typer.Option(help="Curvature: empirical_fisher, fisher, ggn or hessian.")
    ] = "empirical_fisher",
    samples: Annotated[int, typer.Option(help="Number of samples, drawn at random.")] = 1000,
    train_steps: Annotated[
        int, typer.Option(help="AdamW steps to take first: at initialisation, curvature says little.")
    ] = 0,
    seed: Annotated[int, typer.Option(help="Seed for initial weights, training and samples.")] = 0,
    norm_probes: Annotated[
        int, typer.Option(help="Random vectors that estimate how much of the matrix the block means hold; 0 to skip.")
    ] = 8,
    rows: Annotated[
        int, typer.Option(help="Most rows of the table: the blocks with the largest share of the trace.", min=1)
    ] = 40,
    out: Annotated[Path, typer.Option(help="Output folder for the heat map and the numbers.", file_okay=False)] = Path(
        "out"
    ),
) -> None:
    """Show how the blocks of a model are coupled.

    Computes a curvature matrix of the model on data, as block means: prints a table of the blocks, and writes a heat
    map (PNG, SVG) and all numbers (JSON). File names depend on the options, so other options replace nothing. In the
    table, A_ii is the curvature in the direction in which all entries of a block move alike, λ its mean over the
    block's other directions, and "of trace" the share of both in the whole matrix. A second table has the shares of
    Anova's means in the gradient of each weight. Examples:

    \b
    blockmean inspect cnn --train-steps 200
    blockmean inspect mlp --matrix ggn --partition module
    blockmean inspect my_module:build --data my_module:loader --loss mse
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
    _show_means(found.means, rows, saved[-1])
    for path in saved:
        console.print(f"{path} (replaced)" if path in replaced else str(path), soft_wrap=True)


def _show_blocks(found: Inspection, count: int, numbers: Path) -> None:
    """Print a table of blocks, and where to find what it leaves out."""
    shown = found.largest(count)
    headers = ["block", "size", "A_ii", "λ", "of trace", "strongest correlation"]
    numbers_of = [_numbers(row) for row in shown]
    known = [row.block for row in found.rows]
    partners = [("–", "") if row.partner is None else (f"{row.correlation:+.2f} ", row.partner) for row in shown]
    names = max(len("block"), *(len(row.block) for row in shown))
    taken = sum(max(map(len, column)) + GAP for column in zip(headers[1:-1], *numbers_of, strict=True)) + EDGES
    narrow = names + taken + GAP + max(len(headers[-1]), *(len(a + b) for a, b in partners)) > console.width
    table = Table(title=found.title, box=SIMPLE_HEAD)
    for i, header in enumerate(headers[:-1] if narrow else headers):
        table.add_column(header, justify="right" if 1 <= i <= 4 else "left", no_wrap=1 <= i <= 4, overflow="fold")
    for row, values, (strength, partner) in zip(shown, numbers_of, partners, strict=True):
        if narrow:  # the correlation goes below its block, and each name has most of the width
            room = console.width - taken
            below = f"\n  {strength}{_abbreviated(partner, room - 8, known)}" if partner else ""
            table.add_row(_abbreviated(row.block, room, known) + below, *values)
        else:
            table.add_row(row.block, *values, strength + partner)
    console.print(table)
    if narrow:
        console.print(
            "Below each block: its strongest correlation with another one. Long names are\n"
            f"abbreviated from the left; {numbers.name} has them in full.",
            soft_wrap=True,
        )
    left = len(found.rows) - len(shown)
    if left:
        rest = 1 - sum(row.share or 0.0 for row in shown)
        console.print(f"{left:,} further blocks, with {rest:.1%} of the trace, are in {numbers.name}.", soft_wrap=True)


def _show_means(found: list[MeanStatistics], count: int, numbers: Path) -> None:
    """Print how much of each weight's gradient Anova's means hold, and by chance would."""
    if not found:
        console.print("Anova has no means here: every weight is too narrow or too long. It would be AdamW.")
        return
    largest = sorted(range(len(found)), key=lambda i: -found[i].entries)[:count]
    shown = [found[i] for i in sorted(largest)]
    headers = ["weight", "units × inputs", "means", "grand", "per unit", "per input", "all", "by chance"]
    rows = []
    for one in shown:
        shares = [*one.shares[:3], one.shares.means, one.chance.means]
        sizes = f"{one.shape[0]:,} × {one.shape[1]:,}", f"{one.num_means[0]}"
        rows.append([*sizes, *("–" if math.isnan(share) else f"{share:.0%}" for share in shares)])
    room = _room(headers, rows)
    if any(len(one.parameter) > room for one in shown):  # names matter more than sizes
        headers[1:3], rows = [], [row[2:] for row in rows]
        room = _room(headers, rows)
    table = Table(
        title="What Anova's means see: shares of the gradient",
        box=SIMPLE_HEAD,
        collapse_padding=True,
        pad_edge=False,
    )
    for i, header in enumerate(headers):
        table.add_column(header, justify="right" if i else "left", no_wrap=i > 0, overflow="fold")
    for one, row in zip(shown, rows, strict=True):
        table.add_row(_abbreviated(one.parameter, room, [one.parameter for one in found]), *row)
    console.print(table)
    console.print(
        "Where means hold more than by chance, Anova has patterns to work with. During\n"
        "training, Anova.block_statistics() has these numbers, plot.shares draws them.",
        soft_wrap=True,
    )
    if len(found) > len(shown):
        console.print(f"{len(found) - len(shown):,} smaller weights are in {numbers.name}.", soft_wrap=True)


def _room(headers: list[str], rows: list[list[str]]) -> int:
    """Columns of the window that are left for names beside these numbers."""
    return console.width - 2 - sum(max(map(len, column)) + 2 for column in zip(headers[1:], *rows, strict=True))


def _numbers(row: Row) -> list[str]:
    lam = "–" if row.lam is None else f"{row.lam:.3g}"
    share = "–" if row.share is None else f"{row.share:.1%}"
    return [f"{row.size:,}", f"{row.A:.3g}", lam, share]


def _abbreviated(name: str, width: int, known: list[str]) -> str:
    """A dotted name that fits a width if its first parts give way to letters and numbers: t.h.0.attn.weight.

    A part keeps as many letters as tell it from the other parts that `known` names have in its place.
    """
    whole = name.split(".")
    parts = list(whole)
    for i in range(len(parts) - 1):
        if len(".".join(parts)) <= width:
            break
        others = {other[i] for other in (one.split(".") for one in known) if other[:i] == whole[:i] and len(other) > i}
        parts[i] = _initials(whole[i], others - {whole[i]})
    return ".".join(parts)


def _initials(part: str, others: set[str]) -> str:
    """The first letters of a part and its number, as many as no other one has."""

    def cut(text: str, letters: int) -> str:
        return re.sub(rf"^(.{{{letters}}}).*?(\d*)$", r"\1\2", text)

    lengths = range(1, len(part))
    return next((cut(part, n) for n in lengths if cut(part, n) not in {cut(other, n) for other in others}), part)
