"""One training run: checked before it starts, and recorded when it ends."""

from __future__ import annotations

import inspect
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import blockmean
from blockmean.lab.data import PREPARATIONS, Images, load
from blockmean.lab.environment import environment
from blockmean.lab.models import MODELS
from blockmean.lab.spec import RunSpec

Record = dict[str, Any]

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "Adagrad": torch.optim.Adagrad,
    "Adam": torch.optim.Adam,
    "AdamW": torch.optim.AdamW,
    "SGD": torch.optim.SGD,
    "AdaGradBMA": blockmean.AdaGradBMA,
    "AdaGradFull": blockmean.AdaGradFull,
    "AdamBMA": blockmean.AdamBMA,
    "NaturalGradientBMA": blockmean.NaturalGradientBMA,
}

LEARNING_RATES = {"Adagrad": 0.1, "AdaGradBMA": 0.1, "AdaGradFull": 1.0, "Adam": 0.01, "AdamW": 0.01, "SGD": 0.1}
LEARNING_RATES |= {"AdamBMA": LEARNING_RATES["AdamW"]}
"""Rates that work for the networks here. An optimizer without an entry keeps the default of its class."""

TRAINING_IMAGES = {"digits": 4_000, "mnist": 60_000, "cifar10": 50_000}
SHAPES = {"digits": (1, 28, 28), "mnist": (1, 28, 28), "cifar10": (3, 32, 32)}


def steps_per_epoch(dataset: str, batch: int) -> int:
    """Full batches in one pass over the training images; the images left over are not used."""
    _require_one_of("dataset", dataset, TRAINING_IMAGES)
    count = TRAINING_IMAGES[dataset]
    if not 1 <= batch <= count:
        raise ValueError(f"A batch of {batch} cannot be drawn from {count} images.")
    return count // batch


def default_rate(optimizer: str) -> float:
    """The learning rate for an optimizer when none is given."""
    _require_one_of("optimizer", optimizer, OPTIMIZERS)
    if optimizer in LEARNING_RATES:
        return LEARNING_RATES[optimizer]
    return float(inspect.signature(OPTIMIZERS[optimizer]).parameters["lr"].default)


def check(spec: RunSpec) -> None:
    """Raise ValueError if the run, or writing its record, is bound to fail. Takes no data and no time."""
    _require_one_of("model", spec.model, MODELS)
    _require_one_of("optimizer", spec.optimizer, OPTIMIZERS)
    _require_one_of("inputs", spec.inputs, PREPARATIONS)
    steps_per_epoch(spec.dataset, spec.batch)
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
        make_optimizer(spec, MODELS[spec.model](SHAPES[spec.dataset]))


