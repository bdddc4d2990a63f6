"""One training run: a spec that says everything, and the record that comes out of it."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Iterable
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

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "Adagrad": torch.optim.Adagrad,
    "AdamW": torch.optim.AdamW,
    "SGD": torch.optim.SGD,
    "AdaGradBMA": blockmean.AdaGradBMA,
    "AdaGradFull": blockmean.AdaGradFull,
    "AdamBMA": blockmean.AdamBMA,
    "NaturalGradientBMA": blockmean.NaturalGradientBMA,
}


@dataclass(frozen=True)
class Spec:
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

    @property
    def key(self) -> str:
        """A short name for the file of the record."""
        text = json.dumps(asdict(self), sort_keys=True)
        digest = hashlib.blake2b(text.encode(), digest_size=6).hexdigest()
        return f"{self.dataset}-{self.model}-{self.optimizer}-{digest}"

    def __hash__(self) -> int:
        return hash(self.key)  # the options are a dict


def run(
    spec: Spec, data_dir: Path | None = None, on_step: Callable[[int, float], None] | None = None
) -> dict[str, Any]:
    """Train once, on one thread, and return the record; a diverged run has null where a loss is not finite.

    Equal seeds mean equal initial weights and equal batches, whatever the optimizer: runs can be compared in pairs.
    """
    for name, known in (("model", MODELS), ("optimizer", OPTIMIZERS)):
        if getattr(spec, name) not in known:
            raise ValueError(f"{name} must be one of {', '.join(known)}. Got {getattr(spec, name)!r} instead.")
    torch.set_num_threads(1)
    images = _images(spec.dataset, spec.inputs, data_dir)
    torch.manual_seed(spec.seed)
    channels, height, width = images.train.shape[1:]
    model = MODELS[spec.model]((channels, height, width))
    optimizer = OPTIMIZERS[spec.optimizer](model.parameters(), lr=spec.lr, **spec.options)
    losses: list[float | None] = []
    seconds = step_seconds = 0.0
    for i, batch in enumerate(_batches(len(images.train), spec)):
        began = time.process_time()
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images.train[batch]), images.train_labels[batch])
        loss.backward()
        before = time.process_time()
        try:
            optimizer.step()
        except ValueError:  # gradients that are no longer finite
            losses.append(None)
            break
        ended = time.process_time()
        seconds, step_seconds = seconds + ended - began, step_seconds + ended - before
        losses.append(_finite(loss.item()))
        if losses[-1] is None:
            break
        if on_step is not None:
            on_step(i, loss.item())
    diverged = losses[-1] is None
    return {
        "spec": asdict(spec),
        "environment": environment(),
        "losses": losses,
        "train_loss": None if diverged else _loss(model, images.train[:10_000], images.train_labels[:10_000]),
        "test_loss": _loss(model, images.test, images.test_labels),
        "test_error": _error(model, images.test, images.test_labels),
        "seconds": round(seconds, 3),  # of this process, data and evaluation left out
        "step_seconds": round(step_seconds, 3),  # of which the optimizer
    }


@lru_cache(maxsize=2)
def _images(dataset: str, inputs: str, data_dir: Path | None) -> Images:
    return load(dataset, inputs, data_dir)


def _batches(count: int, spec: Spec) -> Iterable[Tensor]:
    """`steps` batches, epoch after epoch in a fresh order; the rest of an epoch that fills no batch is left out."""
    if spec.batch > count:
        raise ValueError(f"A batch of {spec.batch} cannot be drawn from {count} images.")
    generator = torch.Generator().manual_seed(spec.seed + 1_000_003)
    made = 0
    while made < spec.steps:
        for batch in torch.randperm(count, generator=generator).split(spec.batch):
            if len(batch) == spec.batch and made < spec.steps:
                made += 1
                yield batch


@torch.no_grad()
def _loss(model: nn.Module, images: Tensor, labels: Tensor) -> float | None:
    chunks = zip(images.split(1000), labels.split(1000), strict=True)
    return _finite(sum(float(nn.functional.cross_entropy(model(x), y)) * len(y) for x, y in chunks) / len(labels))


@torch.no_grad()
def _error(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    chunks = zip(images.split(1000), labels.split(1000), strict=True)
    return sum(int((model(x).argmax(1) != y).sum()) for x, y in chunks) / len(labels)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
