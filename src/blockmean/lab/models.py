"""The networks of the experiments: the paper's two, and two with ReLU."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn


def convolutional(shape: tuple[int, int, int], depth: int, channels: int) -> nn.Sequential:
    """The paper's models (Tables 1 and 2): four stages of `depth` 3×3 convolutions with tanh, pooling; one linear."""
    layers: list[nn.Module] = []
    before, height, width = shape
    for _ in range(4):
        for _ in range(depth):
            layers += [nn.Conv2d(before, channels, 3, padding=1), nn.Tanh()]
            before = channels
        layers.append(nn.MaxPool2d(2))
        height, width = height // 2, width // 2
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels * height * width, 10))


def small(shape: tuple[int, int, int]) -> nn.Sequential:
    """322 parameters on MNIST, 466 on CIFAR-10."""
    return convolutional(shape, depth=1, channels=3)


def large(shape: tuple[int, int, int]) -> nn.Sequential:
    """139,370 parameters on MNIST, 140,906 on CIFAR-10."""
    return convolutional(shape, depth=4, channels=32)


def mlp(shape: tuple[int, int, int]) -> nn.Sequential:
    """Two hidden layers of 64 ReLU units."""
    inputs = shape[0] * shape[1] * shape[2]
    return nn.Sequential(
        nn.Flatten(), nn.Linear(inputs, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)
    )


def cnn(shape: tuple[int, int, int]) -> nn.Sequential:
    """Three 3×3 convolutions with ReLU and pooling, 16-32-64 channels, and a linear layer: 33,834 on CIFAR-10."""
    layers: list[nn.Module] = []
    before, height, width = shape
    for channels in (16, 32, 64):
        layers += [nn.Conv2d(before, channels, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        before, height, width = channels, height // 2, width // 2
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(before * height * width, 10))


MODELS: dict[str, Callable[[tuple[int, int, int]], nn.Sequential]] = {
    "small": small,
    "large": large,
    "mlp": mlp,
    "cnn": cnn,
}
