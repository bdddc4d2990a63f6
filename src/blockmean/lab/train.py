"""One training run: a spec that says everything, and the record that comes out of it."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import blockmean
from blockmean.lab.data import Images, load
from blockmean.lab.environment import environment
from blockmean.lab.models import MODELS

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

TRAINING_IMAGES = {"digits": 4_000, "mnist": 60_000, "cifar10": 50_000}


def steps_per_epoch(dataset: str, batch: int) -> int:
    """Full batches in one pass over the training images; what fills no batch is left out."""
    if dataset not in TRAINING_IMAGES:
        raise ValueError(f"dataset must be one of {', '.join(TRAINING_IMAGES)}. Got {dataset!r} instead.")
    return TRAINING_IMAGES[dataset] // batch


@dataclass(frozen=True)
class RunSpec:
    """Everything that a run depends on, in plain values; equal specs give equal runs."""

    dataset: str
    model: str
    optimizer: str
    lr: float
    seed: int
    steps: int
    options: dict[str, Any] = field(default_factory=dict)  # further arguments of the optimizer
    inputs: str = "normalised"
    batch: int = 128
    flip: bool = False  # mirror every image from left to right with probability ½, anew in every epoch

    @property
    def key(self) -> str:
        """A short name for the file of the record."""
        text = json.dumps(asdict(self), sort_keys=True)
        digest = hashlib.blake2b(text.encode(), digest_size=6).hexdigest()
        return f"{self.dataset}-{self.model}-{self.optimizer}-{digest}"

    def __hash__(self) -> int:
        return hash(self.key)  # the options are a dict


def run(spec: RunSpec, data_dir: Path | None = None, on_step: Callable[[int, float], None] | None = None) -> Record:
    """Train once, on one thread, and return the record; what is not finite in it is null.

    Equal seeds mean equal initial weights and equal batches, whatever the optimizer: runs can be compared in pairs. A
    run that diverges ends there, and its record says at which step.
    """
    for name, known in (("model", MODELS), ("optimizer", OPTIMIZERS)):
        if getattr(spec, name) not in known:
            raise ValueError(f"{name} must be one of {', '.join(known)}. Got {getattr(spec, name)!r} instead.")
    torch.set_num_threads(1)
    where = environment()
    began = time.process_time()
    images = _images(spec.dataset, spec.inputs, data_dir)
    data_seconds = time.process_time() - began
    torch.manual_seed(spec.seed)
    model = network(spec.model, images.train)
    try:
        optimizer = OPTIMIZERS[spec.optimizer](model.named_parameters(), lr=spec.lr, **spec.options)
    except TypeError as error:  # an option that it does not know
        raise ValueError(f"{spec.optimizer} cannot be made with {spec.options}: {error}") from error
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
        except ValueError:  # gradients that are no longer finite; all else is refused when the optimizer is made
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
    return {
        "spec": asdict(spec),
        "environment": where,
        "epochs": epochs,  # train_loss: mean over the epoch's batches, as they came; the test after the epoch
        "diverged_at": diverged_at,
        "train_loss": None if diverged_at is not None else train["test_loss"],  # of 10,000 images, at the end
        "test_loss": tested["test_loss"],
        "test_error": tested["test_error"],
        "data_seconds": round(data_seconds, 3),  # of this process; near 0 where an earlier run read the data
        "seconds": round(seconds, 3),  # training without data and evaluation
        "step_seconds": round(step_seconds, 3),  # of which the optimizer
    }


def network(name: str, images: Tensor) -> nn.Module:
    """A new model for such images. Its channels lie side by side, pixel by pixel: small convolutions are faster so."""
    channels, height, width = images.shape[1:]
    model: nn.Module = MODELS[name]((channels, height, width))
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]  # not in its stubs


@lru_cache(maxsize=2)
def _images(dataset: str, inputs: str, data_dir: Path | None) -> Images:
    images = load(dataset, inputs, data_dir)
    train, test = (part.contiguous(memory_format=torch.channels_last) for part in (images.train, images.test))
    return images._replace(train=train, test=test)


def _batches(images: Images, spec: RunSpec) -> Iterator[tuple[Tensor, Tensor]]:
    """`steps` batches, epoch after epoch in a fresh order; the rest of an epoch that fills no batch is left out."""
    count = len(images.train)
    if spec.batch > count:
        raise ValueError(f"A batch of {spec.batch} cannot be drawn from {count} images.")
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
    """Mean loss, null where it is not finite, and the share of images that are given the wrong class."""
    loss, wrong = 0.0, 0
    for x, y in zip(images.split(1000), labels.split(1000), strict=True):
        output = model(x)
        loss += float(nn.functional.cross_entropy(output, y, reduction="sum"))
        wrong += int((output.argmax(1) != y).sum())
    return {"test_loss": loss / len(labels) if math.isfinite(loss) else None, "test_error": wrong / len(labels)}
