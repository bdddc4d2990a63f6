"""One training run: checked before it starts, and recorded when it ends."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from blockmean.lab import arms
from blockmean.lab.data import PREPARATIONS
from blockmean.lab.environment import environment
from blockmean.lab.own import check_fit, is_own
from blockmean.lab.spec import RunSpec
from blockmean.lab.tasks import (
    DATASETS,
    LOSSES,
    Data,
    evaluate,
    load_data,
    make_model,
    models_of,
    require_one_of,
    steps_per_epoch,
)

Record = dict[str, Any]


def check(spec: RunSpec) -> None:
    """Raise ValueError if the run, or writing its record, is bound to fail. Takes no data and no time."""
    steps_per_epoch(spec.dataset, spec.batch)
    if not is_own(spec.model):
        require_one_of("model", spec.model, (*models_of(spec), "module:object"))
    require_one_of("optimizer", spec.optimizer, tuple(arms.known()))
    require_one_of("inputs", spec.inputs, PREPARATIONS)
    if spec.flip and not DATASETS[spec.dataset].image:
        raise ValueError("flip mirrors images, and this data set is a text.")
    if not 0 <= spec.seed < 2**32:  # as NumPy wants it
        raise ValueError(f"seed must be between 0 and {2**32 - 1}. Got {spec.seed} instead.")
    if spec.steps < 1:
        raise ValueError(f"steps must be at least 1. Got {spec.steps} instead.")
    if not math.isfinite(spec.lr):
        raise ValueError(f"lr must be a finite number. Got {spec.lr} instead.")
    for name, value in spec.options.items():
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError):
            raise ValueError(
                f"The option {name!r} must be made of finite numbers, strings, lists and True, False or None, so that "
                f"it can be recorded. Got {value!r} instead."
            ) from None
    with torch.random.fork_rng(devices=[]):
        make_optimizer(spec, make_model(spec))


def check_model(spec: RunSpec, data: Data) -> None:
    """Raise ValueError if the model cannot take the data of its run; those that are known here can."""
    if is_own(spec.model):
        with torch.random.fork_rng(devices=[]):
            model = make_model(spec)
            some = slice(max(spec.batch, 1_000))  # enough to have every class
            examples = data.train[some], data.train_targets[some]
            check_fit((spec.model, model), (spec.loss, LOSSES[spec.loss].mean), examples)


def make_optimizer(spec: RunSpec, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of a spec for a model; ValueError if it does not take these options."""
    return arms.make(spec.optimizer, model, spec.lr, spec.options)


def run(spec: RunSpec, data_dir: Path | None = None, on_step: Callable[[int, float], None] | None = None) -> Record:
    """Train once, on one thread, and return the record; a value that is not finite is None in it.

    Equal seeds mean equal initial weights and equal batches, whatever the optimizer: runs can be compared in pairs. A
    run that diverges ends there, and its record says at which step.
    """
    check(spec)
    torch.set_num_threads(1)
    where = environment()
    began = time.process_time()
    data = load_data(spec, data_dir)
    data_seconds = time.process_time() - began
    if spec.curve:
        _warm_up(spec, data)
    arms.seed_everything(spec.seed)
    loss_of = LOSSES[spec.loss]
    model = make_model(spec)
    optimizer = make_optimizer(spec, model)
    per_epoch = len(data.train) // spec.batch
    marks = set(time_marks(spec.steps))

    def test() -> dict[str, float | None]:
        with _evaluation(model, optimizer, spec, data):
            return evaluate(model, loss_of, data.test, data.test_targets)

    epochs: list[dict[str, Any]] = []
    losses: list[float] = []
    seconds_at: list[float] = []
    diverged_at = None
    seconds = step_seconds = 0.0
    arms.switch(optimizer, "train")
    for step, (inputs, targets) in enumerate(batches_of(data, spec)):
        began = time.process_time()
        optimizer.zero_grad()
        loss = loss_of.mean(model(inputs), targets)
        loss.backward()
        before = time.process_time()
        losses.append(loss.item())
        if not _stepped(optimizer):
            losses[-1] = math.nan
        ended = time.process_time()
        seconds, step_seconds = seconds + ended - began, step_seconds + ended - before
        if not math.isfinite(losses[-1]):
            losses.pop()
            diverged_at = step
            break
        if step + 1 in marks:
            seconds_at.append(round(seconds, 4))
        if on_step is not None:
            on_step(step, losses[-1])
        if (step + 1) % per_epoch == 0:
            epochs.append({"train_loss": sum(losses[-per_epoch:]) / per_epoch, **test()})
    whole = bool(epochs) and diverged_at is None and spec.steps % per_epoch == 0  # then the last epoch has had its test
    tested = epochs[-1] if whole else test()
    some = 1_000 if spec.curve else 10_000  # a curve says more about the training loss
    with _evaluation(model, optimizer, spec, data):
        train = evaluate(model, loss_of, data.train[:some], data.train_targets[:some])
    if diverged_at is None and train["test_loss"] is None:
        diverged_at = spec.steps - 1  # the last step broke the weights, and no batch came after it
    curve = {"losses": [float(f"{value:.5g}") for value in losses], "seconds_at": seconds_at} if spec.curve else {}
    return {
        "spec": asdict(spec),
        "environment": where,
        "epochs": epochs,  # train_loss: mean over the epoch's batches while training; tests come after the epoch
        "diverged_at": diverged_at,
        "train_loss": None if diverged_at is not None else train["test_loss"],  # of some examples, at the end
        "test_loss": tested["test_loss"],
        "test_error": tested["test_error"],
        "data_seconds": round(data_seconds, 3),  # near 0 if this process had read the data before
        "seconds": round(seconds, 3),  # training, without reading data and without evaluation
        "step_seconds": round(step_seconds, 3),  # the optimizer's part of these
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "state_bytes": arms.state_bytes(optimizer),
        **curve,  # the loss of every step, and the seconds after each of `time_marks`
    }


