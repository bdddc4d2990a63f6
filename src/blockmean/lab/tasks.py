"""Tasks: data, a model, a loss with its error, a batch and a number of steps. An optimizer is all they lack."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from blockmean.lab.data import load, verify
from blockmean.lab.models import AUTOENCODERS, MODELS
from blockmean.lab.own import is_own, own_model
from blockmean.lab.spec import RunSpec
from blockmean.lab.text import CONTEXT, TEXT_MODELS, read_text, vocabulary
from blockmean.lab.tokens import CONTEXT as TOKENS
from blockmean.lab.tokens import GPTS, VOCABULARY, read_tokens, windows


class Dataset(NamedTuple):
    """What is known of data before they are read."""

    title: str
    examples: int
    """Images, or windows of text, for training; others are held out."""
    image: tuple[int, int, int] | None = None
    """Channels, height and width; None for text."""
    embedded: str = ""
    """The data that stand in for these and are in every installation."""


DATASETS = {
    "digits": Dataset("Digits", 4_000, (1, 28, 28)),
    "mnist": Dataset("MNIST", 60_000, (1, 28, 28), embedded="digits"),
    "cifar10": Dataset("CIFAR-10", 50_000, (3, 32, 32), embedded="digits"),
    "manual": Dataset("Python manual", 5_400),
    "shakespeare": Dataset("Shakespeare", 15_685, embedded="manual"),
}
"""Adding data is adding a row. Of a text the last tenth of the windows is held out."""


@dataclass(frozen=True)
class Loss:
    """What is minimised, the mean over a batch, and the error that is reported beside it, summed over all targets."""

    mean: Callable[[Tensor, Tensor], Tensor]
    error: Callable[[Tensor, Tensor], Tensor]
    unit: str
    """What the mean of the error is, in words."""


def _bits(outputs: Tensor, pixels: Tensor) -> Tensor:
    """Binary cross-entropy of logits, summed over the pixels of an image."""
    return functional.binary_cross_entropy_with_logits(outputs, pixels, reduction="sum") / len(pixels)


def _squares(outputs: Tensor, pixels: Tensor) -> Tensor:
    return (outputs.sigmoid() - pixels).square().sum()


def _wrong(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.argmax(1) != targets).sum()


def _next_token(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of (n, context, vocabulary): with the classes last it takes a quarter less time."""
    return functional.cross_entropy(outputs.flatten(0, -2), targets.flatten())


def _wrong_tokens(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.argmax(-1) != targets).sum()


LOSSES = {
    "cross_entropy": Loss(functional.cross_entropy, _wrong, "share of wrong predictions"),
    "next_token": Loss(_next_token, _wrong_tokens, "share of wrong predictions"),
    "reconstruction": Loss(_bits, _squares, "mean squared error of a pixel"),
}


@dataclass(frozen=True)
class Task:
    """Everything about a run but the optimizer, its learning rate and the seed."""

    dataset: str
    model: str
    steps: int = 0
    batch: int = 128
    inputs: str = "normalised"
    loss: str = "cross_entropy"
    flip: bool = False
    title: str = field(default="", compare=False)
    points: int = 0
    warm_up: float = 0.0
    decay: str = "none"
    clip: float | None = None
    crop: int = 0
    tokenizer: str = ""
    start: dict[str, Any] = field(default_factory=dict)
    split: str = "end"

    def spec(self, arm: Mapping[str, Any], lr: float, seed: int, steps: int = 0, curve: bool = False) -> RunSpec:
        """A run of this task; `arm` has the optimizer and its options, and perhaps a warm-up of its own."""
        own = {name: getattr(self, name) for name in (f.name for f in fields(self)) if name != "title"}
        chosen = {**own, **arm, "steps": steps or self.steps}
        return RunSpec(**chosen, lr=lr, seed=seed, curve=curve)


TASKS = {
    "mlp-raw": Task("mnist", "mlp", 800, inputs="raw", title="MNIST MLP, raw pixels"),
    "mlp": Task("mnist", "mlp", 800, title="MNIST MLP, normalised"),
    "autoencoder": Task("mnist", "autoencoder", 800, inputs="raw", loss="reconstruction", title="MNIST autoencoder"),
    "cnn": Task("cifar10", "convnet", 250, batch=64, title="CIFAR-10 CNN"),
    "resnet": Task("cifar10", "resnet", 200, batch=64, title="CIFAR-10 BatchNorm ResNet"),
    "transformer-64": Task("shakespeare", "transformer-64", 400, batch=32, title="Shakespeare, transformer 64 × 2"),
    "transformer-192": Task("shakespeare", "transformer-192", 200, batch=16, title="Shakespeare, transformer 192 × 4"),
}
"""The tasks of the race; adding one is adding a row."""

_QUICK_STEPS = {"mlp-raw": 200, "mlp": 200, "autoencoder": 200, "cnn": 60, "transformer-64": 60}


def _quick(task: Task, steps: int) -> Task:
    """The task on data that every installation has."""
    own = DATASETS[task.dataset]
    title = task.title.replace(own.title, DATASETS[own.embedded].title)
    return replace(task, dataset=own.embedded, steps=steps, title=title)


PROFILES = {"quick": {name: _quick(TASKS[name], steps) for name, steps in _QUICK_STEPS.items()}, "full": TASKS}


