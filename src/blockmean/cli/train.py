"""`blockmean train`: try one optimizer on one task, and see how it goes."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from blockmean.cli._app import app, check_folder, console, readable_errors


@app.command(short_help="Train one model with one optimizer.")
def train(
    model: Annotated[str, typer.Option(help="small, large, mlp, cnn, convnet or resnet.")] = "small",
    dataset: Annotated[str, typer.Option(help="digits, mnist or cifar10.")] = "digits",
    optimizer: Annotated[
        str,
        typer.Option(
            help="Anova, AdaGradBMA, AdaGradFull, AdamBMA or "
            "NaturalGradientBMA; Adagrad, Adam, AdamW, NAdam or SGD of torch."
        ),
    ] = "AdaGradBMA",
    lr: Annotated[
        float | None, typer.Option(help="The learning rate.", show_default="one that suits the optimizer")
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option(help="Another argument of the optimizer, e.g. variant=weighted. Can be repeated."),
    ] = None,
    epochs: Annotated[int, typer.Option(help="Passes over the training images.", min=1)] = 5,
    batch: Annotated[int, typer.Option(help="Images per step.", min=1)] = 100,
    inputs: Annotated[str, typer.Option(help="Scaling of the pixels: raw, normalised or centred.")] = "normalised",
    flip: Annotated[bool, typer.Option("--flip", help="Mirror half of the images, at random.")] = False,
    seed: Annotated[int, typer.Option(help="Seed for the initial weights and the batches.")] = 0,
    data_dir: Annotated[
        Path | None, typer.Option(help="Folder with the files of the data set.", show_default="$BLOCKMEAN_DATA")
    ] = None,
    download: Annotated[bool, typer.Option("--download", help="Fetch the data set if it is missing.")] = False,
    out: Annotated[Path, typer.Option(help="Folder for the plot and the record.", file_okay=False)] = Path("out"),
) -> None:
    """Train one model with one optimizer on one thread.

    Prints the test error, and writes a plot of the losses and a record of the run.
    """
    with readable_errors("train"):
        from blockmean.lab.arms import OPTIMIZERS, default_rate
        from blockmean.lab.records import write
        from blockmean.lab.spec import RunSpec
        from blockmean.lab.tasks import load_data, require_one_of, steps_per_epoch, verify_data
        from blockmean.lab.train import check, run
        from blockmean.lab.training_curve import draw_training_curve

        # Everything that can be wrong is found before the bar is drawn, and before hours of training are lost.
        require_one_of("optimizer", optimizer, OPTIMIZERS)
        rate = default_rate(optimizer) if lr is None else lr
        steps = epochs * steps_per_epoch(dataset, batch)
        spec = RunSpec(dataset, model, optimizer, rate, seed, steps, _options(option or []), inputs, batch, flip)
        check(spec)
        check_folder(out)
        if download:
            verify_data(spec, data_dir, download)
        load_data(spec, data_dir)
        out.mkdir(parents=True, exist_ok=True)
    console.print(f"{optimizer} (lr {rate:g}): {model} model on {dataset}", soft_wrap=True)
    losses: list[float] = []
    columns = (
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
    """'key=value' as keyword arguments: values are read as Python literals if they are such, else as strings."""
    options: dict[str, Any] = {}
    for text in given:
        key, equals, value = text.partition("=")
        if not (key.isidentifier() and equals):
            raise ValueError(f"--option must look like key=value. Got {text!r} instead.")
        try:
            options[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError, TypeError):
            options[key] = value
    return options


def _show(record: dict[str, Any]) -> None:
    steps = record["spec"]["steps"] if record["diverged_at"] is None else record["diverged_at"] + 1
    reached = f"test error {record['test_error']:.2%}" if record["diverged_at"] is None else "no test error"
    seconds = max(record["seconds"], 1e-9)  # a run that diverges at once takes none
    console.print(
        f"{reached} after {steps:,} steps of {1000 * seconds / steps:.1f} ms, "
        f"{record['step_seconds'] / seconds:.0%} of it in the optimizer",
        soft_wrap=True,
    )
