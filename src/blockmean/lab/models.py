"""The image networks of the experiments: the paper's two, and others with ReLU."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn


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


def relu_cnn(shape: tuple[int, int, int], widths: tuple[int, ...]) -> nn.Sequential:
    """3×3 convolutions with ReLU and pooling, one for each width, and a linear layer."""
    layers: list[nn.Module] = []
    before, height, width = shape
    for channels in widths:
        layers += [nn.Conv2d(before, channels, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        before, height, width = channels, height // 2, width // 2
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(before * height * width, 10))


def cnn(shape: tuple[int, int, int]) -> nn.Sequential:
    """16, 32 and 64 channels: 33,834 parameters on CIFAR-10."""
    return relu_cnn(shape, (16, 32, 64))


def convnet(shape: tuple[int, int, int]) -> nn.Sequential:
    """32, 64 and 64 channels: 66,570 parameters on CIFAR-10."""
    return relu_cnn(shape, (32, 64, 64))


class Residual(nn.Module):
    """Two 3×3 convolutions with BatchNorm beside a shortcut."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(before, after, 3, stride, 1, bias=False),
            nn.BatchNorm2d(after),
            nn.ReLU(),
            nn.Conv2d(after, after, 3, 1, 1, bias=False),
            nn.BatchNorm2d(after),
        )
        same = stride == 1 and before == after
        self.shortcut = (
            nn.Identity()
            if same
            else nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))
        )

    def forward(self, images: Tensor) -> Tensor:
        return nn.functional.relu(self.main(images) + self.shortcut(images))


def resnet(shape: tuple[int, int, int]) -> nn.Sequential:
    """A convolution and three residual blocks of 12, 24 and 48 channels: 44,230 parameters on CIFAR-10."""
    first = [nn.Conv2d(shape[0], 12, 3, padding=1, bias=False), nn.BatchNorm2d(12), nn.ReLU()]
    blocks = [Residual(12, 12, 1), Residual(12, 24, 2), Residual(24, 48, 2)]
    return nn.Sequential(*first, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(48, 10))


def resnet10(shape: tuple[int, int, int]) -> nn.Sequential:
    """A convolution and four residual blocks of 16, 32, 64 and 112 channels: 263,770 parameters on CIFAR-10."""
    first = [nn.Conv2d(shape[0], 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    blocks = [Residual(16, 16, 1), Residual(16, 32, 2), Residual(32, 64, 2), Residual(64, 112, 2)]
    return nn.Sequential(*first, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(112, 10))


def autoencoder(shape: tuple[int, int, int]) -> nn.Sequential:
    """ReLU layers of 128, 64 and 12 units and back; outputs are the logits of the pixels, flat."""
    pixels = shape[0] * shape[1] * shape[2]
    layers: list[nn.Module] = [nn.Flatten()]
    for before, after in ((pixels, 128), (128, 64), (64, 12), (12, 64), (64, 128)):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(128, pixels))


ImageModel = Callable[[tuple[int, int, int]], nn.Sequential]

MODELS: dict[str, ImageModel] = {
    "small": small,
    "large": large,
    "mlp": mlp,
    "cnn": cnn,
    "convnet": convnet,
    "resnet": resnet,
    "resnet10": resnet10,
}
"""Classifiers of images."""

AUTOENCODERS: dict[str, ImageModel] = {"autoencoder": autoencoder}
