"""Small data sets in the formats of the real ones, with their own checksums."""

from __future__ import annotations

import gzip
import hashlib
import io
import tarfile
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import torch

from blockmean.lab.sources import CIFAR10, MNIST, File, Source, batch, idx


def md5(content: bytes) -> str:
    return hashlib.md5(content, usedforsecurity=False).hexdigest()


def contents_of(source: Source) -> dict[str, bytes]:
    """Random pixels and labels in each file of a source."""
    generator = torch.Generator().manual_seed(0)
    contents = {}
    for name, file in source.files.items():
        values = torch.randint(256, file.shape, generator=generator, dtype=torch.uint8)
        if file.labelled:
            values.view(len(values), -1)[:, 0] %= 10
        contents[name] = file.header + bytes(values.flatten().tolist())
    return contents


def with_checksums(source: Source, contents: Mapping[str, bytes]) -> Source:
    return replace(
        source, files={name: replace(source.files[name], checksum=md5(content)) for name, content in contents.items()}
    )


def small(source: Source, resized: Mapping[str, File]) -> tuple[Source, dict[str, bytes]]:
    """A source with smaller files, and their contents."""
    source = replace(source, files=resized)
    contents = contents_of(source)
    return with_checksums(source, contents), contents


def small_mnist() -> tuple[Source, dict[str, bytes]]:
    counts = {name: 20 if name.startswith("train") else 10 for name in MNIST.files}
    return small(MNIST, {name: idx((counts[name], *file.shape[1:]), "") for name, file in MNIST.files.items()})


def small_cifar10() -> tuple[Source, dict[str, bytes]]:
    return small(CIFAR10, {name: batch(3, "") for name in CIFAR10.files})


def compress(content: bytes) -> bytes:
    return gzip.compress(content, 1, mtime=0)


def member(
    name: str, content: bytes = b"", kind: bytes = tarfile.REGTYPE, link: str = ""
) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.size, info.type, info.linkname = len(content), kind, link
    return info, content


def pack(members: Iterable[tuple[tarfile.TarInfo, bytes]]) -> bytes:
    """A .tar.gz of these members, with any names."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz", compresslevel=1) as archive:
        for info, content in members:
            archive.addfile(info, io.BytesIO(content))
    return file.getvalue()


def pack_cifar10(contents: Mapping[str, bytes]) -> bytes:
    return pack(member(f"cifar-10-batches-bin/{name}", content) for name, content in contents.items())


def write(folder: Path, contents: Mapping[str, bytes]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    return folder