def time_marks(steps: int) -> list[int]:
    """The numbers of steps after which a record has the time: every percent of the run."""
    return sorted({math.ceil(steps * percent / 100) for percent in range(1, 101)})


def _stepped(optimizer: torch.optim.Optimizer) -> bool:
    """Take a step; False if numbers got out of hand, so that the optimizer refused it."""
    try:
        optimizer.step()
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]  # not in its stubs
        return False
    except ValueError:
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if all(bool(gradient.isfinite().all()) for gradient in gradients):
            raise  # it refuses something else, and not because the run diverged
        return False
    return True


def _warm_up(spec: RunSpec, data: Data) -> None:
    """Two steps of a twin, so that no run pays for what torch loads in the first steps of a process."""
    with torch.random.fork_rng(devices=[]):
        model = make_model(spec)
        optimizer = make_optimizer(spec, model)
        arms.switch(optimizer, "train")
        for inputs, targets in islice(batches_of(data, spec), 2):
            optimizer.zero_grad()
            LOSSES[spec.loss].mean(model(inputs), targets).backward()
            _stepped(optimizer)


@contextmanager
def _evaluation(model: nn.Module, optimizer: torch.optim.Optimizer, spec: RunSpec, data: Data) -> Iterator[None]:
    """Show the weights that are to be judged, then go on training.

    A schedule-free optimizer judges other weights than it trains, for which BatchNorm has the wrong averages: they are
    taken again from 50 batches, as its authors advise, and put back afterwards.
    """
    if not hasattr(optimizer, "eval"):
        yield
        return
    arms.switch(optimizer, "eval")
    kept = {name: buffer.clone() for name, buffer in model.named_buffers()}
    if any(isinstance(module, nn.BatchNorm2d) for module in model.modules()):
        with torch.no_grad():
            for inputs, _ in islice(batches_of(data, replace(spec, steps=50)), 50):
                model(inputs)
    yield
    for name, buffer in model.named_buffers():
        buffer.copy_(kept[name])
    arms.switch(optimizer, "train")


def batches_of(data: Data, spec: RunSpec) -> Iterator[tuple[Tensor, Tensor]]:
    """`steps` batches, in a new order every epoch; the examples left over at the end of an epoch are not used."""
    examples, targets = data[:2]
    count = len(examples)
    generator = torch.Generator().manual_seed(spec.seed + 1_000_003)
    left = spec.steps
    while left > 0:
        order = torch.randperm(count, generator=generator)
        mirrored = torch.rand(count, generator=generator) < 0.5 if spec.flip else None
        for batch in order[: count - count % spec.batch].split(spec.batch)[:left]:
            inputs = examples[batch]
            if mirrored is not None:
                inputs = torch.where(mirrored[batch].view(-1, 1, 1, 1), inputs.flip(-1), inputs)
            yield inputs, targets[batch]
            left -= 1
