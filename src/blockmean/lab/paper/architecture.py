"""A network of the paper, layer by layer, as found by a forward pass."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from blockmean.lab.models import MODELS
from blockmean.lab.paper.outcome import Claim, Outcome, Table, Verdict

SHAPES = {"MNIST": (1, 28, 28), "CIFAR-10": (3, 32, 32)}
NOT_LISTED = (nn.Tanh, nn.Flatten)
"""Modules without a row of their own in the paper's tables."""


class Layer(NamedTuple):
    """One step of a forward pass."""

    name: str  # as the paper writes it
    after: str  # the modules that follow without a row of their own
    output: str
    parameters: int


def layers(model: nn.Sequential, shape: tuple[int, int, int]) -> list[Layer]:
    """Every module in the order of the forward pass, and the softmax inside the loss."""
    found: list[Layer] = []
    x = torch.zeros(1, *shape)
    with torch.no_grad():
        for module in model:
            x = module(x)
            if isinstance(module, NOT_LISTED):
                found[-1] = found[-1]._replace(after=f" → {_name(module)}", output=_shape(x))
            else:
                found.append(Layer(_name(module), "", _shape(x), sum(param.numel() for param in module.parameters())))
        x = x.softmax(1)
    return [*found, Layer(f"Softmax, {x.shape[1]}", "", _shape(x), 0)]


def architecture(number: int, name: str, printed: list[str]) -> Outcome:
    """Table `number` of the paper: its rows, and the layers of the model of that name."""
    walks = {dataset: layers(MODELS[name](shape), shape) for dataset, shape in SHAPES.items()}
    names = {dataset: [layer.name for layer in walk] for dataset, walk in walks.items()}
    equal = all(found == printed for found in names.values())
    rest = iter(printed)
    rows = [
        [
            first.name + first.after,
            *(cell for layer in (first, second) for cell in (layer.output, f"{layer.parameters:,}")),
            next(rest, ""),
        ]
        for first, second in zip(*walks.values(), strict=True)
    ]
    table = Table(
        f"Table {number}: the {name} model",
        [
            "layer",
            *(f"{what}, {dataset}" for dataset in SHAPES for what in ("output", "parameters")),
            "the paper's row",
        ],
        rows,
    )
    claim = Claim(
        f"Table {number}: the {name} model has these {len(printed)} layers, in this order",
        f"{len(names['MNIST'])} layers on MNIST and {len(names['CIFAR-10'])} on CIFAR-10, "
        + ("each equal to the paper's row" if equal else "not equal to the paper's rows"),
        Verdict.of(equal),
        exact=True,
    )
    note = "The tanh after each convolution is in the paper's text; the softmax is part of the loss function."
    return Outcome([claim], tables=[table], notes=[note])


def _name(module: nn.Module) -> str:
    match module:
        case nn.Conv2d():
            return f"Conv {_square(module.kernel_size)}, {module.out_channels}"
        case nn.MaxPool2d():
            return f"Max Pooling {_square(module.kernel_size)}"
        case nn.Linear():
            return f"Fully Connected, {module.out_features}"
        case _:
            return type(module).__name__


def _square(size: int | tuple[int, ...]) -> str:
    return f"{size}x{size}" if isinstance(size, int) else "x".join(map(str, size))


def _shape(x: Tensor) -> str:
    return "×".join(map(str, x.shape[1:]))
