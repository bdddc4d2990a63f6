"""`blockmean train`: try an optimizer on a task, or several beside each other, and see how it goes."""

from __future__ import annotations

import ast
import math
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from blockmean.cli._app import app, check_folder, console, progress, readable_errors, split_names

MUCH_LOWER = 0.95
"""Part of the last held-out loss below which an earlier one is worth a line."""


@app.command(short_help="Train a model with one optimizer, or compare several.")
def train(
    model: Annotated[
        str,
        typer.Option(
            help="small, large, mlp, cnn, convnet, resnet or resnet10; transformer-64 or transformer-192 for text; or "
            "your own as module:object, an nn.Module or a function that returns one."
        ),
    ] = "cnn",
    dataset: Annotated[str, typer.Option(help="digits, mnist or cifar10; manual or shakespeare for text.")] = "digits",
    optimizer: Annotated[
        str | None,
        typer.Option(
            help="Anova, AdamBMA, AdaGradBMA, NaturalGradientBMA or AdaGradFull (for --model small); "
            "Adagrad, Adam, AdamW, NAdam or SGD of torch.",
            show_default="Anova",
        ),
    ] = None,
    compare: Annotated[
        str | None,
        typer.Option(help="Instead of --optimizer: names separated by commas, trained one after the other."),
    ] = None,
    lr: Annotated[
        float | None,
        typer.Option(help="Learning rate, for all of them.", show_default="per optimizer, tuned on the digits"),
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option(
            help="Any other argument of the optimizer, as weight_decay=0.1. Can be repeated.", metavar="KEY=VALUE"
        ),
    ] = None,
    epochs: Annotated[int, typer.Option(help="Passes over the training set.", min=1)] = 5,
    batch: Annotated[int, typer.Option(help="Batch size.", min=1)] = 100,
    inputs: Annotated[str, typer.Option(help="Pixel scaling: raw, normalised or centred.")] = "normalised",
    flip: Annotated[bool, typer.Option("--flip", help="Flip half of the images horizontally, at random.")] = False,
    seed: Annotated[int, typer.Option(help="Seed for the initial weights and the batches.")] = 0,
    data_dir: Annotated[
        Path | None, typer.Option(help="Folder with the data set.", show_default="$BLOCKMEAN_DATA")
    ] = None,
    download: Annotated[bool, typer.Option("--download", help="Download the data set if it is missing.")] = False,
    out: Annotated[Path, typer.Option(help="Output folder for the plot and train.jsonl.", file_okay=False)] = Path(
        "out"
    ),
) -> None:
    """Train a model with one optimizer, or compare several: one thread, equal initial weights and batches.

    Prints training loss, held-out loss and error, and time; plots them; and adds a record of each run to train.jsonl.
    The defaults take about ten seconds of processor time per optimizer and need no download. Examples:

    \b
    blockmean train --compare AdamW,Anova
    blockmean train --compare AdamW,Anova --lr 0.001 --seed 1
    blockmean train --optimizer Anova --option weight_decay=0.1 --epochs 10
    blockmean train --model my_module:build --dataset mnist --data-dir FOLDER
    """
    with readable_errors("train"):
        from blockmean.lab.arms import OPTIMIZERS, default_rate
        from blockmean.lab.records import append
        from blockmean.lab.spec import RunSpec, digest, file_name
        from blockmean.lab.tasks import load_data, require_one_of, steps_per_epoch, verify_data
        from blockmean.lab.train import check, check_model, run
        from blockmean.lab.training_curve import draw_training_curves

        # Everything that can be wrong is found before the bar is drawn, and before hours of training are lost.
        if optimizer is not None and compare is not None:
            raise ValueError("Give --optimizer or --compare, not both.")
        chosen = split_names(compare) or [optimizer or "Anova"]
        steps = epochs * steps_per_epoch(dataset, batch)
        specs = []
        for name in chosen:
            require_one_of("optimizer", name, OPTIMIZERS)
            rate = default_rate(name) if lr is None else lr
            options = _options(option or [])
            specs.append(RunSpec(dataset, model, name, rate, seed, steps, options, inputs, batch, flip, curve=True))
            check(specs[-1])
        check_folder(out)
        if download:
            verify_data(specs[0], data_dir, download)
        data = load_data(specs[0], data_dir)
        check_model(specs[0], data)
        out.mkdir(parents=True, exist_ok=True)
    console.print(f"{model} model on {dataset}, {steps:,} steps of {batch}", soft_wrap=True)
    records, lines = [], out / "train.jsonl"
    with progress("loss {task.fields[loss]}", transient=True) as bars:  # the table takes their place
        tasks = [bars.add_task(f"{s.optimizer} (lr {s.lr:g})", total=steps, loss="–", start=False) for s in specs]
        for spec, bar in zip(specs, tasks, strict=True):
            bars.start_task(bar)
            recent: list[float] = []

            def on_step(step: int, loss: float, bar: Any = bar, recent: list[float] = recent) -> None:
                recent[:] = [*recent[-49:], loss]
                bars.update(bar, completed=step + 1, loss=f"{sum(recent) / len(recent):.4f}")

            records.append(run(spec, data_dir, on_step))
            append(lines, spec.key, records[-1])
    _show(records, data.test_targets.numel())
    key = specs[0].key
    if len(specs) > 1:
        key = f"compare-{dataset}-{file_name(model)}-{digest({str(i): spec.key for i, spec in enumerate(specs)})}"
    picture = draw_training_curves(records, out / key)
    for path in (lines, picture.png, picture.svg):
        console.print(str(path), soft_wrap=True)