class Data(NamedTuple):
    """Inputs and targets, for training and held out; the first dim counts examples, or tokens of a text for training.

    Of a text in tokens the training targets are empty: its windows may start anywhere.
    """

    train: Tensor
    train_targets: Tensor
    test: Tensor
    test_targets: Tensor


SPLITS = {True: ("end", "pieces", "validation"), False: ("end", "validation")}
"""Of a text in tokens a twentieth is held out: its end, every 20th of its pieces, or the pieces before those.

Of other data the test set, or a tenth of the training set. Validation is what settings are chosen by.
"""


def steps_per_epoch(dataset: str, batch: int) -> int:
    """Full batches in one pass over the training examples; those left over are not used."""
    require_one_of("dataset", dataset, DATASETS)
    data = DATASETS[dataset]
    if not 1 <= batch <= data.examples:
        what = "images" if data.image else "windows"
        raise ValueError(f"A batch of {batch} cannot be drawn from {data.examples} {what}.")
    return data.examples // batch


def epoch_length(spec: RunSpec) -> int:
    """Steps after which a run is tested: an epoch, or a twentieth of a run on tokens, which has no epochs."""
    return max(1, spec.steps // 20) if spec.tokenizer else steps_per_epoch(spec.dataset, spec.batch)


def models_of(spec: RunSpec | Task) -> Mapping[str, Callable[[Any], nn.Module]]:
    """The models that fit the data and the loss."""
    require_one_of("loss", spec.loss, LOSSES)
    if spec.tokenizer:
        return GPTS
    require_one_of("dataset", spec.dataset, DATASETS)
    if not DATASETS[spec.dataset].image:
        return TEXT_MODELS
    return AUTOENCODERS if spec.loss == "reconstruction" else MODELS


def make_model(spec: RunSpec | Task) -> nn.Module:
    """A new model for a task, by its name or 'module:object'. Takes no data."""
    if is_own(spec.model):
        return own_model(spec.model)
    if spec.tokenizer:
        return models_of(spec)[spec.model]((VOCABULARY, TOKENS))
    shape = DATASETS[spec.dataset].image or (vocabulary(spec.dataset), CONTEXT)
    return _channels_last(models_of(spec)[spec.model](shape))


def network(name: str, images: Tensor) -> nn.Module:
    """A new classifier for these images."""
    channels, height, width = images.shape[1:]
    return _channels_last(MODELS[name]((channels, height, width)))


def _channels_last(model: nn.Module) -> nn.Module:
    """In this memory format small convolutions are faster."""
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]  # not in its stubs


def verify_data(task: RunSpec | Task, data_dir: Path | None = None, download: bool = False) -> None:
    """Read the data of a task once: if it is missing or damaged, this should fail before hours of work."""
    if task.tokenizer:
        read_tokens(task.dataset, task.tokenizer, data_dir, task.split)
    elif DATASETS[task.dataset].image:
        verify(task.dataset, data_dir, download)
    else:
        read_text(task.dataset, data_dir)


def load_data(spec: RunSpec | Task, data_dir: Path | None = None) -> Data:
    """The data of a run; it is read once per process."""
    if spec.tokenizer:
        tokens = read_tokens(spec.dataset, spec.tokenizer, data_dir, spec.split)
        inputs, targets = windows(tokens.test.long())
        return Data(tokens.train, tokens.train[:0], inputs, targets)
    data = _load(spec.dataset, spec.inputs, spec.loss, data_dir, is_own(spec.model))
    if spec.split == "validation":
        cut = len(data.train) - len(data.train) // 10
        return Data(data.train[:cut], data.train_targets[:cut], data.train[cut:], data.train_targets[cut:])
    return data


@lru_cache(maxsize=2)
def _load(dataset: str, inputs: str, loss: str, data_dir: Path | None, plain: bool) -> Data:
    if not DATASETS[dataset].image:
        text = read_text(dataset, data_dir)
        count = DATASETS[dataset].examples
        return Data(text.inputs[:count], text.targets[:count], text.inputs[count:], text.targets[count:])
    images = load(dataset, inputs, data_dir)
    layout = torch.contiguous_format if plain else torch.channels_last  # a model of the user's own may use `view`
    train, test = (part.contiguous(memory_format=layout) for part in (images.train, images.test))
    if loss == "reconstruction":
        return Data(train, train.flatten(1), test, test.flatten(1))
    return Data(train, images.train_labels, test, images.test_labels)


@torch.no_grad()
def evaluate(
    model: nn.Module, loss: Loss, inputs: Tensor, targets: Tensor, part: int = 1_000
) -> dict[str, float | None]:
    """Mean loss (None if it is not finite) and mean error, in evaluation mode, `part` examples at once."""
    total = error = 0.0
    model.eval()
    for x, y in zip(inputs.split(part), targets.split(part), strict=True):
        outputs = model(x)
        total += float(loss.mean(outputs, y)) * len(x)
        error += float(loss.error(outputs, y))
    model.train()
    finite = math.isfinite(total)
    return {
        "test_loss": total / len(targets) if finite else None,
        "test_error": error / targets.numel() if math.isfinite(error) else 1.0,
    }


def require_one_of(name: str, value: str, known: Mapping[str, object] | tuple[str, ...]) -> None:
    """Raise ValueError unless the value is a known one."""
    if value not in known:
        raise ValueError(f"{name} must be one of {', '.join(known)}. Got {value!r} instead.")