def make_optimizer(spec: RunSpec, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of a spec for the parameters of a model; ValueError if it does not take these options."""
    try:
        return OPTIMIZERS[spec.optimizer](model.named_parameters(), lr=spec.lr, **spec.options)
    except (TypeError, RuntimeError) as error:
        raise ValueError(f"{spec.optimizer} cannot be made with {spec.options}: {error}") from error


def run(spec: RunSpec, data_dir: Path | None = None, on_step: Callable[[int, float], None] | None = None) -> Record:
    """Train once, on one thread, and return the record; a value that is not finite is None in it.

    Equal seeds mean equal initial weights and equal batches, whatever the optimizer: runs can be compared in pairs. A
    run that diverges ends there, and its record says at which step.
    """
    check(spec)
    torch.set_num_threads(1)
    where = environment()
    began = time.process_time()
    images = images_of(spec, data_dir)
    data_seconds = time.process_time() - began
    torch.manual_seed(spec.seed)
    model = network(spec.model, images.train)
    optimizer = make_optimizer(spec, model)
    per_epoch = len(images.train) // spec.batch

    epochs: list[dict[str, Any]] = []
    losses: list[float] = []  # of the epoch so far
    diverged_at = None
    seconds = step_seconds = 0.0
    for step, (inputs, labels) in enumerate(_batches(images, spec)):
        began = time.process_time()
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        before = time.process_time()
        losses.append(loss.item())
        try:
            optimizer.step()
        except ValueError:  # a gradient is not finite; anything else is refused when the optimizer is made
            losses[-1] = math.nan
        ended = time.process_time()
        seconds, step_seconds = seconds + ended - began, step_seconds + ended - before
        if not math.isfinite(losses[-1]):
            diverged_at = step
            break
        if on_step is not None:
            on_step(step, losses[-1])
        if (step + 1) % per_epoch == 0:
            epochs.append({"train_loss": sum(losses) / per_epoch, **_test(model, images.test, images.test_labels)})
            losses.clear()
    whole = bool(epochs) and not losses  # then the last epoch has had its test
    tested = epochs[-1] if whole else _test(model, images.test, images.test_labels)
    train = _test(model, images.train[:10_000], images.train_labels[:10_000])
    if diverged_at is None and train["test_loss"] is None:
        diverged_at = spec.steps - 1  # the last step broke the weights, and no batch came after it
    return {
        "spec": asdict(spec),
        "environment": where,
        "epochs": epochs,  # train_loss: mean over the epoch's batches while training; tests come after the epoch
        "diverged_at": diverged_at,
        "train_loss": None if diverged_at is not None else train["test_loss"],  # of 10,000 images, at the end
        "test_loss": tested["test_loss"],
        "test_error": tested["test_error"],
        "data_seconds": round(data_seconds, 3),  # near 0 if this process had read the data before
        "seconds": round(seconds, 3),  # training, without reading data and without evaluation
        "step_seconds": round(step_seconds, 3),  # the optimizer's part of these
    }


def network(name: str, images: Tensor) -> nn.Module:
    """A new model for these images, in the channels-last memory format: small convolutions are faster in it."""
    channels, height, width = images.shape[1:]
    model: nn.Module = MODELS[name]((channels, height, width))
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]  # not in its stubs


def images_of(spec: RunSpec, data_dir: Path | None = None) -> Images:
    """The data of a run; it is read once per process."""
    return _images(spec.dataset, spec.inputs, data_dir)


@lru_cache(maxsize=2)
def _images(dataset: str, inputs: str, data_dir: Path | None) -> Images:
    images = load(dataset, inputs, data_dir)
    train, test = (part.contiguous(memory_format=torch.channels_last) for part in (images.train, images.test))
    return images._replace(train=train, test=test)


def _batches(images: Images, spec: RunSpec) -> Iterator[tuple[Tensor, Tensor]]:
    """`steps` batches, in a new order every epoch; the images left over at the end of an epoch are not used."""
    count = len(images.train)
    generator = torch.Generator().manual_seed(spec.seed + 1_000_003)
    left = spec.steps
    while left > 0:
        order = torch.randperm(count, generator=generator)
        mirrored = torch.rand(count, generator=generator) < 0.5 if spec.flip else None
        for batch in order[: count - count % spec.batch].split(spec.batch)[:left]:
            inputs = images.train[batch]
            if mirrored is not None:
                inputs = torch.where(mirrored[batch].view(-1, 1, 1, 1), inputs.flip(-1), inputs)
            yield inputs, images.train_labels[batch]
            left -= 1


@torch.no_grad()
def _test(model: nn.Module, images: Tensor, labels: Tensor) -> dict[str, float | None]:
    """Mean loss (None if it is not finite) and the share of misclassified images."""
    loss, wrong = 0.0, 0
    for x, y in zip(images.split(1000), labels.split(1000), strict=True):
        output = model(x)
        loss += float(nn.functional.cross_entropy(output, y, reduction="sum"))
        wrong += int((output.argmax(1) != y).sum())
    return {"test_loss": loss / len(labels) if math.isfinite(loss) else None, "test_error": wrong / len(labels)}


def _require_one_of(name: str, value: str, known: Iterable[str]) -> None:
    if value not in known:
        raise ValueError(f"{name} must be one of {', '.join(known)}. Got {value!r} instead.")