def _options(given: list[str]) -> dict[str, Any]:
    """'key=value' as keyword arguments: values are read as Python literals if they are such, else as strings."""
    options: dict[str, Any] = {}
    for text in given:
        key, equals, value = text.partition("=")
        if not (key.isidentifier() and equals):
            raise ValueError(f"--option must look like key=value. Got {text!r} instead.")
        if key == "lr":
            raise ValueError(f"Give the learning rate as --lr, not as an option. Got {text!r}.")
        try:
            options[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError, TypeError):
            options[key] = value
    return options


def _show(records: list[dict[str, Any]], tests: int) -> None:
    """Print a sentence about one run, or a table of several and how to read it; `tests` predictions were tested."""
    for record in records:
        if record["diverged_at"] is not None:
            whose = f"{record['spec']['optimizer']}: diverged" if len(records) > 1 else "Diverged"
            message = f"{whose} at step {record['diverged_at'] + 1}: try a smaller --lr."
            console.print(message, style="bold red", soft_wrap=True)
    if len(records) == 1:
        _, rate, train, loss, error, seconds, share = _cells(records[0])
        reached = "no held-out error"
        if records[0]["diverged_at"] is None:
            reached = f"training loss {train}, held-out loss {loss}, held-out error {error}"
        console.print(
            f"{records[0]['spec']['optimizer']} (lr {rate}): {reached} after {_steps(records[0]):,} steps\n"
            f"{seconds} CPU seconds, {share} of them in the optimizer",
            soft_wrap=True,
        )
        return
    table = Table("\noptimizer", box=SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    for name in ("\nlr", "training\nloss", "held-out\nloss", "held-out\nerror", "CPU\nseconds", "in\nstep()"):
        table.add_column(name, justify="right", no_wrap=True)
    table.columns[0].no_wrap = True
    for record in records:
        table.add_row(*_cells(record))
    console.print(table)
    ended = [record for record in records if record["diverged_at"] is None]
    if len(ended) < 2:
        return
    first, others = ended[0], ended[1:]
    for record in others:
        train, held_out = (_change(record, first, name) for name in ("train_loss", "test_loss"))
        both = f"{record['spec']['optimizer']} beside {first['spec']['optimizer']}"
        console.print(f"{both}: training loss {train}, held-out loss {held_out}", soft_wrap=True)
    for record in ended:
        losses = [epoch["test_loss"] for epoch in record["epochs"]]
        if len(losses) > 1 and min(losses) < MUCH_LOWER * losses[-1]:
            console.print(
                f"{record['spec']['optimizer']}: the held-out loss was lowest, {min(losses):.4f}, after epoch "
                f"{losses.index(min(losses)) + 1} of {len(losses)}",
                soft_wrap=True,
            )
    errors = sorted(record["test_error"] for record in ended)[:2]
    # As if each had test examples of its own: they share them, so that the true bound is a little lower.
    noise = 1.96 * math.sqrt(sum(p * (1 - p) for p in errors) / tests)
    console.print(
        "Look at the training loss first: on equal batches, lower is faster learning.\n"
        "Then at held-out loss and error, which are of examples that no step has seen.\n"
        f"Errors less than {100 * noise:.1f} points apart are within noise ({tests:,} predictions).\n"
        "One seed at one rate each proves little: vary --seed and --lr."
    )


def _change(record: dict[str, Any], first: dict[str, Any], loss: str) -> str:
    """By how much a loss differs from that of the first run."""
    if not first[loss]:
        return "–"
    return f"{record[loss] / first[loss] - 1:+.0%}".replace("-", "−")


def _cells(record: dict[str, Any]) -> list[str]:
    spec = record["spec"]
    seconds = max(record["seconds"], 1e-9)  # a run that diverges at once takes none
    results = ["diverged", "–", "–"]
    if record["diverged_at"] is None:
        results = [f"{record['train_loss']:.4f}", f"{record['test_loss']:.4f}", f"{record['test_error']:.2%}"]
    return [
        spec["optimizer"],
        f"{spec['lr']:g}",
        *results,
        f"{seconds:.1f}",
        f"{record['step_seconds'] / seconds:.0%}",
    ]


def _steps(record: dict[str, Any]) -> int:
    """The steps that a run took, the one at which it diverged included."""
    return int(record["spec"]["steps"] if record["diverged_at"] is None else record["diverged_at"] + 1)
