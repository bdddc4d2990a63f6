"""Cutting parameters into blocks, one tensor at a time; `Partition.of` lays the pieces end to end."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from blockmean._checks import require

Params = nn.Module | Tensor | Mapping[str, Tensor] | Iterable[Tensor] | Iterable[tuple[str, Tensor]]
By = str | Callable[[str, Tensor], "str | Tensor"]
"""How to cut parameters into blocks: a name in `BY`, or a callable (name, tensor) → one of these names or labels."""

BY = ("tensor", "unit", "kernel", "module", "all", "element")


class Origin(NamedTuple):
    """Where a group of consecutive blocks comes from; names are made from it only when somebody asks."""

    name: str
    grid: tuple[int, ...]  # one block per index of the grid; () is a single block
    parameter: str

    def block_names(self) -> Iterator[str]:
        for index in itertools.product(*map(range, self.grid)):
            yield self.name + (f"[{','.join(map(str, index))}]" if index else "")


class Cut(NamedTuple):
    """One parameter cut into blocks; blocks with the same key are merged over parameters afterwards."""

    sizes: Tensor
    labels: Tensor | None
    origin: Origin
    key: str | None


def cut_tensor(name: str, position: int, tensor: Tensor, by: By) -> Cut:
    """Cut one parameter into blocks."""
    shape = tuple(tensor.shape)
    shown = name or f"param{position}"
    parameter = f"{shown} {list(shape)}"
    if callable(by):
        answer = by(name, tensor)
        if isinstance(answer, Tensor):
            sizes, labels = sizes_of_labels(answer.broadcast_to(shape).flatten(), f"the partition of {parameter}")
            return Cut(sizes, labels, Origin(shown, (len(sizes),), parameter), None)
        by = answer
    require(by in BY, "by", "Partition.of", f"a callable or one of {', '.join(map(repr, BY))}", by)
    if by == "module" and not name:
        raise ValueError("Partition.of(by='module') needs names. Pass model.named_parameters() or the model itself.")
    key = {"module": module_of(name), "all": "all"}.get(str(by))
    if by == "element":
        grid = shape
    elif by == "kernel" and tensor.ndim >= 3:
        grid = shape[:2]
    elif by in ("unit", "kernel") and tensor.ndim >= 2:
        grid = shape[:1]
    else:
        grid = ()
    count = math.prod(grid)
    return Cut(torch.full((count,), tensor.numel() // count), None, Origin(key or shown, grid, parameter), key)


def named_tensors(params: Params) -> list[tuple[str, Tensor]]:
    """Parameters in any accepted form as (name, tensor) pairs; unnamed ones have the name ''."""
    owner = "Partition.of"
    if isinstance(params, Tensor):
        params = [params]
    if isinstance(params, nn.Module):
        params = params.named_parameters()
    if isinstance(params, Mapping):
        params = params.items()
    named: list[tuple[str, Tensor]] = []
    for item in params:
        name, tensor = item if isinstance(item, tuple) else ("", item)
        require(isinstance(tensor, Tensor), "params", owner, "tensors or (name, tensor) pairs", tensor, TypeError)
        named.append((name, tensor))
    if len({id(tensor) for _, tensor in named}) < len(named):
        raise ValueError(f"The 'params' parameter of {owner} must not name the same tensor twice.")
    return named


def module_of(name: str) -> str:
    """The module part of a parameter's name: 'encoder.0.weight' → 'encoder.0', a root parameter → '(root)'."""
    return name.rpartition(".")[0] or "(root)"


def whole_numbers(values: Sequence[int] | Tensor, name: str, owner: str) -> Tensor:
    """A one-dimensional int64 CPU tensor, refusing anything that is not whole numbers."""
    tensor = torch.as_tensor(values).detach().cpu()
    whole = tensor.numel() == 0 or not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)
    require(whole, name, owner, "whole numbers", tensor.dtype, TypeError)
    require(tensor.ndim == 1, name, owner, "one-dimensional", f"shape {tuple(tensor.shape)}")
    return tensor.to(torch.int64, copy=True)


def sizes_of_labels(values: Sequence[int] | Tensor, owner: str) -> tuple[Tensor, Tensor | None]:
    """The size of every block, and the labels themselves unless the blocks are contiguous and in order."""
    labels = whole_numbers(values, "labels", owner)
    require(len(labels) > 0, "labels", owner, "a non-empty sequence", [])
    require(int(labels.min()) >= 0, "labels", owner, ">= 0", int(labels.min()))
    # L cannot exceed d without leaving a hole, so a stray huge label must not make a huge count.
    sizes = torch.bincount(labels.clamp(max=len(labels)))
    if (sizes == 0).any():
        raise ValueError(
            f"The 'labels' parameter of {owner} must use every number from 0 to {int(labels.max())}. "
            f"Missing: {int((sizes == 0).nonzero()[0])}."
        )
    return sizes, None if bool((labels.diff() >= 0).all()) else labels
