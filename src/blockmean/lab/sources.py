"""The published files of MNIST, CIFAR-10 and tiny Shakespeare: where to find them, and reading them with checksums."""

from __future__ import annotations

import gzip
import hashlib
import math
import struct
import tarfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Protocol

import torch
from torch import Tensor


class DamagedData(ValueError):
    """A file is not the published one."""

    def __str__(self) -> str:
        return f"{self.args[0]}. Put the published file in its place, or remove it and fetch it with --download."


class Stream(Protocol):
    """Anything that can be read from, compressed or not."""

    def read(self, size: int, /) -> bytes: ...


@dataclass(frozen=True)
class File:
    """A header, then unsigned bytes of a shape; in a labelled file each row starts with its label."""

    header: bytes
    shape: tuple[int, ...]
    labelled: bool
    checksum: str  # of the uncompressed content: it does not matter how the file is packed
    algorithm: str = "md5"  # as the authors of MNIST and CIFAR-10 publish it


@dataclass(frozen=True)
class Source:
    """A data set as published."""

    name: str
    files: Mapping[str, File]
    published: Mapping[str, str] = field(default_factory=dict)  # the files to download, and their md5
    mirrors: tuple[str, ...] = ()
    archive: str | None = None  # the one of `published` that contains all files
    folder: str = ""  # their folder inside the archive


def idx(shape: tuple[int, ...], md5: str) -> File:
    """A file of the idx format: images (n, height, width) or labels (n,)."""
    return File(struct.pack(f">HBB{len(shape)}I", 0, 8, len(shape), *shape), shape, len(shape) == 1, md5)


def batch(count: int, md5: str) -> File:
    """A file of CIFAR-10's binary version: a label and the red, green and blue plane in each row."""
    return File(b"", (count, 1 + 3 * 32 * 32), True, md5)


MNIST = Source(
    "mnist",
    {
        "train-images-idx3-ubyte": idx((60_000, 28, 28), "6bbc9ace898e44ae57da46a324031adb"),
        "train-labels-idx1-ubyte": idx((60_000,), "a25bea736e30d166cdddb491f175f624"),
        "t10k-images-idx3-ubyte": idx((10_000, 28, 28), "2646ac647ad5339dbf082846283269ea"),
        "t10k-labels-idx1-ubyte": idx((10_000,), "27ae3e4e09519cfbb04c329615203637"),
    },
    {
        "train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
        "train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
        "t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
        "t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
    },
    ("https://ossci-datasets.s3.amazonaws.com/mnist", "https://storage.googleapis.com/cvdf-datasets/mnist"),
)

CIFAR10 = Source(
    "cifar10",
    {
        "data_batch_1.bin": batch(10_000, "5dd7e06a14cb22eb9f671a540d1b7c25"),
        "data_batch_2.bin": batch(10_000, "5ea93a67294ea407fff1d09f752e9692"),
        "data_batch_3.bin": batch(10_000, "942cd6a4bcdd0dd3c604fbe906cb4421"),
        "data_batch_4.bin": batch(10_000, "ae636b3ba5c66a11e91e8cb52e771fcb"),
        "data_batch_5.bin": batch(10_000, "53f37980c15c3d472c316c40844f3f0d"),
        "test_batch.bin": batch(10_000, "803d5f7f4d78ea53de84dbe85f74fb6d"),
    },
    {"cifar-10-binary.tar.gz": "c32a1d4ab5d03f1284b67883e8d87530"},
    ("https://www.cs.toronto.edu/~kriz",),
    archive="cifar-10-binary.tar.gz",
    folder="cifar-10-batches-bin",
)

SHAKESPEARE = Source(
    "text",
    {
        "tinyshakespeare.txt": File(
            b"",
            (1_115_394,),
            labelled=False,
            checksum="86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
            algorithm="sha256",
        )
    },
)

SOURCES = {source.name: source for source in (MNIST, CIFAR10)}
"""Those that can be downloaded."""


