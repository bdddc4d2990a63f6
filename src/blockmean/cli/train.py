"""`blockmean train`: try one optimizer on one task, and see how it goes."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from blockmean.cli._app import app, console, readable_errors


@app.command()
def train(
    model: Annotated[str, typer.Option(help="small, large, mlp or cnn.")] = "small",
    dataset: Annotated[str, typer.Option(help="digits, mnist or cifar10.")] = "digits",
    optimizer: Annotated[str, typer.Option(help="AdaGradBMA, AdamBMA, AdaGradFull, Adagrad, AdamW, …")] = "AdaGradBMA",
    lr: Annotated[float, typer.Option(help="The learning rate.")] = 0.1,
    option: Annotated[
        list[str] | None, typer.Option(help="Further arguments of the optimizer, as --option variant=weighted.")
    ] = None,
    epochs: Annotated[int, typer.Option(help="Passes over the training images.", min=1)] = 5,
    batch: Annotated[int, typer.Option(help="Images per step.", min=1)] = 100,
    inputs: Annotated[str, typer.Option(help="How pixels are prepared: raw, normalised or centred.")] = "normalised",
    flip: Annotated[bool, typer.Option("--flip", help="Mirror half of the images, at random.")] = False,
    seed: Annotated[int, typer.Option(help="Of initial weights and batches.")] = 0,
    data_dir: Annotated[Path | None, typer.Option(help="The folder with the files of the data set.")] = None,
    download: Annotated[bool, typer.Option("--download", help="Fetch the data set if it is not there.")] = False,
    out: Annotated[
        Path, typer.Option(help="The folder for the plot and the record.", file_okay=False, writable=True)
    ] = Path("out"),
) -> None:
    """Train one model with one optimizer on one thread; ends with the test error and a plot of the losses."""
    with readable_errors("train"):
        from blockmean.lab.data import verify
        from blockmean.lab.records import write
        from blockmean.lab.train import RunSpec, run, steps_per_epoch
        from blockmean.lab.training_curve import draw_training_curve

        steps = epochs * steps_per_epoch(dataset, batch)
        if download:
            verify(dataset, data_dir, download)
        spec = RunSpec(dataset, model, optimizer, lr, seed, steps, _options(option or []), inputs, batch, flip)
        out.mkdir(parents=True, exist_ok=True)  # where that cannot be, say so before the training
        losses: list[float] = []
        columns = (
            TextColumn(f"{optimizer} on {dataset}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]}"),
            TimeElapsedColumn(),
            TextColumn("left:"),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=console) as progress:
            bar = progress.add_task("", total=steps, loss="–")

            def on_step(step: int, loss: float) -> None:
                losses.append(loss)
                recent = losses[-50:]
                progress.update(bar, completed=step + 1, loss=f"{sum(recent) / len(recent):.4f}")

            record = run(spec, data_dir, on_step)
        if record["diverged_at"] is not None:
            console.print(f"Diverged at step {record['diverged_at'] + 1}: try a smaller --lr.", style="bold red")
        _show(record)
        write(out, spec, record)
        picture = draw_training_curve(record, losses, out / spec.key)
        for path in (out / f"{spec.key}.json", picture.png, picture.svg):
            console.print(str(path), soft_wrap=True)


def _options(given: list[str]) -> dict[str, Any]:
    """'key=value' as keyword arguments: numbers, tuples and True/False are read as Python, all else is a string."""
    options: dict[str, Any] = {}
    for text in given:
        key, equals, value = text.partition("=")
        if not (key.isidentifier() and equals):
            raise ValueError(f"--option must look like key=value. Got {text!r} instead.")
        try:
            options[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            options[key] = value
    return options


def _show(record: dict[str, Any]) -> None:
    steps = record["spec"]["steps"] if record["diverged_at"] is None else record["diverged_at"] + 1
    reached = f"test error {record['test_error']:.2%}" if record["diverged_at"] is None else "no test error"
    console.print(
        f"{reached} after {steps:,} steps of "
        f"{1000 * record['seconds'] / steps:.1f} ms each, of which the optimizer "
        f"{record['step_seconds'] / record['seconds']:.0%}",
    )