def find(source: Source, folder: Path) -> tuple[list[Path], list[str]]:
    """The paths that hold the files of a source (unpacked ones preferred), and the names of the missing files.

    They may be in the folder itself or in its subfolder with the name of the data set.
    """
    places = (folder / source.name, folder)
    unpacked = [inner for place in places for inner in (place / source.folder, place)]
    paths, absent = [], []
    for name in source.files:
        here = [path for inner in unpacked for path in (inner / name, inner / f"{name}.gz") if path.is_file()]
        paths += here[:1]
        absent += [] if here else [name]
    archives = [place / source.archive for place in places if source.archive and (place / source.archive).is_file()]
    return (archives[:1], []) if absent and archives else (paths, absent)


def read(source: Source, paths: list[Path]) -> dict[str, Tensor]:
    """The bytes of each file, by name; DamagedData if a file is not the published one. Nothing is written."""
    contents = {}
    for path in paths:
        try:
            for name, where, stream in _open(source, path):
                contents[name] = _decode(source.files[name], where, stream)
        except (EOFError, gzip.BadGzipFile, tarfile.TarError, zlib.error) as error:
            raise DamagedData(f"{path} is truncated or damaged: {error}") from error
    missing = [name for name in source.files if name not in contents]
    if missing:
        raise DamagedData(f"{', '.join(map(str, paths))} lacks {', '.join(missing)}")
    return contents


def _open(source: Source, path: Path) -> Iterator[tuple[str, str, Stream]]:
    """Each file in a path: its name, its location for messages, and a stream."""
    if path.name != source.archive:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as stream:
            yield path.name.removesuffix(".gz"), str(path), stream
        return
    with tarfile.open(path, "r:gz") as archive:
        for member in archive:
            inside = PurePosixPath(member.name)
            if inside.parent != PurePosixPath(source.folder) or inside.name not in source.files:
                continue
            content = archive.extractfile(member) if member.isreg() else None  # a link could point anywhere
            if content is not None:
                yield inside.name, f"{member.name} in {path}", content


def _decode(file: File, where: str, stream: Stream) -> Tensor:
    """The bytes after the header, if everything about them is as expected."""
    size = len(file.header) + math.prod(file.shape)
    raw = bytearray(stream.read(size + 1))  # no more, however much a compressed file expands to
    if not raw.startswith(file.header):
        raise DamagedData(f"{where} {_describe_header(raw)} instead of unsigned bytes of shape {list(file.shape)}")
    if len(raw) != size:
        found = f"only {len(raw)}" if len(raw) < size else f"more than {size}"
        raise DamagedData(f"{where} has {found} bytes instead of {size}")
    values = torch.frombuffer(raw, dtype=torch.uint8, offset=len(file.header)).view(file.shape)
    if file.labelled:
        labels = values.view(len(values), -1)[:, 0]
        if labels.max() > 9:
            row = int(labels.argmax())
            raise DamagedData(f"{where} has the label {labels[row]} in row {row}; labels are 0 to 9")
    checksum = hashlib.new(file.algorithm, raw, usedforsecurity=False).hexdigest()
    if checksum != file.checksum:
        example = " (Fashion-MNIST has files of the same names as MNIST)" if file.header else ""
        raise DamagedData(
            f"{where} has the {file.algorithm} checksum {checksum} instead of {file.checksum}: it was altered, or it "
            f"belongs to another data set{example}"
        )
    return values


def _describe_header(raw: bytes | bytearray) -> str:
    """What the header of a file says, for a message about a wrong one."""
    dimensions = raw[3] if raw[:3] == b"\x00\x00\x08" and len(raw) > 3 else 0
    if not 1 <= dimensions <= 4 or len(raw) < 4 + 4 * dimensions:
        return f"starts with {bytes(raw[:4])!r}, which no idx file does,"
    return f"announces unsigned bytes of shape {list(struct.unpack_from(f'>{dimensions}I', raw, 4))}"
